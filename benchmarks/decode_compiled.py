"""Kernels and bytes of a decode step, compiled for a GPU that is not here, against the least that it has to read.

Nine layers of DeepSeek-V2-Lite in bfloat16, every request in the middle of its text. The steps that the host
starts at once are compiled as one program, and a row gives the average of one step, which chooses tokens
greedily: the number of kernels it launches, the bytes that they read and write, and their time by the rates
that were measured on such a GPU, with a launch for every kernel. "Started" is the number of launches by the
host: the compiler puts kernels into CUDA graphs, in which a launch takes less; nobody has measured how much,
so nothing is subtracted. The lower limit is the time to read once all weights that are used and the cache of
the positions used, at the same bytes a second. Rows are assumed to choose different experts, as far as there
are enough, and that many matrices are counted on both sides. Nothing can be timed without the GPU, so the
compiler chooses the tiles of its own products by rule.

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
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

import models
from dualpipe_jax import inspect
from dualpipe_jax.inspect.roofline import traffic
from dualpipe_jax.inspect.target import MissingCompiler
from dualpipe_jax.present.table import Table
from models.decode import Limits, decoder
from models.decode.cache import init_cache
from models.decode.programs import programs
from models.decode.requests import STEPS_ON_GPU
from models.decode.running import empty_running

FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast"}
"""Instructions that launch nothing."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One launch: the kernel's name, the bytes that it reads and writes, and its seconds by the target's rates."""

    name: str
    moved: int
    seconds: float


def compiled_step(config, target, batch, positions, folder=None, num_steps=1):
    """Compile ``num_steps`` steps of decode for the target's first device, with weights and cache as shapes;
    return the weights' shapes and the module. The compiler writes its dump into the folder."""
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
        (weights, cache, (wanted, tables, None, empty_running(batch))),
    )
    decode: Any = programs(model, False, num_steps=num_steps).decode
    lowered = decode.lower(*arguments)
    options = inspect.recommended_compiler_options("gpu", ahead_of_time=True)
    if folder is not None:
        options = options | {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
    return weights, inspect.read(lowered.compile(compiler_options=options))


def moved(module, within, instruction, num_groups):
    """The bytes that an instruction moves. For grouped products by the kernel of few rows only ``num_groups``
    matrices count, and for a cache the blocks of the rows' tables."""
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
    """The kernels that a computation launches; of a conditional those of the branch with fewest, the greedy one."""
    within, found = module.computations[computation or module.entry], []
    for instruction in within:
        inside = [name for name in instruction.called() if name in module.executed]
        if instruction.opcode == "conditional":
            branches = [kernels(module, rates, clock, num_groups, name) for name in inside]
            fewest = min(branches, key=len)
            found += fewest
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
    """The number of launches by the host in ``num_steps`` steps: of kernels, copies and CUDA graphs. A loop
    is taken to be the loop over steps."""
    sequences = Path(folder).glob("*thunk_sequence_after_thunk_passes.txt")
    text = max(sequences, key=lambda path: path.stat().st_size).read_text()
    count, part = 0, ""
    for line in text.splitlines():
        if line[:1].isdigit():
            part = "loop" if "kWhile" in line else ""
            count += not part
        elif part and line.strip() == "body:":
            # Before the body is the loop's condition, which is not run where the number of trips is known.
            part = "body"
        elif part == "body" and line[4:5].isdigit():  # lines that are indented deeper are inside a graph
            count += num_steps
    return count


def least(config, weights, batch, positions):
    """The bytes of the weights that a step uses, and of the positions that it reads in the cache."""
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
    parser.add_argument(
        "--positions", type=int, default=256, help="number of positions that each request has used"
    )
    parser.add_argument("--layers", type=int, default=9)
    parser.add_argument(
        "--steps", type=int, default=STEPS_ON_GPU, help="number of steps that the host starts at once"
    )
    parser.add_argument("--target", default="h100", help="h100 or h200")
    parser.add_argument("--parts", type=int, default=0, help="number of kinds of kernels to list, by bytes")
    given = parser.parse_args()
    try:
        inspect.Target.parse(f"{given.target}:1x1").check_compiler()
    except (MissingCompiler, ValueError) as error:
        parser.error(str(error))
    config = models.v2_lite(num_layers=given.layers, compute_dtype=jnp.bfloat16)
    rates, clock = inspect.gpu_rates(given.target), inspect.DEVICES[given.target].clock
    # It is known of every GPU.
    assert rates.memory is not None
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
