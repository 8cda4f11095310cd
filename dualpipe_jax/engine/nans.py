"""Find where the first value that is not finite was made: a check at every tick, and an error at the step's end."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from dualpipe_jax.contract import Tree
from dualpipe_jax.engine.state import State
from dualpipe_jax.engine.units import Row
from dualpipe_jax.schedule import Schedule
from dualpipe_jax.split.leaves import is_floating

NO_TICK = np.iinfo(np.int32).max
CHECKED_VALUES = (
    "the stage's output",
    "a loss",
    "the gradient of the stage's input",
    "a gradient of parameters",
    "a gradient of the batch",
)
"""The values that are checked at each tick; ``what`` in ``State.first_bad`` is the number of one of them."""


def record_first_bad(state: State, row: Row, tick: jax.Array) -> State:
    """The state with ``first_bad`` set to (tick, what, stage, microbatch) if this tick made the first bad value."""
    y, dx = (state.under_way.get(payload) for payload in ("y", "dx"))
    sums = state.own, state.shared
    bad = jnp.stack([~_all_finite(tree) for tree in (y, state.losses, dx, sums, state.batch)])
    what = jnp.argmax(bad).astype(jnp.int32)
    stage, microbatch = (
        jnp.where(what < 2, row[f"F_{name}"], row[f"G_{name}"]) for name in ("stage", "microbatch")
    )
    seen = jnp.stack([tick, what, stage, microbatch])
    first = bad.any() & (state.first_bad[0] == NO_TICK)
    return state.put(first_bad=jnp.where(first, seen, state.first_bad))


def _all_finite(tree: Tree) -> jax.Array:
    finite = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree) if is_floating(leaf)]
    return functools.reduce(jnp.logical_and, finite, jnp.asarray(True))


def raise_if_bad(objective: jax.Array, first_bad: jax.Array, schedule: Schedule) -> None:
    """Raise FloatingPointError from the running program if a value was not finite; it says where that began.

    first_bad: int32 [..., 4], with the axes of ``Step.axes`` as leading dims: ``State.first_bad`` of each
      device.
    """

    def report(objective, first_bad):
        tick, what, stage, microbatch = map(int, min(first_bad.reshape(-1, 4).tolist()))
        if tick == NO_TICK:
            return
        raise FloatingPointError(
            f"{schedule.name}: the loss is {objective}. The first value that is not finite is {CHECKED_VALUES[what]}, "
            f"in the {'forward' if what < 2 else 'backward'} of microbatch {microbatch} at stage {stage} (tick {tick})."
        )

    jax.debug.callback(report, objective, first_bad)
