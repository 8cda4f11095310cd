"""Checks of the arguments of public functions against the types and the shapes that their signatures name.

Without them Python runs ``v_half(4, 2.5)`` until something deep inside fails, or returns a wrong result. Each
function itself checks which values of a type it can use.
"""

import functools
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Annotated, Any, TypeVar

from beartype import BeartypeConf, BeartypeViolationVerbosity, FrozenDict, beartype
from beartype.vale import IsInstance

T = TypeVar("T", bound=Callable[..., Any])

NUMBERS: Mapping[Any, Any] = {
    int: Annotated[Integral, ~IsInstance[bool]],
    float: Annotated[Real, ~IsInstance[bool]],
}
"""What counts as an int and as a float: NumPy's numbers too, but no bool, although Python takes True for an int."""


class ArgumentError(TypeError, ValueError):
    """An argument is not of the type in the signature, or is none of the literals that it names."""


class UnfitError(ValueError):
    """Arguments of a step do not fit together or do not fit the device; raised while tracing, so nothing has run."""


def typechecked(function: T) -> T:
    """The function or dataclass, changed to raise ArgumentError for an argument that its signature does not allow.

    NumPy's numbers count as numbers, an int also as a float, a bool as neither, and NumPy's arrays count as
    arrays of JAX. An array argument may name its dims by letters at the end of its name, such as ``x_TD``. It
    must then have that number of dims, and a letter that several arguments share must have the same size in
    all of them, else ValueError is raised.
    """
    taken = dict(NUMBERS)
    if jax := sys.modules.get("jax"):  # a module that does not load JAX has none of its types in signatures
        taken[jax.Array] = jax.Array | sys.modules["numpy"].ndarray
    conf = BeartypeConf(
        hint_overrides=FrozenDict(taken),
        violation_type=ArgumentError,
        violation_verbosity=BeartypeViolationVerbosity.MINIMAL,
        is_color=False,
        is_random=False,  # check a sequence's first item, not a random one: what is refused once is refused always
    )
    check: Any = beartype(conf=conf)
    if isinstance(function, type):
        init: Any = function.__init__  # type: ignore[misc]
        for name, parameter in inspect.signature(init).parameters.items():
            if parameter.default is None:  # a field that __post_init__ fills in
                init.__annotations__[name] |= None
        function.__init__ = check(init)  # type: ignore[misc]
        return function
    return check(_with_equal_dims(function))


def _with_equal_dims(function: T) -> T:
    signature = inspect.signature(function)
    dims = {name: m[1] for name in signature.parameters if (m := re.search("_([A-Z]+)$", name))}
    if not dims:
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        _check_dims(function.__name__, dims, signature.bind(*args, **kwargs).arguments)
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]


def _check_dims(where: str, dims: Mapping[str, str], given: Mapping[str, Any]) -> None:
    seen: dict[str, tuple[int, str]] = {}
    for name, letters in dims.items():
        if given.get(name) is None:
            continue
        shape = given[name].shape
        if len(shape) != len(letters):
            raise ValueError(f"{where}: {name} must be of shape [{', '.join(letters)}], got {list(shape)}.")
        for letter, size in zip(letters, shape, strict=True):
            before, of = seen.setdefault(letter, (size, name))
            if before != size:
                raise ValueError(
                    f"{where}: {letter} is {before} in {of} {list(given[of].shape)} and {size} in {name} "
                    f"{list(shape)}; they must be equal."
                )
