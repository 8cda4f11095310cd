"""The engine: a step as one SPMD program that runs any lowered schedule."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from dualpipe_jax.contract import Report, Tree
from dualpipe_jax.engine.kinds import Kind
from dualpipe_jax.engine.program import Outputs, Program
from dualpipe_jax.engine.state import State
from dualpipe_jax.engine.step import Step
from dualpipe_jax.engine.storage import leaf_shardings
from dualpipe_jax.parallel import PP
from dualpipe_jax.schedule.lowering.table import TickTable
from dualpipe_jax.schedule.lowering.unit_key import UnitKey
from dualpipe_jax.split.leaves import is_floating


@dataclasses.dataclass(frozen=True)
class Results:
    """The results of a program, outside of shard_map.

    Attributes:
      objective, report: see ``Report``.
      gradients: {"stages": PlacedStages of lists, "shared": list, "batch": list}; each list has an entry for
        each leaf, None for leaves without a gradient. None of a forward-only program.
      outputs: what the last stage returned; None unless asked for.
      first_bad: int32 [..., 4], with the axes of ``Step.axes`` as leading dims, see ``State``; None unless
        looked for.
    """

    objective: jax.Array
    report: Report
    gradients: Tree
    outputs: Tree
    first_bad: jax.Array | None


def value_and_grad(step: Step, params: Tree, batch: Tree, key: jax.Array | None) -> Results:
    """Objective, report and gradients. ``params["stages"]`` is placed."""

    def on_rank(params: Tree, batch: Tree, key: jax.Array | None) -> Any:
        program = Program(step, params, batch, key, backward=True)
        state = program.run()
        return *program.sums(state), program.gradients(state), None, program.first_bad(state)

    return _run(step, on_rank, params, batch, key, _gradient_specs(step, params, batch), None)


def rehearse(
    step: Step, params: Tree, batch: Tree, state: State, rows: jax.Array, times: jax.Array
) -> tuple[jax.Array, Tree, State]:
    """Objective, gradients and the new state after other ticks than the schedule's, see ``tick.repeat``.

    Leaves of ``state`` have a leading dim of all devices.
    """
    everywhere = PartitionSpec(step.axes)

    def on_rank(params: Tree, batch: Tree, state: State, rows: jax.Array, times: jax.Array) -> Any:
        program = Program(step, params, batch, None, backward=True)
        state = program.repeat(jax.tree.map(lambda leaf: leaf[0], state), rows, times)
        objective, _ = program.sums(state)
        return objective, program.gradients(state), jax.tree.map(lambda leaf: leaf[None], state)

    return _shard_map(
        step,
        on_rank,
        params,
        (PartitionSpec(), _gradient_specs(step, params, batch), everywhere),
        (everywhere, PartitionSpec(), PartitionSpec()),
    )(params, batch, state, rows, times)


def forward(step: Step, params: Tree, batch: Tree, key: jax.Array | None, outputs: Outputs) -> Results:
    """Objective and report of a forward-only program, and what the last stage returned, [num_microbatches, ...]."""

    def on_rank(params: Tree, batch: Tree, key: jax.Array | None) -> Any:
        program = Program(step, params, batch, key, backward=False, outputs=outputs != "none")
        state = program.run()
        return *program.sums(state), None, program.outputs(state, outputs), program.first_bad(state)

    lead = (PP,) if outputs == "last_rank" else ()
    return _run(step, on_rank, params, batch, key, None, PartitionSpec(*lead, None, step.batch_axes))


@dataclasses.dataclass(frozen=True)
class Sketch:
    """What is known of a step before it is compiled.

    Attributes:
      state: types of the arrays that the scan carries on each device; see ``State``.
      table: the lowered schedule, which the program runs tick by tick.
      flops: the FLOPs of matrix products and convolutions in F, I, W and B of each kind of stage, on one
        device. A Pallas kernel counts with the FLOPs that its author states. Where a kind is used both inside
        the model and at its ends, the largest number.
      values: types of the values that a device's stages compute from parameters alone, once a step; see
        ``Prepared``.
    """

    state: State
    table: TickTable
    flops: Mapping[UnitKey, int]
    values: Tree


def sketch(step: Step, params: Tree, batch: Tree, key: jax.Array | None) -> Sketch:
    """Trace the step as one device sees it; computes nothing."""
    unchecked, found = dataclasses.replace(step, check_vma=False), []

    def on_rank(params: Tree, batch: Tree, key: jax.Array | None) -> State:
        program = Program(unchecked, params, batch, key, backward=True)
        made = [values for _, values in program.own]
        values = jax.tree.map(lambda value: jax.ShapeDtypeStruct(value.shape, value.dtype), made)
        found.append((program.table, _flops(program), values))
        return program.initial_state()

    # With replicated outputs, shard_map's result has the shapes of one device.
    on_device = _shard_map(unchecked, on_rank, params, PartitionSpec())
    state = jax.eval_shape(on_device, params, batch, key)
    return Sketch(state, *found[0])


def _flops(program: Program) -> dict[UnitKey, int]:
    most: dict[UnitKey, int] = {}
    for kind in program.kinds:
        assert isinstance(kind, Kind)
        flops = kind.plan.flops
        for op, own in {"F": flops.forward, "B": flops.backward, "I": flops.input, "W": flops.weight}.items():
            unit = UnitKey(op, (kind.name,))
            most[unit] = max(own, most.get(unit, 0))
    return most


def _run(
    step: Step, on_rank: Callable[..., Any], params: Tree, batch: Tree, key: Any, grads: Tree, outputs: Any
) -> Results:
    bad = PartitionSpec(*step.axes) if step.debug_nans else None
    specs = (PartitionSpec(), PartitionSpec(), grads, outputs, bad)
    return Results(*_shard_map(step, on_rank, params, specs)(params, batch, key))


def _shard_map(
    step: Step,
    on_rank: Callable[..., Any],
    params: Tree,
    out_specs: Tree,
    more: tuple[PartitionSpec, ...] = (PartitionSpec(),),
) -> Callable[..., Any]:
    """``shard_map`` of a function of parameters, a batch and ``more`` arguments: by default a replicated key."""
    specs = step.param_specs(len(params["stages"].local))
    return jax.shard_map(
        on_rank,
        mesh=step.mesh,
        in_specs=(specs, PartitionSpec(None, step.batch_axes), *more),
        out_specs=out_specs,
        axis_names=set(step.axes),
        check_vma=step.check_vma,
    )


def _gradient_specs(step: Step, params: Tree, batch: Tree) -> Tree:
    def listed(tree: Tree, shardings: Tree, frozen: Tree, *lead: str) -> list[PartitionSpec | None]:
        rows = zip(jax.tree.leaves(tree), leaf_shardings(shardings), jax.tree.leaves(frozen), strict=True)
        return [
            None if stop or not is_floating(leaf) else PartitionSpec(*lead, *sharding.stored)
            for leaf, sharding, stop in rows
        ]

    stages = [
        listed(own, step.shardings["stages"], step.frozen["stages"], PP) for own in params["stages"].local
    ]
    over = PartitionSpec(None, step.batch_axes)
    by_batch = [over if is_floating(leaf) else None for leaf in jax.tree.leaves(batch)]
    return {
        "stages": step.placed(tuple(stages)),
        "shared": listed(params["shared"], step.shardings["shared"], step.frozen["shared"]),
        "batch": by_batch if step.input_grads else [],
    }
