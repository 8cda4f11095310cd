"""JAX collectives and the mesh they run on; knows no schedules."""

from dualpipe_jax.parallel.expert import combine, dispatch, expert_matmul
from dualpipe_jax.parallel.expert_groups import grouped_matmul
from dualpipe_jax.parallel.expert_output import combine_product
from dualpipe_jax.parallel.expert_plan import Handle, capacity_for, count, plan_capacity, plan_dropless
from dualpipe_jax.parallel.float8 import check_device as check_float8
from dualpipe_jax.parallel.float8_matmul import float8_matmul
from dualpipe_jax.parallel.mesh import (
    AXES,
    BATCH_AXES,
    DP,
    EP,
    NODE,
    PP,
    batch_spec,
    expert_axes,
    make_mesh,
    over_nodes,
    slow_links,
)
from dualpipe_jax.parallel.placement import (
    Moves,
    choose_copies,
    first_copies,
    move_experts,
    plan_moves,
    share_copies,
    sum_copies,
)
from dualpipe_jax.parallel.two_hops import plan_two_hops
from dualpipe_jax.parallel.wire import Payload, check_payload

__all__ = [
    "AXES",
    "BATCH_AXES",
    "DP",
    "EP",
    "NODE",
    "PP",
    "Handle",
    "Moves",
    "Payload",
    "batch_spec",
    "capacity_for",
    "check_float8",
    "check_payload",
    "choose_copies",
    "combine",
    "combine_product",
    "count",
    "dispatch",
    "expert_axes",
    "expert_matmul",
    "first_copies",
    "float8_matmul",
    "grouped_matmul",
    "make_mesh",
    "move_experts",
    "over_nodes",
    "plan_capacity",
    "plan_dropless",
    "plan_moves",
    "plan_two_hops",
    "share_copies",
    "slow_links",
    "sum_copies",
]
