"""Options that make a step fit into memory, and their price."""

import dataclasses
import math
import typing
from collections.abc import Callable, Iterable
from typing import Any

from dualpipe_jax.pods.plan import Plan
from dualpipe_jax.pods.results import MemorySaving
from dualpipe_jax.schedule.names import find, takes
from dualpipe_jax.step_options import BOUNDED, Remat, Shard

Option = tuple[str, Any, str]

_OPTIONS: tuple[Option, ...] = (
    ("stages_per_rank", 4, "stages half as deep as with two of them: twice as many ticks and sends"),
    ("shard", "optimizer", "parameters are gathered once a step"),
    ("remat", "keys", "norms, keys and values are computed again in the backward"),
    ("remat", "local", "what is wide and cheap is computed again in the backward"),
    ("remat", "wide", "what is wide and cheap is computed again, and rows are sent to experts again"),
    ("max_stash", 3, "more than three waiting backwards are not split: larger bubbles"),
    ("shard", "parameters", "parameters are gathered once a step, before its first microbatch"),
    ("max_stash", 2, "more than two waiting backwards are not split: larger bubbles"),
    ("remat", "all", "layers are computed again in the backward, their all-to-alls too"),
    ("max_stash", 1, "more than one waiting backward is not split: larger bubbles"),
    ("max_stash", 0, "no backward is split: larger bubbles"),
)
"""(option, value, price in words) of options that change no result, the cheapest first."""

_CAPACITY_FACTOR = (
    "capacity_factor",
    BOUNDED,
    "tokens beyond this room are dropped: the model learns otherwise",
)

_STAGES_PER_RANK = "stages_per_rank"

_BY_MEMORY = {"shard": typing.get_args(Shard), "remat": typing.get_args(Remat)}
"""The values of an option, from the one that takes most memory to the one that takes least."""

_MIN_SAVING = 0.01
"""The part of the memory that an option must save to be taken."""

Chosen = dict[str, tuple[Any, str]]
"""The chosen options: name -> (value, price in words)."""

_BOUNDED_ROOM: Chosen = {_CAPACITY_FACTOR[0]: _CAPACITY_FACTOR[1:]}


def remedies(plan: Plan, limit: int, needed: Callable[[Plan], int]) -> tuple[MemorySaving, ...]:
    """Options that together make a plan fit, in the order in which they were taken.

    If no options make it fit, the result is one entry with all options that help. The one option that changes
    what is learnt is taken only if all others are not enough. An option that is not needed once the others
    are taken is left out. Options that save less than a hundredth are only taken if the others are not
    enough. Options that the program refuses are not proposed.

    Args:
      plan: a plan that does not fit.
      limit: the bytes of a device's memory.
      needed: a function that returns the bytes of a device's memory that a plan needs; it raises ValueError for
        a plan that the program refuses.
    """
    known: dict[Plan, float] = {}

    def count(chosen: Chosen) -> float:
        other = dataclasses.replace(plan, **{name: value for name, (value, _) in chosen.items()})
        if other not in known:
            try:
                known[other] = needed(other)
            except ValueError:
                known[other] = math.inf
        return known[other]

    def strongest(options: Iterable[Option]) -> Chosen:
        return {name: (value, price) for name, value, price in options if _saves(plan, name, value)}

    chosen: Chosen = {}
    options = [option for option in _OPTIONS if option[0] != _STAGES_PER_RANK or _can_be_cut(plan)]
    most = strongest(options)
    if count(most) == math.inf:
        options = [option for option in options if count({option[0]: option[1:]}) < math.inf]
        most = strongest(options)
    if count(most) > limit:
        if _saves(plan, *_CAPACITY_FACTOR[:2]) and count(most | _BOUNDED_ROOM) < math.inf:
            chosen = dict(_BOUNDED_ROOM)
        least = count(chosen | most)
        if least > limit:
            words = " ".join(_flag(name, value) for name, (value, _) in (chosen | most).items())
            return (MemorySaving(words, int(least), "all that help"),) if words and least < math.inf else ()
    for name, value, price in options:
        now = chosen[name][0] if name in chosen else getattr(plan, name)
        if count(chosen) <= limit or not _is_less(name, value, now):
            continue
        more = {other: what for other, what in chosen.items() if other != name} | {name: (value, price)}
        if count(more) < (1 - _MIN_SAVING) * count(chosen):
            chosen = more
    if count(chosen) > limit:
        chosen |= most
    for name in [*chosen][::-1]:
        fewer = {other: what for other, what in chosen.items() if other != name}
        if name != _CAPACITY_FACTOR[0] and count(fewer) <= limit:
            chosen = fewer
    found, so_far, flags = [], {}, []
    for name, (value, price) in chosen.items():
        so_far[name] = value, price
        flags.append(_flag(name, value))
        # What the program refuses without the next option stands beside it.
        if (size := count(so_far)) < math.inf:
            found.append(MemorySaving(" ".join(flags), int(size), price))
            flags = []
    return tuple(found)


def _can_be_cut(plan: Plan) -> bool:
    """Whether the schedule takes a number of stages per rank, and the plan does not set the layers of each stage.

    With ``layers_per_stage`` more stages would be a deeper model.
    """
    return (
        not plan.stage_layers
        and plan.layers_per_stage is None
        and takes(find(plan.schedule), "num_stages_per_rank")
    )


def _flag(name: str, value: Any) -> str:
    return f"--{name.replace('_', '-')} {value}"


def _saves(plan: Plan, name: str, value: Any) -> bool:
    return _is_less(name, value, plan.room if name == _CAPACITY_FACTOR[0] else getattr(plan, name))


def _is_less(name: str, value: Any, now: Any) -> bool:
    """Whether a value of an option takes less memory than its present value ``now``."""
    if name in _BY_MEMORY:
        return _BY_MEMORY[name].index(value) > _BY_MEMORY[name].index(now)
    if name == _STAGES_PER_RANK:
        return now is None or value > now
    return now is None or value < now
