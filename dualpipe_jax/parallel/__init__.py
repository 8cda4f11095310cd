"""JAX collectives and the mesh they run on; knows no schedules."""

from dualpipe_jax.parallel.expert import (
    Handle,
    capacity_for,
    combine,
    count,
    dispatch,
    expert_matmul,
    plan_capacity,
    plan_dropless,
)
from dualpipe_jax.parallel.expert_groups import grouped_matmul
from dualpipe_jax.parallel.mesh import DP, EP, PP, make_mesh

__all__ = [
    "DP",
    "EP",
    "PP",
    "Handle",
    "capacity_for",
    "combine",
    "count",
    "dispatch",
    "expert_matmul",
    "grouped_matmul",
    "make_mesh",
    "plan_capacity",
    "plan_dropless",
]
