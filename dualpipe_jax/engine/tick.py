"""One tick of one rank: the exchange, and the guarded units of its row.

``Tick`` is the body of the engine's scan. Its state is a dict; every unit names the entries that it changes,
which are updated in place, and reads the others:

  x, dy, residual_i, residual_w, stash   slot pools (see ``TickTable``)
  y_out, dx_out                          what the rank produced in this tick; sent in the next one
  grads0, grads1, ...                    sums of gradients of each local stage
  embed_grads, head_grads                and of the two ends of the pipe
  loss, aux, outputs                     sums so far; in a forward-only program the last stages' outputs
  first_bad                              (tick, local stage, microbatch) of the first value that is not finite
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dualpipe_jax.engine.guard import pin, run_if
from dualpipe_jax.engine.model import PipelineModel, Tree
from dualpipe_jax.engine.slots import make_pool, read_slot, write_slot
from dualpipe_jax.engine.trees import accumulate, add_to, zeros_like_floating
from dualpipe_jax.engine.varying import vary
from dualpipe_jax.pair import Pool, forward_backward
from dualpipe_jax.parallel.p2p import send
from dualpipe_jax.schedule.lowering.lower import TickTable
from dualpipe_jax.split import SplitPlan

State = dict[str, Any]
POOL_OF = {"y": "x", "dx": "dy"}
NEVER = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True)
class Row:
    """A rank's row of the table, read by column name."""

    columns: tuple[str, ...]
    values: jax.Array

    def __getitem__(self, name: str) -> jax.Array:
        return self.values[self.columns.index(name)]


class ForwardPlan(NamedTuple):
    """A stage that keeps nothing for a backward: stands in for a ``SplitPlan`` in a forward-only program."""

    stage: Callable[[Tree, Tree], tuple[Tree, Tree]]
    y: Tree
    aux: Tree
    keep_input: Literal["F"] = "F"

    def forward(self, params: Tree, x: Tree) -> tuple[Tree, Tree, list[Any], list[Any]]:
        """Output, aux, and no residuals."""
        return *self.stage(params, x), [], []


@dataclasses.dataclass(frozen=True, eq=False)
class Tick:
    """What stays the same through all ticks.

    Attributes:
      model: the user's functions.
      table: the lowered schedule.
      plan: the split of the stage.
      params: the rank's own: {"embed", "head", "stages": tuple over local stages}.
      inputs, targets: leaves [num_microbatches, local microbatch size, ...].
      seed: the loss's cotangent for each microbatch of each device; None in a forward-only program.
      accumulate_dtype: of the gradients' sums; None keeps each parameter's own.
      fuse_pairs: whether an overlapped pair is one guarded computation, or its F and its B after each other.
      check_vma: whether values carry types that say over which axes they vary.
      debug_nans: whether to look for values that are not finite.
    """

    model: PipelineModel
    table: TickTable
    plan: SplitPlan  # or a ForwardPlan, when there is no seed
    params: dict[str, Any]
    inputs: Tree
    targets: Tree
    seed: float | None
    accumulate_dtype: Any
    fuse_pairs: bool
    check_vma: bool
    debug_nans: bool

    # ---------------------------------------------------------------- the scan's body

    def initial_state(self) -> State:
        """Empty pools, nothing to send, zero sums."""
        slots, plan = self.table.num_slots, self.plan
        state: State = {
            "x": make_pool(slots["x"], plan.y),
            "y_out": self._zeros(plan.y),
            "loss": jnp.zeros((), jnp.float32),
            "aux": self._zeros(plan.aux),
            "first_bad": jnp.full((3,), NEVER, jnp.int32),
        }
        if self.seed is None:
            state["outputs"] = make_pool(self.table.schedule.num_microbatches, plan.y)
        else:
            state |= {
                "dx_out": self._zeros(plan.y),
                "dy": make_pool(slots["dy"], plan.y),
                "residual_i": make_pool(slots["residual_i"], plan.residuals_i),
                "residual_w": make_pool(slots["residual_w"], plan.residuals_w),
                "stash": make_pool(slots["stash"], plan.stash),
            }
            sums = {"embed_grads": self.params["embed"], "head_grads": self.params["head"]}
            sums |= {f"grads{k}": stage for k, stage in enumerate(self.params["stages"])}
            state |= {name: zeros_like_floating(p, self.accumulate_dtype) for name, p in sums.items()}
        return vary(state, self.check_vma)

    def __call__(self, state: State, row: tuple[jax.Array, jax.Array]) -> tuple[State, None]:
        """One tick; ``row`` is (the tick's number, int32 [columns])."""
        number, here = row[0], Row(self.table.columns, row[1])
        # What the previous tick made goes out now and is not looked at before this tick's work is done.
        arrived = [
            send(state[f"{channel.payload}_out"], channel.pairs, beside_others=True)
            for channel in self.table.channels
        ]
        state = state | {name: self._zeros(self.plan.y) for name in ("y_out", "dx_out") if name in state}

        units: dict[str, Callable[..., State]] = {
            "F": self._forward,
            "FB": self._pair,
            "B": self._full_backward,
            "I": self._backward_input,
            "W": self._backward_weight,
        }
        state = self._embed(state, here)
        for position, unit in enumerate(self.table.program):
            for stages in self._stages_of(unit):
                state = units[unit](state, here, *stages)
            if unit in ("F", "FB") and not {"F", "FB"} & set(self.table.program[position + 1 :]):
                state = self._head(state, here)
        state = self._embed_backward(state, here)
        state = self._watch(state, here, number)

        for c, (channel, payload) in enumerate(zip(self.table.channels, arrived, strict=True)):
            pool = POOL_OF[channel.payload]
            state = state | {pool: write_slot(state[pool], here[f"arrive{c}"], payload)}
        return state, None

    # ------------------------------------------------- units: which rank runs what, on which entries
    # The scopes are the names by which a compiled program's guards are found.

    @jax.named_scope("forward")
    def _forward(self, state: State, row: Row, k: int) -> State:
        def work(part, here, params):
            return self._do_forward(part, here, params, self._input(part, here))

        wanted = (row["F"] == k) & ~self._paired(row)
        return self._guarded(state, self._forward_changes(), wanted, work, row, self.params["stages"][k])

    @jax.named_scope("backward")
    def _full_backward(self, state: State, row: Row, k: int) -> State:
        def work(part, here, params):
            return self._do_backward(part, here, params, self._saved(part, here), k)

        wanted = (row["B"] == k) & ~self._paired(row)
        return self._guarded(state, self._backward_changes(k), wanted, work, row, self.params["stages"][k])

    @jax.named_scope("pair")
    def _pair(self, state: State, row: Row, kf: int, kb: int) -> State:
        def work(part, here, forward_params, backward_params):
            forward = forward_params, self._input(part, here)
            backward = backward_params, self._kept_input(part, here), read_slot(part["dy"], here["G_dy"])
            (y, aux, *pools), sums, dx = forward_backward(
                self.plan,
                forward,
                self.plan,
                backward,
                _residual_pools(part, here),
                part[f"grads{kb}"],
                add_to,
            )
            # What is read is read before it is written again: else the pools are copied.
            inputs = pin({name: part[name] for name in ("x", "dy")})
            dx, inputs = lax.optimization_barrier((dx, inputs))
            part = part | pin(inputs) | dict(zip(("residual_i", "residual_w"), pools, strict=True))
            part = part | {f"grads{kb}": sums}
            return self._hand_back(self._hand_over(part, here, y, aux), here, dx)

        changes = dict.fromkeys(self._forward_changes() + self._backward_changes(kb))
        wanted = (row["F"] == kf) & (row["B"] == kb) & self._paired(row)
        both = (self.params["stages"][kf], self.params["stages"][kb])
        return self._guarded(state, changes, wanted, work, row, *both)

    @jax.named_scope("backward_input")
    def _backward_input(self, state: State, row: Row, k: int) -> State:
        def work(part, here, params):
            dx, stash = self.plan.backward_input(params, *self._saved(part, here))
            part = part | {"stash": write_slot(part["stash"], here["G_stash"], stash)}
            return self._hand_back(part, here, dx)

        changes = (*self._saved_pools(), "stash", "dx_out")
        return self._guarded(state, changes, row["I"] == k, work, row, self.params["stages"][k])

    @jax.named_scope("backward_weight")
    def _backward_weight(self, state: State, row: Row, k: int, j: int) -> State:
        def work(part, here, params):
            x = read_slot(part["x"], here[f"W{j}_x"]) if self.table.keep_input == "W" else None
            residuals = read_slot(part["residual_w"], here[f"W{j}_residual_w"])
            stash = read_slot(part["stash"], here[f"W{j}_stash"])
            gradients = self.plan.backward_weight(params, x, residuals, stash)
            return part | {f"grads{k}": accumulate(part[f"grads{k}"], gradients)}

        entries = ("x", "residual_w", "stash", f"grads{k}")
        return self._guarded(state, entries, row[f"W{j}"] == k, work, row, self.params["stages"][k])

    @jax.named_scope("embed")
    def _embed(self, state: State, row: Row) -> State:
        if not self.table.column("F_first").any():
            return state

        def work(part, here, embed):
            x = self.model.embed(embed, read_slot(self.inputs, here["F_microbatch"]))
            return {"x": write_slot(part["x"], here["F_x"], vary(x, self.check_vma))}

        wanted = (row["F"] >= 0) & (row["F_first"] == 1)
        return self._guarded(state, ("x",), wanted, work, row, self.params["embed"])

    @jax.named_scope("head")
    def _head(self, state: State, row: Row) -> State:
        if not self.table.column("F_last").any():
            return state

        def work(part, here, head, y):
            target = read_slot(self.targets, here["F_microbatch"])
            if self.seed is None:
                loss = self.model.head_loss(head, y, target)
                part = part | {"outputs": write_slot(part["outputs"], here["F_microbatch"], y)}
            else:
                loss, vjp = jax.vjp(lambda p, y: self.model.head_loss(p, y, target), head, y)
                d_head, dy = vjp(vary(jnp.asarray(self.seed, loss.dtype), self.check_vma))
                part = part | {
                    "head_grads": accumulate(part["head_grads"], d_head),
                    "dy": write_slot(part["dy"], here["F_dy"], dy),
                }
            return part | {"loss": part["loss"] + vary(loss, self.check_vma).astype(jnp.float32)}

        changes = ("loss", "outputs") if self.seed is None else ("loss", "head_grads", "dy")
        wanted = (row["F"] >= 0) & (row["F_last"] == 1)
        return self._guarded(state, changes, wanted, work, row, self.params["head"], state["y_out"])

    @jax.named_scope("embed_backward")
    def _embed_backward(self, state: State, row: Row) -> State:
        if self.seed is None or not self.table.column("G_first").any():
            return state

        def work(part, here, embed, dx):
            inputs = read_slot(self.inputs, here["G_microbatch"])
            _, vjp = jax.vjp(lambda p: vary(self.model.embed(p, inputs), self.check_vma), embed)
            return {"embed_grads": accumulate(part["embed_grads"], vjp(dx)[0])}

        wanted = ((row["B"] >= 0) | (row["I"] >= 0)) & (row["G_first"] == 1)
        reads = (self.params["embed"], state["dx_out"])
        return self._guarded(state, ("embed_grads",), wanted, work, row, *reads)

    def _watch(self, state: State, row: Row, number: jax.Array) -> State:
        if not self.debug_nans:
            return state
        finite = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves((state["y_out"], state["loss"]))]
        bad = (row["F"] >= 0) & ~functools.reduce(jnp.logical_and, finite) & (state["first_bad"][0] == NEVER)
        seen = jnp.stack([vary(number, self.check_vma), row["F"], row["F_microbatch"]])
        return state | {"first_bad": jnp.where(bad, seen, state["first_bad"])}

    # ------------------------------------------------------- works: what happens inside a guard

    def _do_forward(self, part: State, row: Row, params: Tree, x: Tree) -> State:
        return self._keep(part, row, self.plan.forward(params, x))

    def _keep(self, part: State, row: Row, made: tuple[Tree, Tree, Any, Any]) -> State:
        """Put what a forward made where its readers look for it."""
        y, aux, residuals_i, residuals_w = made
        if self.seed is not None:
            part = part | {
                "residual_i": write_slot(part["residual_i"], row["F_residual_i"], residuals_i),
                "residual_w": write_slot(part["residual_w"], row["F_residual_w"], residuals_w),
            }
        return self._hand_over(part, row, y, aux)

    def _hand_over(self, part: State, row: Row, y: Tree, aux: Tree) -> State:
        if self._handover("x", "F_y"):
            part = part | {"x": write_slot(part["x"], row["F_y"], y)}
        total = jax.tree.map(lambda sums, a: sums + vary(a, self.check_vma), part["aux"], aux)
        return part | {"y_out": y, "aux": total}

    def _do_backward(self, part: State, row: Row, params: Tree, saved: tuple[Any, ...], k: int) -> State:
        gradients, dx = self.plan.backward(params, *saved)
        part = part | {f"grads{k}": accumulate(part[f"grads{k}"], gradients)}
        return self._hand_back(part, row, dx)

    def _hand_back(self, part: State, row: Row, dx: Tree) -> State:
        if self._handover("dy", "G_dx"):
            part = part | {"dy": write_slot(part["dy"], row["G_dx"], dx)}
        return part | {"dx_out": dx}

    def _input(self, state: State, row: Row) -> Tree:
        return read_slot(state["x"], row["F_x"])

    def _kept_input(self, state: State, row: Row) -> Tree | None:
        return read_slot(state["x"], row["G_x"]) if self.table.keep_input != "F" else None

    def _saved(self, state: State, row: Row) -> tuple[Any, ...]:
        x = self._kept_input(state, row)
        residuals_i = read_slot(state["residual_i"], row["G_residual_i"])
        residuals_w = read_slot(state["residual_w"], row["G_residual_w"])
        return x, residuals_i, residuals_w, read_slot(state["dy"], row["G_dy"])

    # ---------------------------------------------------------------------- small helpers

    def _guarded(
        self,
        state: State,
        changes: Iterable[str],
        wanted: jax.Array,
        work: Callable[..., State],
        row: Row,
        *reads: Tree,
    ) -> State:
        """Run ``work(part, row, *reads)`` on the entries it changes, if wanted."""

        def trip(part, values, *reads):
            return work(part, Row(row.columns, values), *reads)

        part = {name: state[name] for name in changes}
        return state | run_if(wanted, trip, part, row.values, *reads)

    def _forward_changes(self) -> tuple[str, ...]:
        kept = () if self.seed is None else ("residual_i", "residual_w")
        return ("x", *kept, "y_out", "aux")

    def _saved_pools(self) -> tuple[str, ...]:
        return ("x", "residual_i", "residual_w", "dy")

    def _backward_changes(self, k: int) -> tuple[str, ...]:
        return (*self._saved_pools(), f"grads{k}", "dx_out")

    def _handover(self, pool: str, column: str) -> bool:
        """Whether on some rank the next stage is its own."""
        slot = self.table.column(column)
        runs = (
            self.table.column("F") if column == "F_y" else self.table.column("B") + self.table.column("I") + 1
        )
        return bool((slot[runs >= 0] != self.table.num_slots[pool] - 1).any())

    def _paired(self, row: Row | dict[str, Any]) -> Any:
        """Whether F and B run as one computation."""
        return (row["pair"] == 1) & self.fuse_pairs

    def _stages_of(self, unit: str) -> list[tuple[int, ...]]:
        """The local stages for which some rank runs the unit at some tick: one guard for each.

        One program that picked its stage's parameters by a traced number would copy them at every use.
        A pair names the forward's and the backward's stage, a W its stage and its place in the row.
        """
        column = self.table.column
        paired = self._paired({"pair": column("pair")})
        if unit == "FB":
            return sorted(set(zip(column("F")[paired].tolist(), column("B")[paired].tolist(), strict=True)))
        runs: list[tuple[int, ...]] = (
            [(k,) for k in set(column(unit)[~paired].tolist())]
            if unit != "W"
            else [(k, j) for j in range(self.table.num_w) for k in set(column(f"W{j}").ravel().tolist())]
        )
        return sorted(run for run in runs if run[0] >= 0)

    def _zeros(self, like: Tree) -> Tree:
        return vary(jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), like), self.check_vma)


def _residual_pools(part: State, row: Row) -> list[Pool]:
    """A pair's: its backward reads one slot of each, its forward writes one."""

    def pool(number: int, array: jax.Array, read_at: jax.Array, written_at: jax.Array) -> Pool:
        return Pool(
            array,
            read=lambda array: read_slot(array, read_at),
            write=lambda array, value: write_slot(array, written_at, value),
            used=number,
            made=number,
            pin=pin,
        )

    names = "residual_i", "residual_w"
    at = [[row[f"{unit}_{name}"] for unit in "GF"] for name in names]
    places = [(array, *slots) for name, slots in zip(names, at, strict=True) for array in part[name]]
    return [pool(number, *place) for number, place in enumerate(places)]
