"""Guards: run a piece of work only on the ranks and ticks that need it, in one of three forms."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from dualpipe_jax.engine.state import Entry

Divergence = Literal["loop", "switch", "none"]
"""How ranks run different units in one tick. "loop": each unit is a loop of zero or one trips. "switch": all
units are branches of one conditional. "none": every rank runs every unit that some rank has in that tick, and
keeps the results of its own alone."""


GPU = frozenset({"gpu", "cuda", "rocm"})
"""The names of the GPU platform, for devices that are present and for devices that are only compiled for."""


def usual_divergence(platform: str | None) -> Divergence:
    """The form that suits a platform (None: there are no devices): "switch" on GPUs from JAX 0.11 on, else "loop".

    On a GPU each loop waits for the host, and so does a conditional, of which a tick has only one. On an H200
    the steps of four schedules, with units of some milliseconds, took 1 to 2 % less time with the
    conditional. The compiler of JAX 0.10 copies all pools and sums in every branch.
    """
    return "switch" if platform in GPU and jax.__version_info__ >= (0, 11) else "loop"


def run_if(
    wanted: jax.Array, work: Callable[..., Any], state: Any, *operands: Any, sums: Collection[Entry] = ()
) -> Any:
    """``work(state, *operands)`` if wanted, else ``state``.

    Arguments:
      wanted: bool scalar, different on different ranks.
      work: takes the state and the operands, returns the new state.
      state: what work changes, updated in place.
      operands: what work reads and no guard changes: parameters, the row of the table.
      sums: entries of the state to which work adds in every trip and with which it does nothing else. If
        there are any, the state is a ``State``.

    A loop and not ``lax.cond``, because a loop's state is updated in place on every platform. The barrier is
    needed: without it XLA moves work that does not depend on the state out of the loop, and runs it at every
    tick on every rank. So everything that work computes with must be an argument here, none of it closed
    over.

    Slot pools and sums belong in the state of every guard that touches them, also of one that only reads
    them: since one guard's result is the next guard's state, a single buffer passes through all. A pool that
    is closed over, and that another guard changes, is copied whole at each tick (the CPU time of a 1F1B step
    rose 3.3 times).

    Sums go around the barrier: no work with them can leave the loop, as each trip changes them, and on GPU no
    matrix product can add in place to an array that comes out of a barrier.
    """

    def trip(i, state):
        held, around = _split_off_sums(state, sums)
        _, held, inside = lax.optimization_barrier((i, held, operands))
        return pin(work(_merge_sums(pin(held), around), *pin(inside)))

    return pin(lax.fori_loop(0, wanted.astype(jnp.int32), trip, pin(state)))


def run_one(
    number: jax.Array,
    works: Sequence[Callable[..., Any]],
    state: Any,
    *operands: Any,
    sums: Collection[Entry] = (),
    begin: Callable[[Any], Any] = lambda state: state,
) -> Any:
    """``works[number](begin(state), *operands)``, or ``begin(state)`` if there is no work of that number.

    One conditional: on GPU each guard costs a round trip to the host, and this one costs a single trip for
    all works. Sums go around its barrier, as in ``run_if``: a branch that added to the output of a barrier
    would write each product to memory, and then the sum. ``begin`` adds arrays that hold nothing yet to the
    state, inside every branch: if they were handed in, XLA would copy them in each branch that hands them on.
    """

    def branch(work):
        def run(state, operands):
            held, around = _split_off_sums(state, sums)
            held, inside = lax.optimization_barrier((held, operands))
            return pin(work(begin(_merge_sums(pin(held), around)), *pin(inside)))

        return run

    branches = [*map(branch, works), lambda state, operands: pin(begin(state))]
    index = jnp.where((number >= 0) & (number < len(works)), number, len(works))
    return pin(lax.switch(index, branches, pin(state), operands))


def run_in_lockstep(
    anywhere: jax.Array, wanted: jax.Array, work: Callable[..., Any], state: Any, *operands: Any
) -> Any:
    """Do what ``run_if`` does, but with the same operations on all ranks, in lockstep.

    Arguments:
      anywhere: bool scalar, whether any rank wants the work. It is equal on all ranks, so that all take the
        same branch.
      wanted: bool scalar, whether this rank wants the work and keeps its result.
      work, state, operands: see ``run_if``.
    """

    def work_and_keep(state, wanted, *operands):
        made = work(state, *operands)
        return jax.tree.map(lambda new, old: jnp.where(wanted, new, old), made, state)

    return run_if(anywhere, work_and_keep, state, wanted, *operands)


def _split_off_sums(state: Any, sums: Collection[Entry]) -> tuple[Any, Any]:
    """The state in two: the part that goes through a barrier, and the sums, which go around it."""
    return (state.pick(state.entries - {*sums}), state.pick(sums)) if sums else (state, None)


def _merge_sums(held: Any, around: Any) -> Any:
    return held if around is None else held.merge(around)


def pin(state: Any) -> Any:
    """The state with every array held in row-major layout.

    Without it the TPU compiler gives each guard the layouts that suit that guard, and copies whole pools
    between guards whose layouts differ.
    """

    def hold(a):
        if jnp.issubdtype(a.dtype, jax.dtypes.extended):
            return a  # typed keys have a hidden dim, which no layout can name
        return with_layout_constraint(a, Layout(tuple(range(a.ndim))))

    return jax.tree.map(hold, state)
