"""The schedules of the field, each a function of two integers."""

from collections.abc import Callable

from dualpipe_jax.schedule.ir import Schedule
from dualpipe_jax.schedule.recipes.bidirectional import chimera, hanayo
from dualpipe_jax.schedule.recipes.classic import (
    gpipe,
    interleaved_1f1b,
    interleaved_1f1b_overlap,
    looped_bfs,
    one_f_one_b,
)
from dualpipe_jax.schedule.recipes.dualpipe import dualpipe, dualpipe_v
from dualpipe_jax.schedule.recipes.v_shaped import v_half, v_min, zb_v
from dualpipe_jax.schedule.recipes.zero_bubble import interleaved_zero_bubble, zb_h1, zb_h2

Recipe = Callable[[int, int], Schedule]
"""A schedule as a function of (num_ranks, num_microbatches)."""

ALL_SCHEDULES: tuple[Recipe, ...] = (
    gpipe,
    one_f_one_b,
    interleaved_1f1b,
    interleaved_1f1b_overlap,
    looped_bfs,
    zb_h1,
    zb_h2,
    interleaved_zero_bubble,
    zb_v,
    v_half,
    v_min,
    chimera,
    hanayo,
    dualpipe,
    dualpipe_v,
)
"""Every schedule, as a function of (num_ranks, num_microbatches)."""
