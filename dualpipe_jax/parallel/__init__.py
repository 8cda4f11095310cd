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
from dualpipe_jax.parallel.float8 import check_device as check_float8
from dualpipe_jax.parallel.float8_matmul import float8_matmul
from dualpipe_jax.parallel.mesh import DP, EP, PP, make_mesh
from dualpipe_jax.parallel.placement import (
    Moves,
    choose_copies,
    first_copies,
    move_experts,
    plan_moves,
    share_copies,
    sum_copies,
)
from dualpipe_jax.parallel.wire import Payload, check_payload

__all__ = [
    "DP",
    "EP",
    "PP",
    "Handle",
    "Moves",
    "Payload",
    "capacity_for",
    "check_float8",
    "check_payload",
    "choose_copies",
    "combine",
    "count",
    "dispatch",
    "expert_matmul",
    "first_copies",
    "float8_matmul",
    "grouped_matmul",
    "make_mesh",
    "move_experts",
    "plan_capacity",
    "plan_dropless",
    "plan_moves",
    "share_copies",
    "sum_copies",
]
