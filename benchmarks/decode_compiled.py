"""Kernels and bytes of a decode step, compiled for a GPU that is not here, beside the least that it has to read.

Nine layers of DeepSeek-V2-Lite in bfloat16, every request in the middle of its text. A row is of the compiled text of
the steps that the host starts at once, of which one is a part; they choose tokens greedily: how many kernels it
launches, how many bytes they read and write, and how long that takes by what was measured of such a GPU, every kernel
with its launch. "Started" is what the host starts: the compiler puts kernels into CUDA graphs, in which a launch
takes less; nobody measured how much, so none is taken off. The limit is to read once all weights that are asked for
and the cache of the positions used, at the same bytes a second. Every row's experts are taken to be others', as far
as there are: so many matrices are counted in both. Nothing can be timed without the GPU, so the compiler takes the
tiles of its own products by rule.

    python benchmarks/decode_compiled.py [--batches 1 16 64] [--positions 256] [--layers 9] [--steps 4]
        [--target h100] [--parts 0]

Needs JAX's CUDA compiler, ``pip install "jax[cuda13]"``, and no GPU.
"""

import argparse
import collections
import dataclasses
import math
import os
import re
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

import models
from dualpipe_jax import inspect
from dualpipe_jax.inspect.roofline import traffic
from dualpipe_jax.present.table import Table
from models.decode import Limits, decoder
from models.decode.cache import init_cache
from models.decode.programs import programs
from models.decode.requests import STEPS_ON_GPU
from models.decode.running import none_running

FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast"}
"""Instructions that launch nothing."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One launch: what is it for, bytes that it reads and writes, seconds by the target's rates."""

    name: str
    moved: int
    seconds: float


def compiled_step(config, target, batch, positions, folder=None, num_steps=1):
    """So many steps of decode for the target's first device; weights and cache as shapes. The compiler fills the
    folder."""
    here = SingleDeviceSharding(inspect.Target.parse(f"{target}:1x1").devices()[0])
    limits = Limits(max_requests=batch, max_positions=positions)
    model = decoder(config, platform="gpu")
    params = jax.eval_shape(models.deepseek(config, 1).init, jax.random.key(0))
    weights = jax.eval_shape(model.prepare, params)
    cache = jax.eval_shape(lambda: init_cache(config, limits.total_blocks, limits.block_size))
    wanted = jax.ShapeDtypeStruct((batch,), jnp.bool)
    tables = jax.ShapeDtypeStruct((batch, limits.table_size), jnp.int32)
    arguments = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here),
        (weights, cache, (wanted, tables, None, none_running(batch))),
    )
    lowered = programs(model, False, num_steps=num_steps).decode.lower(*arguments)
    options = inspect.recommended_compiler_options("gpu", ahead_of_time=True)
    if folder is not None:
        options = options | {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
    return weights, inspect.read(lowered.compile(compiler_options=options))


def moved(module, within, instruction, num_groups):
    """Bytes; of grouped products by the kernel of few rows, those of so many matrices, and of a cache the blocks of the
    rows' tables."""
    total = traffic(module, within, instruction)
    if "paged_attention/" in instruction.op_name:
        given = [within.by_name[name] for name in instruction.operands]
        cache, tables = given[5], given[0]
        total += (math.prod(tables.arrays[0].dims) / cache.arrays[0].dims[0] - 1) * cache.nbytes
    if "of_few/" in instruction.op_name:
        stacks = [
            within.by_name[name]
            for name in instruction.operands
            if len(within.by_name[name].arrays[0].dims) == 3
        ]
        total -= sum(stack.nbytes - stack.nbytes // stack.arrays[0].dims[0] * num_groups for stack in stacks)
    return total


def kernels(module, rates, clock, num_groups, computation=None):
    """What a computation launches; of a conditional the branch with least to do, which is the greedy one."""
    within, found = module.computations[computation or module.entry], []
    for instruction in within:
        inside = [name for name in instruction.called() if name in module.executed]
        if instruction.opcode == "conditional":
            branches = [kernels(module, rates, clock, num_groups, name) for name in inside]
            found += min(branches, key=len)
        elif inside:
            times = instruction.trips or 1
            found += times * [
                one for name in inside for one in kernels(module, rates, clock, num_groups, name)
            ]
        elif instruction.opcode not in FREE and not instruction.opcode.endswith("-done"):
            count = moved(module, within, instruction, num_groups)
            cycles = count / rates.memory + rates.launch
            found.append(Kernel(re.sub(r"[.\d]+$", "", instruction.name), count, cycles / clock))
    return found


def started(folder, num_steps=1):
    """What the host starts in so many steps: a kernel, a copy, or a CUDA graph of many; a loop is one over steps."""
    sequences = Path(folder).glob("*thunk_sequence_after_thunk_passes.txt")
    text = max(sequences, key=lambda path: path.stat().st_size).read_text()
    count, part = 0, ""
    for line in text.splitlines():
        if line[:1].isdigit():
            part = "loop" if "kWhile" in line else ""
            count += not part
        elif part and line.strip() == "body:":
            part = "body"  # what is before it asks whether to go on, which nobody does where that is known
        elif part == "body" and line[4:5].isdigit():  # deeper is what lies in a graph
            count += num_steps
    return count


def least(config, weights, batch, positions):
    """Bytes of the weights that a step asks for, and of the cache's positions."""
    share = min(1.0, batch * config.top_k / config.num_experts)

    def asked(path, leaf):
        keys = [getattr(part, "key", None) for part in path]
        if "embed_tokens" in keys and not config.tie_embeddings:
            return batch * leaf.shape[1] * leaf.dtype.itemsize
        return math.prod(leaf.shape) * leaf.dtype.itemsize * (share if "experts" in keys else 1)

    width = config.kv_lora_rank + config.qk_rope_dim
    cached = config.num_layers * batch * positions * width * jnp.dtype(config.compute_dtype).itemsize
    return sum(jax.tree.leaves(jax.tree_util.tree_map_with_path(asked, weights))) + cached


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--positions", type=int, default=256, help="that each request has used")
    parser.add_argument("--layers", type=int, default=9)
    parser.add_argument("--steps", type=int, default=STEPS_ON_GPU, help="that the host starts at once")
    parser.add_argument("--target", default="h100", help="h100 or h200")
    parser.add_argument("--parts", type=int, default=0, help="so many kinds of kernels, by bytes")
    given = parser.parse_args()
    config = models.v2_lite(num_layers=given.layers, compute_dtype=jnp.bfloat16)
    rates, clock = inspect.gpu_rates(given.target), inspect.DEVICES[given.target].clock
    rows = []
    for batch in given.batches:
        with tempfile.TemporaryDirectory() as folder:
            weights, module = compiled_step(config, given.target, batch, given.positions, folder, given.steps)
            starts = started(folder, given.steps) / given.steps
        found = kernels(module, rates, clock, min(batch * config.top_k, config.num_experts))
        number = len(found) / given.steps
        total = sum(k.moved for k in found) / given.steps
        wanted = least(config, weights, batch, given.positions)
        took, limit = sum(k.seconds for k in found) / given.steps, wanted / (rates.memory * clock)
        rows.append(
            (
                str(batch),
                f"{number:.0f}",
                f"{number / given.layers:.0f}",
                f"{starts:g}",
                f"{total / 1e9:.2f}",
                f"{wanted / 1e9:.2f}",
                f"{total / wanted:.2f}",
                f"{took * 1e3:.2f}",
                f"{limit * 1e3:.2f}",
                f"{took / limit:.2f}",
            )
        )
        kinds = collections.defaultdict(list)
        for kernel in found:
            kinds[kernel.name].append(kernel.moved)
        for name, moves in sorted(kinds.items(), key=lambda kind: -sum(kind[1]))[: given.parts]:
            print(f"batch {batch}, all steps: {len(moves):4d} {name:32s} {sum(moves) / 1e6:10.1f} MB")
    bytes_and_times = "GB moved", "GB at least", "ratio", "ms", "ms at least", "ratio"
    head = ("batch", "kernels", "a layer", "started", *bytes_and_times)
    print(Table(head, tuple(rows)).markdown())


if __name__ == "__main__":
    main()
