"""Slot pools: arrays [slots, ...] in which values wait from the unit that makes them to the last unit that reads them.

Stages of different kinds keep different values, but every rank must hold the same arrays. Values of the same
shape and dtype, of different kinds, can share an array. So the values are matched by type, and all values
that the same set of kinds shares form a pool, with as many slots as are in use at one time.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
from jax import lax

from dualpipe_jax.schedule.lowering.table import Keeps, Life

SAVED = ("residual_i", "residual_w", "stash")
"""The values that are saved between units, by who reads them: I alone; W, and perhaps I; W, of values that I makes."""

LIFETIMES: Mapping[str, Life] = dict(zip(SAVED, ("FI", "FW", "IW"), strict=True))

SavedType = tuple[tuple[int, ...], Any, bool]
"""The shape and the dtype of a saved value, and whether it is in the host's memory."""


def make_pool(num_slots: int, like: Any) -> Any:
    """An uninitialised pool for each leaf of ``like`` (arrays or ShapeDtypeStructs), with a leading slot dim.

    No slot is read before it is written, so slots are not cleared: on TPU and GPU they hold whatever was in
    memory.
    """
    return jax.tree.map(lambda a: lax.empty((num_slots, *a.shape), a.dtype), like)


def make_saved_pools(num_slots: int, entries: Sequence[SavedType]) -> list[jax.Array]:
    """An uninitialised pool [num_slots, ...] for each saved value; offloaded ones are in the host's memory."""
    pools = [lax.empty((num_slots, *shape), dtype) for shape, dtype, _ in entries]
    return [
        jax.device_put(pool, jax.memory.Space.Host) if offloaded else pool
        for pool, (_, _, offloaded) in zip(pools, entries, strict=True)
    ]


def read_slot(pool: Any, slot: jax.Array) -> Any:
    """The values in one slot of a pool whose leaves are [slots, ...]."""
    return jax.tree.map(lambda b: lax.dynamic_index_in_dim(b, slot, 0, keepdims=False), pool)


def write_slot(pool: Any, slot: jax.Array, values: Any) -> Any:
    """The pool, whose leaves are [slots, ...], with new values in one slot."""
    return jax.tree.map(lambda b, v: lax.dynamic_update_index_in_dim(b, v, slot, 0), pool, values)


@dataclasses.dataclass(frozen=True)
class PoolLayout:
    """The pools of several kinds.

    Attributes:
      keeps: how long each kind keeps values in each pool, for the lowering.
      types: by pool, the shape and dtype of each value in one slot.
      places: for each kind and each of ``SAVED``, the pool of each saved value and its position in that pool.
    """

    keeps: Keeps
    types: dict[str, list[SavedType]]
    places: tuple[dict[str, list[tuple[str, int]]], ...]

    def groups(self, kind: int, *pools: str) -> list[str]:
        """The names of the pools in which a kind keeps values of these members of ``SAVED``."""
        return sorted({name for pool in pools for name, _ in self.places[kind][pool]})


def lay_out(
    saved: Sequence[Mapping[str, Sequence[SavedType]]],
    keep_input: Sequence[Literal["F", "I", "W"]],
    kind_of: tuple[int, ...],
) -> PoolLayout:
    """Match the values that kinds keep by type, the first of a type with the first and so on; see the module.

    A value that I alone reads, in one kind, may share a place with a value that W reads, in another. The
    values of each kind that are kept longest, those for W, are matched first.

    Arguments:
      saved: for each kind the types of the values that it keeps, by ``SAVED``.
      keep_input, kind_of: see ``Keeps``.
    """
    types: dict[str, list[SavedType]] = {}
    pools: dict[str, dict[int, Life]] = {}
    places: list[dict[str, list[tuple[str, int]]]] = [{} for _ in saved]
    for family, members in (("residual", ("residual_w", "residual_i")), ("stash", ("stash",))):
        # (An entry, the number of equal entries before it in the same kind) -> kind -> member of SAVED.
        matched: dict[tuple[SavedType, int], dict[int, str]] = {}
        numbers: list[dict[str, list[tuple[SavedType, int]]]] = []
        for kind, mine in enumerate(saved):
            seen: Counter[SavedType] = Counter()
            numbers.append({pool: [] for pool in members})
            for pool in members:
                for entry in mine[pool]:
                    matched.setdefault((entry, seen[entry]), {})[kind] = pool
                    numbers[kind][pool].append((entry, seen[entry]))
                    seen[entry] += 1
        sets = sorted({tuple(sorted(users.items())) for users in matched.values()})
        at: dict[tuple[SavedType, int], tuple[str, int]] = {}
        for key, users in matched.items():
            name = f"{family}.{sets.index(tuple(sorted(users.items())))}"
            pools[name] = {kind: LIFETIMES[pool] for kind, pool in users.items()}
            held = types.setdefault(name, [])
            at[key] = name, len(held)
            held.append(key[0])
        for kind, mine_at in enumerate(numbers):
            places[kind] |= {pool: [at[key] for key in keys] for pool, keys in mine_at.items()}
    return PoolLayout(Keeps(kind_of, tuple(keep_input), pools), types, tuple(places))
