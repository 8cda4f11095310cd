"""Count how much of a computation's work is matrix products."""

from typing import NamedTuple

from dualpipe_jax.inspect.hlo import Module
from dualpipe_jax.inspect.report import OverlapReport
from dualpipe_jax.inspect.roofline import flops


class Products(NamedTuple):
    """The matrix products of one run of a computation and of those that it calls; ``products`` makes it.

    Attributes:
      flops: number of multiplications and additions in its matrix products.
      cycles: cycles of the instructions that contain these products, including their other work.
    """

    flops: float
    cycles: float


def products(report: OverlapReport, module: Module, computation: str) -> Products:
    """Count the matrix products of a computation that runs line by line; a conditional counts its longest branch.

    A loop counts its body times its trips, or once if data end it.

    >>> import jax, jax.numpy as jnp
    >>> from dualpipe_jax import inspect
    >>> x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    >>> compiled = jax.jit(lambda x: jnp.tanh(x @ x)).lower(x).compile()
    >>> report, module = inspect.overlap(compiled, inspect.gpu_rates("h100")), inspect.read(compiled)
    >>> inspect.products(report, module, module.entry).flops  # 2 * 64**3
    524288.0

    Args:
      report: the report of ``overlap`` on the module, with ``rates`` unless its text has cycles, as a TPU's has:
        products without a price are not counted.
      module: the module from ``read``.
      computation: the computation's name.
    """
    within, found = module.computations[computation], Products(0.0, 0.0)
    for event in report.timelines[computation]:
        if event.lane != "compute" or event.kind == "wait":
            continue
        instruction = within.by_name[event.name]
        times, inside = 1, [name for name in instruction.called() if name in module.executed]
        if instruction.opcode == "while":
            times = instruction.trips or 1
        elif instruction.opcode == "conditional" and inside:
            inside = [max(inside, key=lambda name: report.computations[name].cycles)]
        if inside:
            parts = [products(report, module, name) for name in inside]
            own = Products(times * sum(p.flops for p in parts), times * sum(p.cycles for p in parts))
        else:
            count = flops(module, within, instruction)
            own = Products(count, event.end - event.start if count else 0.0)
        found = Products(found.flops + own.flops, found.cycles + own.cycles)
    return found
