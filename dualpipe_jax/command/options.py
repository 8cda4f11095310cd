"""Options that several subcommands share, and how a person's name of a schedule finds its recipe."""

import dataclasses
import difflib
import inspect
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import tyro

from dualpipe_jax.schedule import ALL_SCHEDULES, CostModel, MemoryModel, Schedule

SCHEDULES: dict[str, Callable[..., Schedule]] = {recipe.__name__: recipe for recipe in ALL_SCHEDULES}

_ALSO_CALLED = {"1f1b": "one_f_one_b", "zb1p": "zb_h1", "zb2p": "zb_h2", "wave": "hanayo"}

Number = Annotated[float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint="")]
Count = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")]
Output = Annotated[Path | None, tyro.conf.arg(metavar="FILE", aliases=["-o"], help_behavior_hint="")]


class CommandError(ValueError):
    """The command was asked for what it cannot do; says what, and what would do."""


class NothingFits(Exception):
    """The command was asked rightly, and nothing answers."""


@dataclasses.dataclass(frozen=True)
class Costs:
    """Time that a whole rank's share of the model takes for one microbatch, in any unit. Where a rank holds
    k stages of a pipe, each takes 1/k of it."""

    F: float = 1.0
    """Forward."""
    I: float = 1.0
    """Backward for the input."""
    W: float = 1.0
    """Backward for the weights."""
    FB: Number = None
    """Overlapped pair of a forward and a full backward; F + I + W, no gain, unless given."""
    send: float = 0.0
    """Transfer to another rank."""
    blocking: bool = False
    """A transfer keeps its sender too from its next work."""
    first: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """More F, I, W at the model's first stage: the embedding."""
    last: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """More F, I, W at the model's last stage: the head."""
    costs_file: Annotated[Path | None, tyro.conf.arg(name="costs", metavar="FILE", help_behavior_hint="")] = (
        None
    )
    """File to take them from, such as a profiled run's costs.json: {"F": 1, "I": 1, ...}. What is given on the
    line wins."""

    def model(self) -> CostModel:
        """The same as the simulator reads it.

        Raises:
          CommandError: a file that holds no costs.
        """
        if self.costs_file is not None:
            return self.filled(read_costs(self.costs_file)).model()
        extra = {stage: more for stage, more in ((0, self.first), (-1, self.last)) if any(more)}
        return CostModel(self.F, self.I, self.W, self.FB, self.send, extra, self.blocking)  # type: ignore[arg-type]

    def filled(self, found: "Costs") -> "Costs":
        """These costs, and where they are the defaults those of another."""
        fields = [field.name for field in dataclasses.fields(self) if field.name != "costs_file"]
        own = {name: getattr(self, name) for name in fields if getattr(self, name) != getattr(Costs, name)}
        return dataclasses.replace(found, **own)


def read_costs(path: Path) -> Costs:
    """Costs from a JSON file. Keys that are none of ``Costs`` say where the others are from, and are left out.

    Raises:
      CommandError: it cannot be read, or what should be a number, or three of them, is none.
    """
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CommandError(f"--costs {path}: cannot read it: {error}") from None
    found = (
        found.get("costs", found) if isinstance(found, dict) else found
    )  # beside rates, as the probe writes them
    needed = ("F", "I", "W")
    if not isinstance(found, dict) or not set(needed) <= found.keys():
        raise CommandError(
            f"--costs {path}: wants an object with {', '.join(needed)}, as a profiled run's costs.json"
        )
    given: dict[str, Any] = {}
    for name in ("F", "I", "W", "FB", "send", "first", "last"):
        if name not in found:
            continue
        value, count = found[name], 3 if name in ("first", "last") else 1
        numbers = value if isinstance(value, list) else [value]
        if len(numbers) != count or not all(type(number) in (int, float) for number in numbers):
            raise CommandError(
                f"--costs {path}: {name} is {value!r}, must be {'three numbers' if count == 3 else 'a number'}"
            )
        given[name] = tuple(map(float, numbers)) if count == 3 else float(value)
    return Costs(**given, blocking=found.get("blocking") is True)


@dataclasses.dataclass(frozen=True)
class Memory:
    """What a whole rank's share of the model keeps for one microbatch, in bytes or any unit. Left alone,
    memory is the number of live activations."""

    residual_i: float = 1.0
    """Read by the backward for the input alone: from F to the end of I or B."""
    residual_w: float = 0.0
    """Read by the backward for the weights: from F to the end of W or B."""
    stash: float = 0.0
    """Handed from I to W."""
    boundary: float = 0.0
    """A stage's input (not divided by k): from F to the end of W or B."""
    parameters: float = 0.0
    """Weights, gradient sums and optimizer state of one share, whatever the microbatches."""

    def model(self) -> MemoryModel:
        """The same as the simulator reads it."""
        return MemoryModel(**dataclasses.asdict(self))


@dataclasses.dataclass(frozen=True)
class Shape:
    """For the schedules that can be cut finer."""

    stages_per_rank: Count = None
    """Stages of a rank: interleaved schedules."""
    waves: Count = None
    """Waves: hanayo."""

    def given(self) -> dict[str, int]:
        """Keyword arguments of recipes, as far as they were given."""
        named = {"num_stages_per_rank": self.stages_per_rank, "num_waves": self.waves}
        return {name: count for name, count in named.items() if count is not None}


def find(name: str) -> Callable[..., Schedule]:
    """The recipe of a name, however it is spelt: dualpipe_v, DualPipeV, zb-h1, 1f1b.

    Raises:
      CommandError: there is none; says which names are near.
    """
    if not is_known(name):
        spelt = _spellings()
        near = dict.fromkeys(spelt[word] for word in difflib.get_close_matches(_plain(name), spelt, n=3))
        meant = f"did you mean {' or '.join(near)}? There" if near else "there"
        raise CommandError(f"there is no schedule {name!r}; {meant} are {', '.join(SCHEDULES)}")
    return SCHEDULES[_spellings()[_plain(name)]]


def is_known(name: str) -> bool:
    """Whether ``find`` finds it."""
    return _plain(name) in _spellings()


def make(name: str, num_ranks: int, num_microbatches: int, shape: Shape) -> Schedule:
    """The schedule that the options name.

    Raises:
      ValueError: there is none of that name, or not with these counts.
    """
    recipe = find(name)
    taken = _taken(recipe, shape)
    for option in shape.given().keys() - taken.keys():
        flag = "--" + option.removeprefix("num_").replace("_", "-")
        able = [
            known for known, recipe in SCHEDULES.items() if option in inspect.signature(recipe).parameters
        ]
        raise CommandError(f"{recipe.__name__} takes no {flag}; {', '.join(able) or 'no schedule'} can")
    return recipe(num_ranks, num_microbatches, **taken)


def make_all(
    names: Iterable[str], num_ranks: int, num_microbatches: int, shape: Shape
) -> tuple[list[Schedule], dict[str, str]]:
    """The schedules named (all, if none is), and for those that do not take the counts the reason."""
    made, refused = [], {}
    for recipe in dict.fromkeys(map(find, names)) or SCHEDULES.values():
        try:
            made.append(recipe(num_ranks, num_microbatches, **_taken(recipe, shape)))
        except ValueError as error:
            refused[recipe.__name__] = str(error).removeprefix(f"{recipe.__name__}: ")
    return made, refused


def _taken(recipe: Callable[..., Schedule], shape: Shape) -> dict[str, Any]:
    known = inspect.signature(recipe).parameters
    return {option: count for option, count in shape.given().items() if option in known}


def _spellings() -> dict[str, str]:
    return {_plain(known): known for known in SCHEDULES} | {
        other: known for other, known in _ALSO_CALLED.items() if known in SCHEDULES
    }


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
