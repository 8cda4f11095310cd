"""The cost of lockstep: ``Pipeline(divergence="none")``, where every rank runs each unit that some rank has in a tick.

Prints, for each schedule, its ticks, the mean work of a tick in forwards of a stage, and the ratio of a
device's work in a step to its share of the plain model's work; 1 means no waste. Work is FLOPs of matrix
products, counted in traced programs, each unit as often as the table runs it: nothing is run. Pairs are units
of their own, or they run as the forward and the backward that exist anyway (``fuse_pairs=False``).

    python benchmarks/lockstep.py [dualpipe one_f_one_b ...] [--ranks 4] [--microbatches 16]
"""

import argparse
import os
import sys
from unittest import mock

WIDTH = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", help="schedules; all if left out")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=16)
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={options.ranks}"
    from dualpipe_jax.schedule import ALL_SCHEDULES

    known = {make.__name__ for make in ALL_SCHEDULES}
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"no schedule is called {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    print(
        "| schedule | ticks | a tick, in forwards | step over share | a tick, pairs in halves | step over share |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    for make in ALL_SCHEDULES:
        if options.names and make.__name__ not in options.names:
            continue
        try:
            schedule = make(options.ranks, options.microbatches)
        except ValueError as error:
            print(f"left out: {error}", file=sys.stderr)
            continue
        print(row(schedule), flush=True)


def row(schedule) -> str:
    """The line of a schedule in the table."""
    import jax
    import jax.numpy as jnp

    from dualpipe_jax import Pipeline, PipelineModel, make_mesh, reference_value_and_grad, staged

    def stage(p, x):
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"]

    def head_loss(p, x, targets):
        return jnp.mean((x * p - targets) ** 2)

    model = PipelineModel(lambda p, x: x * p, stage, head_loss)
    count, float32 = schedule.placement.num_model_stages, jnp.float32
    wide = {
        "up": jax.ShapeDtypeStruct((count, WIDTH, 4 * WIDTH), float32),
        "down": jax.ShapeDtypeStruct((count, 4 * WIDTH, WIDTH), float32),
    }
    ends = {name: jax.ShapeDtypeStruct((WIDTH,), float32) for name in ("embed", "head")}
    params = {"stages": wide, "shared": ends}
    x = jax.ShapeDtypeStruct((schedule.num_microbatches, 8, WIDTH), float32)
    batch = {"inputs": x, "targets": x}
    whole = staged(model, count)
    plain = flops(jax.make_jaxpr(reference_value_and_grad(whole))(params, batch).jaxpr) / schedule.num_ranks
    mesh = make_mesh(schedule.num_ranks, 1)
    # A device's share of the plain model's work, in forwards of a stage; B is twice F.
    forwards = 3 * schedule.num_microbatches * count // schedule.num_ranks
    ticks, cells = 0, []
    for fused in (True, False):
        # Send at every tick, as on accelerators: on a CPU the sends would be inside a conditional of the
        # tick.
        pipeline = Pipeline(whole, schedule, mesh, fuse_pairs=fused, divergence="none", idle_sends=True)
        ticks, work = counted(pipeline, params, batch)
        over = work / plain
        cells += [f"{over * forwards / ticks:.1f}", f"{over:.1f}"]
    return " | ".join([f"| {schedule.name}", str(ticks), *cells]) + " |"


def counted(pipeline, params, batch) -> tuple[int, float]:
    """The number of ticks, and the FLOPs of all ticks."""
    import jax
    import numpy as np

    from dualpipe_jax.engine import tick as engine
    from dualpipe_jax.split.jaxprs import equation_flops

    seen, run = [], engine.run

    def spy(tick, state):
        seen.append(tick)
        return run(tick, state)

    with mock.patch.object(engine, "run", spy):
        traced = jax.make_jaxpr(pipeline.value_and_grad)(params, batch).jaxpr
    (tick,) = seen
    body = ticks_of(traced)
    guards = [eqn for eqn in body.eqns if eqn.primitive.name == "while"]
    anywhere = tick.table.runs(tick.table.array)
    times = [np.any([anywhere[n] for n in task.numbers], axis=0).sum() for task in tick.tasks]
    outside = sum(equation_flops(eqn) for eqn in body.eqns if eqn not in guards)
    work = sum(int(n) * equation_flops(guard) for n, guard in zip(times, guards, strict=True))
    return tick.table.num_ticks, work + tick.table.num_ticks * outside


def flops(jaxpr) -> int:
    """The multiplications and additions of matrix products; those in scans count as often as they run."""
    from dualpipe_jax.split.jaxprs import equation_flops

    return sum(map(equation_flops, jaxpr.eqns))


def ticks_of(jaxpr):
    """The body of the scan that contains sends; None if there is none."""
    for eqn in jaxpr.eqns:
        inner = [*_inner(eqn)]
        if eqn.primitive.name == "scan" and any(e.primitive.name == "ppermute" for e in inner[0].eqns):
            return inner[0]
        for one in inner:
            if (found := ticks_of(one)) is not None:
                return found
    return None


def _inner(eqn):
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            inner = getattr(item, "jaxpr", item)
            if hasattr(inner, "eqns"):
                yield inner


if __name__ == "__main__":
    main()
