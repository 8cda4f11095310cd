"""Schedules as values: made, checked, simulated, printed and lowered with Python and NumPy alone."""

from collections.abc import Callable

from dualpipe_jax.schedule.costs import CostModel, MemoryModel
from dualpipe_jax.schedule.formats.json_text import from_json, to_json
from dualpipe_jax.schedule.formats.page import html_page
from dualpipe_jax.schedule.formats.plot import plot
from dualpipe_jax.schedule.formats.text import format_grid, parse_grid
from dualpipe_jax.schedule.formats.torch_csv import from_torch_csv, to_torch_csv
from dualpipe_jax.schedule.formats.trace import to_chrome_trace
from dualpipe_jax.schedule.ir import Action, Op, Placement, Schedule, Slot
from dualpipe_jax.schedule.lowering.lower import TickTable, lower
from dualpipe_jax.schedule.optimize.bounds import lower_bound
from dualpipe_jax.schedule.optimize.choose import Candidate, choose
from dualpipe_jax.schedule.optimize.optimum import Optimum, optimum
from dualpipe_jax.schedule.optimize.search import search
from dualpipe_jax.schedule.optimize.stash import limit_stash
from dualpipe_jax.schedule.recipes.bidirectional import chimera, hanayo
from dualpipe_jax.schedule.recipes.classic import gpipe, interleaved_1f1b, looped_bfs, one_f_one_b
from dualpipe_jax.schedule.recipes.dualpipe import dualpipe, dualpipe_v
from dualpipe_jax.schedule.recipes.v_shaped import v_half, v_min, zb_v
from dualpipe_jax.schedule.recipes.zero_bubble import interleaved_zero_bubble, zb_h1, zb_h2
from dualpipe_jax.schedule.simulate import Timeline, simulate
from dualpipe_jax.schedule.validate import ScheduleError, validate

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
    "Candidate",
    "CostModel",
    "MemoryModel",
    "Op",
    "Optimum",
    "Placement",
    "Schedule",
    "ScheduleError",
    "Slot",
    "TickTable",
    "Timeline",
    "chimera",
    "choose",
    "dualpipe",
    "dualpipe_v",
    "format_grid",
    "from_json",
    "from_torch_csv",
    "gpipe",
    "hanayo",
    "html_page",
    "interleaved_1f1b",
    "interleaved_zero_bubble",
    "limit_stash",
    "looped_bfs",
    "lower",
    "lower_bound",
    "one_f_one_b",
    "optimum",
    "parse_grid",
    "plot",
    "search",
    "simulate",
    "to_chrome_trace",
    "to_json",
    "to_torch_csv",
    "v_half",
    "v_min",
    "validate",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
