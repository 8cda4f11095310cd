"""Find the collectives of a scheduled computation, and where each begins and ends.

Compilers print an asynchronous collective in several ways; each of these becomes one ``Pair`` here:

  all-to-all-start ... all-to-all-done       its own opcodes (also permutes, gathers, reductions)
  async-start ... async-update ... async-done        around a computation that holds the collective
  call-start ... call-update ... call-done           the same on another core: the TPU's SparseCore
  fusion ... fusion ... fusion               a TPU's gathers: AsyncCollectiveStart, steps, AsyncCollectiveDone inside
  all-to-all-start with "is_sync":true in its config          a GPU's blocking call, asynchronous in name only

and a plain ``all-to-all`` is a synchronous one: the compiler found no work to put between its start and its done.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from dualpipe_jax.inspect.hlo import Computation, Instruction, Module

KINDS = (
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
    "all-gather",
    "all-reduce",
    "reduce-scatter",
)
"""Opcodes of collectives, which are also the names of the kinds."""

_GROUPS = re.compile(
    r"replica_groups=(?:\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?|\{(\{[\d,{} ]+\})\}"
    r"|mesh\[([^\]]+)\](?:, *device_ids=\(([^{]+)\))? *\{([^}]+)\})"
)
_SOURCE_TARGET_PAIRS = re.compile(r"source_target_pairs=\{([\d,{} ]+)\}")
_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?(?:=(\d+))?")
_TURNED = re.compile(r"\[([\d,]+)\]T\(([\d,]+)\)")
_IS_SYNC = re.compile(r'"is_sync":\s*true')


class Pair(NamedTuple):
    """One collective of one computation.

    Attributes:
      kind: one of ``KINDS``.
      form: ``async``, ``sparsecore`` (asynchronous, run by the TPU's SparseCore) or ``sync``.
      issued: the instruction that names the collective: its start, or the single instruction of a synchronous one.
      start: position in its computation at which it begins to run; the update's position for SparseCore calls.
      done: position at which the core waits for it; the computation's length if another computation waits.
      payload: bytes that a device sends or receives, whichever is more; for a ragged exchange, those of whole arrays.
      groups: numbers of the devices of each group; for permutes, pairs of a source and a target. None if the text does
        not say.
    """

    kind: str
    form: str
    issued: Instruction
    start: int
    done: int
    payload: int
    groups: tuple[tuple[int, ...], ...] | None

    @property
    def group_size(self) -> int | None:
        """Number of devices in the first group; None for permutes or if the groups are not known."""
        return None if self.groups is None or self.kind == "collective-permute" else len(self.groups[0])


def collectives(module: Module, computation: Computation) -> list[Pair]:
    """Return the collectives that a computation issues itself, in the order in which they begin."""
    dones = _dones_by_start(module, computation)
    found = []
    for k, instruction in enumerate(computation):
        kind, phase = kind_of(module, instruction), phase_of(module, instruction)
        if kind is None or phase not in ("start", "whole"):
            continue
        update, done = dones.get(instruction.name, (None, len(computation.instructions)))
        payload = _payload(kind, computation, instruction, done if phase == "start" else k)
        start = k
        if phase == "whole" or _IS_SYNC.search(instruction.config):
            form, done = "sync", k
        elif 'async_execution_thread="sparsecore"' in instruction.attributes:
            form, start = "sparsecore", k if update is None else update
        else:
            form = "async"
        found.append(Pair(kind, form, instruction, start, done, payload, _groups(module, instruction)))
    return sorted(found, key=lambda pair: pair.start)


def kind_of(module: Module, instruction: Instruction) -> str | None:
    """Return the kind of the collective that an instruction is part of, also if wrapped in a computation; else None."""
    base = instruction.opcode.removesuffix("-start").removesuffix("-done").removesuffix("-update")
    if base in KINDS:
        return base
    if base not in ("async", "call", "fusion") or instruction.opcode == "call":
        return None
    wrapped = (i for name in instruction.called() for i in module.inside(name))
    return next((i.opcode for i in wrapped if i.opcode in KINDS), None)


def phase_of(module: Module, instruction: Instruction) -> str:
    """Return the phase of a collective that an instruction runs: "start", "update", "done" or "whole".

    The result means nothing for an instruction without a collective. A fusion that computes while it passes a
    collective on is an update.
    """
    for phase in ("start", "update", "done"):
        if instruction.opcode.endswith(f"-{phase}"):
            return phase
    if instruction.opcode == "fusion":
        targets = {i.target for name in instruction.called() for i in module.inside(name)}
        if "AsyncCollectiveStart" in targets:
            return "start"
        if "AsyncCollectiveDone" in targets:
            return "done"
        if any(name.startswith("async_collective_fusion") for name in instruction.called()):
            return "update"
    return "whole"


def _dones_by_start(module: Module, computation: Computation) -> dict[str, tuple[int | None, int]]:
    """Return, by the name of each start, (position of its first update or None, position of its done)."""
    found = {}
    for k, done in enumerate(computation):
        if phase_of(module, done) == "done":
            update, step = None, _operand_source(computation, done)
            while step is not None and phase_of(module, step) == "update":
                update, step = computation.position[step.name], _operand_source(computation, step)
            if step is not None:
                found[step.name] = (update, k)
    return found


def _operand_source(computation: Computation, instruction: Instruction) -> Instruction | None:
    """Return the instruction that made the first operand, seen through get-tuple-elements."""
    source = computation.by_name.get(instruction.operands[0]) if instruction.operands else None
    while source is not None and source.opcode == "get-tuple-element":
        source = computation.by_name.get(source.operands[0])
    return source


def _payload(kind: str, computation: Computation, issued: Instruction, done: int) -> int:
    """Return the larger of input and output bytes; the state of an asynchronous start counts as neither."""
    got = computation.instructions[done].nbytes if done < len(computation.instructions) else 0
    if issued.opcode == "fusion":
        return got  # A fusion may read more than its collective does.
    # A ragged exchange also reads the array that it writes into, and where each part begins and ends.
    sent = computation.operands(issued)[: 1 if kind == "ragged-all-to-all" else None]
    return max(got, sum(operand.nbytes for operand in sent))


def _groups(module: Module, issued: Instruction) -> tuple[tuple[int, ...], ...] | None:
    """Return the groups of a collective, which HLO prints in several ways.

    These are ``{{0,1},{2,3}}``, ``[2,2]<=[4]``, ``[2,2]<=[2,2]T(1,0)`` and, since jax 0.12,
    ``mesh['a'=2,'b'=2] {'b'}``, or ``mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}``.
    """
    inside = (i.attributes for name in issued.called() for i in module.inside(name))
    for attributes in (issued.attributes, *inside):
        if pairs := _SOURCE_TARGET_PAIRS.search(attributes):
            return tuple((int(a), int(b)) for a, b in re.findall(r"(\d+),\s*(\d+)", pairs[1]))
        if match := _GROUPS.search(attributes):
            count, size, dims, order, listed, mesh, laid, axes = match.groups()
            if listed:
                return tuple(map(_numbers, re.findall(r"[\d,]+\d|\d", listed)))
            if mesh:
                return _mesh_groups(mesh, axes, laid)
            return tuple(map(tuple, _counted(dims, order).reshape(int(count), int(size)).tolist()))
    return None


def _counted(dims: str, order: str | None) -> np.ndarray:
    """Return the numbers from 0 on, laid out in dims that are then transposed."""
    sizes = _numbers(dims)
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    return numbers.transpose(_numbers(order)) if order else numbers


def _mesh_groups(mesh: str, axes: str, laid: str | None) -> tuple[tuple[int, ...], ...]:
    """Return the groups along axes of a mesh; ``'a':(2)4`` is a part of size 4 of an axis, after a part of size 2.

    ``laid`` is the order of its devices, ``[4,2]T(1,0)`` or ``0,2,1,3``; None: from 0 on.
    """
    sizes = {name: int(whole) for name, _, _, whole in _AXIS.findall(mesh)}
    parts: dict[str, list[tuple[int, int]]] = {}
    for name, before, part, _ in _AXIS.findall(axes):
        parts.setdefault(name, []).append((int(before or 1), int(part or sizes[name])))
    dims, chosen = [], []
    for name, whole in sizes.items():
        passed = 1
        for before, part in sorted(parts.get(name, ())):
            dims += [before // passed, part]
            chosen.append(len(dims) - 1)
            passed = before * part
        dims.append(whole // passed)
    ids = np.arange(math.prod(dims))
    if laid is not None:
        turned = _TURNED.fullmatch(laid)
        ids = _counted(turned[1], turned[2]) if turned else np.array(_numbers(laid))
    ids = ids.reshape(dims)
    others = [dim for dim in range(len(dims)) if dim not in chosen]
    size = math.prod(dims[dim] for dim in chosen)
    return tuple(map(tuple, ids.transpose(*others, *chosen).reshape(-1, size).tolist()))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def is_matmul(instruction: Instruction, targets: re.Pattern[str]) -> bool:
    """Whether an instruction is itself a matrix product: dot, convolution, or a custom call that ``targets`` match."""
    if instruction.opcode in ("dot", "convolution", "ragged-dot"):
        return True
    return instruction.opcode == "custom-call" and bool(targets.search(instruction.target))


def matmuls(module: Module, instruction: Instruction, targets: re.Pattern[str]) -> Iterator[Instruction]:
    """Yield the matrix products that an instruction runs, itself included; those inside loops once."""
    if is_matmul(instruction, targets):
        yield instruction
    for name in instruction.called():
        yield from (i for i in module.inside(name) if is_matmul(i, targets))
