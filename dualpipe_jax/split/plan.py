"""The parts of one function: forward, backward, backward for the input and backward for the weights.

``jax.vjp`` of a stage computes dx and dparams together. A pipeline schedule needs dx first: the neighbour waits
for it, while the weight gradient may fill an idle tick later. Both come from one graph, so the split is a
cut of that graph: the part that dx needs is ``backward_input`` (I), the rest is ``backward_weight`` (W), and the
values that pass from I to W are the stash.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import jax

from dualpipe_jax.split.crossing import nbytes, never, partition_by_min_cut
from dualpipe_jax.split.graph import (
    Atom,
    Node,
    Program,
    Value,
    count_flops,
    find_collectives,
    is_arithmetic,
    is_cheap,
)
from dualpipe_jax.split.leaves import Leaves, cut, is_floating, leaves_like
from dualpipe_jax.split.recursion import split_equations
from dualpipe_jax.split.relink import relink
from dualpipe_jax.split.run import evaluate, zeros
from dualpipe_jax.split.slices import derived, prune
from dualpipe_jax.split.trace import JointTrace

Tree: TypeAlias = Any
Arrays: TypeAlias = list[Any]
Keep: TypeAlias = Literal["F", "I", "W"]


class Flops(NamedTuple):
    """FLOPs of matmuls and convolutions in each part; ``input + weight == backward``."""

    forward: int
    backward: int
    input: int
    weight: int


class Programs(NamedTuple):
    """The parts as programs, from flat lists of arrays to flat lists.

    Attributes:
      forward: the program from params and x to y, aux, residuals_i and residuals_w.
      backward: the program from params, x, residuals_i, residuals_w, dy and sums to dparams and dx.
      input: the program from the arguments of ``backward`` to dx and the stash; it does not read the sums.
      weight: the program from params, x, residuals_w, the stash and sums to dparams.
    """

    forward: Program
    backward: Program
    input: Program
    weight: Program


@dataclass(frozen=True, eq=False)
class SplitPlan:
    """The parts of one function at one set of shapes. Its methods may be called under any trace.

    Attributes:
      residuals_i: types of the arrays that the forward keeps for I alone.
      residuals_w: types of the arrays that the forward keeps for W (and perhaps for I).
      stash: types of the arrays that I hands to W.
      y: tree of the output's types.
      aux: tree of the auxiliary output's types; None without one.
      keep: the last part that reads each leaf of x: "F" (the forward), "I" or "W".
      keep_input: the last part that reads any leaf of x that is not ``at_hand``.
      offloaded: three lists of bools for residuals_i, residuals_w and stash: whether each array lies in host memory.
      flops: FLOPs of each part.
      sums: the sums of those gradients of params that a kernel adds to their sum, by the gradient's number in the
        programs. The programs take the sum so far and return the new sum; the methods pass zeros, and so return the
        gradient.
      programs: the parts on flat lists; ``forward_arguments`` and the methods after it convert trees to these lists.
      params, x: leaves of the arguments, and which of them have a gradient: ``params.has_gradient``.
    """

    residuals_i: list[jax.ShapeDtypeStruct]
    residuals_w: list[jax.ShapeDtypeStruct]
    stash: list[jax.ShapeDtypeStruct]
    y: Tree
    aux: Tree
    keep: tuple[Keep, ...]
    keep_input: Keep
    offloaded: tuple[list[bool], ...]
    flops: Flops
    sums: dict[int, Value]
    programs: Programs
    params: Leaves
    x: Leaves

    def forward(self, params: Tree, x: Tree) -> tuple[Tree, Tree, Arrays, Arrays]:
        """Return ``(y, aux, residuals_i, residuals_w)``."""
        return self.forward_results(evaluate(self.programs.forward, self.forward_arguments(params, x)))

    def backward_input(
        self, params: Tree, x: Tree, residuals_i: Arrays, residuals_w: Arrays, dy: Tree
    ) -> tuple[Tree, Arrays]:
        """Return ``(dx, stash)``; leaves of x with ``keep`` "F" may be None, and so may x if all its leaves are."""
        arguments = self.backward_arguments(params, x, residuals_i, residuals_w, dy)
        dx, stash = cut(evaluate(self.programs.input, arguments), self.x.num_gradients, len(self.stash))
        return self.x.gradients(dx), stash

    def backward_weight(self, params: Tree, x: Tree, residuals_w: Arrays, stash: Arrays) -> Tree:
        """Return dparams; leaves of x with ``keep`` "F" or "I" may be None, and so may x if all its leaves are."""
        arguments = self.weight_arguments(params, x, residuals_w, stash)
        return self.params.gradients(evaluate(self.programs.weight, arguments))

    def backward(
        self, params: Tree, x: Tree, residuals_i: Arrays, residuals_w: Arrays, dy: Tree
    ) -> tuple[Tree, Tree]:
        """Return ``(dparams, dx)`` in the order of ``jax.vjp``; x is as in ``backward_input``."""
        arguments = self.backward_arguments(params, x, residuals_i, residuals_w, dy)
        dparams, dx = self.backward_results(evaluate(self.programs.backward, arguments))
        return self.params.gradients(dparams), self.x.gradients(dx)

    def collectives(self, part: Literal["forward", "backward"]) -> dict[str, frozenset[str]]:
        """Return the mesh axes of each collective primitive in a part."""
        return find_collectives(getattr(self.programs, part).equations)

    # ------------------------------------------- the programs' flat arguments and results

    def forward_arguments(self, params: Tree, x: Tree) -> Arrays:
        """Return the flat arguments of ``programs.forward``."""
        return [*self.params.leaves(params), *self.x.leaves(x)]

    def forward_results(self, outputs: Arrays) -> tuple[Tree, Tree, Arrays, Arrays]:
        """Return the results of ``forward`` from the flat results of its program."""
        y: Any = jax.tree.structure(self.y)
        aux: Any = jax.tree.structure(self.aux)
        kept_i, kept_w = len(self.residuals_i), len(self.residuals_w)
        parts = cut(outputs, y.num_leaves, aux.num_leaves, kept_i, kept_w)
        return y.unflatten(parts[0]), aux.unflatten(parts[1]), parts[2], parts[3]

    def backward_arguments(
        self, params: Tree, x: Tree, residuals_i: Arrays, residuals_w: Arrays, dy: Tree
    ) -> Arrays:
        """Return the flat arguments of ``programs.backward`` and ``programs.input``; the sums, last, are zeros."""
        kept = [*residuals_i, *residuals_w]
        return [*self._given(params, x, "I"), *kept, *self._cotangents(dy), *map(zeros, self.sums.values())]

    def weight_arguments(self, params: Tree, x: Tree, residuals_w: Arrays, stash: Arrays) -> Arrays:
        """Return the flat arguments of ``programs.weight``; the sums, last, are zeros."""
        return [*self._given(params, x, "W"), *residuals_w, *stash, *map(zeros, self.sums.values())]

    def backward_results(self, outputs: Arrays) -> tuple[Arrays, Arrays]:
        """Return the gradients of params and of x from the flat results, one for each leaf that has a gradient."""
        dparams, dx = cut(outputs, self.params.num_gradients, self.x.num_gradients)
        return dparams, dx

    def _given(self, params: Tree, x: Tree, reader: str) -> Arrays:
        ignored = ["FIW".index(keep) < "FIW".index(reader) for keep in self.keep]
        return [*self.params.leaves(params), *self.x.leaves(x, ignored)]

    def _cotangents(self, dy: Tree) -> Arrays:
        types, tree = jax.tree.flatten(self.y)
        floating = list(map(is_floating, types))
        leaves = leaves_like("dy", dy, tree, types, ignored=[not is_one for is_one in floating])
        return [leaf for leaf, is_one in zip(leaves, floating, strict=True) if is_one]


def make_plan(
    joint: JointTrace, wanted: Sequence[bool], at_hand: Sequence[bool], trees: tuple[Any, Any]
) -> SplitPlan:
    """Make a plan: choose what the forward keeps from the joint graph, then what I hands to W.

    Arguments:
      joint: the function and its backward as one graph.
      wanted: for each leaf of params and x, whether its gradient is wanted.
      at_hand: for each leaf of x, whether the backward has it in any case.
      trees: the tree structures of params and of x.
    """
    dparams = [g for g in joint.dparams if g is not None]
    dx = [g for g in joint.dx if g is not None]
    dy = [v for v in joint.dy if v is not None]
    every = [total for g, total in zip(joint.dparams, joint.sums, strict=True) if g is not None]
    sums = {number: total for number, total in enumerate(every) if total is not None}
    gradients = [*dparams, *dx]
    held = {v for v, at in zip(joint.x, at_hand, strict=True) if at}

    def weight(value: Value) -> int:
        return 0 if value in held else nbytes(value)

    forward, backward = relink(joint.forward, prune(joint.backward, gradients)[0], set(joint.params))
    kept = partition_by_min_cut(
        forward,
        backward,
        gradients,
        free=derived(forward, joint.params),
        late_inputs={*dy, *sums.values()},
        weight=weight,
        repeatable=is_arithmetic,
    )
    backward = kept.late
    parts = split_equations(
        backward,
        dx,
        dparams,
        set(joint.params),
        late_inputs=set(sums.values()),
        weight=weight,
        movable=is_cheap if dx else never,
    )
    for_weight = set(parts.crossing)
    stored = [v for v in kept.crossing if v not in joint.x]
    residuals_w = [v for v in stored if v in for_weight]
    residuals_i = [v for v in stored if v not in for_weight]
    stash = [v for v in parts.crossing if v not in stored and v not in joint.x]
    given = (*joint.params, *joint.x)
    whole = (*given, *residuals_i, *residuals_w, *dy, *sums.values())
    programs = Programs(
        forward=_program(given, forward, [*joint.y, *joint.aux, *residuals_i, *residuals_w]),
        backward=_program(whole, backward, gradients),
        input=_program(whole, parts.early, [*dx, *stash]),
        weight=_program((*given, *residuals_w, *stash, *sums.values()), parts.late, dparams),
    )
    keep = _keep(joint.x, programs)
    num_params = len(joint.params)
    return SplitPlan(
        residuals_i=list(map(_struct, residuals_i)),
        residuals_w=list(map(_struct, residuals_w)),
        stash=list(map(_struct, stash)),
        y=joint.y_tree.unflatten(map(_struct, joint.y)),
        aux=joint.aux_tree.unflatten(map(_struct, joint.aux)),
        keep=keep,
        keep_input=max(
            (k for k, at in zip(keep, at_hand, strict=True) if not at), key="FIW".index, default="F"
        ),
        offloaded=tuple(
            [v.memory is not None for v in values] for values in (residuals_i, residuals_w, stash)
        ),
        flops=Flops(*(count_flops(program.equations) for program in programs)),
        sums=sums,
        programs=programs,
        params=Leaves(
            "params", trees[0], joint.params, list(wanted[:num_params]), _has_gradient(joint.dparams)
        ),
        x=Leaves("x", trees[1], joint.x, list(wanted[num_params:]), _has_gradient(joint.dx)),
    )


def _program(inputs: Sequence[Value], nodes: Sequence[Node], outputs: Sequence[Atom]) -> Program:
    equations, needed = prune(nodes, outputs)
    missing = needed.difference(inputs)
    assert not missing, f"split: {len(missing)} values are read but never made"
    return Program(tuple(inputs), equations, tuple(outputs))


def _has_gradient(gradients: Iterable[Atom | None]) -> list[bool]:
    return [g is not None for g in gradients]


def _struct(atom: Atom) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(atom.kind.shape, atom.kind.dtype)


def _keep(x: Iterable[Value], programs: Programs) -> tuple[Keep, ...]:
    by_weight, by_input = (prune(p.equations, p.outputs)[1] for p in (programs.weight, programs.input))
    return tuple("W" if v in by_weight else "I" if v in by_input else "F" for v in x)
