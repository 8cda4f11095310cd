"""Find copies of large buffers, above all those that a loop repeats in every iteration."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from dualpipe_jax.arguments import typechecked
from dualpipe_jax.inspect.hlo import Array, Computation, Instruction, Module, read

_MOVES = ("copy", "bitcast", "transpose", "reshape", "parameter", "get-tuple-element", "tuple")
"""Opcodes that only move data; a fusion of these alone is a copy."""


class Copy(NamedTuple):
    """One copy of a buffer.

    Attributes:
      name, opcode: those of the instruction; a fusion that does nothing but copy or transpose counts too.
      array: the copied array, as HLO prints it: ``Array("bf16", (5, 2048, 1024))``.
      nbytes: bytes of the array.
      computation, context: the computation of the instruction, and the path of loops and branches to it from the entry.
      in_loop: whether some loop repeats it.
      changes_memory: whether the copy goes to another memory space, as the TPU's prefetch into its vector memory
        does, rather than to a second buffer in the same one.
      op_name: JAX's name of the copied value, if the compiler kept it.
    """

    name: str
    opcode: str
    array: Array
    nbytes: int
    computation: str
    context: str
    in_loop: bool
    changes_memory: bool
    op_name: str


@typechecked
def copies(program: Any, min_bytes: int = 1 << 20, *, in_loops: bool = True) -> tuple[Copy, ...]:
    """Return the copies of buffers of at least min_bytes, largest first.

    A loop that updates slot pools, sums and parameters in place holds no copy of their shape:

    >>> import jax, jax.numpy as jnp
    >>> from dualpipe_jax import inspect
    >>> fill = jax.jit(lambda pool: jax.lax.fori_loop(0, 5, lambda slot, pool: pool.at[slot].set(1.0), pool))
    >>> compiled = fill.lower(jax.ShapeDtypeStruct((5, 512, 512), jnp.float32)).compile()
    >>> [copy for copy in inspect.copies(compiled) if copy.array.dims == (5, 512, 512)]
    []

    Args:
      program: a program as ``overlap`` takes it.
      min_bytes: the least bytes of a copied buffer; smaller copies are left out.
      in_loops: whether to return only copies that a loop repeats; False returns all.
    """
    module = read(program)
    found = [
        copy
        for name, context in module.executed.items()
        for copy in _copies(module, module.computations[name], context)
        if copy.nbytes >= min_bytes and (copy.in_loop or not in_loops)
    ]
    return tuple(sorted(found, key=lambda copy: -copy.nbytes))


def _copies(module: Module, computation: Computation, context: str) -> Iterator[Copy]:
    in_loop = any(step.endswith((" body", " condition")) for step in context.split("/"))
    for instruction in computation:
        if instruction.opcode in ("copy", "copy-start") or _only_moves(module, instruction):
            made = instruction.arrays[0]
            source = computation.operands(instruction)
            yield Copy(
                instruction.name,
                instruction.opcode,
                made,
                made.nbytes,
                computation.name,
                context,
                in_loop,
                bool(source) and _memory(instruction.shape) != _memory(source[0].shape),
                instruction.op_name,
            )


def _only_moves(module: Module, instruction: Instruction) -> bool:
    """Whether an instruction is a transpose, or a fusion that only copies or transposes a whole array."""
    if instruction.opcode == "transpose":
        return True
    if instruction.opcode != "fusion":
        return False
    inside = [i.opcode for name in instruction.called("calls") for i in module.inside(name)]
    return all(opcode in _MOVES for opcode in inside) and bool({"copy", "transpose"} & set(inside))


def _memory(shape: str) -> str:
    """Return the memory space of the first array of a shape: ``S(1)`` in ``bf16[8]{0:T(256)S(1)}``."""
    layout = shape.partition("{")[2].partition("}")[0]
    return layout[layout.find("S(") :] if "S(" in layout else ""
