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


def make_pool(num_slots: int, like: Any) -> Any:
    """Zeroed pool for each leaf of ``like`` (arrays or ShapeDtypeStructs), with a leading slot dim."""
    return jax.tree.map(lambda a: jnp.zeros((num_slots, *a.shape), a.dtype), like)


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
    types: dict[str, list[jax.ShapeDtypeStruct]]
    places: tuple[dict[str, list[tuple[str, int]]], ...]

    def groups(self, kind: int, *pools: str) -> list[str]:
        """The pools that a kind touches, by their whole names."""
        return sorted({name for pool in pools for name, _ in self.places[kind][pool]})


def lay_out(
    kept: Sequence[Mapping[str, Sequence[jax.ShapeDtypeStruct]]],
    keep_input: Sequence[Literal["F", "I", "W"]],
    kind_of: tuple[int, ...],
) -> Layout:
    """Match what kinds keep by type, the first of a type with the first and so on; see the module's docstring.

    Arguments:
      kept: for each kind the types of what it keeps, by ``KEPT``.
      keep_input, kind_of: see ``Keeps``.
    """
    types: dict[str, list[jax.ShapeDtypeStruct]] = {}
    sets: dict[str, tuple[frozenset[int], ...]] = {}
    places: list[dict[str, list[tuple[str, int]]]] = [{} for _ in kept]
    for pool in KEPT:
        entries: list[
            list[Any]
        ] = []  # for each kind its entries: (shape, dtype, how many of these came before)
        for kind in kept:
            seen: Counter[Any] = Counter()
            mine = []
            for struct in kind[pool]:
                type_ = struct.shape, struct.dtype
                mine.append((*type_, seen[type_]))
                seen[type_] += 1
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
            held.append(jax.ShapeDtypeStruct(*entry[:2]))
        for number, mine in enumerate(entries):
            places[number][pool] = [at[entry] for entry in mine]
    keeps = Keeps(kind_of, tuple(keep_input), sets)
    return Layout(keeps, types, tuple(places))
