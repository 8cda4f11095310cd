"""Read compiled programs: which communication is hidden, which buffers are copied, how much memory is needed.

It works on any program that JAX compiled for TPU, GPU or CPU, also ahead of time for devices that are not present:

>>> import jax, jax.numpy as jnp
>>> from dualpipe_jax import inspect
>>> compiled = jax.jit(lambda x: x @ x).lower(jnp.ones((64, 64))).compile()
>>> print(inspect.overlap(compiled))
jit__lambda: no collectives
"""

from dualpipe_jax.inspect.compiler import gpu_process_environment, recommended_compiler_options
from dualpipe_jax.inspect.copies import copies
from dualpipe_jax.inspect.cycles import Work
from dualpipe_jax.inspect.hlo import Module, read
from dualpipe_jax.inspect.memory import Memory, memory
from dualpipe_jax.inspect.overlap import overlap
from dualpipe_jax.inspect.picture import plot
from dualpipe_jax.inspect.products import Products, products
from dualpipe_jax.inspect.rates import gpu_rates
from dualpipe_jax.inspect.target import DEVICES, Target
from dualpipe_jax.inspect.trace import to_chrome_trace

__all__ = [
    "DEVICES",
    "Memory",
    "Module",
    "Products",
    "Target",
    "Work",
    "copies",
    "gpu_process_environment",
    "gpu_rates",
    "memory",
    "overlap",
    "plot",
    "products",
    "read",
    "recommended_compiler_options",
    "to_chrome_trace",
]
