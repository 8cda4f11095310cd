"""Speed of the devices: guards in seconds, links and copies in bytes a second, products in operations a second."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils

from dualpipe_jax.engine.guard import Divergence, run_if, run_one
from dualpipe_jax.parallel import EP
from dualpipe_jax.parallel.p2p import send
from dualpipe_jax.probe.place import Place, seconds

NUM_GUARDS = 5
"""Number of guards of a tick, as in the engine (F, B, I, W and pairs): five loops, or one conditional's branches."""


def guards(place: Place, form: Divergence) -> dict[str, float]:
    """Seconds of a tick's guards without their work: if none of them is taken, and if one is.

    Ticks that do nothing else are timed on all devices at once; the time of ticks with the same work but no guards is
    subtracted.
    """
    ticks = 50 if place.is_small else 500

    def works(number: int) -> Callable[[jax.Array], jax.Array]:
        return lambda x: x * (1 + 2.0**-number)

    def guarded(x: jax.Array, chosen: jax.Array) -> jax.Array:
        if form == "switch":
            return run_one(chosen, [works(number) for number in range(NUM_GUARDS)], x)
        for number in range(NUM_GUARDS):
            x = run_if(chosen == number, works(number), x)
        return x

    def seconds_per_tick(body: Callable[[jax.Array, jax.Array], jax.Array], chosen: int) -> float:
        def run(x: jax.Array, chosen: jax.Array) -> jax.Array:
            return lax.scan(lambda x, number: (body(x, number), None), x, chosen)[0]

        step = place.on_devices(run)
        numbers = place.put(np.full((place.pp, place.ep, ticks), chosen, np.int32))
        return seconds(lambda: step(x, numbers)) / ticks

    x = place.put(np.ones((place.pp, place.ep, 1024), np.float32))
    bare = seconds_per_tick(lambda x, number: x * (1 + number.astype(jnp.float32)), 0)
    skipped, taken = (max(0.0, seconds_per_tick(guarded, chosen) - bare) for chosen in (-1, 1))
    return {"skipped_seconds": skipped, "taken_seconds": taken}


def all_to_alls(place: Place) -> dict[str, Any]:
    """Rate and latency of an all-to-all in all groups at once, and each group's rate alone with the largest payload."""

    def exchange(x: jax.Array) -> jax.Array:
        return lax.all_to_all(x.reshape(place.ep, -1), EP, 0, 0).reshape(x.shape)

    sizes = payloads(place)
    alone = {f"rank {rank}": (place.of_ranks(slice(rank, rank + 1)), exchange) for rank in range(place.pp)}
    return fit_line(sizes, [_seconds_in_chain(place, exchange, size) for size in sizes]) | {
        "devices": place.ep,
        "by_group": _rates_alone(alone, sizes[-1]),
    }


def permutes(place: Place) -> dict[str, Any]:
    """Rate and latency of a send from all ranks at once to the next one, and the rate of every two neighbours alone."""

    def around(count: int) -> Callable[[jax.Array], jax.Array]:
        pairs = [(rank, (rank + 1) % count) for rank in range(count)]
        return lambda x: send(x, pairs, concurrent=True)

    sizes = payloads(place)
    alone = {
        f"ranks {rank}, {rank + 1}": (place.of_ranks(slice(rank, rank + 2)), around(2))
        for rank in range(place.pp - 1)
    }
    times = [_seconds_in_chain(place, around(place.pp), size) for size in sizes]
    return fit_line(sizes, times) | {"by_group": _rates_alone(alone, sizes[-1])}


def payloads(place: Place) -> list[int]:
    """The payloads to time: bytes on each device, a multiple of the group's size, the smallest first."""
    unit = 4 * place.ep
    return [size // unit * unit for size in ([1 << 14, 1 << 18] if place.is_small else [1 << 18, 1 << 26])]


def fit_line(sizes: Sequence[int], times: Sequence[float]) -> dict[str, float]:
    """Fit seconds = latency + bytes / rate through the smallest and the largest payload.

    Where the fit gives a negative latency or no positive rate, the latency is 0 and the rate is the largest's.
    """
    (small, quick), (large, slow) = (sizes[0], times[0]), (sizes[-1], times[-1])
    slope = (slow - quick) / (large - small)
    latency = quick - small * slope
    if slope <= 0 or latency < 0:
        return {"bytes_per_second": large / slow, "latency": 0.0}
    return {"bytes_per_second": 1 / slope, "latency": latency}


def _rates_alone(
    parts: Mapping[str, tuple[Place, Callable[[jax.Array], jax.Array]]], size: int
) -> dict[str, float]:
    """Bytes a second of each part, one part after the other; only processes with a device of the part time it."""
    rates = []
    for name, (part, once) in parts.items():
        multihost_utils.sync_global_devices(name)
        rates.append(size / _seconds_in_chain(part, once, size) if part.is_local else 0.0)
    found = np.reshape(multihost_utils.process_allgather(np.asarray(rates, np.float32)), (-1, len(parts)))
    return dict(zip(parts, found.max(axis=0).tolist(), strict=True))


def _seconds_in_chain(place: Place, once: Callable[[jax.Array], jax.Array], size: int) -> float:
    """Seconds of one collective in a chain of several, on float32 arrays of ``size`` bytes on each device."""
    times = 4 if place.is_small else 20
    step = place.on_devices(repeated(once, times))
    x = place.put(np.zeros((place.pp, place.ep, size // 4), np.float32))
    return seconds(lambda: step(x)) / times


def repeated(once: Callable[[jax.Array], jax.Array], times: int) -> Callable[[jax.Array], jax.Array]:
    """A function that applies ``once`` ``times`` times, one after the other."""
    return lambda x: lax.scan(lambda x, _: (once(x), None), x, None, times)[0]


def matmuls(place: Place) -> dict[str, Any]:
    """Operations a second of one device in a product of square matrices; bfloat16, but float32 on CPU."""
    size, times = (512, 4) if place.is_small else (8192, 10)
    return {"flops_per_second": product_rate(place, size, times), "size": size, "dtype": place.dtype.name}


def product_rate(place: Place, size: int, times: int) -> float:
    """Operations a second of one device in ``times`` products of square matrices, one after the other.

    Matrices are random: constants take less power, and a GPU that is bound by its power multiplies them a tenth faster.
    """
    # Divided by sqrt(size), so that the numbers of products stay of the same size.
    drawn = np.random.default_rng(0).standard_normal((2, size, size), np.float32) / math.sqrt(size)
    x, w = (jnp.asarray(matrix, place.dtype) for matrix in drawn)
    step = jax.jit(lambda x, w: repeated(lambda x: x @ w, times)(x), compiler_options=place.options)
    return 2 * size**3 * times / seconds(lambda: step(x, w))


def copies(place: Place) -> dict[str, Any]:
    """Bytes a second of a copy in one device's memory, read plus written."""
    size, times = (1 << 22 if place.is_small else 1 << 27), 10
    step = jax.jit(repeated(jnp.negative, times), compiler_options=place.options)
    x = jnp.ones(size, jnp.float32)
    return {"bytes_per_second": 2 * 4 * size * times / seconds(lambda: step(x)), "size": 4 * size}
