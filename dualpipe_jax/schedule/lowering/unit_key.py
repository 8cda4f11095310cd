"""How a unit of the engine is named: by one value in a program, in what is measured of it and in what it costs."""

from collections.abc import Mapping
from typing import NamedTuple, Self
from urllib.parse import quote, unquote

SCOPES: Mapping[str, str] = {
    "FB": "pair",
    "F": "forward",
    "B": "backward",
    "I": "backward_input",
    "W": "backward_weight",
}
"""What each op's units are called in a compiled program."""


class UnitKey(NamedTuple):
    """A unit, by what it does to which kinds of stages.

    Attributes:
      op: F, B, I, W, or FB, a pair.
      kinds: of the stage; of a pair, of the forward's and the backward's. Empty: of whatever kind most stages are.
    """

    op: str
    kinds: tuple[str, ...] = ()

    @property
    def scope(self) -> str:
        """The named scope in which it is compiled: forward/first, pair/first-last."""
        return f"{SCOPES[self.op]}/{_joined(self.kinds)}"

    @classmethod
    def of_scope(cls, scope: str) -> Self:
        """The inverse of ``scope``."""
        name, _, kinds = scope.partition("/")
        return cls({name: op for op, name in SCOPES.items()}[name], _parted(kinds))

    def __str__(self) -> str:
        """The key in reports and JSON: F of most stages, F/first of the first, FB/first-last of a pair of both ends."""
        return f"{self.op}/{_joined(self.kinds)}" if self.kinds else self.op

    @classmethod
    def parse(cls, text: str) -> Self:
        """The inverse of ``str``."""
        op, _, kinds = text.partition("/")
        return cls(op, _parted(kinds) if kinds else ())


SCOPE = rf"(?:{'|'.join(SCOPES.values())})/[^/]+"
"""Matches a unit's scope in the name of a compiled program's instruction."""


def _joined(kinds: tuple[str, ...]) -> str:
    """The name with what parts names in it written as in addresses: a kind may have any name."""
    return "-".join(quote(kind, safe="").replace("-", "%2D") for kind in kinds)


def _parted(text: str) -> tuple[str, ...]:
    return tuple(map(unquote, text.split("-")))
