"""Test whether ranks may diverge, so that only some work in a tick: small programs, checked against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dualpipe_jax.engine.guard import Divergence, run_if, run_one
from dualpipe_jax.parallel import EP, PP
from dualpipe_jax.parallel.p2p import send
from dualpipe_jax.probe.place import Place

TICKS = 12


def diverging(place: Place, form: Divergence, *, exchange: bool = False, beside: bool = False) -> str:
    """What is wrong with guards of a form, in words; empty if nothing is.

    Each rank works in ticks of its own: x becomes 1.5 x + 1 on the ranks that work.

    Args:
      exchange: whether the work starts with an all-to-all within the rank's group, in which other ranks take no part.
      beside: whether the result of the tick before is sent to the next rank while the guard runs, like the engine's
        sends.
    """
    around = [(rank, (rank + 1) % place.pp) for rank in range(place.pp)]

    def work(x: jax.Array) -> jax.Array:
        return 1.5 * (lax.all_to_all(x, EP, 0, 0) if exchange else x) + 1

    def run(x: jax.Array, wanted: jax.Array) -> jax.Array:
        def tick(x: jax.Array, wanted: jax.Array) -> tuple[jax.Array, None]:
            arrived = send(x, around, concurrent=True) if beside else None
            x = (
                run_if(wanted, work, x)
                if form == "loop"
                else run_one(wanted.astype(jnp.int32) - 1, [work], x)
            )
            return x if arrived is None else x + arrived / 8, None

        return lax.scan(tick, x, wanted)[0]

    rng = np.random.default_rng(0)
    wanted = rng.integers(0, 2, (place.pp, TICKS)).astype(bool)
    # In the first tick neighbouring ranks diverge whatever was drawn.
    wanted[:, 0] = np.arange(place.pp) % 2
    x = rng.standard_normal((place.pp, place.ep, place.ep, 256 if place.is_small else 1 << 16), np.float32)
    found = place.on_devices(run)(x, np.repeat(wanted[:, None], place.ep, axis=1))
    return difference(place.fetch(found), expected(x, wanted, exchange=exchange, beside=beside))


def expected(x: np.ndarray, wanted: np.ndarray, *, exchange: bool, beside: bool) -> np.ndarray:
    """The results of the same ticks in NumPy; x [pp, ep, ep, n], wanted [pp, ticks]."""
    for tick in range(wanted.shape[1]):
        arrived = np.roll(x, 1, axis=0) / 8 if beside else 0
        made = 1.5 * (x.swapaxes(1, 2) if exchange else x) + 1
        x = np.where(wanted[:, tick, None, None, None], made, x) + arrived
    return x


def permute_inside(place: Place) -> str:
    """What is wrong with a permute that only some ranks reach; empty if nothing is.

    The engine never does this, and a hang is to be expected.
    """

    def run(x: jax.Array, wanted: jax.Array) -> jax.Array:
        around = [(device, (device + 1) % place.ep) for device in range(place.ep)]
        return run_if(wanted, lambda x: lax.ppermute(x, EP, around), x)

    x = np.arange(float(place.pp * place.ep), dtype=np.float32).reshape(place.pp, place.ep)
    wanted = np.repeat(np.arange(place.pp)[:, None] % 2 == 0, place.ep, axis=1)
    return difference(
        place.fetch(place.on_devices(run)(x, wanted)), np.where(wanted, np.roll(x, 1, axis=1), x)
    )


def difference(got: np.ndarray, wanted: np.ndarray) -> str:
    """How far two arrays differ, in words; empty if they are the same up to rounding."""
    off = np.abs(got - wanted).max() / max(float(np.abs(wanted).max()), 1e-30)
    return "" if off <= 1e-5 else f"wrong results, off by {off:.1e} of the largest"


def why_no_groups(place: Place) -> str:
    """Why all-to-alls cannot be tested on these devices; empty if they can."""
    return "" if place.ep > 1 else f"--{EP} 1: a group of one device has no all-to-all"


def why_no_ranks(place: Place) -> str:
    """Why diverging ranks cannot be tested on these devices; empty if they can."""
    return "" if place.pp > 1 else f"--{PP} 1: one rank cannot part ways with another"
