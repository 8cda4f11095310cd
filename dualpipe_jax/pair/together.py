"""``interleave`` for any two functions."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax

from dualpipe_jax.pair.interleave import interleave
from dualpipe_jax.split.graph import Program
from dualpipe_jax.split.run import zeros
from dualpipe_jax.split.slices import prune
from dualpipe_jax.split.trace import trace_program

Tree: TypeAlias = Any


def side_by_side(
    first: Callable[..., Tree],
    first_arguments: Sequence[Tree],
    second: Callable[..., Tree],
    second_arguments: Sequence[Tree],
    passed: Callable[[Tree], Tree] | None = None,
) -> tuple[Tree, Tree]:
    """Compute ``(first(*first_arguments), second(*second_arguments))``, each hiding the other's communication.

    An example is the forwards of two microbatches that are at different layers, each with its own cache. The
    functions are traced, and their collectives alternate, beginning with the second's; see ``interleave``.
    The first argument of each is taken to be parameters, which exist long before the call. The result must
    not be differentiated: derivatives that inner functions define themselves are lost.

    Arguments:
      first, second: functions of trees, with their arguments.
      passed: picks the part of the second's result that the first takes as one more argument, such as the
        keys and values of the other microbatch's layers; each array is passed on as soon as it is computed.

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
        # Zeros of the right types, for tracing; the first is later given the second's outputs in their place.
        stand_ins = jax.tree.map(lambda k: zeros(other.outputs[k].kind), numbers)
        first_arguments = (*first_arguments, stand_ins)
    one, one_tree = _traced(first, first_arguments)
    ours, theirs = interleave(
        one,
        jax.tree.leaves(first_arguments),
        other,
        jax.tree.leaves(second_arguments),
        passed=handed,
        fixed=(
            range(len(jax.tree.leaves(first_arguments[:1]))),
            range(len(jax.tree.leaves(second_arguments[:1]))),
        ),
    )
    return one_tree.unflatten(ours), other_tree.unflatten(theirs)


def _traced(function: Callable[..., Tree], arguments: Sequence[Tree]) -> tuple[Program, Tree]:
    """The function's program, without equations that no output needs: ``interleave`` would give them time."""
    program, tree = trace_program(function, *arguments)
    return dataclasses.replace(program, equations=prune(program.equations, program.outputs)[0]), tree
