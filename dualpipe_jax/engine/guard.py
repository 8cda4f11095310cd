"""Run a piece of work only on the ranks and ticks that want it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def run_if(wanted: jax.Array, work: Callable[..., Any], state: Any, *operands: Any) -> Any:
    """``state = work(state, *operands)`` if wanted.

    Arguments:
      wanted: bool scalar, different on different ranks.
      work: takes the state and the operands, returns the new state.
      state: what work changes, updated in place.
      operands: what work only reads and could compute with before it reads the state: above all parameters.

    A loop and not ``lax.cond``, because a loop's state is updated in place on every platform. The barrier is
    what makes it a guard: without it XLA moves work that does not depend on the state out of the loop, and
    runs it at every tick on every rank. So everything that work computes with must come through here, except
    pools that it reads at an index that came through here.
    """

    def trip(i, state):
        _, state, inside = lax.optimization_barrier((i, state, operands))
        return work(state, *inside)

    return lax.fori_loop(0, wanted.astype(jnp.int32), trip, state)
