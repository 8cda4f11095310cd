"""Count arithmetic and memory traffic of single instructions, to price those that the compiler does not price."""

import math
import re
from collections.abc import Iterator, Mapping

from dualpipe_jax.convolution import num_window_hits
from dualpipe_jax.inspect.hlo import Computation, Instruction, Module

_CONTRACTED = re.compile(r"lhs_contracting_dim(?:ension)?s\"?[=:]\s*[\[{]([^\]}]*)[\]}]")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_ESTIMATE = re.compile(r'"cost_estimate":\{"flops":"?(\d+)"?.*?"bytes_accessed":"?(\d+)')
_CAUSAL = re.compile(r'"mask_type":\s*"(?:PADDING_)?CAUSAL"')
_SLICES = ("dynamic-slice", "slice", "gather")
_SEEN_THROUGH = ("bitcast", "reshape")
_LIBRARIES = ("__cublas", "__cudnn")


def flops(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Return the multiplications and additions of the matrix products in an instruction.

    It counts ``dot``, the convolutions that TPUs use instead, the GPU libraries' matrix products, cuDNN's attention,
    the grouped products of ``parallel.mosaic`` and ``triton`` as if their groups filled all rows, and kernels that
    state their cost; in a fusion, the instructions inside it. Loops and other kernels count 0.
    """
    if stated := _ESTIMATE.search(instruction.config):
        return int(stated[1])
    if "cudnn$fmha" in instruction.target:
        return _attention_flops(computation, instruction)
    if instruction.target.startswith(("mosaic_gpu", "__gpu$xla.gpu.triton")):
        return _grouped_flops(computation, instruction)
    if instruction.opcode == "dot" or "lhs_contracting_dim" in instruction.config:
        left = computation.by_name.get(instruction.operands[0]) if instruction.operands else None
        contracted = _CONTRACTED.search(instruction.attributes)
        if left is None or contracted is None or not left.arrays:
            return 0
        sizes = [left.arrays[0].dims[int(d)] for d in re.findall(r"\d+", contracted[1])]
        return 2 * math.prod(instruction.arrays[0].dims) * math.prod(sizes)
    if instruction.opcode == "convolution":
        return _convolution_flops(computation, instruction)
    inner = _fused(module, instruction)
    return 0 if inner is None else sum(flops(module, inner, i) for i in inner)


def _fused(module: Module, instruction: Instruction) -> Computation | None:
    """Return the computation of a fusion; None for other instructions, or where only a part of the text was kept."""
    called = instruction.called("calls") if instruction.opcode == "fusion" else ()
    return module.computations.get(called[0]) if called else None


def _convolution_flops(computation: Computation, instruction: Instruction) -> int:
    """Return the operations of a convolution, without those that padding or dilation multiply by zero."""
    labels = _LABELS.search(instruction.attributes)
    found = computation.operands(instruction)[:2]
    if labels is None or len(found) < 2 or not all(operand.arrays for operand in found):
        return 0
    of_left, of_kernel, made = (
        dict(zip(text, whose.arrays[0].dims, strict=True))
        for text, whose in zip(labels.groups(), (*found, instruction), strict=True)
    )
    products = of_kernel["i"] * made["f"] * made["b"]
    window = _WINDOW.search(instruction.attributes)
    fields = dict(part.split("=") for part in window[1].split()) if window else {}
    for dim in filter(str.isdigit, of_left):
        products *= _window_hits(of_left[dim], of_kernel[dim], made[dim], int(dim), fields)
    return 2 * products


def _window_hits(size: int, window: int, made: int, dim: int, fields: Mapping[str, str]) -> int:
    """Return ``num_window_hits`` along one dim, from the fields of the instruction's ``window``."""

    def of(name: str, default: str) -> str:
        return fields[name].split("x")[dim] if name in fields else default

    stride, spread, apart = (int(of(name, "1")) for name in ("stride", "lhs_dilate", "rhs_dilate"))
    before = int(of("pad", "0_0").partition("_")[0])
    return num_window_hits(size, window, made, stride, before, spread, apart)


def _attention_flops(computation: Computation, instruction: Instruction) -> int:
    """Return the operations of cuDNN's attention.

    Its first operands are q [B, Q, H, X], k [B, K, H, X] and v [B, K, H, V]. A forward has two matrix products, a
    backward five: the scores once more, then the gradients of values, scores, queries and keys. Under a causal mask
    half of the scores count.
    """
    known = computation.operands(instruction)[:3]
    if len(known) < 3 or any(len(made.arrays) != 1 or len(made.arrays[0].dims) != 4 for made in known):
        return 0
    (B, Q, H, X), (_, K, _, _), (_, _, _, V) = (made.arrays[0].dims for made in known)
    keys, values = (3, 2) if instruction.target.endswith("Backward") else (1, 1)
    multiplied = 2 * B * H * Q * K * (keys * X + values * V)
    return multiplied // 2 if _CAUSAL.search(instruction.config) else multiplied


def _grouped_flops(computation: Computation, instruction: Instruction) -> int:
    """Return the operations of a grouped product; 0 if its shapes are not one of the two known forms.

    These are rows [R, D] by matrices [G, ...] to [R, F], and rows [R, D] by rows [R, F] to [G, D, F], which may be
    added to a previous sum.
    """
    arrays = [o.arrays[0].dims for o in computation.operands(instruction) if len(o.arrays) == 1]
    dims = sorted((len(shape) for shape in arrays if len(shape) > 1), reverse=True)
    rows = [shape for shape in arrays if len(shape) == 2]
    made = instruction.arrays[0].dims if len(instruction.arrays) == 1 else ()
    if dims == [3, 2] and len(made) == 2 and made[0] == rows[0][0]:
        return 2 * math.prod(rows[0]) * made[1]
    if dims in ([2, 2], [3, 2, 2]) and len(made) == 3 and rows[0][0] == rows[1][0]:
        return 2 * math.prod(rows[0]) * made[2]
    return 0


def traffic(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Return the bytes that an instruction reads and writes.

    For a buffer that it only slices, the slices count; for a buffer that it updates in place, the update. For a kernel
    that states its cost, the stated bytes count.
    """
    if stated := _ESTIMATE.search(instruction.config):
        return int(stated[2])
    if (inner := _fused(module, instruction)) is not None:
        read = sum(_fusion_reads(inner))
    else:
        read = sum(_operand_bytes(computation, instruction, name) for name in instruction.operands)
    return read + written(module, computation, instruction)


def written(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Return the bytes that an instruction writes; for a buffer that it updates in place, those of the update.

    The workspace of a library call, an array of bytes among its results, is not counted.
    """
    if (inner := _fused(module, instruction)) is not None:
        return sum(_result_bytes(inner, inner.root))
    if instruction.target.startswith(_LIBRARIES):
        first, *others = instruction.arrays
        return first.nbytes + sum(made.nbytes for made in others if made.dtype not in ("s8", "u8"))
    return sum(_result_bytes(computation, instruction))


def _fusion_reads(inner: Computation) -> Iterator[int]:
    """Yield the bytes that a fusion reads of each of its parameters."""
    for parameter in inner:
        if parameter.opcode == "parameter":
            uses = list(_uses(inner, parameter.name))
            yield min(parameter.nbytes, sum(_operand_bytes(inner, use, name) for use, name in uses))


def _uses(inner: Computation, name: str) -> Iterator[tuple[Instruction, str]]:
    """Yield the instructions that use a value, each with the operand's name; bitcasts and reshapes are seen through."""
    for instruction in inner:
        if name in instruction.operands:
            if instruction.opcode in _SEEN_THROUGH and not instruction.is_root:
                yield from _uses(inner, instruction.name)
            else:
                yield instruction, name


def _operand_bytes(computation: Computation, instruction: Instruction, name: str) -> int:
    """Return the bytes that an instruction reads of one of its operands."""
    operand = computation.by_name.get(name)
    if operand is None:
        return 0
    if name == instruction.operands[0]:
        if instruction.opcode in _SLICES:
            return instruction.nbytes
        if instruction.opcode == "dynamic-update-slice":
            return 0
    return operand.nbytes


def _result_bytes(computation: Computation, made: Instruction | None) -> Iterator[int]:
    """Yield the written bytes of each result; for an update in place, those of the update."""
    while made is not None and made.opcode in _SEEN_THROUGH:
        made = computation.by_name.get(made.operands[0])
    if made is None:
        return
    if made.opcode == "tuple":
        for name in made.operands:
            yield from _result_bytes(computation, computation.by_name.get(name))
    elif made.opcode == "dynamic-update-slice":
        update = computation.by_name.get(made.operands[1])
        yield update.nbytes if update is not None else made.nbytes
    else:
        yield made.nbytes
