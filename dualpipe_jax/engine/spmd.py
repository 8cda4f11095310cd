"""The engine: a step as one SPMD program that runs any lowered schedule."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from dualpipe_jax.contract import Report, Tree
from dualpipe_jax.engine.program import Outputs, Program, Repeated
from dualpipe_jax.engine.state import State
from dualpipe_jax.engine.step import Step
from dualpipe_jax.engine.storage import leaves_of
from dualpipe_jax.parallel import PP
from dualpipe_jax.schedule.lowering.table import TickTable
from dualpipe_jax.split.leaves import is_floating


@dataclasses.dataclass(frozen=True)
class Results:
    """What a program gives, on the outside of shard_map.

    Attributes:
      objective, report: see ``Report``.
      gradients: {"stages": PlacedStages of lists, "shared": list, "batch": list}, over floating leaves, None for those
        without a gradient; None forward only.
      outputs: what the last stage returned; None unless asked for.
      first_bad: int32 [dp, pp, ep, 4], or with nodes [dp, pp, node, ep, 4], see ``State``; None unless looked for.
    """

    objective: jax.Array
    report: Report
    gradients: Tree
    outputs: Tree
    first_bad: jax.Array | None


def value_and_grad(
    step: Step, params: Tree, batch: Tree, key: jax.Array | None, instead: Repeated | None = None
) -> Results:
    """Objective, report and gradients. ``params["stages"]`` is placed; ``instead`` of the schedule's ticks."""

    def on_rank(params: Tree, batch: Tree, key: jax.Array | None) -> Any:
        program = Program(step, params, batch, key, backward=True)
        state = program.run(instead)
        return *program.sums(state), program.gradients(state), None, program.first_bad(state)

    return _run(step, on_rank, params, batch, key, _gradient_specs(step, params, batch), None)


def forward(step: Step, params: Tree, batch: Tree, key: jax.Array | None, outputs: Outputs) -> Results:
    """The same without gradients, and what the last stage returned, [num_microbatches, ...]."""

    def on_rank(params: Tree, batch: Tree, key: jax.Array | None) -> Any:
        program = Program(step, params, batch, key, backward=False, outputs=outputs != "none")
        state = program.run()
        return *program.sums(state), None, program.outputs(state, outputs), program.first_bad(state)

    lead = (PP,) if outputs == "last_rank" else ()
    return _run(step, on_rank, params, batch, key, None, PartitionSpec(*lead, None, step.batch_axes))


def state(step: Step, params: Tree, batch: Tree, key: jax.Array | None) -> State:
    """Types of what the scan carries on each device, computes nothing."""
    return _shapes(step, Program.initial_state, params, batch, key)


def table(step: Step, params: Tree, batch: Tree, key: jax.Array | None) -> TickTable:
    """What the program walks through; computes nothing."""
    found = []

    def keep(program: "Program") -> State:
        found.append(program.table)
        return State()

    _shapes(step, keep, params, batch, key)
    return found[0]


def _shapes(step: Step, of: Callable[["Program"], State], params: Tree, batch: Tree, key: Any) -> State:
    """Types of what a function of one device's program returns."""
    unchecked = dataclasses.replace(step, check_vma=False)

    def on_rank(params: Tree, batch: Tree, key: jax.Array | None) -> State:
        return of(Program(unchecked, params, batch, key, backward=True))

    # Called replicated, what it returns has the shapes that it has on one device.
    on_device = _shard_map(unchecked, on_rank, params, PartitionSpec())
    return jax.eval_shape(on_device, params, batch, key)


def _run(
    step: Step, on_rank: Callable[..., Any], params: Tree, batch: Tree, key: Any, grads: Tree, outputs: Any
) -> Results:
    bad = PartitionSpec(*step.axes) if step.debug_nans else None
    specs = (PartitionSpec(), PartitionSpec(), grads, outputs, bad)
    return Results(*_shard_map(step, on_rank, params, specs)(params, batch, key))


def _shard_map(step: Step, on_rank: Callable[..., Any], params: Tree, out_specs: Tree) -> Callable[..., Any]:
    specs = step.param_specs(len(params["stages"].local))
    return jax.shard_map(
        on_rank,
        mesh=step.mesh,
        in_specs=(specs, PartitionSpec(None, step.batch_axes), PartitionSpec()),
        out_specs=out_specs,
        axis_names=set(step.axes),
        check_vma=step.check_vma,
    )


def _gradient_specs(step: Step, params: Tree, batch: Tree) -> Tree:
    def listed(tree: Tree, layout: Tree, frozen: Tree, *lead: str) -> list[PartitionSpec | None]:
        rows = zip(jax.tree.leaves(tree), leaves_of(layout), jax.tree.leaves(frozen), strict=True)
        return [
            None if stop or not is_floating(leaf) else PartitionSpec(*lead, *lies.stored)
            for leaf, lies, stop in rows
        ]

    stages = [listed(own, step.layout["stages"], step.frozen["stages"], PP) for own in params["stages"].local]
    over = PartitionSpec(None, step.batch_axes)
    by_batch = [over if is_floating(leaf) else None for leaf in jax.tree.leaves(batch)]
    return {
        "stages": step.placed(tuple(stages)),
        "shared": listed(params["shared"], step.layout["shared"], step.frozen["shared"]),
        "batch": by_batch if step.input_grads else [],
    }
