"""Ranges of options, given in the type of each option: ``steps: Annotated[int, Ge(1)] = 250``."""

import dataclasses
import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Lt

FLOAT32 = (2 - 2**-23) * 2.0**127
"""The largest finite number of float32; a larger one becomes infinite in float32."""

AtLeastOne = Annotated[int, Ge(1)]
NotNegative = Annotated[int, Ge(0)]
NotBelowZero = Annotated[float, Ge(0), Le(FLOAT32)]
AboveZero = Annotated[float, Gt(0), Le(FLOAT32)]
Share = Annotated[float, Ge(0), Lt(1)]


def out_of_range(options: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any, str]]:
    """For each field that is outside its range: the path of the field, its value, and what it must be, in words.

    None is inside every range.

    Args:
      options: a dataclass, whose fields may be dataclasses.
      path: the path of ``options`` itself, which the paths of fields begin with.
    """
    hints = typing.get_type_hints(type(options), include_extras=True)
    for field in dataclasses.fields(options):
        value, where = getattr(options, field.name), (*path, field.name)
        if dataclasses.is_dataclass(value):
            yield from out_of_range(value, where)
        elif value is not None:
            yield from ((where, value, why) for why in _violations(hints[field.name], value))


def _violations(hint: Any, value: Any) -> Iterator[str]:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        for part in typing.get_args(hint):
            yield from _violations(part, value)
    elif typing.get_origin(hint) is Annotated:
        inner, *notes = typing.get_args(hint)
        yield from _violations(inner, value)
        for note in notes:  # "not value >= ..." below, since NaN must be outside every range
            match note:
                case Ge(ge=least) if not value >= least:  # type: ignore[operator]
                    yield "must not be negative" if least == 0 else f"must be at least {least}"
                case Gt(gt=bound) if not value > bound:  # type: ignore[operator]
                    yield f"must be above {bound}"
                case Le(le=most) if not value <= most:  # type: ignore[operator]
                    yield f"must be at most {most:.4g}, the largest number of float32"
                case Lt(lt=bound) if not value < bound:  # type: ignore[operator]
                    yield f"must be below {bound}"
