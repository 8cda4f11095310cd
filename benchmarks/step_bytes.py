"""The bytes that a step writes, compiled for an H100 that is not here: the engine against plain accumulation, pp 1.

The program is that of `scripts/bench gpu --parts step`: 8 layers of width 4096, 8 microbatches, each layer
with leaves of its own or a stage's layers stacked. The bytes that an instruction writes are counted as often
as it runs: the body of the scan once per trip, the body of a guard as often as the table runs its unit.
Products and attention are listed apart: there the engine writes more, because its products themselves add to
the sums of gradients, which plain accumulation does in a separate pass. The last column is the time of a tick
without its units, by the roofline: the cost of its guards.

    scripts/bench step_bytes            # in an environment with the extra `cuda`; needs no GPU, 10 minutes of CPU
"""

import argparse
import collections
import os

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp

from benchmarks.on_gpu import step
from benchmarks.on_gpu.bench import STILL
from dualpipe_jax import Pipeline, inspect, make_mesh
from dualpipe_jax.inspect.hlo import Module
from dualpipe_jax.inspect.roofline import flops, written
from dualpipe_jax.inspect.target import MissingCompiler, Target
from dualpipe_jax.pods.units import overheads, units_in
from dualpipe_jax.schedule.lowering.unit_key import UnitKey

GiB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="h100:1x1", help="GPU to compile for")
    parser.add_argument(
        "--largest",
        type=int,
        default=0,
        metavar="N",
        help="also list the N largest of the other instructions",
    )
    options = parser.parse_args()
    try:
        target = Target.parse(options.target)
        device = target.devices()[0]
    except (MissingCompiler, ValueError) as error:
        parser.error(str(error))
    here, mesh = jax.sharding.SingleDeviceSharding(device), make_mesh(1, 1, devices=[device])

    def struct(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here)

    def given(make, *args):
        return jax.tree.map(struct, jax.eval_shape(lambda: make(*args)))

    tokens = given(jnp.zeros, (step.MICROBATCHES, step.SIZE, step.SEQUENCE), jnp.int32)
    batch = {"inputs": tokens, "targets": tokens}
    print(
        "| program | products, GiB | all else | all else over plain | all over plain | temporaries, GiB | tick, us |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |", flush=True)
    plain: dict[str, tuple[int, int]] = {}
    for leaves in ("own", "stacked"):
        found = Bytes(target, jax.jit(step.plain), {}, given(step.parameters, 1, leaves), batch)
        plain[leaves] = found.products, found.others
        found.show(f"plain accumulation, {leaves} leaves", plain["own"], options.largest)
    for make, form, leaves in step.FORMS:
        schedule = make(1, step.MICROBATCHES)
        model = step.model(schedule.placement.num_model_stages)
        pipeline = Pipeline(model, schedule, mesh, divergence=form, compute_dtype=jnp.bfloat16)
        params = given(step.parameters, model.num_stages, leaves)
        runs = step.runs_of(pipeline.table(params, batch), model.kind_of)
        found = Bytes(target, pipeline.value_and_grad, runs, params, batch)
        found.show(f"{schedule.name}, {form}, {leaves} leaves", plain["own"], options.largest)


class Bytes:
    """The bytes that a program writes: those of products and attention, and those of all other instructions."""

    def __init__(self, target: Target, function, runs: dict[UnitKey, int], *args):
        compiled = function.lower(*args).compile(inspect.recommended_compiler_options("gpu"))
        module = inspect.read(compiled)
        beside = overheads(inspect.overlap(module, target.rates), module)
        self.tick = "" if beside is None else f"{beside[0] / target.device.clock * 1e6:.0f}"
        self.temporaries = compiled.memory_analysis().temp_size_in_bytes
        self.products = 0
        self.by_name: collections.Counter[str] = collections.Counter()
        for name, times in times_of(module, runs).items():
            computation = module.computations[name]
            for instruction in computation:
                if instruction.opcode in STILL:
                    continue
                made = round(times * written(module, computation, instruction))
                if flops(module, computation, instruction):
                    self.products += made
                else:
                    operation = instruction.op_name.rpartition("/")[2]
                    self.by_name[f"{instruction.name.rstrip('0123456789.')} ({operation})"] += made
        self.others = self.by_name.total()

    def show(self, what: str, plain: tuple[int, int], largest: int) -> None:
        ratios = self.others / plain[1], (self.others + self.products) / sum(plain)
        written = f"{self.products / GiB:.1f} | {self.others / GiB:.1f} | {ratios[0]:.2f} | {ratios[1]:.2f}"
        print(f"| {what} | {written} | {self.temporaries / GiB:.1f} | {self.tick} |", flush=True)
        for name, made in self.by_name.most_common(largest):
            print(f"  {made / GiB:8.2f} GiB  {name}", flush=True)


def times_of(module: Module, runs: dict[UnitKey, int]) -> dict[str, float]:
    """How often each computation runs; if a unit has several bodies, its runs are divided equally among them."""
    found = units_in(module) if runs else {}
    if found.keys() != runs.keys():
        raise ValueError(f"the program has the units {sorted(found)}, and the table {sorted(runs)}")
    guarded = {body: runs[key] / len(bodies) for key, bodies in found.items() for body in bodies}
    times: dict[str, float] = collections.defaultdict(float)

    def walk(name: str, often: float) -> None:
        times[name] += often
        for instruction in module.computations[name]:
            for body in instruction.called("body") if instruction.opcode == "while" else ():
                walk(body, guarded.get(body, often * (instruction.trips or 1)))
            for body in instruction.called("branch", "to_apply") if instruction.opcode in STILL else ():
                walk(body, guarded.get(body, often))

    walk(module.entry, 1)
    return times


if __name__ == "__main__":
    main()
