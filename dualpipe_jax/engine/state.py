"""What a device keeps while a step runs: one typed value, of which each unit changes a part."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Self

import jax

from dualpipe_jax.contract import Tree

_SINGLE = "dropped", "outputs", "first_bad"
"""Fields that hold one value, None where there is none; the others are mappings."""


class Entry(NamedTuple):
    """A field of ``State``, and which of its keys; None for a field that has none."""

    field: str
    key: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """What the engine's scan carries on each device, or that part of it with which a unit works.

    Attributes:
      pools: slots, by the table's names: "x" for inputs of stages and "dy" for gradients of their outputs;
        "residual.0", ... for what forwards keep for backwards, a pool for every set of kinds of stages that has arrays
        of the same types; "stash.0", ... for what a backward for the input hands to that for the weights.
      under_way: "y" and "dx", what the rank made in this tick; sent in the next one.
      own: sums of gradients, by (local stage, leaf), those of a borrowed copy too.
      shared: of gradients of what all stages share, by leaf.
      batch: gradients of the batch's leaves, [num_microbatches, ...], by leaf.
      losses, metrics: sums so far, by name.
      dropped: likewise, how many choices of an expert found no room; None if no stage dispatches.
      outputs: in a forward-only program what the last stage returned, [num_microbatches, ...].
      first_bad: (tick, what, stage, microbatch) of the first value that is not finite, if it is looked for.
    """

    pools: Mapping[str, Tree] = dataclasses.field(default_factory=dict)
    under_way: Mapping[str, Tree] = dataclasses.field(default_factory=dict)
    own: Mapping[tuple[int, int], Any] = dataclasses.field(default_factory=dict)
    shared: Mapping[int, Any] = dataclasses.field(default_factory=dict)
    batch: Mapping[int, Any] = dataclasses.field(default_factory=dict)
    losses: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    metrics: Mapping[str, Tree] = dataclasses.field(default_factory=dict)
    dropped: Any = None
    outputs: Tree = None
    first_bad: Any = None

    @property
    def entries(self) -> set[Entry]:
        found = set()
        for field in _FIELDS:
            value = getattr(self, field)
            if field in _SINGLE:
                found |= set() if value is None else {Entry(field)}
            else:
                found |= {Entry(field, key) for key in value}
        return found

    def family(self, name: str) -> dict[str, Tree]:
        """The pools of a name and of the name with a number: "residual" means "residual.0", "residual.1" and so on."""
        return {pool: held for pool, held in self.pools.items() if pool.partition(".")[0] == name}

    def pick(self, entries: Iterable[Entry]) -> Self:
        found: dict[str, Any] = {}
        for field, key in entries:
            if field in _SINGLE:
                found[field] = getattr(self, field)
            else:
                found.setdefault(field, {})[key] = getattr(self, field)[key]
        return type(self)(**found)

    def put(self, **changed: Any) -> Self:
        """The state with new values: of a field that is a mapping those of some keys, of another the whole."""
        return dataclasses.replace(
            self,
            **{
                field: new if field in _SINGLE else {**getattr(self, field), **new}
                for field, new in changed.items()
            },
        )

    def merge(self, other: "State") -> Self:
        return self.put(**{field: getattr(other, field) for field, _ in other.entries})


_FIELDS = tuple(field.name for field in dataclasses.fields(State))
