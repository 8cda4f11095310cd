"""What a compiled program's cycles say of a step: costs of its units, its time, its share of the peak.

All of this is the compiler's model of the device, or a roofline where it has none; nothing here was measured.
"""

import dataclasses
from collections.abc import Mapping

import models
from dualpipe_jax.inspect import Module, OverlapReport
from dualpipe_jax.schedule import CostModel, Schedule, lower, simulate

SCOPE_OF = {
    "FB": "pair",
    "F": "forward",
    "B": "backward",
    "I": "backward_input",
    "W": "backward_weight",
    "embed": "embed",
    "head": "head",
    "embed_backward": "embed_backward",
}
"""The scope by which each unit of the engine is found in a compiled program."""


@dataclasses.dataclass(frozen=True)
class Unit:
    """One guarded unit, run once.

    Attributes:
      cycles: from its first instruction to its last.
      computation: cycles in which the core works.
      communication: cycles that its collectives take, hidden or not; None if a rate is missing.
      exposed: cycles in which the core waits for them.
      unpriced: instructions that nobody prices, which make cycles a lower bound.
    """

    cycles: float
    computation: float
    communication: float | None
    exposed: float
    unpriced: int

    @property
    def over_limit(self) -> float | None:
        """Cycles over the larger of computation and communication: 1 is as good as can be."""
        limit = max(self.computation, self.communication or 0.0)
        return self.cycles / limit if limit else None

    @property
    def over_sum(self) -> float | None:
        """Cycles over computation and communication one after the other: 1 is nothing hidden."""
        total = self.computation + (self.communication or 0.0)
        return self.cycles / total if total else None


def bodies(module: Module, unit: str) -> list[str]:
    """Computations in which a unit stands, behind its guard: one for each local stage that runs it."""
    ending = f"/{SCOPE_OF[unit]}/while"
    return [body for body, (_, loop) in module.loops.items() if loop.op_name.endswith(ending)]


def walk(module: Module) -> str | None:
    """The body of the scan over ticks, which holds all guards; None where there are none."""
    holders = (
        holder for unit in SCOPE_OF for body in bodies(module, unit) for holder in [module.loops[body][0]]
    )
    return next(holders, None)


def measure(report: OverlapReport, module: Module) -> dict[str, Unit]:
    """The units of a program; of several for different stages the slowest."""
    found = {unit: [_unit(report, body) for body in bodies(module, unit)] for unit in SCOPE_OF}
    return {unit: max(units, key=lambda u: u.cycles) for unit, units in found.items() if units}


def _unit(report: OverlapReport, body: str) -> Unit:
    time = report.computations[body]
    durations = [c.duration for c in report.collectives if c.computation == body]
    total = None if None in durations else sum(d for d in durations if d is not None)
    return Unit(time.cycles, time.work, total, time.exposed, len(time.unpriced))


def costs(units: Mapping[str, Unit], send: float) -> CostModel:
    """Costs of one stage in cycles, from units measured.

    Where only a full backward was measured, two thirds of it are taken for the input, as it does two of the three
    parts of the forward's work that a split would give it; schedules that never split do not mind.

    Raises:
      ValueError: F is missing, or both B and the pair I, W.
    """
    cycles = {name: unit.cycles for name, unit in units.items()}
    if "F" not in cycles or not ({"I", "W"} <= cycles.keys() or "B" in cycles):
        raise ValueError(
            f"costs: needs F and either B or I and W; measured were {', '.join(cycles) or 'none'}"
        )
    split = {"I", "W"} <= cycles.keys()
    backward = (cycles["I"], cycles["W"]) if split else (cycles["B"] * 2 / 3, cycles["B"] / 3)
    extra = {}
    if "embed" in cycles:
        extra[0] = (cycles["embed"], cycles.get("embed_backward", 0.0), 0.0)
    if "head" in cycles:
        extra[-1] = (cycles["head"], 0.0, 0.0)
    return CostModel(cycles["F"], *backward, FB=cycles.get("FB"), send=send, extra=extra)  # type: ignore[arg-type]


def step_cycles(schedule: Schedule, costs: CostModel) -> tuple[float, float]:
    """Cycles from the first forward to the last backward: in the engine's ticks, and in the ideal order.

    The optimizer and the reduction of gradients come on top.
    """
    return lower(schedule, costs).makespan(costs), simulate(schedule, costs).makespan


def model_flops(numbers: models.Config, active: int, sequence: int) -> float:
    """Floating-point operations that one token's training needs, the customary count for MFU.

    6 for each parameter that it meets (the embedding is looked up, not multiplied) and 3 times its attention to
    half the sequence on average. What is computed again in the backward does not count, nor what fills up
    capacity.
    """
    per_key = numbers.num_heads * (numbers.qk_nope_dim + numbers.qk_rope_dim + numbers.v_head_dim)
    attention = 2 * per_key * sequence / 2 * numbers.num_layers
    return 6.0 * (active - numbers.vocab * numbers.dim) + 3.0 * attention
