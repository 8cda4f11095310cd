"""The cost of a layer of DeepSeek-V3 on a device, forward and backward, by the compiler's model of an absent v5p.

One program for one host of four devices: a layer's forward, what it keeps, its backward, and float32 sums of
its gradients; no pipeline, ticks or slots. There are 16 of V3's 256 experts, and a token chooses 8 of them,
so that every device has four experts and multiplies as many rows as one of 64 devices does in the whole
model. Work is the cycles in which the core computes and does not wait.

    python benchmarks/one_layer.py [--remat wide]
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import models
from dualpipe_jax.command.output import show
from dualpipe_jax.contract import At
from dualpipe_jax.inspect import overlap, recommended_compiler_options
from dualpipe_jax.inspect.rates import tpu_rates
from dualpipe_jax.inspect.target import Target
from dualpipe_jax.present.table import Table

EP = 4
REMAT = {"none": None, "wide": models.recompute_wide, "all": jax.checkpoint_policies.nothing_saveable}
"""The values of the trainer's ``--remat``, and their policies."""


@dataclasses.dataclass(frozen=True)
class Options:
    """The options for a layer of V3 on one host."""

    remat: tuple[Literal["none", "wide", "all"], ...] = ("all", "wide")
    """What the backward computes again."""
    target: str = "v5p:2x2x1"
    """One host's devices."""
    sequence: int = 2048
    """The number of tokens of a device."""


def compile_layer(target: Target, remat: str, sequence: int) -> Any:
    """Compile the layer in the middle of three."""
    numbers = models.v3(
        num_layers=3, num_dense_layers=0, num_mtp_layers=0, num_experts=4 * EP, num_groups=1, top_groups=1
    )
    model = models.deepseek(
        numbers,
        (1, 1, 1),
        ep_axis="ep",
        dispatch="capacity",
        capacity_factor=1.0,
        remat=REMAT[remat],
        platform="tpu",
    )
    mesh = Mesh(np.array(target.devices())[:EP], ("ep",))
    specs, over = model.param_specs["stages"], PartitionSpec("ep")

    def both(own: Any, sums: Any, x: Any, dy: Any, tokens: Any) -> Any:
        at = At({"inputs": tokens, "targets": tokens}, jnp.int32(1), jnp.int32(0), None)

        def layer(layers: Any, x: Any) -> Any:
            return model.staged.kinds[model.layout.kinds[1]](own | {"layers": layers}, {}, x, at).x

        y, pull = jax.vjp(layer, own["layers"], x)
        y, dy = jax.lax.optimization_barrier((y, dy))
        gradients, dx = pull(dy)
        return y, dx, jax.tree.map(jnp.add, sums, gradients)

    def struct(leaf: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    def middle() -> Any:
        return jax.tree.map(lambda leaf: leaf[1], model.init(jax.random.key(0))["stages"])

    own = jax.tree.map(struct, jax.eval_shape(middle), specs)
    x = struct(jax.ShapeDtypeStruct((EP, sequence, numbers.dim), jnp.bfloat16), over)
    tokens = struct(jax.ShapeDtypeStruct((EP, sequence), jnp.int32), over)
    mapped = jax.shard_map(
        both,
        mesh=mesh,
        in_specs=(specs, specs["layers"], over, over, over),
        out_specs=(over, over, specs["layers"]),
        check_vma=False,
    )
    lowered = jax.jit(mapped, donate_argnums=1).lower(own, own["layers"], x, x, tokens)
    options = recommended_compiler_options("tpu", target.generation)
    return lowered.compile(options)


def main(options: Options) -> None:
    """Compile the layer with each remat, and print its cost."""
    target, rows = Target.parse(options.target), []
    for remat in options.remat:
        compiled = compile_layer(target, remat, options.sequence)
        report = overlap(compiled, rates=tpu_rates(target.generation))
        whole = max(report.computations.values(), key=lambda time: time.cycles)
        temporary = compiled.memory_analysis().temp_size_in_bytes
        rows.append((remat, f"{whole.work / 1e6:.1f}", f"{temporary / 2**30:.2f}"))
    show("", Table(("remat", "work, Mcycles", "temporary, GiB"), tuple(rows)))


if __name__ == "__main__":
    main(tyro.cli(Options))
