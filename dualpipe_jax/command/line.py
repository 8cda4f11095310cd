"""Reads a command line into a dataclass; the help has the common options first, the others in groups below them.

A command is a dataclass. ``COMMON``, if its class has one, names the flags that stand first, in that order. The
command's other own options are the group "advanced", and each field that is a dataclass is a group of its other
options. The docstring of a field is its help. Every option is one flag, however deep its field lies. Fields that
``HIDDEN`` of a class names are not options.

An option that a file may set as well is None where it is left out, so that a given value counts even if it is the
default. A dataclass that a file may replace as a whole is None where none of its options is given.
"""

import ast
import contextlib
import dataclasses
import functools
import inspect
import itertools
import os
import re
import shutil
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro
from tyro.conf import arg

from dualpipe_jax.command.output import discard_output

T = TypeVar("T")

_GROUP = "group_"
_LEAST_COLUMNS = 40
_NAMES = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH"}


@dataclasses.dataclass(frozen=True)
class Option:
    """An option of the command line.

    Attributes:
      path: names of the fields that lead to it.
      flag: the flag without its dashes.
      hint: the field's type, with its annotations.
      default: the default value; ``dataclasses.MISSING`` if the option must be given.
      text: its text in the help.
      in_optional: whether it lies in a dataclass that is None where none of its options is given.
    """

    path: tuple[str, ...]
    flag: str
    hint: Any
    default: Any
    text: str
    in_optional: bool = False

    @property
    def name(self) -> str:
        return self.flag.replace("-", "_")

    @property
    def is_list(self) -> bool:
        """Whether it takes any number of values."""
        return (_metavar(self.hint) or "").endswith(" ...")

    def field(self, paired: bool) -> tuple[str, Any, Any]:
        """The field of a dataclass that tyro reads; ``paired``: booleans have a flag for each of their values."""
        inner, notes = _split_annotated(self.hint)
        known = self._default(inner, paired)
        text = re.sub(r" If left out, [^.]*\.", "", self.text) if known else self.text
        own = arg(help=text, metavar=_metavar(inner), help_behavior_hint=known)
        default = self.default
        # A boolean needs no None: its flag is given only to change its default.
        if self.in_optional and inner is not bool:
            inner, default = inner | None, None
        return self.name, Annotated[(inner, own, *notes)], dataclasses.field(default=default)  # type: ignore[return-value]

    def is_left_out(self, value: Any) -> bool:
        """Whether the value that was read means "left out", so that it is not passed to its optional dataclass."""
        return self.in_optional and (value is None or (isinstance(value, bool) and value == self.default))

    def _default(self, inner: Any, paired: bool) -> str | None:
        """The default in words; nothing where the text says what happens without the option."""
        if self.default is dataclasses.MISSING:
            return None
        if inner is bool:
            return f"(default: {'on' if self.default else 'off'})" if paired else ""
        values = self.default if isinstance(self.default, tuple) else (self.default,)
        words = " ".join("" if value is None else _number(value) for value in values)
        return f"(default: {words})" if words else ""


def options_of(kind: type, default: Any = None) -> list[Option]:
    """All options of a dataclass that are not hidden: its own, then those of its fields that are dataclasses.

    Args:
      kind: the dataclass.
      default: an instance that has the defaults of the options; each field's own default if None.

    Raises:
      TypeError: two options have the same flag.
    """
    found = list(_walk_options(kind, default, ()))
    flags: dict[str, Option] = {}
    for option in found:
        if option.flag in flags:
            first, second = (".".join(one.path) for one in (flags[option.flag], option))
            raise TypeError(f"--{option.flag} names both {first} and {second}")
        flags[option.flag] = option
    return found


def common_of(kind: type) -> tuple[str, ...]:
    """The flags that stand first in the help.

    Raises:
      TypeError: a flag of ``COMMON`` is not an option.
    """
    flags = [option.flag for option in options_of(kind)]
    own = [option.flag for option in options_of(kind) if len(option.path) == 1]
    asked: tuple[str, ...] = getattr(kind, "COMMON", tuple(own))
    if unknown := [flag for flag in asked if flag not in flags]:
        raise TypeError(
            f"{kind.__name__}.COMMON: no option {', '.join(unknown)}; there are {', '.join(flags)}"
        )
    return asked


def read(
    kind: Callable[..., T],
    prog: str,
    arguments: Sequence[str],
    default: T | None = None,
    description: str | None = None,
    paired: bool = False,
) -> T:
    """Read a command line into a dataclass. Prints the help if it is asked for; exits with 2 where reading fails, and
    for a list that is given twice, and with 141 where the reader of the help has closed it.

    Args:
      kind: the dataclass.
      prog: the command's name, for the help.
      arguments: the words after it.
      default: an instance that has the values of options that are left out; each field's own default if None.
      description: the description of the command, in place of the class's docstring.
      paired: whether booleans have a flag for each of their values, ``--x`` and ``--no-x``.
    """
    assert isinstance(kind, type)
    options = options_of(kind, default)
    pairs = () if paired else (tyro.conf.FlagCreatePairsOff,)
    _refuse_second_list(options, arguments)
    with wide_enough(), _reader_may_leave():
        found: Any = tyro.cli(
            _grouped_class(kind, options, paired),
            prog=prog,
            description=wrapped(description or inspect.getdoc(kind) or ""),
            args=arguments,
            config=(tyro.conf.OmitArgPrefixes, *pairs),
        )
    places = [found, *(value for name, value in vars(found).items() if name.startswith(_GROUP))]
    read_as = (
        (option, next(vars(place)[option.name] for place in places if option.name in vars(place)))
        for option in options
    )
    values = {option.path: value for option, value in read_as if not option.is_left_out(value)}
    return _build(kind, (), values)  # type: ignore[no-any-return]


@contextlib.contextmanager
def _reader_may_leave() -> Iterator[None]:
    """Exit with 141 where the reader of the help, such as ``head``, has closed its end."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        discard_output()
        raise SystemExit(141) from None


def _refuse_second_list(options: Sequence[Option], arguments: Sequence[str]) -> None:
    """Exit with 2 for a list of values that is given twice: tyro would drop the first one without a word."""
    flags = [word.partition("=")[0].replace("_", "-") for word in arguments if word.startswith("--")]
    for option in options:
        if option.is_list and flags.count(f"--{option.flag}") > 1:
            print(
                f"error: --{option.flag}: is given twice, and the last one alone would count; give all values "
                f"after one --{option.flag}",
                file=sys.stderr,
            )
            raise SystemExit(2)


def _grouped_class(kind: type, options: Sequence[Option], paired: bool) -> type:
    """The class that tyro reads: common options, and a dataclass for each group of the others."""
    common = common_of(kind)
    by_flag = {option.flag: option for option in options}
    fields = [by_flag[flag].field(paired) for flag in common]
    rest = [option for option in options if option.flag not in common]
    groups: dict[tuple[str, ...], list[Option]] = {}
    for option in rest:
        groups.setdefault(option.path[:-1], []).append(option)
    for path, members in sorted(groups.items(), key=lambda item: len(item[0]) > 0):
        title, text = _heading(kind, path)
        group = _make_class(f"Group{len(fields)}", [option.field(paired) for option in members])
        fields.append(
            (
                f"{_GROUP}{'_'.join(path)}",
                Annotated[group, arg(name=title, help=text)],
                dataclasses.field(default_factory=group),
            )
        )
    return _make_class(kind.__name__, fields)


def _make_class(name: str, fields: list[tuple[str, Any, Any]]) -> type:
    return dataclasses.make_dataclass(
        name, fields, kw_only=True, namespace={"__doc__": name, "__module__": __name__}
    )


def _heading(kind: type, path: tuple[str, ...]) -> tuple[str, str]:
    """A group's name and its description."""
    if not path:
        return "advanced", ""
    title = ""
    for name in path:
        hint = typing.get_type_hints(kind, include_extras=True)[name]
        inner, notes = _split_annotated(hint)
        title, kind = _name_of(name, notes), _dataclass(inner) or inner
    return title, " ".join((inspect.getdoc(kind) or "").split())


def _build(kind: type, path: tuple[str, ...], values: Mapping[tuple[str, ...], Any]) -> Any:
    hints, given = typing.get_type_hints(kind), {}
    for field in dataclasses.fields(kind):
        here = (*path, field.name)
        if here in values:
            given[field.name] = values[here]
        elif (group := _dataclass(hints[field.name])) is not None:
            optional = group is not hints[field.name]
            nothing = optional and not any(path[: len(here)] == here for path in values)
            given[field.name] = None if nothing else _build(group, here, values)
    return kind(**given)


def _walk_options(
    kind: type, default: Any, path: tuple[str, ...], in_optional: bool = False
) -> Iterator[Option]:
    hints, texts = typing.get_type_hints(kind, include_extras=True), _texts(kind)
    later = []
    for field in dataclasses.fields(kind):
        here, value = (*path, field.name), _default_of(field, default)
        inner, notes = _split_annotated(hints[field.name])
        if (group := _dataclass(inner)) is not None:
            known = None if value is dataclasses.MISSING else value
            later.append((group, known, here, in_optional or group is not inner))
            continue
        flag = _name_of(field.name, notes).replace("_", "-")
        if field.name not in getattr(kind, "HIDDEN", ()):
            yield Option(here, flag, hints[field.name], value, texts.get(field.name, ""), in_optional)
    for group, known, here, optional in later:
        yield from _walk_options(group, known, here, optional)


def _default_of(field: dataclasses.Field[Any], default: Any) -> Any:
    if default is not None:
        return getattr(default, field.name)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _split_annotated(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """The type inside ``Annotated``, and its annotations; any other type, and none."""
    if typing.get_origin(hint) is Annotated:
        inner, *notes = typing.get_args(hint)
        return inner, tuple(notes)
    return hint, ()


def _dataclass(hint: Any) -> type | None:
    """The dataclass ``D`` of a type ``D`` or ``D | None``; None for any other type."""
    known = _without_none(hint)
    return known if dataclasses.is_dataclass(known) else None  # type: ignore[return-value]


def _without_none(hint: Any) -> Any:
    """The type ``X`` of ``X`` or ``X | None``; None for a union of several types."""
    if typing.get_origin(hint) not in (types.UnionType, typing.Union):
        return hint
    known = [part for part in typing.get_args(hint) if part is not type(None)]
    return known[0] if len(known) == 1 else None


def _name_of(name: str, notes: tuple[Any, ...]) -> str:
    given = [getattr(note, "name", None) for note in notes]
    return next((one for one in reversed(given) if isinstance(one, str)), name)


def _metavar(hint: Any) -> str | None:
    """The help's placeholder for a value; that of ``X | None`` is that of ``X``, for None only means left out."""
    # ``Annotated`` may be around the union, around its one type, or both.
    inner, _ = _split_annotated(_without_none(_split_annotated(hint)[0]))
    origin, parts = typing.get_origin(inner), typing.get_args(inner)
    if origin is Literal:
        return "{" + ",".join(map(str, parts)) + "}"
    if origin is tuple and parts[1:] == (...,):
        return f"{_metavar(parts[0])} ..."
    if origin is tuple:
        return " ".join(str(_metavar(part)) for part in parts)
    return _NAMES.get(inner)


def _number(value: Any) -> str:
    short = f"{value:g}" if isinstance(value, float) else str(value)
    return short if not isinstance(value, float) or float(short) == value else str(value)


@functools.cache
def _texts(kind: type) -> Mapping[str, str]:
    """The docstring below each field, in one line; a field without one has that of the base class that defines it."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        if not dataclasses.is_dataclass(one):
            continue
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(one))).body
        assert isinstance(node, ast.ClassDef)
        for field, below in itertools.pairwise(node.body):
            match field, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str() as text)),
                ):
                    found[name] = " ".join(text.split())
    return found


@contextlib.contextmanager
def wide_enough() -> Iterator[None]:
    """A context in which a terminal has ``_LEAST_COLUMNS`` columns or more: in few of them tyro's help never ends."""
    before = os.environ.get("COLUMNS")
    if shutil.get_terminal_size().columns < _LEAST_COLUMNS:
        os.environ["COLUMNS"] = str(_LEAST_COLUMNS)
    try:
        yield
    finally:
        os.environ.pop("COLUMNS", None)
        if before is not None:
            os.environ["COLUMNS"] = before


def wrapped(description: str) -> str:
    """A description in lines of the terminal's width, its examples below it.

    Paragraphs that begin with a command are examples. tyro leaves lines that begin with a blank as they are, and joins
    all others.
    """
    width = max(_LEAST_COLUMNS, shutil.get_terminal_size().columns - 2)
    paragraphs = [" ".join(part.split()) for part in description.split("\n\n")]
    examples = [part for part in paragraphs if part.startswith("dualpipe ")]
    said = " ".join(part for part in paragraphs if part not in examples)
    fill = functools.partial(textwrap.fill, width=width, initial_indent="  ", break_on_hyphens=False)
    lines = [fill(said, subsequent_indent="  ")]
    if examples:
        lines += ["", "Examples:" if len(examples) > 1 else "Example:"]
    # An option and its value stay on one line.
    for one in examples:
        kept = re.sub(r"(?<= )(-[^ ]+) (?=[^-])", "\\1\0", one)
        lines.append(fill(kept, subsequent_indent=" " * 6).replace("\0", " "))
    return "\n".join(lines)
