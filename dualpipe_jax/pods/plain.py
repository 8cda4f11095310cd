"""Convert dataclasses to values that JSON can hold, and back."""

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def plain(value: Any) -> Any:
    """Convert dataclasses, mappings and sequences to dicts and lists. Keys become strings."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): plain(part) for name, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, list | tuple) else value


def filled(kind: type[T], value: Any) -> T:
    """The inverse of ``plain`` for a value of type ``kind``. Entries of a dict that are no fields are left out.

    Keys of a type with a method ``parse``, such as ``UnitKey``, are read by that method; keys of type int
    become ints.
    """
    return _filled(kind, value)


def _filled(kind: Any, value: Any) -> Any:
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if value is None or kind is Any:
        return value
    if origin is typing.Annotated:
        return _filled(parts[0], value)
    if origin in (types.UnionType, typing.Union):
        known = [part for part in parts if part is not type(None)]
        return _filled(known[0], value) if len(known) == 1 else value
    if origin is tuple:
        return tuple(_filled(parts[0], part) for part in value)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        key = getattr(parts[0], "parse", int if parts[0] is int else str)
        return {key(name): _filled(parts[1], part) for name, part in value.items()}
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        hints = _hints(kind)  # type: ignore[arg-type]  # a class is hashable
        return kind(**{name: _filled(hints[name], part) for name, part in value.items() if name in hints})  # type: ignore[operator]
    return value


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.init}
