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
import jax.numpy as jnp
from jax import lax

from dualpipe_jax.schedule.lowering.lower import Keeps

KEPT = ("residual_i", "residual_w", "stash")
"""What is kept, by who reads it: I alone; W, and perhaps I; W, from I."""

Entry = tuple[tuple[int, ...], Any, bool]
"""Shape, dtype, and whether it lies in the host's memory."""


def make_pool(num_slots: int, like: Any) -> Any:
    """Zeroed pool for each leaf of ``like`` (arrays or ShapeDtypeStructs), with a leading slot dim."""
    return jax.tree.map(lambda a: jnp.zeros((num_slots, *a.shape), a.dtype), like)


def make_kept(num_slots: int, entries: Sequence[Entry]) -> list[jax.Array]:
    """Zeroed pools for what is kept, each where it is to lie."""
    pools = [jnp.zeros((num_slots, *shape), dtype) for shape, dtype, _ in entries]
    return [
        jax.device_put(pool, jax.memory.Space.Host) if offloaded else pool
        for pool, (_, _, offloaded) in zip(pools, entries, strict=True)
    ]


def read_slot(pool: Any, slot: jax.Array) -> Any:
    """The values in one slot."""
    return jax.tree.map(lambda b: lax.dynamic_index_in_dim(b, slot, 0, keepdims=False), pool)


def write_slot(pool: Any, slot: jax.Array, values: Any) -> Any:
    """The pool with one slot overwritten."""
    return jax.tree.map(lambda b, v: lax.dynamic_update_index_in_dim(b, v, slot, 0), pool, values)


@dataclasses.dataclass(frozen=True)
class Layout:
    """The pools of several kinds.

    Attributes:
      keeps: what the lowering wants to know.
      types: for each pool by its whole name what a slot of it holds.
      places: for each kind and each of ``KEPT`` the pool and position of everything kept.
    """

    keeps: Keeps
    types: dict[str, list[Entry]]
    places: tuple[dict[str, list[tuple[str, int]]], ...]

    def groups(self, kind: int, *pools: str) -> list[str]:
        """The pools that a kind touches, by their whole names."""
        return sorted({name for pool in pools for name, _ in self.places[kind][pool]})


def lay_out(
    kept: Sequence[Mapping[str, Sequence[Entry]]],
    keep_input: Sequence[Literal["F", "I", "W"]],
    kind_of: tuple[int, ...],
) -> Layout:
    """Match what kinds keep by type, the first of a type with the first and so on; see the module's docstring.

    Arguments:
      kept: for each kind the types of what it keeps, by ``KEPT``.
      keep_input, kind_of: see ``Keeps``.
    """
    types: dict[str, list[Entry]] = {}
    sets: dict[str, tuple[frozenset[int], ...]] = {}
    places: list[dict[str, list[tuple[str, int]]]] = [{} for _ in kept]
    for pool in KEPT:
        entries: list[list[Any]] = []  # for each kind: what, and how many of these came before
        for kind in kept:
            seen: Counter[Any] = Counter()
            mine = []
            for entry in kind[pool]:
                mine.append((entry, seen[entry]))
                seen[entry] += 1
            entries.append(mine)
        users: dict[Any, set[int]] = {}
        for number, mine in enumerate(entries):
            for entry in mine:
                users.setdefault(entry, set()).add(number)
        groups = sorted({frozenset(found) for found in users.values()}, key=sorted)
        sets[pool] = tuple(groups)
        at: dict[Any, tuple[str, int]] = {}
        for entry, found in users.items():
            name = f"{pool}.{groups.index(frozenset(found))}"
            held = types.setdefault(name, [])
            at[entry] = name, len(held)
            held.append(entry[0])
        for number, mine in enumerate(entries):
            places[number][pool] = [at[entry] for entry in mine]
    keeps = Keeps(kind_of, tuple(keep_input), sets)
    return Layout(keeps, types, tuple(places))
