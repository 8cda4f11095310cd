"""JAX collectives and the mesh they run on; knows no schedules."""

from dualpipe_jax.parallel.expert import combine, dispatch, expert_matmul
from dualpipe_jax.parallel.expert_output import combine_product
from dualpipe_jax.parallel.expert_plan import Handle, capacity_for, count, plan_capacity, plan_dropless
from dualpipe_jax.parallel.float8 import check_device as check_float8
from dualpipe_jax.parallel.mesh import DP, EP, PP, make_mesh
from dualpipe_jax.parallel.placement import choose_copies, move_experts, plan_moves, share_copies, sum_copies
from dualpipe_jax.parallel.two_hops import plan_two_hops

__all__ = [
    "DP",
    "EP",
    "PP",
    "Handle",
    "capacity_for",
    "check_float8",
    "choose_copies",
    "combine",
    "combine_product",
    "count",
    "dispatch",
    "expert_matmul",
    "make_mesh",
    "move_experts",
    "plan_capacity",
    "plan_dropless",
    "plan_moves",
    "plan_two_hops",
    "share_copies",
    "sum_copies",
]
