"""Write files about a compiled program: its text, and the timeline of its pair as a picture or a trace."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from dualpipe_jax import inspect
from dualpipe_jax.inspect.lanes import DIRECTION_NAMES, Names
from dualpipe_jax.inspect.report import OverlapReport
from dualpipe_jax.inspect.target import Target
from dualpipe_jax.pods.units import bodies_of

PICTURES = ".svg", ".png"
TRACE = ".trace"


def write(
    files: Sequence[str],
    text: Callable[[], str],
    report: OverlapReport,
    module: inspect.Module,
    target: Target,
    title: str,
    names: Names = DIRECTION_NAMES,
) -> None:
    """Write each file in the form of its ending; see ``Request.files``. ``names`` are those of the two directions.

    Raises:
      ValueError: the program has no collectives of which a picture or a trace could be made.
      ModuleNotFoundError: a picture is asked for, and matplotlib is not installed.
    """
    drawings = [file for file in map(Path, files) if file.suffix.lower() in (*PICTURES, TRACE)]
    for file in map(Path, files):
        if file not in drawings:  # before any drawing, which may be refused
            file.write_text(text())
    if not drawings:
        return
    computation, name = _choose_computation(report, module)
    clock = target.device.clock
    for file in drawings:
        if file.suffix.lower() == TRACE:
            file.write_text(json.dumps(inspect.to_chrome_trace(report, computation, clock, names)))
        else:
            inspect.plot(report, computation, file, title=f"{title}: {name}", clock=clock, names=names)


def _choose_computation(report: OverlapReport, module: inspect.Module) -> tuple[str, str]:
    """The computation to draw and its title: the slowest pair, or without pairs the one that communicates longest."""
    if pairs := bodies_of(module, "FB"):
        return max(pairs, key=lambda body: report.computations[body].cycles), "an overlapped pair"
    spent: dict[str, float] = {}
    for c in report.collectives:
        spent[c.computation] = spent.get(c.computation, 0.0) + (c.duration or 0.0)
    if not spent:
        raise ValueError(f"{module.name}: no collectives, so there is no overlap to draw")
    longest = max(spent, key=spent.__getitem__)
    return longest, "the whole step" if longest == module.entry else longest
