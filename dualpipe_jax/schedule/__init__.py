"""Schedules as values: made, checked, simulated, printed and lowered with Python and NumPy alone."""

from collections.abc import Callable

from dualpipe_jax.schedule.bidirectional import chimera, hanayo
from dualpipe_jax.schedule.classic import gpipe, interleaved_1f1b, looped_bfs, one_f_one_b
from dualpipe_jax.schedule.costs import CostModel, MemoryModel
from dualpipe_jax.schedule.dualpipe import dualpipe, dualpipe_v
from dualpipe_jax.schedule.ir import Action, Op, Placement, Schedule, Slot
from dualpipe_jax.schedule.lower import TickTable, lower
from dualpipe_jax.schedule.simulate import Timeline, simulate
from dualpipe_jax.schedule.text import format_grid, parse_grid
from dualpipe_jax.schedule.v_shaped import v_half, v_min, zb_v
from dualpipe_jax.schedule.validate import ScheduleError, validate
from dualpipe_jax.schedule.zero_bubble import interleaved_zero_bubble, zb_h1, zb_h2

ALL_SCHEDULES: tuple[Callable[[int, int], Schedule], ...] = (
    gpipe,
    one_f_one_b,
    interleaved_1f1b,
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

__all__ = [
    "ALL_SCHEDULES",
    "Action",
    "CostModel",
    "MemoryModel",
    "Op",
    "Placement",
    "Schedule",
    "ScheduleError",
    "Slot",
    "TickTable",
    "Timeline",
    "chimera",
    "dualpipe",
    "dualpipe_v",
    "format_grid",
    "gpipe",
    "hanayo",
    "interleaved_1f1b",
    "interleaved_zero_bubble",
    "looped_bfs",
    "lower",
    "one_f_one_b",
    "parse_grid",
    "simulate",
    "v_half",
    "v_min",
    "validate",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
