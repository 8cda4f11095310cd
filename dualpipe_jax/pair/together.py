"""The uses of ``interleave``: a forward beside a backward, as training wants it, and any two functions."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax

from dualpipe_jax.pair.interleave import Pool, interleave
from dualpipe_jax.split.graph import Program
from dualpipe_jax.split.plan import SplitPlan
from dualpipe_jax.split.run import zeros_like
from dualpipe_jax.split.slices import prune
from dualpipe_jax.split.trace import trace_program

Tree: TypeAlias = Any
Arrays: TypeAlias = list[Any]


def side_by_side(
    first: Callable[..., Tree],
    first_arguments: Sequence[Tree],
    second: Callable[..., Tree],
    second_arguments: Sequence[Tree],
    passed: Callable[[Tree], Tree] | None = None,
) -> tuple[Tree, Tree]:
    """Gives ``(first(*first_arguments), second(*second_arguments))``, each hiding the other's communication.

    For two microbatches' forwards, say, that are at different layers, with a cache each. The functions are traced, and
    their collectives take turns, the second's leading; see ``interleave``. The first argument of each is taken
    for parameters, which were there long before. Not to be differentiated: what functions inside say of their own
    derivatives is lost.

    Arguments:
      first, second: functions of trees, with their arguments.
      passed: picks the part of the second's result that the first takes as one more argument, such as the keys and
        values of the other microbatch's layers; each array is passed on as soon as it is computed.

    >>> import jax.numpy as jnp
    >>> side_by_side(jnp.add, (1, 2), jnp.multiply, (3, 4))
    (Array(3, dtype=int32, weak_type=True), Array(12, dtype=int32, weak_type=True))
    >>> side_by_side(jnp.add, (1,), jnp.multiply, (3, 4), passed=lambda product: product)[0]
    Array(13, dtype=int32)
    """
    other, other_tree = _traced(second, second_arguments)
    handed: dict[int, int] = {}
    if passed is not None:
        numbers = passed(other_tree.unflatten(range(len(other.outputs))))
        start = len(jax.tree.leaves(first_arguments))
        handed = dict(enumerate(jax.tree.leaves(numbers), start))
        # What it will be given in their place.
        stand_ins = jax.tree.map(lambda k: zeros_like(other.outputs[k]), numbers)
        first_arguments = (*first_arguments, stand_ins)
    one, one_tree = _traced(first, first_arguments)
    ours, theirs = interleave(
        one,
        jax.tree.leaves(first_arguments),
        other,
        jax.tree.leaves(second_arguments),
        passed=handed,
        num_fixed=(len(jax.tree.leaves(first_arguments[:1])), len(jax.tree.leaves(second_arguments[:1]))),
    )
    return one_tree.unflatten(ours), other_tree.unflatten(theirs)


def _traced(function: Callable[..., Tree], arguments: Sequence[Tree]) -> tuple[Program, Tree]:
    """Its program, without what nobody wants of it: that would be given time."""
    program, tree = trace_program(function, *arguments)
    return dataclasses.replace(program, equations=prune(program.equations, program.outputs)[0]), tree


def forward_backward(
    forward_plan: SplitPlan,
    forward: tuple[Tree, Tree],
    backward_plan: SplitPlan,
    backward: tuple[Tree, Tree, Tree],
    pools: Sequence[Pool],
    sums: Sequence[Any],
    add: Callable[[Any, Any], Any],
) -> tuple[tuple[Tree, Tree, Arrays, Arrays], Arrays, Tree]:
    """A forward and a full backward of different microbatches, each hiding the other's communication.

    The plans may be those of different functions.

    Arguments:
      forward: (params, x).
      backward: (params, x, dy); x may be None as in ``SplitPlan.backward``.
      pools: where what the forward keeps goes, and where what the backward kept lies. ``made`` counts the
        forward plan's ``[*residuals_i, *residuals_w]``, ``used`` the backward plan's; every residual of the
        backward must be in one pool, and what of the forward is in none comes back as it is.
      sums: one for each leaf of params that ``backward_plan.params.has_gradient``, to which that is added.
      add: from a sum and a gradient to the new sum.

    Returns:
      What ``forward_plan.forward`` gives, with new pools in place of the residuals that went there; the new sums;
      and dx.

    Raises:
      ValueError: another number of sums, or arguments that differ from those traced.
    """
    if len(sums) != backward_plan.params.num_gradients:
        raise ValueError(
            f"forward_backward: {len(sums)} sums were given, but {backward_plan.params.num_gradients} leaves of params "
            "have a gradient (backward_plan.params.has_gradient); give one for each of these."
        )
    params, x, dy = backward
    kept = len(backward_plan.residuals_i), len(backward_plan.residuals_w)
    given = backward_plan.backward_arguments(params, x, [None] * kept[0], [None] * kept[1], dy)
    ahead = len(jax.tree.leaves((forward_plan.y, forward_plan.aux)))
    behind = len(backward_plan.params.types) + len(backward_plan.x.types)
    outputs, gradients = interleave(
        forward_plan.programs.forward,
        forward_plan.forward_arguments(*forward),
        backward_plan.programs.backward,
        given,
        pools=[dataclasses.replace(pool, made=ahead + pool.made, used=behind + pool.used) for pool in pools],
        finish={k: functools.partial(add, total) for k, total in enumerate(sums)},
        num_fixed=(len(forward_plan.params.types), len(backward_plan.params.types)),
    )
    _, dx = backward_plan.backward_results(gradients)
    return forward_plan.forward_results(outputs), gradients[: len(sums)], backward_plan.x.gradients(dx)
