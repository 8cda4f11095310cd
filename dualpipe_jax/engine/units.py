"""The units that ranks run in ticks, as tasks: the work of each unit, and the entries of the state that it changes.

A unit works on a part of the engine's state: the entries that it changes, and the pools that it reads.
``tick`` decides on which ranks and ticks it runs.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dualpipe_jax.contract import At, Tree, key_at
from dualpipe_jax.engine.guard import pin
from dualpipe_jax.engine.kinds import ForwardKind, Gradients, Kind
from dualpipe_jax.engine.slots import PoolLayout, read_slot, write_slot
from dualpipe_jax.engine.state import Entry, State
from dualpipe_jax.engine.trees import add_to
from dualpipe_jax.pair.interleave import Pool
from dualpipe_jax.schedule.lowering.table import LocalStage, TickTable, Unit
from dualpipe_jax.schedule.lowering.unit_key import UnitKey


@dataclasses.dataclass(frozen=True)
class Row:
    """A rank's row of the table, read by column name."""

    columns: tuple[str, ...]
    values: jax.Array

    def __getitem__(self, name: str) -> jax.Array:
        return self.values[self.columns.index(name)]


@dataclasses.dataclass(frozen=True, eq=False)
class StepConstants:
    """What stays the same through all ticks of a rank.

    Attributes:
      own: the own parameters of each local stage, with the values of ``Prepared``.
      shared: the shared parameters.
      batch: leaves [num_microbatches, part of a microbatch, ...].
      key: the key of the step, or None.
      part: int32 scalar, the number of this device's part of the microbatches.
      seeds: for each loss its cotangent in each microbatch, [num_microbatches]; 1 on average over all parts.
      links: see ``pair.interleave``.
    """

    own: tuple[Tree, ...]
    shared: Tree
    batch: Tree
    key: jax.Array | None
    part: jax.Array
    seeds: Mapping[str, jax.Array]
    links: Mapping[str, float]


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """A unit of the program.

    Attributes:
      key: its name in compiled programs.
      numbers: the numbers of the table's units that it runs.
      changes: the entries of the state that it changes, and those of pools that it only reads.
      sums: the entries of ``changes`` that are sums to which it adds gradients.
      reads: the parameters that it reads: an (own, shared) for each stage with which it works.
      work: ``work(part of the state, row, *reads) -> part``.
    """

    key: UnitKey
    numbers: tuple[int, ...]
    changes: tuple[Entry, ...]
    sums: tuple[Entry, ...]
    reads: tuple[Tree, ...]
    work: Callable[..., State]


class TaskBuilder:
    """Makes tasks from a table's units.

    Arguments:
      table: the lowered schedule.
      kinds: the kinds of stages, in the order of the table's numbers.
      layout: the layout of the pools.
      constants: what stays the same through all ticks.
      outputs: whether the last stage's x is collected.
      fuse_pairs: see ``Pipeline``.
    """

    def __init__(
        self,
        table: TickTable,
        kinds: Sequence[ForwardKind],
        layout: PoolLayout,
        constants: StepConstants,
        *,
        outputs: bool,
        fuse_pairs: bool,
    ):
        self.table, self.kinds = table, kinds
        self.pool_layout, self.constants, self.outputs = layout, constants, outputs
        self.fuse_pairs, self.links = fuse_pairs, constants.links if fuse_pairs else None
        self._last = table.keeps.kind_of[-1]
        self._first = table.keeps.kind_of[0]

    def tasks(self) -> list[Task]:
        """A task for each unit that the table runs. A pair that is not fused is run by the tasks of its F and its B."""
        halves: dict[tuple[str, LocalStage], list[int]] = {}
        tasks = []
        for number in sorted(set(self.table.column("unit").ravel().tolist()) - {-1}):
            unit = self.table.units[number]
            if unit.op == "FB" and self.fuse_pairs:
                tasks.append(self._task(unit, (number,)))
                continue
            for op, stage in (
                (unit.op.replace("FB", "F"), unit.forward),
                (unit.op.replace("FB", "B"), unit.backward),
            ):
                if stage is not None:
                    halves.setdefault((op, stage), []).append(number)
        for (op, stage), numbers in sorted(halves.items(), key=lambda item: (item[0][0] == "F", *item[0])):
            unit = Unit(op, stage, None) if op == "F" else Unit(op, None, stage)
            tasks.append(self._task(unit, tuple(numbers)))
        return tasks

    def _task(self, unit: Unit, numbers: tuple[int, ...]) -> Task:
        op, ahead, back = unit
        stages = [stage for stage in (ahead, back) if stage is not None]
        key = UnitKey(op, tuple(self.kinds[stage.kind].name for stage in stages))
        changes = dict.fromkeys(
            [
                *(self._forward_changes(ahead) if ahead else ()),
                *(self._backward_changes(op, back) if back else ()),
            ]
        )
        reads = tuple((self.constants.own[stage.local], self.constants.shared) for stage in stages)

        def work(part: State, row: Row, *params: Tree) -> State:
            if ahead is not None and back is not None:
                return self._pair(part, row, ahead, back, *params)
            if ahead is not None:
                return self._forward(part, row, ahead, *params)
            assert back is not None
            return {"B": self._backward, "I": self._input, "W": self._weight}[op](part, row, back, *params)

        sums = tuple(self._sum_entries(back)) if back is not None and op != "I" else ()
        return Task(key, numbers, tuple(changes), sums, reads, work)

    # ------------------------------------------------------------------ forward

    def _forward_changes(self, stage: LocalStage) -> tuple[Entry, ...]:
        kind, last = self.kinds[stage.kind], stage.kind == self._last
        touches_x = stage.kind != self._first or (not last and "x" in self.table.hands_over)
        return (
            *([Entry("pools", "x")] if touches_x else []),
            *self._pool_entries(stage.kind, "residual_i", "residual_w"),
            *([] if last else [Entry("under_way", "y")]),
            *([Entry("outputs")] if last and self.outputs else []),
            *(Entry("losses", name) for name in kind.losses),
            *(Entry("metrics", name) for name in kind.metrics),
            *([] if kind.dropped is None else [Entry("dropped")]),
        )

    def _forward(self, part: State, row: Row, stage: LocalStage, params: Tree) -> State:
        kind = self.kinds[stage.kind]
        seen = self._x(part, row, stage, "F"), self._at(row, "F")
        made, aux, residuals_i, residuals_w = kind.forward(params, seen)
        part = self._write_pools(
            part, row, "F", stage.kind, {"residual_i": residuals_i, "residual_w": residuals_w}
        )
        return self._finish_forward(part, row, stage, made, aux)

    def _finish_forward(self, part: State, row: Row, stage: LocalStage, made: Any, aux: Any) -> State:
        (y, losses), (metrics, dropped) = made, aux
        if stage.kind != self._last:
            if "x" in self.table.hands_over:
                part = part.put(pools={"x": write_slot(part.pools["x"], row["F_y"], y)})
            part = part.put(under_way={"y": y})
        elif self.outputs:
            part = part.put(outputs=write_slot(part.outputs, row["F_microbatch"], y))
        weighted = {name: self._seed(name, row, "F") * loss for name, loss in losses.items()}
        part = part.put(
            losses={name: part.losses[name] + loss for name, loss in weighted.items()},
            metrics={
                name: jax.tree.map(jnp.add, part.metrics[name], metric) for name, metric in metrics.items()
            },
        )
        return part if dropped is None else part.put(dropped=part.dropped + dropped)

    # ----------------------------------------------------------------- backward

    def _backward_changes(self, op: str, stage: LocalStage) -> tuple[Entry, ...]:
        kind = self._kind(stage)
        last, first = stage.kind == self._last, stage.kind == self._first
        pools = {"I": ("residual_i", "residual_w", "stash"), "W": ("residual_w", "stash")}
        entries = self._pool_entries(stage.kind, *pools.get(op, ("residual_i", "residual_w")))
        if self._reads_x(op, stage) and not first:
            entries.append(Entry("pools", "x"))
        if op != "W":
            entries += [] if last and (first or "dy" not in self.table.hands_over) else [Entry("pools", "dy")]
            entries += [] if first else [Entry("under_way", "dx")]
            entries += [Entry("batch", leaf) for leaf in kind.batch]
        if op != "I":
            entries += self._sum_entries(stage)
        return tuple(entries)

    def _backward(self, part: State, row: Row, stage: LocalStage, params: Tree) -> State:
        residuals, dy = self._residuals(part, row, stage.kind), self._dy(part, row, stage)
        seen, sums = self._backward_inputs(part, row, stage, "B"), self._current_sums(part, stage)
        gradients = self._kind(stage).backward(params, seen, residuals, dy, sums, self.links)
        return self._finish_backward(self._with_new_sums(part, stage, gradients), row, stage, gradients)

    def _input(self, part: State, row: Row, stage: LocalStage, params: Tree) -> State:
        residuals, dy = self._residuals(part, row, stage.kind), self._dy(part, row, stage)
        seen = self._backward_inputs(part, row, stage, "I")
        gradients, stash = self._kind(stage).backward_input(params, seen, residuals, dy)
        part = self._write_pools(part, row, "G", stage.kind, {"stash": stash})
        return self._finish_backward(part, row, stage, gradients)

    def _weight(self, part: State, row: Row, stage: LocalStage, params: Tree) -> State:
        residuals, stash = (self._read_pools(part, row, stage.kind, pool) for pool in ("residual_w", "stash"))
        seen, sums = self._backward_inputs(part, row, stage, "W"), self._current_sums(part, stage)
        gradients = self._kind(stage).backward_weight(params, seen, residuals, stash, sums)
        return self._with_new_sums(part, stage, gradients)

    def _finish_backward(self, part: State, row: Row, stage: LocalStage, gradients: Gradients) -> State:
        for number, gradient in zip(self._kind(stage).batch, gradients.batch, strict=True):
            held, at = part.batch[number], row["G_microbatch"]
            part = part.put(batch={number: write_slot(held, at, add_to(read_slot(held, at), gradient))})
        if stage.kind == self._first:
            return part
        dx = self._whole_dx(part, stage, gradients.x)
        if "dy" in self.table.hands_over:
            part = part.put(pools={"dy": write_slot(part.pools["dy"], row["G_dx"], dx)})
        return part.put(under_way={"dx": dx})

    def _whole_dx(self, part: State, stage: LocalStage, gradients: list[Any]) -> list[Any]:
        """The gradients of all floating leaves of x; zeros for a leaf that the stage does not use."""
        kind = self._kind(stage)
        made = dict(zip(kind.x, gradients, strict=True))
        return [
            made[number] if number in made else jnp.zeros_like(zero)
            for number, zero in zip(kind.floating_x, part.under_way["dx"], strict=True)
        ]

    def _current_sums(self, part: State, stage: LocalStage) -> list[jax.Array]:
        return [getattr(part, field)[key] for field, key in self._sum_entries(stage)]

    def _with_new_sums(self, part: State, stage: LocalStage, gradients: Gradients) -> State:
        """The part of the state with the new sums, which ``gradients`` holds in place of parameters' gradients."""
        kind = self._kind(stage)
        return part.put(
            own={(stage.local, leaf): total for leaf, total in zip(kind.own, gradients.own, strict=True)},
            shared=dict(zip(kind.shared, gradients.shared, strict=True)),
        )

    # --------------------------------------------------------------------- pair

    def _pair(
        self,
        part: State,
        row: Row,
        ahead: LocalStage,
        back: LocalStage,
        forward_params: Tree,
        backward_params: Tree,
    ) -> State:
        first, second = self._kind(ahead), self._kind(back)
        seen = self._x(part, row, ahead, "F"), self._at(row, "F")
        saved, dy = self._backward_inputs(part, row, back, "B"), self._dy(part, row, back)
        slots = self._pools_of_pair(part, row, ahead.kind, back.kind)
        sums = self._current_sums(part, back)
        (made, aux, *_), gradients, pools = first.run_pair(
            second, (forward_params, seen), (backward_params, saved, dy), slots, sums, self.constants.links
        )
        # The barrier makes all reads of these pools come before the next writes: else the pools are copied.
        inputs = pin({name: part.pools[name] for name in ("x", "dy") if name in part.pools})
        gradients, inputs = lax.optimization_barrier((gradients, inputs))
        part = self._with_new_sums(part.put(pools=pin(inputs) | self._replaced(part, pools)), back, gradients)
        return self._finish_backward(self._finish_forward(part, row, ahead, made, aux), row, back, gradients)

    def _pools_of_pair(self, part: State, row: Row, ahead: int, back: int) -> dict[tuple[str, int], Pool]:
        """The pools that the forward writes or the backward reads, by name and position."""
        pools: dict[tuple[str, int], Pool] = {}
        for kind, letter in ((ahead, "F"), (back, "G")):
            places = [
                place
                for pool in ("residual_i", "residual_w")
                for place in self.pool_layout.places[kind][pool]
            ]
            for number, (name, i) in enumerate(places):
                pool = pools.get((name, i)) or Pool(part.pools[name][i], pin=pin)
                at = row[f"{letter}_{name}"]
                if letter == "F":
                    pools[name, i] = dataclasses.replace(pool, write=_writing(at), output=number)
                else:
                    read = functools.partial(read_slot, slot=at)
                    pools[name, i] = dataclasses.replace(pool, read=read, argument=number)
        return pools

    def _replaced(self, part: State, pools: Mapping[tuple[str, int], Any]) -> dict[str, list[Any]]:
        changed = {name: list(part.pools[name]) for name, _ in pools}
        for (name, i), pool in pools.items():
            changed[name][i] = pool
        return changed

    def _sum_entries(self, stage: LocalStage) -> list[Entry]:
        kind = self._kind(stage)
        own = [Entry("own", (stage.local, leaf)) for leaf in kind.own]
        return [*own, *(Entry("shared", leaf) for leaf in kind.shared)]

    # ------------------------------------------------------------ small helpers

    def _kind(self, stage: LocalStage) -> Kind:
        kind = self.kinds[stage.kind]
        assert isinstance(kind, Kind)
        return kind

    def _at(self, row: Row, letter: str) -> At:
        constants, stage, microbatch = self.constants, row[f"{letter}_stage"], row[f"{letter}_microbatch"]
        key = key_at(constants.key, stage, microbatch, constants.part)
        return At(
            batch=read_slot(constants.batch, microbatch),
            stage=stage,
            microbatch=microbatch,
            key=None if key is None else jax.random.key_data(key),
        )

    def _x(self, part: State, row: Row, stage: LocalStage, letter: str) -> Tree:
        return None if stage.kind == self._first else read_slot(part.pools["x"], row[f"{letter}_x"])

    def _backward_inputs(self, part: State, row: Row, stage: LocalStage, op: str) -> tuple[Tree, At]:
        """The stage's input as the forward saw it, (x, at); x is None if it is not read any more."""
        x = self._x(part, row, stage, "G") if self._reads_x(op, stage) else None
        return x, self._at(row, "G")

    def _reads_x(self, op: str, stage: LocalStage) -> bool:
        keep = self._kind(stage).keep_input
        return keep == "W" or (keep == "I" and op != "W")

    def _seed(self, name: str, row: Row, letter: str) -> jax.Array:
        return lax.dynamic_index_in_dim(
            self.constants.seeds[name], row[f"{letter}_microbatch"], keepdims=False
        )

    def _dy(self, part: State, row: Row, stage: LocalStage) -> list[Any]:
        """The cotangents of the output x, over its floating leaves, then of the losses in the order of their names."""
        above = [] if stage.kind == self._last else read_slot(part.pools["dy"], row["G_dy"])
        return [*above, *(self._seed(name, row, "G") for name in sorted(self.kinds[stage.kind].losses))]

    def _read_pools(self, part: State, row: Row, kind: int, pool: str) -> list[Any]:
        return [
            read_slot(part.pools[name][i], row[f"G_{name}"])
            for name, i in self.pool_layout.places[kind][pool]
        ]

    def _residuals(self, part: State, row: Row, kind: int) -> tuple[list[Any], list[Any]]:
        return self._read_pools(part, row, kind, "residual_i"), self._read_pools(
            part, row, kind, "residual_w"
        )

    def _write_pools(
        self, part: State, row: Row, letter: str, kind: int, made: Mapping[str, list[Any]]
    ) -> State:
        pools = {name: list(part.pools[name]) for name in self.pool_layout.groups(kind, *made)}
        for pool, values in made.items():
            for (name, i), value in zip(self.pool_layout.places[kind][pool], values, strict=True):
                pools[name][i] = write_slot(pools[name][i], row[f"{letter}_{name}"], value)
        return part.put(pools=pools)

    def _pool_entries(self, kind: int, *saved: str) -> list[Entry]:
        return [Entry("pools", name) for name in self.pool_layout.groups(kind, *saved)]


def _writing(slot: jax.Array) -> Callable[[jax.Array, jax.Array], jax.Array]:
    return lambda pool, value: write_slot(pool, slot, value)
