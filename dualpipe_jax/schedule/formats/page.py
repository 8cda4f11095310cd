"""One HTML page, in one file that needs no network, on which to try out schedules and costs."""

import base64
import dataclasses
import itertools
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dualpipe_jax.present.numbers import Units
from dualpipe_jax.schedule.blame import Link
from dualpipe_jax.schedule.costs import CostModel, MemoryModel
from dualpipe_jax.schedule.formats.colours import COLOURS, NAMES
from dualpipe_jax.schedule.ir import Op, Schedule, Slot
from dualpipe_jax.schedule.names import with_finer_variants
from dualpipe_jax.schedule.recipes import ALL_SCHEDULES, Recipe, dualpipe

RANKS = (2, 3, 4, 6, 8, 12, 16)
MICROBATCHES = (2, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)

_COMPUTED = {"F": 36.3, "I": 59.7, "W": 35.1}
_SERIAL, _OVERLAPPED = 211.0, 129.0
"""Milliseconds of DeepSeek-V3's pair in its published training trace (four layers, 4096 tokens, 64-way experts, H800):
the compute times of F, I and W (_COMPUTED), the time of the pair without overlap, and its measured time."""

_OPS = (Op.F, Op.B, Op.I, Op.W)
_HERE = Path(__file__).parent


def html_page(
    schedule: Schedule | None = None,
    costs: CostModel | None = None,
    memory: MemoryModel | None = None,
    *,
    recipes: Iterable[Recipe] | None = None,
    units: Units | None = None,
    chain: Sequence[Link] | None = None,
) -> str:
    """A page with sliders for ranks, microbatches, costs and memory that shows the resulting step.

    It draws the chosen schedule to time, with each rank's memory below, and compares all schedules at the
    same setting. The page holds the orders that the recipes made for each of RANKS x MICROBATCHES, or the
    reason why a recipe refused; its script simulates orders but makes none. A fragment of the address
    chooses the first setting: ``page.html#schedule=zb_h1&ranks=8&microbatches=20&W=0.5&FB=2``.

    >>> from dualpipe_jax.schedule import dualpipe, html_page
    >>> page = html_page(dualpipe(4, 8), recipes=[dualpipe])  # write it to a file and open that in a browser
    >>> page.splitlines()[0]
    '<!doctype html>'

    Args:
      schedule: the schedule that the page shows at first, of any name and counts, also if no recipe made it;
        DualPipe on 8 ranks with 20 microbatches if left out. If its counts do not exceed the largest of RANKS
        and MICROBATCHES, the page also offers them for all other schedules.
      costs: the first costs, of a rank's whole share of the model: each of its k stages in a pipe takes 1/k.
      memory: the first sizes, likewise of a rank's whole share.
      units: the units of the costs and sizes.
      chain: slots of the schedule that wait for each other, from ``blame``; they are marked until a setting changes.
      recipes: functions of (num_ranks, num_microbatches); if left out, ALL_SCHEDULES and their finer variants.

    Returns:
      The page's HTML, some hundred kilobytes; making it takes a few seconds.
    """
    recipes = tuple(with_finer_variants(ALL_SCHEDULES)) if recipes is None else tuple(recipes)
    shown = dualpipe(8, 20) if schedule is None else schedule
    payload = _payload(shown, costs or CostModel(), memory or MemoryModel(), recipes)
    payload["units"] = dataclasses.asdict(units or Units())
    payload["chain"] = [(link.rank, shown.orders[link.rank].index(link.slot)) for link in chain or ()]
    packed = base64.b64encode(zlib.compress(json.dumps(payload, separators=(",", ":")).encode(), 9)).decode()
    page = _HERE.joinpath("page.html").read_text(encoding="utf-8")
    for place, name in (
        ("@STYLE@", "page.css"),
        ("@PLAYER@", "player.js"),
        ("@PAINTER@", "painter.js"),
        ("@SCRIPT@", "page.js"),
    ):
        page = page.replace(place, _HERE.joinpath(name).read_text(encoding="utf-8").rstrip())
    return page.replace("@PAYLOAD@", packed)


def _payload(
    shown: Schedule, costs: CostModel, memory: MemoryModel, recipes: Iterable[Recipe]
) -> dict[str, Any]:
    counts = shown.num_ranks, shown.num_microbatches
    points = _points(*counts)
    made: dict[str, dict[tuple[int, int], Schedule | str]] = {
        recipe.__name__: {
            point: _make_or_refusal(recipe, *point)
            for point in points
            if _is_within_grid(point) or (recipe.__name__, point) == (shown.name, counts)
        }
        for recipe in recipes
    }
    name = shown.name
    if name not in made or made[name][counts] != shown:
        name = f"{name}, as given" if name in made else name
        made[name] = {counts: shown}
    about = {recipe.__name__: (recipe.__doc__ or "").partition("\n")[0] for recipe in recipes}
    return {
        "schedules": {
            name: {f"{r},{m}": _entry(held) for (r, m), held in table.items()} for name, table in made.items()
        },
        "points": points,
        "about": about,
        "colours": [COLOURS[op] for op in _OPS],
        "names": [NAMES[op] for op in _OPS],
        "extra": [(stage, *more) for stage, more in costs.extra.items()],
        "kept": list(memory.extra.items()),
        "presets": presets(),
        "start": _first_settings(name, counts, costs, memory),
    }


def presets() -> list[tuple[str, dict[str, float], str]]:
    """The presets of the page's costs: name, values of the sliders, and the source of the values.

    In the measured preset, F and I include their communication in series, so that they and the pair are times of
    the same work. The forward and the backward for the input exchange equal amounts with the experts, and W
    exchanges nothing; so each of the two gets half of the time that the serial pair takes beyond computing.
    """
    communicated = (_SERIAL - sum(_COMPUTED.values())) / 2
    f, i, w = _COMPUTED["F"] + communicated, _COMPUTED["I"] + communicated, _COMPUTED["W"]
    measured = {"F": 1.0, "I": round(i / f, 3), "W": round(w / f, 3), "pair": round(_OVERLAPPED / _SERIAL, 3)}
    how = (
        f"From DeepSeek-V3's published trace: F, I, W compute {_COMPUTED['F']}, {_COMPUTED['I']}, "
        f"{_COMPUTED['W']} ms; in series the pair takes {_SERIAL:g} ms, so F and I each communicate for "
        f"{communicated:.1f} ms more; overlapped it takes {_OVERLAPPED:g} ms. In units of F = {f:.1f} ms."
    )
    even = {"F": 1.0, "I": 1.0, "W": 1.0}
    return [
        ("all equal", even | {"pair": 1.0}, "F = I = W, and a pair gains nothing."),
        ("pairs gain a quarter", even | {"pair": 0.75}, "F = I = W, and a pair takes 3/4 of F + I + W."),
        ("as measured for DeepSeek-V3", measured, how),
    ]


def _first_settings(
    name: str, counts: tuple[int, int], costs: CostModel, memory: MemoryModel
) -> dict[str, Any]:
    together = costs.F + costs.I + costs.W
    sizes = {name: size for name, size in dataclasses.asdict(memory).items() if name != "extra"}
    return {
        "schedule": name,
        "ranks": counts[0],
        "microbatches": counts[1],
        "F": costs.F,
        "I": costs.I,
        "W": costs.W,
        "pair": costs.FB / together if together else 1.0,
        "send": costs.send,
        "inside": costs.send if costs.send_inside is None else costs.send_inside,
        "node": 1 if costs.send_inside is None else costs.ranks_per_node,
        "blocking": costs.blocking,
        "head": 0.0,
        "jitter": 0.0,
        "beside": "",
        **sizes,
    }


def _points(num_ranks: int, num_microbatches: int) -> list[tuple[int, int]]:
    """The counts that the page holds: a grid, with a row and a column for the counts of the shown schedule."""
    shown = num_ranks, num_microbatches
    grid = itertools.product({*RANKS, num_ranks}, {*MICROBATCHES, num_microbatches})
    return sorted(point for point in grid if _is_within_grid(point) or point == shown)


def _is_within_grid(point: tuple[int, int]) -> bool:
    return point[0] <= RANKS[-1] and point[1] <= MICROBATCHES[-1]


def _make_or_refusal(recipe: Recipe, num_ranks: int, num_microbatches: int) -> Schedule | str:
    try:
        return recipe(num_ranks, num_microbatches)
    except ValueError as refusal:
        return str(refusal)


def _entry(made: Schedule | str) -> Mapping[str, Any] | str:
    if isinstance(made, str):
        return made
    orders = [encode(order, held) for order, held in zip(made.orders, made.placement.stages_on, strict=True)]
    return {"pipes": made.placement.pipes, "orders": orders}


def encode(order: Iterable[Slot], held: tuple[int, ...]) -> str:
    """An order as text: a letter for each action, ``+`` between the two of a pair.

    The letter tells op and local stage: F B I W of the rank's first stage are A B C D, of its second
    E F G H. A number after the letter is the microbatch; without one, it is the letter's previous microbatch + 1,
    or 0 at first.

    >>> from dualpipe_jax.schedule import Action
    >>> encode(((Action(2, Op.F, 0),), (Action(2, Op.F, 1), Action(5, Op.B, 3))), (2, 5))
    'AA+F3'
    """
    letters = {
        (stage, op): chr(65 + 4 * local + number)
        for local, stage in enumerate(held)
        for number, op in enumerate(_OPS)
    }
    following = dict.fromkeys(letters.values(), 0)
    text = []
    for slot in order:
        for place, (stage, op, microbatch) in enumerate(slot):
            letter = letters[stage, op]
            as_expected = microbatch == following[letter]
            text.append(("+" if place else "") + (letter if as_expected else f"{letter}{microbatch}"))
            following[letter] = microbatch + 1
    return "".join(text)
