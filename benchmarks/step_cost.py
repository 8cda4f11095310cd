"""The cost of a pipelined step relative to plain gradient accumulation of the same work, in CPU seconds.

8 transformer layers of width 512, 16 microbatches. A pipeline of 4 ranks shares this machine's cores, so wall
time says little: the ratio is that of the CPU seconds of one step to those of one JAX program that
accumulates gradients over the same microbatches on one device. The two programs take turns, each ratio is of
two neighbouring runs, and the median is quoted.

    python benchmarks/step_cost.py [--rounds 5]
"""

import argparse
import os
import statistics
import time

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
os.environ["XLA_FLAGS"] += " --xla_cpu_collective_call_warn_stuck_timeout_seconds=300"
os.environ["XLA_FLAGS"] += " --xla_cpu_collective_call_terminate_timeout_seconds=600"

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from dualpipe_jax import PipelineModel, make_mesh, pipeline_value_and_grad, place_stages
from dualpipe_jax.schedule import dualpipe, dualpipe_v, one_f_one_b, zb_h1

RANKS, MICROBATCHES, SIZE, SEQ, WIDTH, HEADS, VOCAB = 4, 16, 2, 128, 512, 8, 256


def norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def layer(p, x):
    """A pre-norm transformer layer, x [size, seq, width]."""
    h = norm(x, p["norm1"])
    q, k, v = jnp.moveaxis((h @ p["qkv"]).reshape(*x.shape[:2], 3, HEADS, -1), 2, 0)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(jnp.float32(WIDTH / HEADS))
    causal = jnp.tril(jnp.ones((SEQ, SEQ), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e30))
    x = x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ p["out"]
    return x + jax.nn.gelu(norm(x, p["norm2"]) @ p["up"]) @ p["down"]


def model(layers_per_stage):
    """A model whose stages have ``layers_per_stage`` layers."""

    def stage(params, x):
        for i in range(layers_per_stage):
            x = layer(jax.tree.map(lambda leaf, i=i: leaf[i], params), x)
        return x

    def head_loss(p, x, targets):
        log_probs = jax.nn.log_softmax(norm(x, p["norm"]) @ p["out"])
        return -jnp.mean(jnp.take_along_axis(log_probs, targets[..., None], -1))

    return PipelineModel(lambda p, tokens: p[tokens], stage, head_loss)


def init(num_stages, layers_per_stage):
    """Parameters of the whole model, cut into stages."""
    shapes = {
        "qkv": (WIDTH, 3 * WIDTH),
        "out": (WIDTH, WIDTH),
        "up": (WIDTH, 4 * WIDTH),
        "down": (4 * WIDTH, WIDTH),
    }
    keys = jax.random.split(jax.random.key(0), 6)
    lead = (num_stages, layers_per_stage)
    stages = {
        n: 0.02 * jax.random.normal(k, lead + s) for k, (n, s) in zip(keys, shapes.items(), strict=False)
    }
    stages |= {n: jnp.ones((*lead, WIDTH)) for n in ("norm1", "norm2")}
    head = {"norm": jnp.ones(WIDTH), "out": 0.02 * jax.random.normal(keys[4], (WIDTH, VOCAB))}
    return {"embed": jax.random.normal(keys[5], (VOCAB, WIDTH)), "stages": stages, "head": head}


def accumulation(functions, num_microbatches):
    """Plain gradient accumulation on one device: a scan over microbatches of jax.value_and_grad."""

    def loss(params, tokens, targets):
        x = functions.embed(params["embed"], tokens)
        num_stages = jax.tree.leaves(params["stages"])[0].shape[0]
        for s in range(num_stages):
            x = functions.stage(jax.tree.map(lambda leaf, s=s: leaf[s], params["stages"]), x)
        return functions.head_loss(params["head"], x, targets) / num_microbatches

    def step(params, inputs, targets):
        def one(total, batch):
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(params, *batch)), None

        zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        return jax.lax.scan(one, zero, (inputs, targets))[0]

    return jax.jit(step)


def cpu_seconds(step, *args):
    """CPU seconds (user and system, all threads) of one call."""
    before = time.process_time()
    jax.block_until_ready(step(*args))
    return time.process_time() - before


def data(num_microbatches):
    """Tokens and the next ones, [microbatches, size, seq]."""
    tokens = jax.random.randint(jax.random.key(1), (num_microbatches, SIZE, SEQ), 0, VOCAB)
    return tokens, jnp.roll(tokens, -1, -1)


def pipelined_program(schedule, num_layers):
    """The pipelined step and its arguments, stages placed on their ranks."""
    num_stages, mesh = schedule.placement.num_model_stages, make_mesh(schedule.num_ranks, 1)
    params = init(num_stages, num_layers // num_stages)
    placed = params | {"stages": place_stages(params["stages"], schedule, mesh)}
    step = pipeline_value_and_grad(model(num_layers // num_stages), schedule, mesh)
    return step, placed, *data(schedule.num_microbatches)


def plain_program(schedule, num_layers):
    """Gradient accumulation of the same work and its arguments."""
    num_stages = schedule.placement.num_model_stages
    step = accumulation(model(num_layers // num_stages), schedule.num_microbatches)
    return step, init(num_stages, num_layers // num_stages), *data(schedule.num_microbatches)


def both(schedule, num_layers):
    """The two programs, warmed up; their losses are compared."""
    (plain, *plain_args), (pipelined, *pipelined_args) = programs = (
        plain_program(schedule, num_layers),
        pipelined_program(schedule, num_layers),
    )
    expected, loss = float(plain(*plain_args)[0]), float(pipelined(*pipelined_args)[0])
    assert abs(expected - loss) < 1e-4, (expected, loss)
    return programs


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds, console = parser.parse_args().rounds, Console()
    if rounds < 1:
        parser.error(f"--rounds {rounds}: needs at least 1 timed round")
    table = Table("schedule", "CPU s, plain", "CPU s, pipelined", "ratio: min", "median", "max")
    for make in (one_f_one_b, zb_h1, dualpipe, dualpipe_v):
        schedule = make(RANKS, MICROBATCHES)
        plain, pipelined = both(schedule, num_layers=8)
        pairs = [(cpu_seconds(*plain), cpu_seconds(*pipelined)) for _ in range(rounds)]
        ratios = sorted(b / a for a, b in pairs)
        median = [statistics.median(column) for column in zip(*pairs, strict=True)]
        shown = [f"{v:.2f}" for v in (*median, ratios[0], statistics.median(ratios), ratios[-1])]
        table.add_row(schedule.name, *shown)
        console.print(f"{schedule.name}: median ratio {shown[3]}", highlight=False)
    console.print(table)


if __name__ == "__main__":
    main()
