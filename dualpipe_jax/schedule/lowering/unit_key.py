"""The key that names a unit of the engine in compiled programs, in measurements and in costs."""

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
"""The name of each op's units in a compiled program."""


class UnitKey(NamedTuple):
    """A unit, identified by its op and the kinds of its stages.

    Attributes:
      op: F, B, I, W, or FB, a pair.
      kinds: the kind of the stage, or of a pair the kinds of the forward's and the backward's stage. Empty: the kind
        of most stages.
    """

    op: str
    kinds: tuple[str, ...] = ()

    @property
    def scope(self) -> str:
        """The named scope in which it is compiled: forward/first, pair/first-last."""
        return f"{SCOPES[self.op]}/{_join_kinds(self.kinds)}"

    @classmethod
    def of_scope(cls, scope: str) -> Self:
        """The inverse of ``scope``."""
        name, _, kinds = scope.partition("/")
        return cls({name: op for op, name in SCOPES.items()}[name], _split_kinds(kinds))

    def __str__(self) -> str:
        """The key in reports and JSON, such as F (most stages), F/first, or FB/first-last for a pair of both ends."""
        return f"{self.op}/{_join_kinds(self.kinds)}" if self.kinds else self.op

    @classmethod
    def parse(cls, text: str) -> Self:
        """The inverse of ``str``."""
        op, _, kinds = text.partition("/")
        return cls(op, _split_kinds(kinds) if kinds else ())


SCOPE = rf"(?:{'|'.join(SCOPES.values())})/[^/]+"
"""A regular expression that matches a unit's scope in the name of an instruction of a compiled program."""


def _join_kinds(kinds: tuple[str, ...]) -> str:
    """Join kinds by hyphens, with special characters percent-encoded as in URLs, since a kind may have any name."""
    return "-".join(quote(kind, safe="").replace("-", "%2D") for kind in kinds)


def _split_kinds(text: str) -> tuple[str, ...]:
    return tuple(map(unquote, text.split("-")))
