"""A schedule as JSON with four entries; slots are written as ``spelt`` writes them."""

import json
from collections.abc import Mapping
from typing import Any

from dualpipe_jax.arguments import typechecked
from dualpipe_jax.schedule.ir import Placement, Schedule, Slot, parse_slot, spelt

_ENTRIES = "name", "num_microbatches", "pipes", "orders"


@typechecked
def to_json(schedule: Schedule, more: Mapping[str, Any] | None = None) -> str:
    """Write a schedule as JSON; ``from_json`` reads it back.

    The entries are ``name``, ``num_microbatches`` (over all pipes), ``pipes`` (for each, the rank of the
    stage at each depth) and ``orders`` (for each rank its slots: ``"3F0"``, or ``"7F2+0B0"`` for a pair).

    >>> from dualpipe_jax.schedule import gpipe
    >>> print(to_json(gpipe(2, 1)))
    {
      "name": "gpipe",
      "num_microbatches": 1,
      "pipes": [[0, 1]],
      "orders": [
        ["0F0", "0B0"],
        ["1F0", "1B0"]
      ]
    }

    Args:
      schedule: the schedule to write, valid or not.
      more: further entries, which ``from_json`` ignores.

    Raises:
      TypeError: if JSON has no form for a value of ``more``.
    """
    try:
        added = {name: json.dumps(value) for name, value in (more or {}).items()}
    except (TypeError, ValueError) as error:
        raise TypeError(f"to_json: more has what JSON has no form for: {error}") from None
    orders = (json.dumps([spelt(slot) for slot in order]) for order in schedule.orders)
    entries = {
        "name": json.dumps(schedule.name),
        "num_microbatches": json.dumps(schedule.num_microbatches),
        "pipes": json.dumps(schedule.placement.pipes),
        "orders": "[\n    " + ",\n    ".join(orders) + "\n  ]",
    } | added
    return "{\n" + ",\n".join(f"  {json.dumps(name)}: {text}" for name, text in entries.items()) + "\n}"


@typechecked
def from_json(text: str) -> Schedule:
    """Read a schedule that ``to_json`` wrote. Other entries are ignored; the result is not validated.

    >>> from dualpipe_jax.schedule import gpipe
    >>> from_json(to_json(gpipe(2, 3))) == gpipe(2, 3)
    True

    Raises:
      ValueError: if the text is not JSON, an entry is missing or of the wrong type (the message says which), or a
        slot cannot be read (it says where).
    """
    try:
        entries = json.loads(text)
        missing = [name for name in _ENTRIES if not isinstance(entries, dict) or name not in entries]
        if missing:
            raise ValueError(f"from_json: {', '.join(missing)} missing; a schedule has {', '.join(_ENTRIES)}")
        _check_kinds(entries)
    except json.JSONDecodeError as error:
        raise ValueError(f"from_json: not JSON: {error}") from None
    except RecursionError:
        raise ValueError(
            "from_json: nested too deeply; a schedule is an object of four flat entries"
        ) from None
    orders = tuple(
        tuple(_parse_slot(rank, index, slot) for index, slot in enumerate(order))
        for rank, order in enumerate(entries["orders"])
    )
    placement = Placement(tuple(map(tuple, entries["pipes"])))
    return Schedule(entries["name"], placement, entries["num_microbatches"], orders)


def _check_kinds(entries: Mapping[str, Any]) -> None:
    kinds = {
        "name": (str, "a string"),
        "num_microbatches": (int, "a whole number"),
        "pipes": (list, "a list of lists of ranks, such as [[0, 1], [1, 0]]"),
        "orders": (list, 'a list of lists of slots, such as [["0F0", "0B0"]]'),
    }
    inner = {"pipes": int, "orders": str}
    for name, (kind, wanted) in kinds.items():
        value = entries[name]
        right = isinstance(value, kind) and type(value) is not bool
        if right and name in inner:
            right = all(isinstance(row, list) and all(type(x) is inner[name] for x in row) for row in value)
        if not right:
            raise ValueError(f"from_json: {name} must be {wanted}, not {json.dumps(value)[:60]}")


def _parse_slot(rank: int, index: int, text: str) -> Slot:
    try:
        return parse_slot(text)
    except ValueError as error:
        raise ValueError(f"from_json: orders[{rank}][{index}]: {error}") from None
