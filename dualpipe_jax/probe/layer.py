"""Times of a layer's forward, backward, its two halves, and a pair on these devices: relative costs for schedules."""

import math
from typing import Any

import jax
import numpy as np
from jax import lax

from dualpipe_jax.pair import side_by_side
from dualpipe_jax.parallel import EP
from dualpipe_jax.probe.place import Place, seconds
from dualpipe_jax.split import split_backward

LAYERS = 2
"""Number of layers of a stage: more than one, so that a pair's collectives can alternate with each other's work."""


def layer(place: Place) -> dict[str, Any]:
    """Seconds of F, B, I, W and FB of a stage of layers, each compiled alone, on all devices at once.

    A layer is a residual matmul and one expert on every device; all-to-alls send tokens to the experts and back. The
    ratios of F, I and W depend on the model: these costs are for a first look, a profiled run's for the model itself.
    """
    tokens, width, hidden = (64, 64, 128) if place.is_small else (4096, 2048, 4096)
    tokens = math.ceil(tokens / place.ep) * place.ep
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        drawn = rng.standard_normal((place.pp, place.ep, *shape), np.float32) / math.sqrt(shape[0])
        return place.put(drawn.astype(place.dtype))

    shapes = {"mix": (width, width), "up": (width, hidden), "down": (hidden, width)}
    params = [{name: normal(*shape) for name, shape in shapes.items()} for _ in range(LAYERS)]
    x, dy = normal(tokens, width), normal(tokens, width)
    split = split_backward(stage)

    def pair(p: Any, x: Any, residuals: Any, dy: Any) -> Any:
        return side_by_side(split.forward, (p, x), split.backward, (p, x, residuals, dy))

    forward, backward = place.on_devices(split.forward), place.on_devices(split.backward)
    inputs, weights = place.on_devices(split.backward_input), place.on_devices(split.backward_weight)
    both = place.on_devices(pair)
    _, residuals = forward(params, x)
    _, stash = inputs(params, x, residuals, dy)
    return {
        "F": seconds(lambda: forward(params, x)),
        "B": seconds(lambda: backward(params, x, residuals, dy)),
        "I": seconds(lambda: inputs(params, x, residuals, dy)),
        "W": seconds(lambda: weights(params, x, residuals, stash)),
        "FB": seconds(lambda: both(params, x, residuals, dy)),
        "boundary_bytes": tokens * width * place.dtype.itemsize,
        "of": f"{LAYERS} layers of width {width}, experts of {hidden}, {tokens} tokens a device, "
        f"{place.dtype.name}",
    }


def stage(params: Any, x: jax.Array) -> jax.Array:
    """A stage; x [tokens, width] of a device. The layers are unrolled, so that a pair's collectives can alternate."""
    for p in params:
        x = x + jax.nn.gelu(x @ p["mix"])
        arrived = _exchange(x)
        x = x + _exchange(jax.nn.gelu(arrived @ p["up"]) @ p["down"])
    return x


def _exchange(x: jax.Array) -> jax.Array:
    size = lax.axis_size(EP)
    return lax.all_to_all(x.reshape(size, -1, x.shape[-1]), EP, 0, 0).reshape(x.shape)
