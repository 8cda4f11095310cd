"""Each kind of stage in its parts: forward, backward for the input, backward for the weights."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from dualpipe_jax.contract import At, StageFunction, Tree, checked_output
from dualpipe_jax.engine import checks
from dualpipe_jax.engine.slots import SAVED, SavedType
from dualpipe_jax.engine.trees import Vary, add_to, as_metric, raw, typed
from dualpipe_jax.pair import by_itself, interleave
from dualpipe_jax.pair.interleave import Pool
from dualpipe_jax.parallel.expert_plan import DROPPED
from dualpipe_jax.split import split_backward
from dualpipe_jax.split.leaves import cut, is_floating
from dualpipe_jax.split.marks import capture_marked
from dualpipe_jax.split.plan import SplitPlan
from dualpipe_jax.split.run import evaluate


def raw_stage(
    kind: str, function: StageFunction, params: tuple[Tree, Tree], seen: tuple[Tree, At], vary: Vary
) -> Callable[..., Any]:
    """A stage as a function of raw trees: ``f((own, shared), (x, at)) -> ((x, losses), metrics)``.

    PRNG keys are plain integers here, since slots and permutes cannot hold typed keys; ``params`` and ``seen``
    are the types of the arguments with typed keys. Losses are float32.
    """

    def stage(raw_params: tuple[Tree, Tree], raw_seen: tuple[Tree, At]) -> Any:
        out = checked_output(kind, function(*typed(raw_params, params), *typed(raw_seen, seen)))
        losses = {name: jnp.asarray(loss).astype(jnp.float32) for name, loss in out.losses.items()}
        metrics = jax.tree.map(lambda m: jax.lax.stop_gradient(as_metric(m)), dict(out.metrics))
        return vary((raw(jax.tree.map(jnp.asarray, out.x)), losses)), vary(metrics)

    return stage


def with_dropped_count(stage: Callable[..., Any], params: Tree, seen: Tree) -> Callable[..., Any]:
    """The stage with ``(metrics, dropped)`` in place of metrics, see ``Report``.

    ``dropped`` is None if the stage dispatches no tokens to experts.
    """
    with_marked = capture_marked(stage, DROPPED, params, seen)

    def with_count(params: Tree, seen: Tree) -> Any:
        if with_marked is None:
            made, metrics = stage(params, seen)
            return made, (metrics, None)
        (made, metrics), marked = with_marked(params, seen)
        return made, (metrics, sum_marked(marked))

    return with_count


def sum_marked(marked: Sequence[jax.Array]) -> jax.Array:
    """The sum of all arrays that ``capture_marked`` found: int32 []."""
    return functools.reduce(jnp.add, [jnp.sum(counts, dtype=jnp.int32) for counts in marked])


class ForwardKind:
    """A kind of stage that keeps nothing for a backward.

    Attributes:
      name: the kind's name in the model.
      y: types of the stage's output, which goes to the next stage or, at the last stage, to the caller.
      losses: names of its losses.
      metrics: types of its metrics, by name.
      dropped: type of the number of dropped assignments, None for a stage without experts.
      keep_input: the last part that reads x: "F", "I" or "W".
      saved: for each of ``SAVED`` the types of the arrays that are saved for a backward: none here.
    """

    keep_input: Literal["F", "I", "W"] = "F"

    def __init__(
        self, name: str, function: Callable[..., Any], params: tuple[Tree, Tree], seen: tuple[Tree, At]
    ):
        self.name, self.function = name, function
        (self.y, losses), (self.metrics, self.dropped) = jax.eval_shape(function, params, seen)
        self.losses = tuple(losses)
        self.saved: dict[str, list[SavedType]] = {pool: [] for pool in SAVED}

    def forward(
        self, params: tuple[Tree, Tree], seen: tuple[Tree, At]
    ) -> tuple[Any, Tree, list[Any], list[Any]]:
        """Returns ((y, losses), (metrics, dropped), [], [])."""
        return *self.function(params, seen), [], []


class Kind(ForwardKind):
    """A kind of stage with its backward, whole and in two halves.

    Gradients are lists, over the leaves whose numbers ``own``, ``shared``, ``x`` and ``batch`` hold. A leaf that
    the kind does not use, or that is frozen, is not among them: nothing is computed, kept or added for it.

    Further attributes:
      own, shared: the numbers of the leaves of own and shared parameters that have gradients.
      x: such numbers of leaves of the input x.
      batch: such numbers of leaves of the batch.
      floating_x: the numbers of all floating leaves of the input x.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        params: tuple[Tree, Tree],
        seen: tuple[Tree, At],
        *,
        is_last: bool,
        wanted: tuple[tuple[Tree, Tree], tuple[bool, At]],
        sums: Sequence[Any] | None,
    ):
        def without_last_output(params: tuple[Tree, Tree], seen: tuple[Tree, At]) -> Any:
            (y, losses), aux = function(params, seen)
            return (None if is_last else y, losses), aux

        super().__init__(name, without_last_output, params, seen)
        split = split_backward(
            without_last_output, has_aux=True, wanted=wanted, at_hand=(False, True), sums=sums
        )
        self.plan: SplitPlan = split.trace(params, seen)
        plan = self.plan
        checks.check_backward(name, plan.collectives("backward"))
        self.saved = {
            pool: [(struct.shape, struct.dtype, off) for struct, off in zip(structs, offloaded, strict=True)]
            for pool, structs, offloaded in zip(
                SAVED, (plan.residuals_i, plan.residuals_w, plan.stash), plan.offloaded, strict=True
            )
        }
        counts = [len(jax.tree.leaves(tree)) for tree in (*params, seen[0], seen[1].batch)]
        has = cut([*plan.params.has_gradient, *plan.x.has_gradient], *counts)
        numbers = (tuple(i for i, there in enumerate(part) if there) for part in has)
        self.own, self.shared, self.x, self.batch = numbers
        self.floating_x = tuple(i for i, leaf in enumerate(jax.tree.leaves(seen[0])) if is_floating(leaf))
        self.keep_input = plan.keep_input
        self._num_x = counts[2]

    def forward(
        self, params: tuple[Tree, Tree], seen: tuple[Tree, At]
    ) -> tuple[Any, Tree, list[Any], list[Any]]:
        """Returns ((y, losses), (metrics, dropped), residuals_i, residuals_w); y is None at the last stage."""
        return self.plan.forward(params, seen)

    def backward(
        self,
        params: tuple[Tree, Tree],
        seen: tuple[Tree, At],
        residuals: tuple[list[Any], list[Any]],
        dy: list[Any],
        sums: Sequence[Any],
        links: Mapping[str, float] | None,
    ) -> "Gradients":
        """I and W at once: the gradients, in which those of parameters are the new ``sums``.

        With ``links`` (see ``pair.interleave``) W's work is done while I's collectives, if there are any, are
        in flight.

        ``residuals`` is (residuals_i, residuals_w). ``dy`` has the cotangents of the floating leaves of the output
        x, and then those of the losses in the order of their names. The x of ``seen`` may be None where it is
        not read any more.
        """
        given, input_sums = (
            [*self._leaves(params, seen), *residuals[0], *residuals[1], *dy],
            self._input_sums(sums),
        )
        if links is None:
            made = evaluate(self.plan.programs.backward, [*given, *input_sums])
            dparams, dx = self.plan.backward_results(made)
            return self._gradients(self._new_sums(sums, dparams), dx)
        made = by_itself(
            self.plan.programs.backward,
            [*given, *input_sums],
            finish=self._sum_adders(sums),
            fixed=self._fixed_arguments(len(given)),
            links=links,
        )
        return self._gradients(*self.plan.backward_results(made))

    def backward_input(
        self,
        params: tuple[Tree, Tree],
        seen: tuple[Tree, At],
        residuals: tuple[list[Any], list[Any]],
        dy: list[Any],
    ) -> tuple["Gradients", list[Any]]:
        """The gradients of x and of the batch, and the stash.

        Its work is left in the compiler's order: there is little to overlap with its collectives, and in an
        order of our own it took as long.
        """
        arguments = [
            *self._leaves(params, seen),
            *residuals[0],
            *residuals[1],
            *dy,
            *[None] * len(self.plan.sums),
        ]
        made = evaluate(self.plan.programs.input, arguments)
        dx, stash = cut(made, self.plan.x.num_gradients, len(self.plan.stash))
        return self._gradients([None] * self.plan.params.num_gradients, dx), stash

    def backward_weight(
        self,
        params: tuple[Tree, Tree],
        seen: tuple[Tree, At],
        residuals_w: list[Any],
        stash: list[Any],
        sums: Sequence[Any],
    ) -> "Gradients":
        """The new ``sums``, to which the gradients of parameters have been added."""
        arguments = [*self._leaves(params, seen), *residuals_w, *stash, *self._input_sums(sums)]
        dparams = evaluate(self.plan.programs.weight, arguments)
        return self._gradients(self._new_sums(sums, dparams), [None] * self.plan.x.num_gradients)

    def run_pair(
        self,
        other: "Kind",
        forward: tuple[Any, tuple[Tree, At]],
        backward: tuple[Any, tuple[Tree, At], list[Any]],
        pools: Mapping[tuple[str, int], Pool],
        sums: Sequence[Any],
        links: Mapping[str, float],
    ) -> tuple[tuple[Any, Tree, list[Any], list[Any]], "Gradients", dict[tuple[str, int], Any]]:
        """A forward of this kind and a full backward of the other, each hiding the other's communication.

        See ``pair.interleave``; ``output`` and ``argument`` of a pool are numbers of residuals. Returns what
        ``forward`` does (with pools in place of residuals), the gradients, in which those of parameters are
        the new ``sums``, and the pools that were written.
        """
        mine, theirs = self.plan, other.plan
        num_outputs = len(jax.tree.leaves((mine.y, mine.aux)))
        params, seen, dy = backward
        given = other._leaves(params, seen)
        num_residuals = len(theirs.residuals_i) + len(theirs.residuals_w)
        backward_arguments = [*given, *[None] * num_residuals, *dy]
        input_sums = other._input_sums(sums)
        outputs, made = interleave(
            mine.programs.forward,
            self._leaves(*forward),
            theirs.programs.backward,
            [*backward_arguments, *input_sums],
            pools=[
                dataclasses.replace(
                    pool, output=num_outputs + pool.output, argument=len(given) + pool.argument
                )
                for pool in pools.values()
            ],
            finish=other._sum_adders(sums),
            fixed=(range(len(mine.params.types)), other._fixed_arguments(len(backward_arguments))),
            links=links,
        )
        written = {
            place: outputs[num_outputs + pool.output]
            for place, pool in pools.items()
            if pool.write is not None
        }
        return mine.forward_results(outputs), other._gradients(*theirs.backward_results(made)), written

    def _input_sums(self, sums: Sequence[Any]) -> list[Any]:
        """The sums that the plan's programs take as inputs and add gradients to."""
        return [sums[number] for number in self.plan.sums]

    def _fixed_arguments(self, num_given: int) -> list[int]:
        """The numbers of a backward's arguments that exist long before it: parameters, and sums, which come last."""
        return [*range(len(self.plan.params.types)), *range(num_given, num_given + len(self.plan.sums))]

    def _sum_adders(self, sums: Sequence[Any]) -> dict[int, Callable[[Any], Any]]:
        """By the number of a gradient that the plan's programs do not add to its sum, the function that adds it."""
        return {
            k: functools.partial(add_to, total) for k, total in enumerate(sums) if k not in self.plan.sums
        }

    def _new_sums(self, sums: Sequence[Any], made: Sequence[Any]) -> list[Any]:
        """The new sums, from the outputs of the plan's programs: gradients, or sums that are new already."""
        pairs = enumerate(zip(sums, made, strict=True))
        return [new if k in self.plan.sums else add_to(total, new) for k, (total, new) in pairs]

    def _leaves(self, params: Tree, seen: tuple[Tree, At]) -> list[Any]:
        x = [None] * self._num_x if seen[0] is None else jax.tree.leaves(seen[0])
        return [*jax.tree.leaves(params), *x, *jax.tree.leaves(seen[1])]

    def _gradients(self, dparams: list[Any], dx: list[Any]) -> "Gradients":
        own, shared = cut(dparams, len(self.own), len(self.shared))
        return Gradients(own, shared, *cut(dx, len(self.x), len(self.batch)))


class Gradients(NamedTuple):
    """The gradients of a backward, over the leaves that ``Kind`` numbers.

    An entry is None where a half of a backward does not compute it. In ``own`` and ``shared`` the entries of
    W and B are the new sums.
    """

    own: list[Any]
    shared: list[Any]
    x: list[Any]
    batch: list[Any]
