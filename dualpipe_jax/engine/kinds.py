"""Each kind of stage in its parts: forward, backward for the input, backward for the weights."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from dualpipe_jax.engine.model import At, Out, StageFunction, Tree
from dualpipe_jax.engine.guard import pin
from dualpipe_jax.engine.slots import KEPT, read_slot, write_slot
from dualpipe_jax.engine.trees import add_to, is_floating, raw, typed
from dualpipe_jax.engine.varying import Vary
from dualpipe_jax.pair import Pool, interleave
from dualpipe_jax.split import SplitPlan, split_backward
from dualpipe_jax.split.graph import values
from dualpipe_jax.split.run import evaluate


@dataclasses.dataclass(frozen=True)
class Sight:
    """Types of all that a stage sees on one device, typed keys as such.

    Attributes:
      own, shared: its parameters and those of all.
      x: what it is given; None at the first stage.
      at: the rest.
    """

    own: Tree
    shared: Tree
    x: Tree
    at: At


@dataclasses.dataclass(frozen=True)
class Constants:
    """What has no gradient though it could.

    Attributes:
      own, shared: for each leaf of the parameters whether it is frozen.
      batch: whether the batch's leaves have none.
    """

    own: tuple[bool, ...]
    shared: tuple[bool, ...]
    batch: bool


def plain(function: StageFunction, sight: Sight, constants: Constants, vary: Vary) -> Callable[..., Any]:
    """A stage of raw trees: ``f((own, shared), (x, at)) -> ((x, losses), metrics)``.

    Typed keys are integers here, which is what slots and permutes know; losses are float32.
    """

    def stopped(tree: Tree, stops: Sequence[bool]) -> Tree:
        leaves, form = jax.tree.flatten(tree)
        return form.unflatten(
            jax.lax.stop_gradient(leaf) if stop else leaf for leaf, stop in zip(leaves, stops, strict=True)
        )

    def stage(params: tuple[Tree, Tree], seen: tuple[Tree, At]) -> Any:
        own = typed(stopped(params[0], constants.own), sight.own)
        shared = typed(stopped(params[1], constants.shared), sight.shared)
        x, at = typed(seen[0], sight.x), typed(seen[1], sight.at)
        if constants.batch:
            at = at._replace(batch=jax.tree.map(jax.lax.stop_gradient, at.batch))
        out = Out(*function(own, shared, x, at))
        losses = {name: jnp.asarray(loss).astype(jnp.float32) for name, loss in out.losses.items()}
        metrics = jax.tree.map(lambda m: jax.lax.stop_gradient(jnp.asarray(m)), dict(out.metrics))
        return vary((raw(out.x), losses)), vary(metrics)

    return stage


class ForwardKind:
    """A kind of stage that keeps nothing for a backward.

    Attributes:
      name: what the model calls it.
      y: types of what it hands on, or at the last stage gives out.
      losses: names of its losses.
      metrics: types of its metrics, by name.
      keep_input: how long x is read.
      kept: for each of ``KEPT`` the types of what is kept: nothing.
    """

    keep_input: Literal["F", "I", "W"] = "F"

    def __init__(
        self, name: str, function: Callable[..., Any], params: tuple[Tree, Tree], seen: tuple[Tree, At]
    ):
        self.name, self.function = name, function
        (self.y, losses), self.metrics = jax.eval_shape(function, params, seen)
        self.losses = tuple(losses)
        self.kept: dict[str, list[jax.ShapeDtypeStruct]] = {pool: [] for pool in KEPT}

    def forward(
        self, params: tuple[Tree, Tree], seen: tuple[Tree, At]
    ) -> tuple[Any, Tree, list[Any], list[Any]]:
        """Gives ((x, losses), metrics, [], [])."""
        return *self.function(params, seen), [], []


class Slot(NamedTuple):
    """An array of a pool in a pair: which slot the forward writes with which of its residuals, which one the backward
    reads as which of its own. -1 and None where it does not."""

    array: jax.Array
    written_at: jax.Array | None = None
    made: int = -1
    read_at: jax.Array | None = None
    used: int = -1

    def pool(self, ahead: int, behind: int) -> Pool:
        """As ``pair`` takes it: ``ahead`` outputs stand before the residuals, ``behind`` arguments."""
        read, write = self.read_at, self.written_at
        return Pool(
            self.array,
            read=None if read is None else lambda pool: read_slot(pool, read),
            write=None if write is None else lambda pool, value: write_slot(pool, write, value),
            used=-1 if read is None else behind + self.used,
            made=-1 if write is None else ahead + self.made,
            pin=pin,
        )


class Kind(ForwardKind):
    """A kind of stage with its backward, in whole and in halves.

    Gradients are lists, over the leaves whose numbers these attributes have. A leaf that the kind does not use, or
    that is frozen, is not among them: nothing is computed, kept or added for it.

    Further attributes:
      own, shared: leaves of the parameters.
      x: leaves of what is handed in.
      batch: leaves of the batch.
      floating_x: all floating leaves of what is handed in.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        params: tuple[Tree, Tree],
        seen: tuple[Tree, At],
        *,
        is_last: bool,
    ):
        def handing_on(params: tuple[Tree, Tree], seen: tuple[Tree, At]) -> Any:
            (y, losses), metrics = function(params, seen)
            return (None if is_last else y, losses), metrics

        super().__init__(name, handing_on, params, seen)
        self.plan = plan = split_backward(handing_on, has_aux=True).trace(params, seen)
        self.kept = {"residual_i": plan.residuals_i, "residual_w": plan.residuals_w, "stash": plan.stash}
        own, x, batch = (len(jax.tree.leaves(tree)) for tree in (params[0], seen[0], seen[1].batch))
        self._num_own, self._num_x = own, x
        touched = _touched(plan)
        num_params = len(jax.tree.leaves(params))
        self.own = tuple(i for i in touched if i < own)
        self.shared = tuple(i - own for i in touched if own <= i < num_params)
        self.x = tuple(i - num_params for i in touched if 0 <= i - num_params < x)
        self.batch = tuple(i - num_params - x for i in touched if 0 <= i - num_params - x < batch)
        self.floating_x = tuple(i for i, leaf in enumerate(jax.tree.leaves(seen[0])) if is_floating(leaf))
        self.keep_input = _keep_input(plan, num_params, x)

    def forward(
        self, params: tuple[Tree, Tree], seen: tuple[Tree, At]
    ) -> tuple[Any, Tree, list[Any], list[Any]]:
        """Gives ((x, losses), metrics, residuals_i, residuals_w)."""
        return self.plan.forward(params, seen)

    def backward(
        self,
        params: tuple[Tree, Tree],
        seen: tuple[Tree, At],
        kept: tuple[list[Any], list[Any]],
        dy: list[Any],
    ) -> "Gradients":
        """I and W at once.

        ``kept`` is (residuals_i, residuals_w), ``dy`` that of the floating leaves of x and then of the losses by name;
        x may be None where it is not read any more.
        """
        arguments = [*self._leaves(params, seen), *kept[0], *kept[1], *dy]
        return self._gradients(evaluate(self.plan.programs.backward, arguments))

    def backward_input(
        self,
        params: tuple[Tree, Tree],
        seen: tuple[Tree, At],
        kept: tuple[list[Any], list[Any]],
        dy: list[Any],
    ) -> tuple["Gradients", list[Any]]:
        """The gradients of x and of the batch, and the stash."""
        arguments = [*self._leaves(params, seen), *kept[0], *kept[1], *dy]
        outputs = evaluate(self.plan.programs.input, arguments)
        num_stash = len(self.plan.stash)
        split = len(outputs) - num_stash
        none = [None] * self.plan.params.num_gradients
        return self._gradients([*none, *outputs[:split]]), outputs[split:]

    def backward_weight(
        self, params: tuple[Tree, Tree], seen: tuple[Tree, At], residuals_w: list[Any], stash: list[Any]
    ) -> "Gradients":
        """The gradients of parameters."""
        arguments = [*self._leaves(params, seen), *residuals_w, *stash]
        outputs = evaluate(self.plan.programs.weight, arguments)
        return self._gradients([*outputs, *[None] * self.plan.x.num_gradients])

    def beside(
        self,
        other: "Kind",
        forward: tuple[Any, tuple[Tree, At]],
        backward: tuple[Any, tuple[Tree, At], list[Any]],
        slots: Mapping[tuple[str, int], Slot],
        sums: Sequence[Any],
    ) -> tuple[tuple[Any, Tree, list[Any], list[Any]], "Gradients", dict[tuple[str, int], Any]]:
        """A forward of this kind and a full backward of the other, each hiding the other's communication.

        See ``pair.interleave``. Gives what ``forward`` does (with pools in place of residuals), gradients in which
        parameters' are the new ``sums``, and the pools that were written.
        """
        mine, theirs = self.plan, other.plan
        ahead = len(jax.tree.leaves((mine.y, mine.aux)))
        params, seen, dy = backward
        given = other._leaves(params, seen)
        kept = len(theirs.residuals_i) + len(theirs.residuals_w)
        pools = [slot.pool(ahead, len(given)) for slot in slots.values()]
        places = [*other.own, *(i + other._num_own for i in other.shared)]
        outputs, made = interleave(
            mine.programs.forward,
            self._leaves(*forward),
            theirs.programs.backward,
            [*given, *[None] * kept, *dy],
            pools=pools,
            finish={
                k: functools.partial(add_to, total)
                for k, total in zip(other._outputs_of(places), sums, strict=True)
            },
            num_fixed=(len(mine.params.types), len(theirs.params.types)),
        )
        written = {place: outputs[ahead + slot.made] for place, slot in slots.items() if slot.made >= 0}
        return mine.forward_results(outputs), other._gradients(made), written

    def _outputs_of(self, numbers: Sequence[int]) -> list[int]:
        """Which outputs of the backward are the gradients of these leaves of the parameters."""
        floating = [i for i, there in enumerate(self.plan.params.has_gradient) if there]
        return [floating.index(number) for number in numbers]

    def _leaves(self, params: Tree, seen: tuple[Tree, At]) -> list[Any]:
        x = [None] * self._num_x if seen[0] is None else jax.tree.leaves(seen[0])
        return [*jax.tree.leaves(params), *x, *jax.tree.leaves(seen[1])]

    def _gradients(self, outputs: list[Any]) -> "Gradients":
        """Outputs, one for each floating leaf of params and of what is seen, as lists over the touched ones."""
        has = [*self.plan.params.has_gradient, *self.plan.x.has_gradient]
        numbers = [i for i, there in enumerate(has) if there]
        of = dict(zip(numbers, outputs, strict=True))
        num_params = len(self.plan.params.types)
        own = self._num_own
        x = num_params + self._num_x
        return Gradients(
            [of[i] for i in self.own],
            [of[i + own] for i in self.shared],
            [of[i + num_params] for i in self.x],
            [of[i + x] for i in self.batch],
        )


class Gradients(NamedTuple):
    """What a backward made, over the leaves that ``Kind`` numbers; None in a half that does not make it."""

    own: list[Any]
    shared: list[Any]
    x: list[Any]
    batch: list[Any]


def _touched(plan: SplitPlan) -> list[int]:
    """Numbers of the leaves of params and x whose gradients depend on the cotangents at all."""
    program = plan.programs.backward
    num_dy = sum(plan._floats)
    reached = set(program.inputs[len(program.inputs) - num_dy :]) if num_dy else set()
    for node in program.equations:
        if reached.intersection(values(node.inputs)):
            reached.update(node.outputs)
    has = [*plan.params.has_gradient, *plan.x.has_gradient]
    numbers = [i for i, there in enumerate(has) if there]
    return [i for i, output in zip(numbers, program.outputs, strict=True) if output in reached]


def _keep_input(plan: SplitPlan, begin: int, count: int) -> Literal["F", "I", "W"]:
    def reads(program: Any) -> bool:
        mine = set(program.inputs[begin : begin + count])
        used = {value for node in program.equations for value in values(node.inputs)} | set(
            values(program.outputs)
        )
        return bool(mine & used)

    programs = plan.programs
    return (
        "W" if reads(programs.weight) else "I" if reads(programs.input) or reads(programs.backward) else "F"
    )
