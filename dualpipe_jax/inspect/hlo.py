"""Parse the text of a compiled program.

``read`` takes the result of ``jax.jit(f).lower(...).compile()``, or its ``as_text()``, for TPU, GPU or CPU. In a
scheduled module (``is_scheduled=true``) the order of a computation's lines is the order in which the device
issues them; the rest of this package relies on that.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from dualpipe_jax.arguments import typechecked

_HEADER = re.compile(r"(ENTRY )?%?([\w.\-$]+) .*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-$]+) = (\(.*?\)|[^\s(]\S*) ([a-z][\w\-]*)\(")
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|true_computation|false_computation|select|scatter)=%?([\w.\-$]+)"
    r"|\b(branch_computations|called_computations|calls)=\{([^}]*)\}"
)
_OPERAND = re.compile(r"%([\w.\-$]+)")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"?(\d+)')
_INTEGER = re.compile(r"-?\d+")
_INDEX = re.compile(r"\bindex=(\d+)")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<= ]*)\]")
_BITS = re.compile(r"[a-z]+(\d+)")
_COMPUTATION_ENDS = ("}, execution_thread", "} //")
_BRANCH_ROLES = ("branch_computations", "true_computation", "false_computation")


class Array(NamedTuple):
    """An array's element type as HLO prints it, and the sizes of its dimensions."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its packed elements; the padding of a tiled layout is not counted."""
        bits = 8 if self.dtype == "pred" else int(m[1]) if (m := _BITS.match(self.dtype)) else 0
        return math.ceil(math.prod(self.dims) * bits / 8)


class Call(NamedTuple):
    """A computation that an instruction runs, and its role (such as calls, to_apply, body, condition, branch)."""

    role: str
    computation: str


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: its name in the module, without ``%``.
      opcode: its operation, such as ``fusion`` or ``all-to-all-start``.
      shape: the type of its result as text: ``bf16[8,128]{1,0}``, or a tuple of these.
      operands: names of the instructions that it reads, all of its own computation.
      calls: the computations that it runs.
      op_name: JAX's name stack (``metadata={op_name=...}``), empty where the compiler kept none.
      cycles: the TPU compiler's ``estimated_cycles``; None where it gave none (copies, Pallas calls, GPU, CPU).
      trips: the number of iterations of a loop; None if neither the compiler nor the loop's own text tells it.
      integer: the value of a constant of one integer; None for other instructions.
      attributes: the rest of the line; ``config`` is its ``backend_config``.
      is_root: whether it is the computation's result.
    """

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    calls: tuple[Call, ...]
    op_name: str
    cycles: int | None
    attributes: str
    is_root: bool
    trips: int | None = None
    integer: int | None = None

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays in its shape, those of nested tuples too."""
        return arrays(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all its arrays."""
        return sum(a.nbytes for a in self.arrays)

    @property
    def config(self) -> str:
        """The compiler's ``backend_config``, as text."""
        return self.attributes.partition("backend_config=")[2]

    @property
    def target(self) -> str:
        """The target of a custom call; empty for other instructions."""
        return m[1] if (m := _TARGET.search(self.attributes)) else ""

    def called(self, *roles: str) -> tuple[str, ...]:
        """Return the names of the computations that it runs in these roles; in any role if none is given."""
        return tuple(call.computation for call in self.calls if not roles or call.role in roles)


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions in the order of the text, which in a scheduled module is the order of execution."""

    name: str
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        """Instructions by name."""
        return {i.name: i for i in self.instructions}

    @functools.cached_property
    def position(self) -> dict[str, int]:
        """Positions of instructions in the order, by name."""
        return {i.name: k for k, i in enumerate(self.instructions)}

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """Return the instructions that an instruction reads, as far as this computation holds them."""
        return [self.by_name[name] for name in instruction.operands if name in self.by_name]

    @property
    def root(self) -> Instruction | None:
        """The instruction whose value is the computation's result."""
        return next((i for i in reversed(self.instructions) if i.is_root), None)

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions)


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program; ``read`` makes it.

    Attributes:
      name: the program's name, such as ``jit_step``.
      computations: its computations by name, in the order of the text.
      entry: name of the computation with which the program starts.
      is_scheduled: whether the order of instructions is the order of execution.
    """

    name: str
    computations: Mapping[str, Computation]
    entry: str
    is_scheduled: bool

    @functools.cached_property
    def callers(self) -> dict[str, tuple[str, Instruction, str]]:
        """The caller of each computation that runs line by line: name -> (computation, its instruction, the role).

        A caller comes before the computations that it calls; the entry has no caller and is left out.
        """
        found: dict[str, tuple[str, Instruction, str]] = {}
        pending = [self.entry]
        while pending:
            name = pending.pop()
            for instruction in self.computations[name]:
                for role, called in _called_line_by_line(instruction):
                    if called in self.computations and called not in found:
                        found[called] = name, instruction, role
                        pending.append(called)
        return found

    @functools.cached_property
    def executed(self) -> dict[str, str]:
        """Computations that run line by line, and their contexts: name -> context.

        The context is the path of loops, branches and calls from the entry, such as
        ``main/while.3 body/conditional.1 branch 0``. The computations of fusions, asynchronous calls and
        reductions are not listed: the device runs each of these as one instruction.
        """
        contexts = {self.entry: self.entry}
        for name, (caller, instruction, role) in self.callers.items():
            contexts[name] = f"{contexts[caller]}/{instruction.name} {role}".rstrip()
        return {name: contexts[name] for name in self.computations if name in contexts}

    @functools.cached_property
    def loops(self) -> dict[str, tuple[str, Instruction]]:
        """The bodies of executed loops: body -> (computation that holds the loop, its ``while`` instruction)."""
        return self._bodies_of("while", "body")

    @functools.cached_property
    def branches(self) -> dict[str, tuple[str, Instruction]]:
        """The branches of executed conditionals: branch -> (computation with the conditional, the ``conditional``)."""
        return self._bodies_of("conditional", "branch")

    def _bodies_of(self, opcode: str, role: str) -> dict[str, tuple[str, Instruction]]:
        return {
            body: (name, instruction)
            for name in self.executed
            for instruction in self.computations[name]
            if instruction.opcode == opcode
            for body in instruction.called(role)
        }

    def inside(self, name: str, enter_loops: bool = True) -> Iterator[Instruction]:
        """Yield all instructions of a computation and of those that it calls: fusions, branches, calls and loops.

        A computation is repeated for each instruction that calls it. With ``enter_loops`` False, the computations of
        loops are left out.
        """
        for instruction in self.computations[name].instructions if name in self.computations else ():
            yield instruction
            if enter_loops or instruction.opcode != "while":
                for called in instruction.called():
                    yield from self.inside(called, enter_loops)


@typechecked
def read(program: Any) -> Module:
    """Parse a compiled program.

    >>> import jax, jax.numpy as jnp
    >>> from dualpipe_jax import inspect
    >>> x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    >>> compiled = jax.jit(lambda x: jnp.tanh(x @ x)).lower(x).compile()
    >>> module = inspect.read(compiled)
    >>> module.name, [instruction.opcode for instruction in module.inside(module.entry)].count("tanh")
    ('jit__lambda', 1)

    Args:
      program: ``jax.jit(f).lower(...).compile()``, its text, or a ``Module``, which is returned unchanged.

    Raises:
      TypeError: if the program is none of these.
      ValueError: if the text holds no HLO module, or the compiler gave no text.
    """
    if isinstance(program, Module):
        return program
    if not isinstance(program, str) and not hasattr(program, "as_text"):
        raise TypeError(
            f"read: program must be text, or what jax.jit(f).lower(...).compile() returns, got {program!r:.40}"
        )
    text = program if isinstance(program, str) else program.as_text()
    if not isinstance(text, str):
        raise ValueError("read: the compiler gave no text for this program; as_text() returned None")
    text = text.lstrip()
    entry = ""
    found: dict[str, tuple[Instruction, ...]] = {}
    for header, lines in _blocks(text):
        found[header[2]] = tuple(_instruction(head, line) for head, line in lines)
        entry = header[2] if header[1] else entry
    if not entry:
        raise ValueError(
            f"read: no HLO module with an ENTRY computation in the text that begins {text[:40]!r}. Pass what "
            "jax.jit(f).lower(...).compile() returns, or its as_text(); a lowered program is not compiled yet"
        )
    name = m[1] if (m := re.match(r"HloModule ([^\s,]+)", text)) else ""
    computations = {key: Computation(key, instructions) for key, instructions in found.items()}
    counted = _Counters(computations).trips
    computations |= {
        key: Computation(key, tuple(dataclasses.replace(i, trips=counted.get(i.name, i.trips)) for i in each))
        for key, each in computations.items()
        if any(i.name in counted for i in each)
    }
    return Module(name, computations, entry, "is_scheduled=true" in text[: text.find("\n")])


def arrays(shape: str) -> tuple[Array, ...]:
    """Return the arrays of a shape's text: ``(bf16[2,3]{1,0}, u32[])`` -> (Array("bf16", (2, 3)), Array("u32", ()))."""
    return tuple(
        Array(dtype, tuple(int(d.strip("<= ")) for d in dims.split(",") if d.strip()))
        for dtype, dims in _ARRAY.findall(shape)
    )


def _blocks(text: str) -> Iterator[tuple[re.Match[str], list[tuple[re.Match[str], str]]]]:
    """Yield the header of each computation, and for each of its instructions (match of its head, its text).

    A line that begins no instruction continues the previous one: the metadata of some Pallas kernels is JSON
    over several lines.
    """
    header = None
    lines: list[tuple[re.Match[str], str]] = []
    for line in text.splitlines():
        if header is None:
            header = None if line.startswith("HloModule") else _HEADER.match(line)
        elif line == "}" or line.startswith(_COMPUTATION_ENDS):
            yield header, lines
            header, lines = None, []
        elif head := _INSTRUCTION.match(line):
            lines.append((head, line))
        elif lines:
            lines[-1] = (lines[-1][0], f"{lines[-1][1]}\n{line}")


def _instruction(head: re.Match[str], line: str) -> Instruction:
    end = _closing_parenthesis(line, head.end())
    attributes = line[end + 1 :].lstrip(", ")
    plain = attributes.partition("backend_config=")[0]
    name = _OP_NAME.search(plain)
    cycles, trips = _CYCLES.search(attributes), _TRIPS.search(attributes)
    integer = _INTEGER.fullmatch(line, head.end(), end) if head[4] == "constant" else None
    return Instruction(
        name=head[2],
        opcode=head[4],
        shape=head[3],
        operands=tuple(_OPERAND.findall(line, head.end(), end)),
        calls=_calls(plain),
        op_name=name[1] if name else "",
        cycles=int(cycles[1]) if cycles else None,
        attributes=attributes,
        is_root=head[1] is not None,
        trips=int(trips[1]) if trips else None,
        integer=int(integer[0]) if integer else None,
    )


def _closing_parenthesis(line: str, start: int) -> int:
    """Return the position of the parenthesis that closes the one just before ``start``."""
    end = line.find(")", start)
    opened = line.count("(", start, end)
    while opened and end >= 0:
        after = line.find(")", end + 1)
        opened += line.count("(", end, after) - 1
        end = after
    return end if end >= 0 else len(line)


def _calls(attributes: str) -> tuple[Call, ...]:
    found = []
    for role, name, group, names in _CALLED.findall(attributes):
        role = role or group
        listed = [name] if name else [n.strip().lstrip("%") for n in names.split(",") if n.strip()]
        found += [Call("branch" if role in _BRANCH_ROLES else role, n) for n in listed]
    return tuple(found)


def _called_line_by_line(instruction: Instruction) -> Iterator[tuple[str, str]]:
    """Yield (role, name) of each computation that an instruction runs line by line; the role of a call is empty."""
    if instruction.opcode == "while":
        yield from ((call.role, call.computation) for call in instruction.calls)
    elif instruction.opcode == "conditional":
        yield from ((f"branch {k}", name) for k, name in enumerate(instruction.called("branch")))
    elif instruction.opcode == "call":
        yield from (("", name) for name in instruction.called("to_apply", "calls"))


class _Counters:
    """Counts the trips of loops of which the compiler tells nothing, as on TPUs, from their counters.

    Counted are loops such as ``lax.scan`` makes: a number that begins with a constant and grows by a constant, while it
    is less than a constant. Constants may be handed down through loops that leave them unchanged.

    Attributes:
      trips: the number of iterations, by the name of the ``while``.
    """

    def __init__(self, computations: Mapping[str, Computation]):
        self._computations = computations
        loops = [(c, i) for c in computations.values() for i in c if i.opcode == "while"]
        self._loops = {name: loop for loop in loops for name in loop[1].called("body", "condition")}
        counts = {loop.name: self._count(holder, loop) for holder, loop in loops if loop.trips is None}
        self.trips = {name: count for name, count in counts.items() if count is not None}

    def _count(self, holder: Computation, loop: Instruction) -> int | None:
        condition, body = (
            next((self._computations.get(name) for name in loop.called(role)), None)
            for role in ("condition", "body")
        )
        test = condition.root if condition else None
        if condition is None or body is None or test is None or "direction=LT" not in test.attributes:
            return None
        place, end = self._place(condition, test, 0), self._operand(condition, test, 1)
        step = _through_copies(body, self._carried(body, place))
        if place is None or step is None or step.opcode != "add" or self._place(body, step, 0) != place:
            return None
        begin = self._integer(holder, self._begun(holder, loop, place))
        last, by = self._integer(condition, end), self._integer(body, self._operand(body, step, 1))
        if begin is None or last is None or by is None or by < 1:
            return None
        return max(0, math.ceil((last - begin) / by))

    def _integer(self, computation: Computation, made: Instruction | None) -> int | None:
        """Return the value of an instruction, if it is a constant of this loop or of one around it."""
        if made is None or made.opcode != "get-tuple-element":
            return None if made is None else made.integer
        place, found = self._index(computation, made), self._loops.get(computation.name)
        if place is None or found is None:
            return None
        holder, loop = found
        body = next((self._computations.get(name) for name in loop.called("body")), None)
        if body is None or self._index(body, _through_copies(body, self._carried(body, place))) != place:
            return None
        return self._integer(holder, self._begun(holder, loop, place))

    def _begun(self, holder: Computation, loop: Instruction, place: int) -> Instruction | None:
        """Return what a loop's state holds in a place at first."""
        state = holder.by_name.get(loop.operands[0])
        return self._operand(holder, state, place) if state and state.opcode == "tuple" else None

    def _carried(self, body: Computation, place: int | None) -> Instruction | None:
        """Return what a loop's state holds in a place after an iteration."""
        root = body.root
        return (
            body.by_name.get(root.operands[place])
            if root and root.opcode == "tuple" and place is not None
            else None
        )

    def _place(self, computation: Computation, instruction: Instruction, number: int) -> int | None:
        return self._index(computation, self._operand(computation, instruction, number))

    @staticmethod
    def _operand(computation: Computation, instruction: Instruction, number: int) -> Instruction | None:
        names = instruction.operands[number : number + 1]
        return _through_copies(computation, computation.by_name.get(names[0]) if names else None)

    @staticmethod
    def _index(computation: Computation, made: Instruction | None) -> int | None:
        """Return the place in a loop's state that an instruction reads."""
        if made is None or made.opcode != "get-tuple-element":
            return None
        source, index = computation.by_name.get(made.operands[0]), _INDEX.search(made.attributes)
        return int(index[1]) if index and source is not None and source.opcode == "parameter" else None


def _through_copies(computation: Computation, made: Instruction | None) -> Instruction | None:
    while made is not None and made.opcode in ("copy", "copy-start", "copy-done", "bitcast"):
        made = computation.by_name.get(made.operands[0])
    return made
