"""Runs side by side: their curves, and whether they are equal bit for bit."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dualpipe_jax.present.numbers import how_many
from train.config import FLAGS, ConfigError, option
from train.report.folder import RunFolder
from train.report.page import charts, loss_chart, render

METRICS = ("loss", "grad_norm")
"""The metrics that are compared. metrics.jsonl has all their digits, so equal numbers mean equal bits."""

_COMPARED_CHARTS: tuple[tuple[str, tuple[str, ...], dict[str, bool]], ...] = (
    ("gradient norm", ("grad_norm",), {"log": True}),
    ("tokens a second", ("tokens_per_s",), {"zero": True}),
    ("MaxVio", ("max_vio",), {"zero": True}),
    ("entropy of load, 1 is even", ("load_entropy",), {}),
    ("seconds of a step", ("step_s",), {"zero": True}),
)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A run compared with the first one.

    Attributes:
      name: the path of the run's folder.
      common: the number of steps that both did.
      only: the number of steps that only one of them did.
      first: (step, metric, the first run's value, this one's) where they first differ; None if nowhere.
      largest: the largest difference of losses, over common steps where both are numbers; NaN without such steps.
    """

    name: str
    common: int
    only: int
    first: tuple[int, str, Any, Any] | None
    largest: float

    @property
    def equal(self) -> bool:
        """Whether losses and gradient norms are equal bit for bit at every step that both did."""
        return self.common > 0 and self.first is None

    def __str__(self) -> str:
        if not self.common:
            return f"{self.name}: no step in common"
        rest = f"; {how_many(self.only, 'step')} in one of them alone" if self.only else ""
        if self.first is None:
            common = how_many(self.common, "common step")
            return f"{self.name}: bitwise equal in {' and '.join(METRICS)} at each of {common}{rest}"
        step, metric, ours, theirs = self.first
        return (
            f"{self.name}: differs from step {step} on, {metric} {ours!r} against {theirs!r}; "
            f"losses differ by {self.largest:.3g} at most over {how_many(self.common, 'common step')}{rest}"
        )


def compare(runs: Sequence[RunFolder]) -> list[Comparison]:
    """Compare every other run with the first.

    Raises:
      ConfigError: there are fewer than two runs.
    """
    if len(runs) < 2:
        raise ConfigError("--compare: wants two runs or more, such as --compare runs/a runs/b")
    return [_compare_with_first(runs[0], other) for other in runs[1:]]


def _compare_with_first(first: RunFolder, other: RunFolder) -> Comparison:
    ours, theirs = ({record["step"]: record for record in run.steps} for run in (first, other))
    common = sorted(ours.keys() & theirs.keys())
    differing = (
        (step, metric, ours[step].get(metric), theirs[step].get(metric))
        for step in common
        for metric in METRICS
        if ours[step].get(metric) != theirs[step].get(metric)
    )
    losses = ((ours[step]["loss"], theirs[step]["loss"]) for step in common)
    differences = [abs(a - b) for a, b in losses if a is not None and b is not None]
    return Comparison(
        name=str(other.path),
        common=len(common),
        only=len(ours.keys() ^ theirs.keys()),
        first=next(differing, None),
        largest=max(differences, default=math.nan),
    )


def write_comparison(runs: Sequence[RunFolder], found: Sequence[Comparison], path: Path) -> None:
    """Write a page with the curves of several runs, the results of their comparison and the options that differ."""
    verdict = "bitwise equal" if all(one.equal for one in found) else "not bitwise equal"
    names = [run.path.name for run in runs]
    differing = {"head": ["option", *names], "rows": _options(runs)}
    page = {
        "title": f"{' and '.join(names) if len(names) < 4 else f'{len(names)} runs'}: {verdict}",
        "about": f"Each beside {runs[0].path}.",
        "alarms": [str(one) for one in found],
        "tiles": [],
        "sections": [
            {"title": "Curves", "charts": [loss_chart(runs), *charts(runs, _COMPARED_CHARTS)]},
            {"title": "Options that differ", "tables": [differing]},
        ],
    }
    path.write_text(render(page), encoding="utf-8")


def _options(runs: Sequence[RunFolder]) -> list[list[str]]:
    found = []
    for flag in FLAGS:
        values = [str(option(run.config, flag)) for run in runs]
        if len(set(values)) > 1:
            found.append([flag.removeprefix("--"), *values])
    return found
