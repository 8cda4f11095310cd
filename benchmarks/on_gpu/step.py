"""The cost of the engine's step against plain accumulation on one GPU: pp 1, 8 layers of width 4096, 8 microbatches.

Each layer has leaves of its own, or the layers of a stage are stacked in one leaf, which the stage slices.
The engine casts parameters to bfloat16 once a step (``compute_dtype``); plain accumulation also casts them
once a step, before its scan.
"""

import collections
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.on_gpu.bench import Bench
from dualpipe_jax import Pipeline, PipelineModel, StagedModel, make_mesh, staged
from dualpipe_jax.pods.units import cycles_of
from dualpipe_jax.schedule import dualpipe_v, one_f_one_b, zb_h1, zb_v
from dualpipe_jax.schedule.lowering.table import TickTable
from dualpipe_jax.schedule.lowering.unit_key import UnitKey
from models.cudnn import cudnn_attention

MICROBATCHES, SIZE, SEQUENCE, WIDTH, HEADS, VOCAB, LAYERS = 8, 1, 2048, 4096, 32, 1024, 8
FORMS = (
    *((make, "loop", "own") for make in (one_f_one_b, zb_h1, dualpipe_v, zb_v)),
    *((make, "switch", "own") for make in (dualpipe_v, one_f_one_b, zb_v, zb_h1)),
    *((make, "loop", "stacked") for make in (dualpipe_v, zb_v, one_f_one_b, zb_h1)),
    (zb_v, "switch", "stacked"),
)
"""The schedule, the form of guards, and whether each layer has leaves of its own or a stage's layers are
stacked."""
SHAPES = {
    "qkv": (WIDTH, 3 * WIDTH),
    "out": (WIDTH, WIDTH),
    "up": (WIDTH, 4 * WIDTH),
    "down": (4 * WIDTH, WIDTH),
}


def norm(x: Any, scale: Any) -> Any:
    mean = jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)
    return x * jax.lax.rsqrt(mean + 1e-6).astype(x.dtype) * scale.astype(x.dtype)


def layer(p: Any, x: Any) -> Any:
    heads = (norm(x, p["norm1"]) @ p["qkv"]).reshape(*x.shape[:2], 3, HEADS, -1)
    q, k, v = (heads[:, :, i].swapaxes(1, 2) for i in range(3))
    attended = cudnn_attention(q, k, v, 1 / math.sqrt(WIDTH / HEADS)).swapaxes(1, 2)
    x = x + attended.reshape(x.shape) @ p["out"]
    return x + jax.nn.gelu(norm(x, p["norm2"]) @ p["up"]) @ p["down"]


def stage(params: Any, x: Any) -> Any:
    """Compute layers, which are a list of trees or one tree of leaves [layers, ...]."""
    if isinstance(params, dict):
        params = [{name: leaf[i] for name, leaf in params.items()} for i in range(len(params["norm1"]))]
    for p in params:
        x = layer(p, x)
    return x


def embed(table: Any, tokens: Any) -> Any:
    return table[tokens].astype(jnp.bfloat16)


def head_loss(p: Any, x: Any, targets: Any) -> Any:
    logits = (norm(x, p["norm"]) @ p["out"].astype(jnp.bfloat16)).astype(jnp.float32)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)
    return -jnp.mean(picked)


def model(num_stages: int) -> StagedModel:
    return staged(PipelineModel(embed, stage, head_loss), num_stages)


def parameters(num_stages: int, leaves: str = "own") -> Any:
    """The engine's parameters for ``num_stages`` stages; their values do not depend on the stages or on ``leaves``."""
    keys = iter(jax.random.split(jax.random.key(0), LAYERS * len(SHAPES) + 2))
    of_layers = [
        {name: 0.02 * jax.random.normal(next(keys), shape) for name, shape in SHAPES.items()}
        | {"norm1": jnp.ones(WIDTH), "norm2": jnp.ones(WIDTH)}
        for _ in range(LAYERS)
    ]
    each = LAYERS // num_stages
    cut: Any = [jax.tree.map(lambda *ls: jnp.stack(ls), *of_layers[i::each]) for i in range(each)]
    if leaves == "stacked":
        cut = jax.tree.map(lambda *ls: jnp.stack(ls, axis=1), *cut)
    head = {"norm": jnp.ones(WIDTH), "out": 0.02 * jax.random.normal(next(keys), (WIDTH, VOCAB))}
    return {"stages": cut, "shared": {"embed": jax.random.normal(next(keys), (VOCAB, WIDTH)), "head": head}}


def runs_of(table: TickTable, kind_of: tuple[str, ...]) -> dict[UnitKey, int]:
    """The number of times that a step runs each unit on its only rank."""
    names = {table.keeps.kind_of[stage]: kind for stage, kind in enumerate(kind_of)}
    runs: collections.Counter[UnitKey] = collections.Counter()
    for number in table.column("unit").ravel().tolist():
        if number >= 0:
            op, *stands = table.units[number]
            runs[UnitKey(op, tuple(names[stand.kind] for stand in stands if stand is not None))] += 1
    return runs


def plain(params: Any, batch: Any) -> Any:
    """The mean loss and its gradients, summed over microbatches in a scan."""
    narrow = jax.tree.map(lambda a: a[0].astype(jnp.bfloat16), params["stages"])
    shared = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params["shared"])

    def loss(narrow: Any, shared: Any, one: Any) -> Any:
        x = stage(narrow, embed(shared["embed"], one["inputs"]))
        return head_loss(shared["head"], x, one["targets"]) / MICROBATCHES

    def add(sums: Any, one: Any) -> Any:
        found = jax.value_and_grad(loss, (0, 1))(narrow, shared, one)
        return jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, found), None

    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), (narrow, shared))
    return jax.lax.scan(add, (jnp.zeros(()), zeros), batch)[0]


def step(bench: Bench) -> None:
    """Time plain accumulation, then every schedule: milliseconds, their ratio, and the gradients' largest error."""
    tokens = np.random.default_rng(1).integers(0, VOCAB, (MICROBATCHES, SIZE, SEQUENCE + 1), np.int32)
    batch = bench.given({"inputs": tokens[..., :-1], "targets": tokens[..., 1:]})
    params = bench.made(lambda: parameters(1))
    each = sum(math.prod(shape) for shape in SHAPES.values())
    per_token = 6.0 * (LAYERS * each + WIDTH * VOCAB) + 6 * LAYERS * WIDTH * SEQUENCE
    flops = MICROBATCHES * SIZE * SEQUENCE * per_token
    wanted = bench.time("plain accumulation", plain, params, batch, flops=flops, seconds=0.5, predict=True)
    base: Any = None if bench.compiles_only else bench.records[-1]["ms"]
    mesh = make_mesh(1, 1, devices=[bench.device])
    for make, form, leaves in FORMS:
        schedule = make(1, MICROBATCHES)
        num_stages = schedule.placement.num_model_stages
        pipeline = Pipeline(model(num_stages), schedule, mesh, divergence=form, compute_dtype=jnp.bfloat16)
        mine = bench.made(lambda n=num_stages, leaves=leaves: parameters(n, leaves))
        name = f"{schedule.name}, {form}, {leaves} leaves"
        table = pipeline.table(mine, batch)
        runs = runs_of(table, pipeline.model.kind_of)
        predict = functools.partial(cycles_of, runs=runs, ticks=table.num_ticks)
        out = bench.time(
            name, pipeline.value_and_grad, mine, batch, flops=flops, seconds=0.5, predict=predict
        )
        if bench.compiles_only:
            continue
        ((loss, _), grads) = out
        facts = {
            "over_plain": bench.records[-1]["ms"] / base,
            "loss": float(loss),
            "plain_loss": float(wanted[0]),
            "worst_gradient": float(worst(grads, wanted[1], num_stages)),
        }
        del out, grads
        bench.say(f"{name}: over plain", **facts)


@functools.partial(jax.jit, static_argnums=2)
def worst(grads: Any, wanted: Any, num_stages: int) -> jax.Array:
    """The largest error of a leaf, relative to its norm, computed on the device because the gradients are gigabytes."""
    stages, each = grads["stages"], LAYERS // num_stages
    if isinstance(stages, dict):
        stages = [{name: leaf[:, i] for name, leaf in stages.items()} for i in range(each)]
    pairs = [
        (leaf[s], wanted[0][s * each + i][name])
        for i, own in enumerate(stages)
        for name, leaf in own.items()
        for s in range(num_stages)
    ]
    pairs += list(zip(jax.tree.leaves(grads["shared"]), jax.tree.leaves(wanted[1]), strict=True))
    return jnp.stack([jnp.linalg.norm(a - b) / jnp.linalg.norm(b) for a, b in pairs]).max()
