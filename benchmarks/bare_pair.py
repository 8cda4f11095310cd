"""What guards, slot pools and sends cost a pair, by the compiler's model of devices that are not here.

Three programs are compiled for each target. The engine's pair, as `dualpipe overlap` reads it. And twice the bare
pair: the same stage's forward of one microbatch and full backward of another in one function, residuals and gradients
plain arguments and results; no ticks, guards, slots, sends or sums of gradients. Once in our own order
(`interleave`), once in the compiler's.

    python benchmarks/bare_pair.py [--target v5e:4x4 [options of `dualpipe overlap`]]

Without a target: all of CASES. A target of CASES brings its program along, unless options say another.
"""

import dataclasses
import os
import sys

from dualpipe_jax.inspect.target import TPU_ENVIRONMENT

os.environ.update(TPU_ENVIRONMENT)  # before JAX is imported; compilers for GPUs do not mind

import jax
import jax.numpy as jnp
import tyro
from jax.errors import JaxRuntimeError
from jax.sharding import NamedSharding, PartitionSpec

from dualpipe_jax import inspect
from dualpipe_jax.command.output import Table, percent, show
from dualpipe_jax.command.program import Program
from dualpipe_jax.engine.interleave import interleave
from dualpipe_jax.engine.split import split_backward
from dualpipe_jax.parallel import EP, PP
from train import predict, study
from train.request import Request

EVERYWHERE = PartitionSpec((PP, EP))
"""Each device has its own part of the first dim."""

_V2_LITE = Program("v2-lite", layers_per_stage=2, sequence=2048)
_CHANGE = ("num_dense_layers=0", "num_shared_experts=1", "vocab=1024", "top_k=8")
CASES = {
    "v5p:4x4x4": dataclasses.replace(
        _V2_LITE, ep=16, microbatch_size=32, change=(*_CHANGE, "num_experts=64", "expert_hidden=1024")
    ),
    "v5e:4x4": dataclasses.replace(
        _V2_LITE, microbatch_size=8, change=(*_CHANGE, "num_experts=32", "expert_hidden=512", "num_heads=8")
    ),
}
"""Near 1 : 1 of computation and communication, where it is hardest."""


@dataclasses.dataclass(frozen=True)
class Options:
    """The engine's pair against the bare one."""

    target: str | None = None
    """Devices, see `dualpipe overlap`; all of CASES if left out."""
    program: Program = dataclasses.field(default_factory=Program)


def lower(blueprint, *, ordered):
    """The bare pair: of (parameters, x) and (parameters, x, residuals, dy) on each device, lowered.

    Arguments:
      ordered: in the order of `interleave`, which its barriers keep, instead of the compiler's own.
    """
    embed, stage, _ = blueprint.model.functions
    params, ends = blueprint.params["stages"].local[0], blueprint.params["embed"]
    _, size, sequence = blueprint.tokens.shape
    tokens = jax.ShapeDtypeStruct((blueprint.mesh.shape[PP] * size, sequence), jnp.int32)

    def forward(params, x):
        *_, residuals_i, residuals_w = plan_of(stage, params, x).forward(own(params), x)
        return [jnp.atleast_1d(leaf) for leaf in (*residuals_i, *residuals_w)]

    def pair(params, x, *saved):
        made = (ordered_pair if ordered else plain_pair)(plan_of(stage, params, x), own(params), x, *saved)
        return [jnp.atleast_1d(leaf) for leaf in jax.tree.leaves(made) if leaf.dtype != jax.dtypes.float0]

    _, x = on_devices(embed, blueprint.mesh, ends, laid(tokens, blueprint.mesh))
    _, residuals = on_devices(forward, blueprint.mesh, params, x)
    saved = params, x, residuals, x
    function, _ = on_devices(pair, blueprint.mesh, params, x, *saved)
    return jax.jit(function).lower(params, x, *saved)


def plan_of(stage, params, x):
    return split_backward(stage, has_aux=True).trace(own(params), x)


def own(stages):
    """A rank's stage, without the dim of ranks."""
    return jax.tree.map(lambda leaf: leaf[0], stages)


def plain_pair(plan, params, x, old_params, old_x, residuals, dy):
    """F, then B: the compiler orders them."""
    return plan.forward(params, x), plan.backward(own(old_params), old_x, *shaped(plan, residuals), dy)


def ordered_pair(plan, params, x, old_params, old_x, residuals, dy):
    """As `SplitPlan.pair`, which knows slots only; hence its programs."""
    programs, fixed = plan._programs, jax.tree.leaves(params)
    saved = jax.tree.leaves((own(old_params), old_x, shaped(plan, residuals), dy))
    return interleave(programs.forward, [*fixed, x], programs.backward, saved, num_fixed=len(fixed))


def shaped(plan, residuals):
    """Residuals for the backward for the input and for the weights', scalars as such again."""
    types = [*plan.residuals_i, *plan.residuals_w]
    arrays = [array.reshape(kind.shape) for array, kind in zip(residuals, types, strict=True)]
    return arrays[: len(plan.residuals_i)], arrays[len(plan.residuals_i) :]


def on_devices(function, mesh, *arguments):
    """The function on each device, and what it makes."""
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, arguments)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=EVERYWHERE, check_vma=False)
    return mapped, laid(jax.eval_shape(mapped, *arguments), mesh)


def laid(tree, mesh):
    """Types of arrays that lie EVERYWHERE."""
    sharding = NamedSharding(mesh, EVERYWHERE)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)


def read_bare(blueprint, target, options, *, ordered):
    """Compile the bare pair; its cycles as a unit's, and the share of its all-to-alls that is hidden."""
    module = inspect.read(lower(blueprint, ordered=ordered).compile(options))
    report = inspect.overlap(module, target.rates)
    return predict.unit_of(report, module.entry), report.hidden("all-to-all")


def measure(name, program):
    """The table of one target; a row without figures is of a program that its compiler refuses."""
    target = inspect.Target.parse(name)
    _, blueprint = study.draw(program, target, target.devices())
    engine = study.compile_and_read(Request(program, name, "pair"), blueprint, target, say)
    options = engine["options"]
    if "out_of_memory" in engine:
        raise SystemExit(engine["out_of_memory"])
    fields = {field.name for field in dataclasses.fields(predict.Unit)}
    whole = predict.Unit(**{k: v for k, v in engine["units"]["FB"].items() if k in fields})
    rows = [row("the engine's", whole, engine["all_to_all"]["hidden"], whole)]
    for ordered, title in ((True, "bare, our order"), (False, "bare, the compiler's order")):
        say(f"compiling the pair {title}")
        try:
            rows.append(row(title, *read_bare(blueprint, target, options, ordered=ordered), whole))
        except JaxRuntimeError as error:
            rows.append((title, *[""] * 6))
            say(f"the compiler refuses it: {str(error)[:500]}")
    head = ("pair", "Mcycles", "computation", "communication", "hidden", "over the larger", "engine over it")
    show(f"\n{program.model}, pp {program.pp} x ep {program.ep} on {name}\n", Table(head, tuple(rows)))


def row(title, pair, hidden, whole):
    cells = (f"{(number or 0) / 1e6:.3f}" for number in (pair.cycles, pair.computation, pair.communication))
    return title, *cells, percent(hidden), f"{pair.over_limit:.3f}", f"{whole.cycles / pair.cycles:.3f}"


def say(stage):
    print(stage, file=sys.stderr, flush=True)


def main():
    given = tyro.cli(Options, config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff))
    for name in [given.target] if given.target else CASES:
        measure(name, CASES.get(name, given.program) if given.program == Program() else given.program)


if __name__ == "__main__":
    main()
