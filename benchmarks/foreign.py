"""Programs that use nothing of this project, compiled for devices that are not here, for `dualpipe overlap --compiled`.

fsdp: gradients of four transformer layers of flax.linen, their weights sharded by GSPMD.
ring: gradients of ring attention by the package ringattention (pip install ringattention einops).
moe: gradients of an expert layer with a capacity, as often written: shard_map, top-2, one-hot dispatch, two
    all-to-alls.

XLA's dump of the program is then read by dualpipe overlap --target TARGET --compiled FOLDER.

    scripts/bench foreign moe v5p:2x2x2 --recommended
    scripts/bench foreign fsdp v5p:2x2x2 --folder dump \\
        --option xla_enable_async_all_gather=true --option xla_tpu_enable_async_collective_fusion_fuse_all_gather=true
"""

import argparse
import functools
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from dualpipe_jax.__main__ import main as main_of_commands
from dualpipe_jax.inspect.target import MissingCompiler, Target

SEQUENCES, TOKENS, WIDTH, HEADS, LAYERS = 8, 4096, 4096, 32, 4
EXPERTS, ROOM = 32, 1.25


def fsdp(mesh):
    """Parameters are sharded along their longest axis; the compiler gathers them where they are used."""
    import flax.linen as nn
    import jax
    import jax.numpy as jnp

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            half = dict(dtype=jnp.bfloat16)
            y = nn.LayerNorm(**half)(x)
            x = x + nn.MultiHeadDotProductAttention(HEADS, **half)(y, y)
            y = nn.gelu(nn.Dense(4 * WIDTH, **half)(nn.LayerNorm(**half)(x)))
            return x + nn.Dense(WIDTH, **half)(y)

    model = nn.Sequential([Block() for _ in range(LAYERS)])
    x = shaped(mesh, (SEQUENCES, TOKENS, WIDTH), jax.P("d"))
    params = jax.eval_shape(model.init, jax.random.key(0), x)

    def in_parts(leaf):
        longest = int(np.argmax(leaf.shape))
        return shaped(mesh, leaf.shape, jax.P(*(None,) * longest, "d"), leaf.dtype)

    def loss(params, x):
        y: Any = model.apply(params, x)
        return jnp.mean(y.astype(jnp.float32) ** 2)

    params = jax.tree.map(in_parts, params)
    kept = jax.tree.map(lambda leaf: leaf.sharding, params)
    return jax.jit(jax.grad(loss), out_shardings=kept), (params, x)


def ring(mesh):
    """Keys and values go around a ring; each device computes with the block that it has and then sends it on."""
    import importlib.util

    import jax
    import jax.numpy as jnp

    # The package itself cannot be imported: it asks JAX for a backend in a way that JAX has removed.
    found = importlib.util.find_spec("ringattention")
    if found is None or importlib.util.find_spec("einops") is None:
        sys.exit(
            "foreign.py ring: needs the packages ringattention and einops; pip install ringattention einops"
        )
    # It is a package, and a spec from a file of Python has a loader.
    assert found.submodule_search_locations is not None
    folder = found.submodule_search_locations[0]
    spec = importlib.util.spec_from_file_location("ring", Path(folder) / "ringattention_jax.py")
    assert spec is not None and spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    chunks = dict(causal_block_size=1, deterministic=True, dropout_rng=None, attn_pdrop=0.0)
    chunks |= dict(query_chunk_size=1024, key_chunk_size=1024, dtype=jnp.bfloat16, precision=None)
    chunks |= dict(policy=jax.checkpoint_policies.nothing_saveable, prevent_cse=True)

    def attend(q, k, v):
        return package.ring_attention(q, k, v, None, None, None, "d", True, chunks)

    where = jax.P(None, "d")
    whole = jax.shard_map(attend, mesh=mesh, in_specs=where, out_specs=where, check_vma=False)
    q = shaped(mesh, (1, 8 * TOKENS, HEADS, WIDTH // HEADS), where)

    def loss(q, k, v):
        return jnp.sum(whole(q, k, v).astype(jnp.float32) ** 2)

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2))), (q, q, q)


def moe(mesh):
    """Tokens go to the device of their expert and back; all computation depends on what was sent."""
    import jax
    import jax.numpy as jnp

    room = int(ROOM * 2 * TOKENS / EXPERTS)

    def layer(x, router, up, down):
        scores, chosen = jax.lax.top_k(jax.nn.softmax((x @ router).astype(jnp.float32)), 2)
        wanted = jax.nn.one_hot(chosen, EXPERTS, dtype=jnp.int32)  # [T, 2, E]
        place = jnp.cumsum(wanted.reshape(-1, EXPERTS), 0).reshape(wanted.shape) * wanted - 1
        slot = jax.nn.one_hot(place.max(-1), room, dtype=x.dtype)  # a token without room has none
        where = jnp.einsum("tke,tkc->tkec", wanted.astype(x.dtype), slot)
        sent = jnp.einsum("tkec,td->ecd", where, x)
        got = jax.lax.all_to_all(sent, "d", 0, 1, tiled=True)
        made = jnp.einsum("ecf,efd->ecd", jax.nn.silu(jnp.einsum("ecd,edf->ecf", got, up)), down)
        back = jax.lax.all_to_all(made, "d", 1, 0, tiled=True)
        return x + jnp.einsum("tkec,ecd,tk->td", where, back, scores.astype(x.dtype))

    specs = jax.P("d"), jax.P(), jax.P("d"), jax.P("d")
    whole = jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=jax.P("d"))
    x = shaped(mesh, (mesh.size * TOKENS, WIDTH), specs[0])
    weights = (
        shaped(mesh, (WIDTH, EXPERTS), specs[1]),
        shaped(mesh, (EXPERTS, WIDTH, WIDTH), specs[2]),
        shaped(mesh, (EXPERTS, WIDTH, WIDTH), specs[3]),
    )

    def loss(x, *weights):
        return jnp.sum(whole(x, *weights).astype(jnp.float32) ** 2)

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))), (x, *weights)


def shaped(mesh, shape, spec, dtype="bfloat16"):
    import jax

    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, spec))


PROGRAMS = {make.__name__: make for make in (fsdp, ring, moe)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("target", help="devices to compile for: v5p:2x2x2, h100:1x8")
    parser.add_argument(
        "--folder", help="folder into which XLA dumps the program; a temporary one if left out"
    )
    parser.add_argument(
        "--recommended", action="store_true", help="compile with recommended_compiler_options"
    )
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="compiler option")
    given = parser.parse_args()
    try:
        target = Target.parse(given.target)
        target.check_compiler()
    except (MissingCompiler, ValueError) as error:
        parser.error(str(error))
    if unfit := [option for option in given.option if "=" not in option]:
        parser.error(f"--option {unfit[0]}: write NAME=VALUE")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(given.folder or temporary).absolute()
        dump(given, target, folder)
        status = main_of_commands(["overlap", "--target", given.target, "--compiled", str(folder)])
    # By 1 it says that little is hidden, which is the figure that was asked for.
    return 0 if status == 1 else status


def dump(given, target, folder):
    """Compile the program, and let XLA dump it into the folder."""
    os.environ["XLA_FLAGS"] = f"--xla_dump_to={folder} --xla_dump_hlo_as_text"

    from dualpipe_jax.inspect import recommended_compiler_options

    devices = target.devices()
    import jax

    mesh = jax.sharding.Mesh(np.array(devices), ("d",))
    step, arguments = PROGRAMS[given.program](mesh)
    platform = {"cuda": "gpu"}.get(target.platform, target.platform)
    ahead = functools.partial(recommended_compiler_options, platform, ahead_of_time=True)
    options = ahead(target.generation) if given.recommended or platform == "gpu" else {}
    options |= dict(option.split("=", 1) for option in given.option)
    step.lower(*arguments).compile(options)


if __name__ == "__main__":
    sys.exit(main())
