"""Run a piece of work only on the ranks and ticks that want it, in one of three forms."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from dualpipe_jax.engine.state import Entry

Divergence = Literal["loop", "switch", "none"]
"""How ranks part ways in a tick: each unit in a loop of zero or one trips; all units the branches of one conditional;
or not at all: every rank runs every unit that some rank has in that tick, and keeps what it wants."""


GPU = frozenset({"gpu", "cuda", "rocm"})
"""Names of the platform, of devices that are there and of those that are compiled for."""


def usual_divergence(platform: str | None) -> Divergence:
    """The form that suits devices of a platform, None of no devices: "switch" on GPUs from JAX 0.11 on, else "loop".

    On a GPU each loop waits for the host, and a conditional once. On an H200 four schedules took 1 to 2 % less with it,
    of units of some milliseconds. The compiler of JAX 0.10 copies all pools and sums in every branch.
    """
    return "switch" if platform in GPU and jax.__version_info__ >= (0, 11) else "loop"


def run_if(
    wanted: jax.Array, work: Callable[..., Any], state: Any, *operands: Any, sums: Collection[Entry] = ()
) -> Any:
    """``state = work(state, *operands)`` if wanted.

    Arguments:
      wanted: bool scalar, different on different ranks.
      work: takes the state and the operands, returns the new state.
      state: what work changes, updated in place.
      operands: what work reads and no guard changes: parameters, the row of the table.
      sums: entries of the state, then a ``State``, that work adds to every time, and does nothing else with.

    A loop and not ``lax.cond``, because a loop's state is updated in place on every platform. The barrier is
    what makes it a guard: without it XLA moves work that does not depend on the state out of the loop, and
    runs it at every tick on every rank. So everything that work computes with must come through here.

    Slot pools and sums belong in the state of every guard that touches them, also of one that only reads:
    as one guard's result is the next one's state, a single buffer passes through all. Closed over, a pool
    that another guard changes is copied whole at each tick (the CPU time of a 1F1B step rose 3.3 times).

    Sums go around the barrier: no work with them can leave the loop, as each trip changes them, and on GPU no product
    adds to what comes out of a barrier.
    """

    def trip(i, state):
        held, around = _apart(state, sums)
        _, held, inside = lax.optimization_barrier((i, held, operands))
        return pin(work(_together(pin(held), around), *pin(inside)))

    return pin(lax.fori_loop(0, wanted.astype(jnp.int32), trip, pin(state)))


def run_one(
    number: jax.Array,
    works: Sequence[Callable[..., Any]],
    state: Any,
    *operands: Any,
    sums: Collection[Entry] = (),
    begin: Callable[[Any], Any] = lambda state: state,
) -> Any:
    """``state = works[number](state, *operands)``, or the state as it is where the number is none of them.

    One conditional: on GPU each guard costs a round trip to the host, and this is a single one. Sums go around its
    barrier, as in ``run_if``: a branch that added to what comes out of one would write each product, and the sum after
    it. ``begin`` puts what holds nothing yet into the state of every branch; handed in, XLA copies it in each branch
    that hands it on.
    """

    def branch(work):
        def run(state, operands):
            held, around = _apart(state, sums)
            held, inside = lax.optimization_barrier((held, operands))
            return pin(work(begin(_together(pin(held), around)), *pin(inside)))

        return run

    branches = [*map(branch, works), lambda state, operands: pin(begin(state))]
    index = jnp.where((number >= 0) & (number < len(works)), number, len(works))
    return pin(lax.switch(index, branches, pin(state), operands))


def run_together(
    anywhere: jax.Array, wanted: jax.Array, work: Callable[..., Any], state: Any, *operands: Any
) -> Any:
    """Do what ``run_if`` does, but the same operations on all ranks, in lockstep.

    Arguments:
      anywhere: bool scalar, whether any rank wants it: the same on all ranks, which so go one way.
      wanted: whether this one does, and keeps what work makes.
      work, state, operands: as of ``run_if``.
    """

    def work_and_keep(state, wanted, *operands):
        made = work(state, *operands)
        return jax.tree.map(lambda new, old: jnp.where(wanted, new, old), made, state)

    return run_if(anywhere, work_and_keep, state, wanted, *operands)


def _apart(state: Any, sums: Collection[Entry]) -> tuple[Any, Any]:
    """What goes through a barrier, and the sums, which go around it."""
    return (state.pick(state.entries - {*sums}), state.pick(sums)) if sums else (state, None)


def _together(held: Any, around: Any) -> Any:
    return held if around is None else held.merge(around)


def pin(state: Any) -> Any:
    """Keep every array row-major.

    Left to itself the TPU compiler gives each guard the layouts that suit it, and copies whole pools between
    guards that differ.
    """

    def hold(a):
        if jnp.issubdtype(a.dtype, jax.dtypes.extended):
            return a  # typed keys have a hidden dim, which no layout can name
        return with_layout_constraint(a, Layout(tuple(range(a.ndim))))

    return jax.tree.map(hold, state)
