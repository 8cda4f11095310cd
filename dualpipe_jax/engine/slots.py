"""Slot pools: arrays [slots, ...] where values wait from the unit that makes them to the last that reads.

Stages of different kinds keep different things, but a device holds the same arrays on every rank. What one kind keeps
in an array of some shape and dtype another may keep there too: so what is kept is matched by type, and what the same
set of kinds has forms a pool, with as many slots as values of these kinds live at once.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
from jax import lax

from dualpipe_jax.schedule.lowering.table import Keeps, Life

KEPT = ("residual_i", "residual_w", "stash")
"""What is kept, by who reads it: I alone; W, and perhaps I; W, from I."""

LIVES: Mapping[str, Life] = dict(zip(KEPT, ("FI", "FW", "IW"), strict=True))

Entry = tuple[tuple[int, ...], Any, bool]
"""Shape, dtype, and whether it lies in the host's memory."""


def make_pool(num_slots: int, like: Any) -> Any:
    """Pool for each leaf of ``like`` (arrays or ShapeDtypeStructs), with a leading slot dim; nothing is in it yet.

    No slot is read before it is written, so nobody clears them: on TPU and GPU they hold whatever was there.
    """
    return jax.tree.map(lambda a: lax.empty((num_slots, *a.shape), a.dtype), like)


def make_kept(num_slots: int, entries: Sequence[Entry]) -> list[jax.Array]:
    """Uninitialised pools, [num_slots, ...], of what is kept; offloaded ones are in the host's memory."""
    pools = [lax.empty((num_slots, *shape), dtype) for shape, dtype, _ in entries]
    return [
        jax.device_put(pool, jax.memory.Space.Host) if offloaded else pool
        for pool, (_, _, offloaded) in zip(pools, entries, strict=True)
    ]


def read_slot(pool: Any, slot: jax.Array) -> Any:
    """What lies in a slot of a pool whose leaves are [slots, ...]."""
    return jax.tree.map(lambda b: lax.dynamic_index_in_dim(b, slot, 0, keepdims=False), pool)


def write_slot(pool: Any, slot: jax.Array, values: Any) -> Any:
    """The pool with other values in a slot; leaves are [slots, ...]."""
    return jax.tree.map(lambda b, v: lax.dynamic_update_index_in_dim(b, v, slot, 0), pool, values)


@dataclasses.dataclass(frozen=True)
class Layout:
    """The pools of several kinds.

    Attributes:
      keeps: what the lowering wants to know.
      types: for each pool what a slot of it holds.
      places: for each kind and each of ``KEPT`` the pool and position of everything kept.
    """

    keeps: Keeps
    types: dict[str, list[Entry]]
    places: tuple[dict[str, list[tuple[str, int]]], ...]

    def groups(self, kind: int, *pools: str) -> list[str]:
        """The pools in which a kind keeps these."""
        return sorted({name for pool in pools for name, _ in self.places[kind][pool]})


def lay_out(
    kept: Sequence[Mapping[str, Sequence[Entry]]],
    keep_input: Sequence[Literal["F", "I", "W"]],
    kind_of: tuple[int, ...],
) -> Layout:
    """Match what kinds keep by type, the first of a type with the first and so on; see the module's docstring.

    What I alone reads and what W reads may share a place, in stages of different kinds: what is longest kept is matched
    first.

    Arguments:
      kept: for each kind the types of what it keeps, by ``KEPT``.
      keep_input, kind_of: see ``Keeps``.
    """
    types: dict[str, list[Entry]] = {}
    pools: dict[str, dict[int, Life]] = {}
    places: list[dict[str, list[tuple[str, int]]]] = [{} for _ in kept]
    for family, members in (("residual", ("residual_w", "residual_i")), ("stash", ("stash",))):
        # An entry and how many alike came before: kind -> pool.
        matched: dict[tuple[Entry, int], dict[int, str]] = {}
        numbers: list[dict[str, list[tuple[Entry, int]]]] = []
        for kind, mine in enumerate(kept):
            seen: Counter[Entry] = Counter()
            numbers.append({pool: [] for pool in members})
            for pool in members:
                for entry in mine[pool]:
                    matched.setdefault((entry, seen[entry]), {})[kind] = pool
                    numbers[kind][pool].append((entry, seen[entry]))
                    seen[entry] += 1
        sets = sorted({tuple(sorted(users.items())) for users in matched.values()})
        at: dict[tuple[Entry, int], tuple[str, int]] = {}
        for key, users in matched.items():
            name = f"{family}.{sets.index(tuple(sorted(users.items())))}"
            pools[name] = {kind: LIVES[pool] for kind, pool in users.items()}
            held = types.setdefault(name, [])
            at[key] = name, len(held)
            held.append(key[0])
        for kind, mine_at in enumerate(numbers):
            places[kind] |= {pool: [at[key] for key in keys] for pool, keys in mine_at.items()}
    return Layout(Keeps(kind_of, tuple(keep_input), pools), types, tuple(places))
