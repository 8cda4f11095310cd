"""All of the engine's units in one tiny step, compared with ``jax.value_and_grad`` of the same model in plain JAX."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from dualpipe_jax.engine import Pipeline, PipelineModel, staged
from dualpipe_jax.engine.guard import Divergence
from dualpipe_jax.parallel import EP
from dualpipe_jax.probe.place import Place
from dualpipe_jax.schedule import Schedule, dualpipe, dualpipe_v

WIDTH, TOKENS, VOCAB = 8, 2, 11
"""The model's width, the tokens of each device for each expert, and the vocabulary. A group's device has one expert."""
RUNS = 5
"""Number of runs of a step whose bits are compared."""


def check_units(place: Place, form: Divergence) -> str:
    """What is wrong with a step whose ranks diverge in a form; empty if nothing is."""
    pipeline, params, batch = tiny_pipeline(place, form)
    with jax.default_matmul_precision("highest"):
        step = jax.jit(pipeline.value_and_grad, compiler_options=place.options)
        (loss, _), grads = step(params, batch)
        want = jax.jit(jax.value_and_grad(plain_loss))(params, batch["inputs"], batch["targets"])
    return differences(place.fetch((loss, grads)), want)


def repeats(place: Place) -> dict[str, Any]:
    """Whether a step gives the same bits when it is run again: the leaves that differ in any of ``RUNS`` runs.

    The step has a sum that GPUs add up in the order in which threads arrive: the gradient of an embedding whose rows
    many tokens share.
    """
    sizes = (16, 32) if place.is_small else (512, 2048)
    pipeline, params, batch = tiny_pipeline(place, "loop", *sizes)
    step = jax.jit(pipeline.value_and_grad, compiler_options=place.options)
    first, *others = ([*_bits(place.fetch(step(params, batch)))] for _ in range(RUNS))
    names = [name for name, _ in first]
    differ = {name for run in others for (name, a), (_, b) in zip(first, run, strict=True) if a != b}
    return {"leaves": len(names), "differ": [name for name in names if name in differ], "runs": RUNS}


def _bits(made: Any) -> Iterator[tuple[str, bytes]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(made):
        yield jax.tree_util.keystr(path), np.asarray(leaf).tobytes()


def tiny_pipeline(
    place: Place, form: Divergence, width: int = WIDTH, each: int = TOKENS
) -> tuple[Pipeline, Any, Any]:
    """The engine with a tiny model, its parameters and a batch; ``each``: the tokens of a device for each expert."""
    schedule = dualpipe(place.pp, 2 * place.pp) if place.pp % 2 == 0 else dualpipe_v(place.pp, 2 * place.pp)
    pipeline = Pipeline(
        staged(PipelineModel(embed, stage, head_loss), schedule.placement.num_model_stages),
        schedule,
        place.mesh,
        param_specs={"stages": {"w": PartitionSpec(EP), "out": None}},
        fuse_pairs=True,
        divergence=form,
    )
    return pipeline, *inputs(schedule, place.ep, width, each)


def embed(p: Any, tokens: jax.Array) -> jax.Array:
    """Embed the tokens [..., ep * TOKENS] of a device's sequences; returns [..., ep * TOKENS, width]."""
    return p[tokens]


def stage(p: Any, x: jax.Array) -> jax.Array:
    """One stage; x [1, ep * TOKENS, width] of a device.

    The e-th block of TOKENS tokens goes to expert e, on device e of the group.
    """
    sent = x.reshape(lax.axis_size(EP), -1, x.shape[-1])
    arrived = lax.all_to_all(sent, EP, 0, 0)
    back = lax.all_to_all(jnp.tanh(arrived @ p["w"][0]), EP, 0, 0)
    return x + jnp.tanh(back.reshape(x.shape) @ p["out"])


def head_loss(p: Any, x: jax.Array, targets: jax.Array) -> jax.Array:
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x @ p), targets[..., None], -1))


def plain_loss(params: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    """The same model with neither mesh nor schedule; tokens [microbatches, ep, ep * TOKENS]."""
    x = params["shared"]["embed"][tokens]
    for number in range(params["stages"]["w"].shape[0]):
        w, out = params["stages"]["w"][number], params["stages"]["out"][number]
        by_expert = x.reshape(*x.shape[:2], -1, TOKENS, WIDTH)
        made = jnp.tanh(jnp.einsum("mpetd,edf->mpetf", by_expert, w))
        x = x + jnp.tanh(made.reshape(x.shape) @ out)
    return head_loss(params["shared"]["head"], x, targets)


def inputs(schedule: Schedule, ep: int, width: int, each: int) -> tuple[Any, Any]:
    """Random parameters and a batch; ``each``: the tokens of a device for each expert."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32) / 2

    count = schedule.placement.num_model_stages
    stages = {"w": normal(count, ep, width, width), "out": normal(count, width, width)}
    shared = {"embed": normal(VOCAB, width), "head": normal(width, VOCAB)}
    tokens = rng.integers(0, VOCAB, (2, schedule.num_microbatches, ep, ep * each), np.int32)
    return {"stages": stages, "shared": shared}, {"inputs": tokens[0], "targets": tokens[1]}


def differences(found: Any, wanted: Any) -> str:
    """The name and the error of the leaf with the largest relative error, in words; empty if all are right."""
    leaves = jax.tree_util.tree_leaves_with_path(found)
    off = [
        float(np.abs(got - want).max() / np.abs(want).max())
        for (_, got), want in zip(leaves, jax.tree.leaves(jax.device_get(wanted)), strict=True)
    ]
    # NumPy's argmax takes a NaN for the largest.
    at = int(np.argmax(off))
    worst, name = off[at], jax.tree_util.keystr(leaves[at][0])
    words = "the loss" if name == "[0]" else f"the gradient of params{name.removeprefix('[1]')}"
    return "" if worst <= 1e-4 else f"wrong results: {words} is off by {worst:.1e} of its largest entry"
