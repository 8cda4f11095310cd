"""The figures of a step: gradient norms by part, routing biases, and how tokens spread over experts.

``step_figures`` runs on the devices, inside the step; ``step_record`` turns its arrays into what metrics.jsonl holds.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey, KeyPath

Tree = Any

PARTS = ("embedding", "norms", "attention", "router", "experts", "shared", "dense", "head", "other")
"""Parts of a model, by the names of their parameters; see ``part_of``."""

_NAMES = {
    "embed_tokens": "embedding",
    "lm_head": "head",
    "shared_experts": "shared",
    "experts": "experts",
    "gate": "router",
    "self_attn": "attention",
    "mlp": "dense",
}
"""Name in the path of a parameter -> its part; the first name in this order that occurs counts. Names are compared
whole: "gate" is a router, "gate_proj" is not."""


def step_figures(params: Tree, grads: Tree, aux: Mapping[str, jax.Array]) -> dict[str, Any]:
    """Arrays that describe a step; called inside of the step's program.

    Args:
      params: the parameters after the step, as the engine takes them; routing biases are under a key "routing".
      grads: the gradients of the trainable parameters, before clipping.
      aux: the counts of the stages: "counts", int32 [..., experts], the number of assignments to each expert; if
        experts are placed also "devices", int32 [..., devices], the number of assignments that each device worked on.

    Returns {"grad_norms": {part: float32}, "bias_range": float32} and the counts of ``aux``: the norm of the gradients
    of each part that the model has, and the range of routing biases in the layer in which it is widest.
    """
    found = {"grad_norms": grad_norms(grads), "bias_range": bias_range(params), "counts": aux["counts"]}
    return found | {name: aux[name] for name in ("devices",) if name in aux}


def grad_norms(grads: Tree) -> dict[str, jax.Array]:
    """The norm of the gradients of each part of the model; the squares add up to the square of the whole norm."""
    squares: dict[str, jax.Array] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        part = part_of(path)
        square = jnp.sum(jnp.square(leaf.astype(jnp.float32)))
        squares[part] = squares[part] + square if part in squares else square
    return {part: jnp.sqrt(squares[part]) for part in PARTS if part in squares}


def part_of(path: KeyPath) -> str:
    """The part of a parameter: "norms" if a name in its path contains "norm", else by ``_NAMES``, else "other"."""
    names = [str(key.key) for key in path if isinstance(key, DictKey)]
    if any("norm" in name for name in names):
        return "norms"
    return next((part for name, part in _NAMES.items() if name in names), "other")


def bias_range(params: Tree) -> jax.Array:
    """The largest difference between the routing biases of two experts of a layer, float32; 0 without biases."""
    widest = [
        jnp.max(jnp.max(leaf, -1) - jnp.min(leaf, -1)).astype(jnp.float32)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if DictKey("routing") in path and DictKey("bias") in path
    ]
    return jnp.max(jnp.stack(widest)) if widest else jnp.zeros((), jnp.float32)


def step_record(metrics: Mapping[str, Any], *, with_load: bool, num_devices: int = 1) -> dict[str, Any]:
    """A step's metrics, fetched from the devices, as the plain numbers of a line of metrics.jsonl.

    "counts" becomes "load_entropy" and, with ``with_load``, "load": a list for each layer of each expert's
    assignments. If ``num_devices`` is above 1, there is "device_load" (see ``device_load``): from "devices" if experts
    are placed, else from "counts", because experts are in order.
    """
    numbers = {name: value for name, value in metrics.items() if name not in ("counts", "devices")}
    record = jax.tree.map(lambda value: np.asarray(value).item(), numbers)
    if "counts" in metrics:
        load = expert_load(np.asarray(metrics["counts"]))
        record["load_entropy"] = load_entropy(load)
        if with_load:
            record["load"] = load.tolist()
        if num_devices > 1:
            in_order = load.reshape(len(load), num_devices, -1).sum(-1)
            record["device_load"] = device_load(expert_load(np.asarray(metrics.get("devices", in_order))))
    return record


def device_load(loads: np.ndarray) -> float:
    """The busiest device's load over the mean, on average over layers: 1 is balance.

    Args:
      loads: the load of each device, [layers, devices]; no layer may be without load.
    """
    return float((loads.max(-1) / loads.mean(-1)).mean()) if loads.size else 1.0


def expert_load(counts: np.ndarray) -> np.ndarray:
    """The load of each expert, int [layers, experts] in model order, from counts [..., experts].

    If stages are not equally deep, counts have rows of zeros for empty slots, too. They are left out; a layer always
    has assignments.
    """
    rows = counts.reshape(-1, counts.shape[-1])
    return rows[rows.sum(-1) > 0]


def load_entropy(load: np.ndarray) -> float:
    """Entropy of a layer's load over that of an even load, on average over layers: 1 is balance, 0 one expert alone.

    Args:
      load: the load of each expert, [layers, experts]; no layer may be without load.
    """
    if not load.size or load.shape[-1] == 1:
        return 1.0
    shares = load / load.sum(-1, keepdims=True)
    logarithms = np.log(shares, out=np.zeros_like(shares), where=shares > 0)
    return float((-(shares * logarithms).sum(-1) / np.log(load.shape[-1])).mean())
