"""Schedules as values: made, checked, simulated, printed and lowered with Python and NumPy alone.

Code that draws, lowers or optimises schedules is imported when one of its names is first used; code that
makes, reads, checks and simulates them is imported at once.
"""

import importlib
from typing import TYPE_CHECKING, Any

from dualpipe_jax.schedule.costs import CostModel, MemoryModel
from dualpipe_jax.schedule.formats.json_text import from_json, to_json
from dualpipe_jax.schedule.formats.text import format_grid, parse_grid
from dualpipe_jax.schedule.formats.torch_csv import from_torch_csv, to_torch_csv
from dualpipe_jax.schedule.ir import Action, Op, Placement, Schedule, Slot
from dualpipe_jax.schedule.optimize.stash import limit_stash
from dualpipe_jax.schedule.recipes import (
    ALL_SCHEDULES,
    chimera,
    dualpipe,
    dualpipe_v,
    gpipe,
    hanayo,
    interleaved_1f1b,
    interleaved_1f1b_overlap,
    interleaved_zero_bubble,
    looped_bfs,
    one_f_one_b,
    v_half,
    v_min,
    zb_h1,
    zb_h2,
    zb_v,
)
from dualpipe_jax.schedule.simulate import Timeline, simulate
from dualpipe_jax.schedule.validate import ScheduleError, validate

if TYPE_CHECKING:
    from dualpipe_jax.schedule.formats.page import html_page
    from dualpipe_jax.schedule.formats.plot import plot
    from dualpipe_jax.schedule.formats.trace import to_chrome_trace
    from dualpipe_jax.schedule.lowering.lower import lower
    from dualpipe_jax.schedule.lowering.table import TickTable
    from dualpipe_jax.schedule.optimize.bounds import lower_bound
    from dualpipe_jax.schedule.optimize.choose import Candidate, choose
    from dualpipe_jax.schedule.optimize.optimum import Optimum, optimum
    from dualpipe_jax.schedule.optimize.search import search

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
    "interleaved_1f1b_overlap",
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

_MODULE_OF = {
    "Candidate": "optimize.choose",
    "Optimum": "optimize.optimum",
    "TickTable": "lowering.table",
    "choose": "optimize.choose",
    "html_page": "formats.page",
    "lower": "lowering.lower",
    "lower_bound": "optimize.bounds",
    "optimum": "optimize.optimum",
    "plot": "formats.plot",
    "search": "optimize.search",
    "to_chrome_trace": "formats.trace",
}
"""The module, relative to this package, of each name that is imported when it is first used."""


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
