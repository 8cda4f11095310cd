"""Memory that a compiled program takes on each device."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device, as the compiler planned them.

    Attributes:
      arguments, outputs: of the program.
      aliased: outputs that take the place of donated arguments.
      temporaries: what it needs besides while it runs.
      code: of the program itself.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int

    @property
    def peak(self) -> int:
        """All together: arguments and outputs, those that share a place counted once, temporaries, code."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code


def memory(compiled: Any) -> Memory | None:
    """Memory of what ``jax.jit(f).lower(...).compile()`` returned; None if its compiler does not tell."""
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
