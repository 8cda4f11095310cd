"""What stages make of their parameters alone: made before the first tick, its gradients led back after the last.

These values come in groups. The first are layers of leaves that hold several, the same for all kinds of stages; then
there is one group for each kind, of what its matmuls make.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

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


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Values of parameters alone; a stage's own parameters are ``(own, values)`` to the rest of the engine.

    Attributes:
      kinds: of each kind of stage, what it makes of (own, shared).
      kind_of: the kind of each model stage.
      placement: which stages a rank has.
      vary: see ``Vary``.
    """

    kinds: Sequence[Hoisted]
    kind_of: tuple[int, ...]
    placement: Placement
    vary: Vary

    @functools.cached_property
    def layers(self) -> dict[Layer, jax.ShapeDtypeStruct]:
        """Those of all kinds, with their types."""
        return {
            layer: value
            for kind in self.kinds
            for layer, value in zip(kind.layers, kind.values, strict=False)  # the first values are layers
        }

    @property
    def types(self) -> list[list[jax.ShapeDtypeStruct]]:
        return [[*self.layers.values()], *(kind.values[len(kind.layers) :] for kind in self.kinds)]

    def wanted(self, trained: tuple[Tree, Tree]) -> list[list[bool]]:
        """Whether each value gets a gradient: where something trained is in it."""
        leaves = jax.tree.leaves(trained)
        return [
            [leaves[layer.leaf] for layer in self.layers],
            *(
                [any(t and s for t, s in zip(leaves, sources, strict=True)) for sources in made_of]
                for made_of in (kind.sources[len(kind.layers) :] for kind in self.kinds)
            ),
        ]

    def function(self, kind: int) -> Callable[..., Any]:
        """A kind's stage, of ``((own, values), shared)`` and what it sees."""
        hoisted, places = self.kinds[kind], {layer: place for place, layer in enumerate(self.layers)}

        def stage(params: tuple[tuple[Tree, Any], Tree], seen: Any) -> Any:
            (own, (layers, *of_kinds)), shared = params
            mine = [layers[places[layer]] for layer in hoisted.layers]
            return hoisted.function(((own, shared), [*mine, *of_kinds[kind]]), seen)

        return stage

    def stages(self, own: Sequence[Tree], shared: Tree) -> tuple[tuple[Tree, Any], ...]:
        """``(own, values)`` of each local stage; zeros for what its kind does not make."""
        return tuple((stage, self._values(local, stage, shared)) for local, stage in enumerate(own))

    def _values(self, local: int, own: Tree, shared: Tree) -> list[list[jax.Array]]:
        leaves = jax.tree.leaves((own, shared))
        layers = [leaves[layer.leaf][layer.at].reshape(layer.shape) for layer in self.layers]

        def made(number: int, kind: Hoisted) -> list[jax.Array]:
            count = len(kind.layers)
            if len(kind.values) == count:
                return []
            none = self.vary(zeros(kind.values[count:]))
            return run_if(
                self._is(number, local), lambda _, *params: kind.prelude(params)[count:], none, own, shared
            )

        return [layers, *(made(number, kind) for number, kind in enumerate(self.kinds))]

    def lead_back(
        self,
        params: Sequence[tuple[Tree, Any]],
        shared: Tree,
        gradients: Sequence[list[Any]],
        of_shared: list[Any],
    ) -> tuple[list[list[Any]], list[Any]]:
        """Gradients of own and shared, those by way of the values added.

        Arguments:
          params: what ``stages`` gave.
          gradients: of each local stage a list over the leaves of ``(own, values)``; None for a leaf without one.
          of_shared: likewise of the shared parameters.
        """
        stages = []
        for local, ((own, _), given) in enumerate(zip(params, gradients, strict=True)):
            count = len(jax.tree.leaves(own))
            of_own, of_layers, *of_kinds = cut(given, count, *map(len, self.types))
            total = _added([*of_own, *of_shared], self._stacked((own, shared), of_layers))
            for number, of_values in enumerate(of_kinds):
                if any(g is not None for g in of_values):
                    total = _added(total, self._led_back(number, local, (own, shared), of_values))
            stages.append(total[:count])
            of_shared = total[count:]
        return stages, of_shared

    def _stacked(self, params: tuple[Tree, Tree], of_layers: list[Any]) -> list[Any]:
        """The gradient of each leaf of params from those of its layers, None where there are none."""

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

    def _led_back(
        self, number: int, local: int, params: tuple[Tree, Tree], of_values: list[Any]
    ) -> list[Any]:
        """One for each leaf of params, None for those of which no value with a gradient is made."""
        leaves, kind = jax.tree.leaves(params), self.kinds[number]
        made_of = [
            s for s, g in zip(kind.sources[len(kind.layers) :], of_values, strict=True) if g is not None
        ]
        reached = [i for i, leaf in enumerate(leaves) if is_floating(leaf) and any(s[i] for s in made_of)]

        def work(_: Any, params: Tree, *given: Any) -> list[Any]:
            of_all = iter(given)
            each = [None if g is None else next(of_all) for g in of_values]
            led = jax.tree.leaves(kind.postlude(params, [*[None] * len(kind.layers), *each]))
            return [led[i] for i in reached]

        # Not of all leaves: where a model is large, zeros of it are what there is no room for.
        none = self.vary([jnp.zeros(leaves[i].shape, leaves[i].dtype) for i in reached])
        there = [g for g in of_values if g is not None]
        made = dict(zip(reached, run_if(self._is(number, local), work, none, params, *there), strict=True))
        return [made.get(i) for i in range(len(leaves))]

    def _is(self, number: int, local: int) -> jax.Array:
        """Whether this rank's local stage is of the kind: elsewhere the prelude would see parameters of another."""
        of_rank = [
            self.kind_of[self.placement.model_stage(stages[local])] == number
            for stages in self.placement.stages_on
        ]
        return jnp.asarray(np.array(of_rank))[lax.axis_index(PP)]


def _added(totals: list[Any], more: list[Any]) -> list[Any]:
    return [t if t is None or m is None else t + m.astype(t.dtype) for t, m in zip(totals, more, strict=True)]
