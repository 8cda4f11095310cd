"""Read compiled programs: what hides behind what, what is copied, what it takes of memory.

Works on any program that JAX compiled, for TPU, GPU or CPU, also ahead of time for devices that are not here:

>>> from dualpipe_jax import inspect
>>> compiled = jax.jit(step).lower(params, x).compile()  # doctest: +SKIP
>>> print(inspect.overlap(compiled))  # doctest: +SKIP
"""

from dualpipe_jax.inspect.compiler import (
    gpu_process_environment,
    recommended_compiler_options,
    tpu_generation,
)
from dualpipe_jax.inspect.copies import Copy, copies
from dualpipe_jax.inspect.cycles import Collective, ComputationTime, Event, Total, Work
from dualpipe_jax.inspect.hlo import Array, Call, Computation, Instruction, Module, read
from dualpipe_jax.inspect.lanes import DIRECTION_NAMES, Names
from dualpipe_jax.inspect.measured import measured_rates, read_rates
from dualpipe_jax.inspect.memory import Memory, memory
from dualpipe_jax.inspect.overlap import overlap
from dualpipe_jax.inspect.picture import plot
from dualpipe_jax.inspect.products import Products, products
from dualpipe_jax.inspect.rates import (
    FLOPS_PER_CYCLE,
    H100_CLOCK,
    LINK_BYTES_PER_CYCLE,
    MEMORY_BYTES_PER_CYCLE,
    Rates,
    h100_rates,
    tpu_rates,
)
from dualpipe_jax.inspect.report import OverlapReport
from dualpipe_jax.inspect.scheduler import (
    STATISTICS_ENVIRONMENT,
    SchedulerStatistics,
    Waste,
    capture,
    parse_statistics,
)
from dualpipe_jax.inspect.target import DEVICES, Device, MissingCompiler, Target
from dualpipe_jax.inspect.trace import to_chrome_trace

__all__ = [
    "DEVICES",
    "DIRECTION_NAMES",
    "FLOPS_PER_CYCLE",
    "H100_CLOCK",
    "LINK_BYTES_PER_CYCLE",
    "MEMORY_BYTES_PER_CYCLE",
    "STATISTICS_ENVIRONMENT",
    "Array",
    "Call",
    "Collective",
    "Computation",
    "ComputationTime",
    "Copy",
    "Device",
    "Event",
    "Instruction",
    "Memory",
    "MissingCompiler",
    "Module",
    "Names",
    "OverlapReport",
    "Products",
    "Rates",
    "SchedulerStatistics",
    "Target",
    "Total",
    "Waste",
    "Work",
    "capture",
    "copies",
    "gpu_process_environment",
    "h100_rates",
    "measured_rates",
    "memory",
    "overlap",
    "parse_statistics",
    "plot",
    "products",
    "read",
    "read_rates",
    "recommended_compiler_options",
    "to_chrome_trace",
    "tpu_generation",
    "tpu_rates",
]
