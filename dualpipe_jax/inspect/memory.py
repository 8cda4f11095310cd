"""The memory that a compiled program takes on each device."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device, as the compiler planned them; ``memory`` makes it.

    Attributes:
      arguments: bytes of the program's arguments.
      outputs: bytes of its outputs.
      aliased: bytes of outputs that take the place of donated arguments.
      temporaries: bytes that it needs in addition while it runs.
      code: bytes of the program itself.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int

    @property
    def peak(self) -> int:
        """The sum of all, in bytes; an output that takes the place of an argument is counted once."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code


def memory(compiled: Any) -> Memory | None:
    """Return the memory of a result of ``jax.jit(f).lower(...).compile()``; None if the compiler does not tell it.

    >>> import jax, jax.numpy as jnp
    >>> from dualpipe_jax import inspect
    >>> x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    >>> compiled = jax.jit(lambda x: jnp.tanh(x @ x)).lower(x).compile()
    >>> inspect.memory(compiled).arguments, inspect.memory(compiled).outputs
    (16384, 16384)
    """
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    return Memory(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        code=stats.generated_code_size_in_bytes,
    )
