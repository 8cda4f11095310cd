"""The state that a device keeps while a step runs: one typed value, parts of which each unit changes."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Self

import jax

from dualpipe_jax.contract import Tree

_SINGLE = "dropped", "outputs", "first_bad"
"""The fields of ``State`` that hold one value, or None; the others are mappings."""


class Entry(NamedTuple):
    """A field of ``State`` and one of its keys; the key is None for a field without keys."""

    field: str
    key: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """The state that the engine's scan carries on each device, or the part of it with which a unit works.

    Attributes:
      pools: slots, by the table's names: "x" for inputs of stages and "dy" for gradients of their outputs;
        "residual.0", ... for values that forwards keep for backwards, one pool for every set of kinds of
        stages that share arrays of the same types; "stash.0", ... for values that an I keeps for its W.
      under_way: "y" and "dx", the output and the input gradient that the rank made in this tick; sent in the
        next tick.
      own: sums of gradients of stages' own parameters, by (local stage, leaf), also of borrowed stages.
      shared: sums of gradients of the shared parameters, by leaf.
      batch: sums of gradients of the batch's floating leaves, [num_microbatches, ...], by leaf.
      losses, metrics: sums so far, by name.
      dropped: int32 [], the number so far of assignments of tokens to experts that found no slot; None if no
        stage dispatches.
      outputs: in a forward-only program what the last stage returned, [num_microbatches, ...].
      first_bad: int32 [4], (tick, what, stage, microbatch) of the first value that is not finite, if it is
        looked for; ``what`` is a number in ``nans.CHECKED_VALUES``.
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
        """The pools of a family, by their full names: "residual" means "residual.0", "residual.1" and so on."""
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
        """The state with new values: for a field that is a mapping, those of some keys; for others the whole field."""
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
