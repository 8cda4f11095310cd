"""Values that stages compute from their parameters alone.

They are computed before the first tick, and their gradients are pulled back to the parameters after the last.
There are two groups of values: the layers of leaves that hold several layers, which are the same for all
kinds of stages, and the results of matmuls of parameters. A rank's stage is of one kind, so all kinds put
these results in the same places.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dualpipe_jax.contract import Tree
from dualpipe_jax.engine.guard import run_if
from dualpipe_jax.engine.trees import Vary, zeros
from dualpipe_jax.parallel import PP
from dualpipe_jax.schedule import Placement
from dualpipe_jax.split.hoist import Hoisted, Layer
from dualpipe_jax.split.leaves import cut, is_floating


class Place(NamedTuple):
    """The place of a kind's value: the ``turn``-th of its type that gets a gradient, or that gets none."""

    type: jax.ShapeDtypeStruct
    wanted: bool
    turn: int


@dataclasses.dataclass(frozen=True)
class Prepared:
    """The values that depend on parameters alone. The rest of the engine sees ``(own, values)`` as own parameters.

    Attributes:
      kinds: for each kind of stage, the function that computes its values from (own, shared), and the stage
        function that takes them.
      kind_of: the kind of each model stage.
      placement: the stages of each rank.
      vary: see ``Vary``.
      trained: for each leaf of (own, shared) whether it has a gradient.
    """

    kinds: Sequence[Hoisted]
    kind_of: tuple[int, ...]
    placement: Placement
    vary: Vary
    trained: tuple[Tree, Tree]

    @functools.cached_property
    def layers(self) -> dict[Layer, jax.ShapeDtypeStruct]:
        """The layers that any kind reads, each with its type."""
        return {
            layer: value
            for kind in self.kinds
            for layer, value in zip(kind.layers, kind.values, strict=False)  # the first values are layers
        }

    @functools.cached_property
    def places_of(self) -> list[list[Place]]:
        """For each kind, the places of the results of its matmuls."""
        trained = jax.tree.leaves(self.trained)

        def places(kind: Hoisted) -> list[Place]:
            found, turns = list[Place](), Counter[tuple[jax.ShapeDtypeStruct, bool]]()
            of_matmuls = slice(len(kind.layers), None)
            for value, made_of in zip(kind.values[of_matmuls], kind.sources[of_matmuls], strict=True):
                wanted = any(t and s for t, s in zip(trained, made_of, strict=True))
                found.append(Place(value, wanted, turns[value, wanted]))
                turns[value, wanted] += 1
            return found

        return [places(kind) for kind in self.kinds]

    @functools.cached_property
    def places(self) -> list[Place]:
        """All places: of each type as many as the kind with most values of that type needs."""
        return list(dict.fromkeys(place for places in self.places_of for place in places))

    @property
    def types(self) -> list[list[jax.ShapeDtypeStruct]]:
        return [[*self.layers.values()], [place.type for place in self.places]]

    @property
    def wanted(self) -> list[list[bool]]:
        """Whether each value gets a gradient: whether it depends on a leaf that is trained."""
        leaves = jax.tree.leaves(self.trained)
        return [[leaves[layer.leaf] for layer in self.layers], [place.wanted for place in self.places]]

    def function(self, kind: int) -> Callable[..., Any]:
        """The stage function of a kind, with the arguments ``((own, values), shared)`` and ``seen``."""
        hoisted, places = self.kinds[kind], self.places_of[kind]

        def stage(params: tuple[tuple[Tree, Any], Tree], seen: Any) -> Any:
            (own, (layers, made)), shared = params
            held = dict(zip([*self.layers, *self.places], [*layers, *made], strict=True))
            return hoisted.function(((own, shared), [held[key] for key in (*hoisted.layers, *places)]), seen)

        return stage

    def stages(self, own: Sequence[Tree], shared: Tree) -> tuple[tuple[Tree, Any], ...]:
        """``(own, values)`` of each local stage; places that its kind does not fill hold zeros."""
        return tuple((stage, self._values(local, stage, shared)) for local, stage in enumerate(own))

    def _values(self, local: int, own: Tree, shared: Tree) -> list[list[jax.Array]]:
        leaves = jax.tree.leaves((own, shared))
        layers = [leaves[layer.leaf][layer.at].reshape(layer.shape) for layer in self.layers]

        def compute(number: int, held: list[jax.Array], *params: Tree) -> list[jax.Array]:
            kind = self.kinds[number]
            made = kind.prelude(params)[len(kind.layers) :]
            filled = dict(zip(self.places_of[number], made, strict=True))
            return [filled.get(place, old) for place, old in zip(self.places, held, strict=True)]

        made = self.vary(zeros([place.type for place in self.places]))
        for number in self._kinds_with_products(local):
            made = run_if(
                self._has_kind(number, local), functools.partial(compute, number), made, own, shared
            )
        return [layers, made]

    def pull_back(
        self,
        params: Sequence[tuple[Tree, Any]],
        shared: Tree,
        gradients: Sequence[list[Any]],
        of_shared: list[Any],
    ) -> tuple[list[list[Any]], list[Any]]:
        """The whole gradients of own and shared parameters: those through the values are added to the given ones.

        Arguments:
          params: what ``stages`` returned.
          gradients: for each local stage a list over the leaves of ``(own, values)``, None for a leaf without
            gradient.
          of_shared: such a list over the leaves of the shared parameters.
        """
        stages = []
        for local, ((own, _), given) in enumerate(zip(params, gradients, strict=True)):
            count = len(jax.tree.leaves(own))
            of_own, of_layers, made = cut(given, count, *map(len, self.types))
            of_places = dict(zip(self.places, made, strict=True))
            total = _sum_gradients([*of_own, *of_shared], self._stacked((own, shared), of_layers))
            for number in self._kinds_with_products(local):
                of_values = [of_places[place] for place in self.places_of[number]]
                if any(g is not None for g in of_values):
                    total = _sum_gradients(total, self._pulled_back(number, local, (own, shared), of_values))
            stages.append(total[:count])
            of_shared = total[count:]
        return stages, of_shared

    def _stacked(self, params: tuple[Tree, Tree], of_layers: list[Any]) -> list[Any]:
        """The gradient of each leaf of params, stacked from those of its layers; None where no layer has one."""

        def whole(number: int, leaf: Any) -> Any:
            given = [
                (layer.at, g)
                for layer, g in zip(self.layers, of_layers, strict=True)
                if layer.leaf == number and g is not None
            ]
            if not given:
                return None
            rows = [[g.reshape(leaf.shape[1:]) for at, g in given if at == i] for i in range(leaf.shape[0])]
            none = self.vary(jnp.zeros(leaf.shape[1:], given[0][1].dtype))
            return jnp.stack([sum(row[1:], row[0]) if row else none for row in rows])

        return [whole(number, leaf) for number, leaf in enumerate(jax.tree.leaves(params))]

    def _pulled_back(
        self, number: int, local: int, params: tuple[Tree, Tree], of_values: list[Any]
    ) -> list[Any]:
        """The gradient of each leaf of params through the values of a kind; None where there is none."""
        leaves, kind = jax.tree.leaves(params), self.kinds[number]
        made_of = [
            s for s, g in zip(kind.sources[len(kind.layers) :], of_values, strict=True) if g is not None
        ]
        reached = [i for i, leaf in enumerate(leaves) if is_floating(leaf) and any(s[i] for s in made_of)]

        def work(_: Any, params: Tree, *given: Any) -> list[Any]:
            of_all = iter(given)
            each = [None if g is None else next(of_all) for g in of_values]
            pulled = jax.tree.leaves(kind.postlude(params, [*[None] * len(kind.layers), *each]))
            return [pulled[i] for i in reached]

        # Only for the leaves that are reached: zeros for all of a large model would not fit into memory.
        none = self.vary([jnp.zeros(leaves[i].shape, leaves[i].dtype) for i in reached])
        there = [g for g in of_values if g is not None]
        made = dict(
            zip(reached, run_if(self._has_kind(number, local), work, none, params, *there), strict=True)
        )
        return [made.get(i) for i in range(len(leaves))]

    def _kinds_on_ranks(self, local: int) -> list[int]:
        """The kind of each rank's local stage."""
        return [self.kind_of[self.placement.model_stage(on[local])] for on in self.placement.stages_on]

    def _kinds_with_products(self, local: int) -> list[int]:
        """The kinds that some rank has at this local stage and that compute values by matmuls."""
        return [number for number in sorted({*self._kinds_on_ranks(local)}) if self.places_of[number]]

    def _has_kind(self, number: int, local: int) -> jax.Array:
        """Whether this rank's local stage is of the kind: else the prelude would see parameters of another kind."""
        of_rank = np.array(self._kinds_on_ranks(local)) == number
        return jnp.asarray(of_rank)[lax.axis_index(PP)]


def _sum_gradients(totals: list[Any], more: list[Any]) -> list[Any]:
    return [t if t is None or m is None else t + m.astype(t.dtype) for t, m in zip(totals, more, strict=True)]
