"""Options that several subcommands share."""

import dataclasses
import functools
import importlib.util
import math
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import tyro

from dualpipe_jax.installing import install_command
from dualpipe_jax.schedule import CostModel, MemoryModel, Schedule, limit_stash
from dualpipe_jax.schedule.costs import REL_TOLERANCE
from dualpipe_jax.schedule.names import takes
from dualpipe_jax.schedule.recipes.classic import MOST_ACTIONS

Number = float | None
Count = int | None
EndCosts = tuple[float, float, float] | None
Output = Annotated[Path | None, tyro.conf.arg(metavar="FILE", aliases=["-o"])]
Pipes = Annotated[str | None, tyro.conf.arg(metavar="PIPES")]


class CommandError(ValueError):
    """The command cannot do what was asked; the message says what, and what to ask for instead."""


class NothingFits(Exception):
    """The request is valid, but no schedule or plan satisfies it."""


class ChildDied(RuntimeError):
    """The child process ended without an answer; the message says how, and quotes its last errors.

    Attributes:
      stage: the stage of its work at its end.
      known: the part of the answer that it had by then; empty if nothing.
    """

    def __init__(self, message: str, stage: str, known: dict[str, Any]):
        super().__init__(message)
        self.stage, self.known = stage, known


@dataclasses.dataclass(frozen=True)
class Costs:
    """Time that a whole rank's share of the model takes for one microbatch, in any unit. Where a rank holds
    k stages of a pipe, each takes 1/k of it."""

    costs: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """JSON file with a share's costs, memory and units, as written by `dualpipe show --json`, `dualpipe
    dryrun --write-costs`, `dualpipe probe` and a profiled training run. Options given with it win over the
    file."""
    F: Number = None
    """Time of the forward. If left out, 1."""
    I: Number = None
    """Time of the backward for the input. If left out, 1."""
    W: Number = None
    """Time of the backward for the weights. If left out, 1."""
    FB: Number = None
    """Time of a forward and a whole backward that overlap. If left out, F + I + W: the overlap gains
    nothing."""
    send: Number = None
    """Time of a transfer to another rank. If left out, 0."""
    send_inside: Number = None
    """Time of a transfer to a rank of the same node. If left out, the same as --send."""
    ranks_per_node: Count = None
    """How many ranks share a node: the first so many from rank 0 on, and so forth. If left out, 1."""
    blocking: bool = False
    """The sender of a transfer waits, too, until it is done."""
    no_blocking: bool = False
    """The sender does not wait, whatever the file of costs says."""
    first: EndCosts = None
    """What the model's first stage takes more for F, I and W: the embedding. Negative where it takes less. If
    left out, nothing."""
    last: EndCosts = None
    """What the model's last stage takes more for F, I and W: the head. If left out, nothing."""

    def applied_to(self, base: CostModel | None) -> CostModel:
        """The same as the simulator reads it; what is not given is the base's, if there is one."""
        if self.blocking and self.no_blocking:
            raise CommandError("--blocking and --no-blocking: give one of them, or neither")
        base = base or CostModel()
        given = _given_values(self, ("F", "I", "W", "FB", "send", "send_inside", "ranks_per_node"))
        if self.blocking or self.no_blocking:
            given["blocking"] = self.blocking
        # Close to, for a file's own figures were rounded each by itself.
        if math.isclose(base.FB, base.F + base.I + base.W, rel_tol=REL_TOLERANCE):
            # FB is worked out anew, from the F, I and W that now hold.
            given = {"FB": None} | given
        extra = {**base.extra, **_end_values(self.first, self.last)}
        given["extra"] = {stage: more for stage, more in extra.items() if any(more)}
        return dataclasses.replace(base, **given)


@dataclasses.dataclass(frozen=True)
class Memory:
    """What a whole rank's share of the model keeps for one microbatch, in bytes or any unit. Left alone,
    memory is the number of live activations."""

    residual_i: Number = None
    """What only the backward for the input reads. It is kept from F to the end of I or B. If left out, 1."""
    residual_w: Number = None
    """What the backward for the weights reads. It is kept from F to the end of W or B. If left out, 0."""
    stash: Number = None
    """What I hands on to W. It is kept from I to the end of W. If left out, 0."""
    boundary: Number = None
    """A stage's input, which is not divided by k. It is kept from F to the end of W or B. If left out, 0."""
    parameters: Number = None
    """Weights, sums of gradients and optimizer state of one share. If left out, 0."""
    fixed: Number = None
    """What each rank keeps under every schedule. If left out, 0."""
    first_parameters: Number = None
    """What the model's first stage has more of --parameters: the embedding. If left out, 0."""
    last_parameters: Number = None
    """What the model's last stage has more of --parameters: the head. If left out, 0."""

    def applied_to(self, base: MemoryModel | None) -> MemoryModel:
        """The same as the simulator reads it; what is not given is the base's, if there is one."""
        names = [field.name for field in dataclasses.fields(self) if not field.name.endswith("_parameters")]
        base = base or MemoryModel()
        extra = {**base.extra, **_end_values(self.first_parameters, self.last_parameters)}
        given = _given_values(self, names) | {"extra": {stage: more for stage, more in extra.items() if more}}
        return dataclasses.replace(base, **given)


def _given_values(options: Costs | Memory, names: Iterable[str]) -> dict[str, Any]:
    """The values of those options that were given."""
    return {name: value for name in names if (value := getattr(options, name)) is not None}


def _end_values(first: Any, last: Any) -> dict[int, Any]:
    """The values that were given for the model's first stage, 0, and for its last, -1."""
    return {stage: more for stage, more in ((0, first), (-1, last)) if more is not None}


@dataclasses.dataclass(frozen=True)
class Shape:
    """How finely schedules are cut, where they leave a choice."""

    stages_per_rank: Count = None
    """Stages of each rank, for interleaved schedules."""
    waves: Count = None
    """Number of waves, for hanayo."""
    max_stash: Count = None
    """How many stashes, what I hands on to W, a rank may keep at a time. Backwards beyond that are not split.
    If left out, there is no limit."""

    def __post_init__(self):
        if self.max_stash is not None and self.max_stash < 0:
            raise CommandError(f"--max-stash {self.max_stash}: must not be negative")

    def given(self) -> dict[str, int]:
        """The keyword arguments for recipes that were given."""
        named = {"num_stages_per_rank": self.stages_per_rank, "num_waves": self.waves}
        return {name: count for name, count in named.items() if count is not None}


@dataclasses.dataclass(frozen=True)
class SearchOptions:
    """Options of commands that look for schedules: the counts, and a memory limit."""

    ranks: int
    """Number of pipeline ranks."""
    microbatches: int
    """Number of microbatches of a step, over all pipes."""
    memory_limit: Number = None
    """The most that a rank may keep, in the unit of the memory options. Without these the unit is a
    microbatch's activations in a whole rank's share. If left out, there is no limit."""

    @property
    def limit(self) -> float:
        """The memory limit that was given, infinite if none was.

        Raises:
          CommandError: it is not a positive, finite number.
        """
        if self.memory_limit is None:
            return math.inf
        if not 0 < self.memory_limit < math.inf:
            raise CommandError(
                f"--memory-limit {self.memory_limit}: give a number above 0, or leave it out for no limit"
            )
        return self.memory_limit


def check_jitter(jitter: float) -> None:
    """Check --jitter before schedules are made or searched.

    Raises:
      CommandError: it is negative or not finite.
    """
    if not 0 <= jitter < math.inf:
        raise CommandError(f"--jitter {jitter:g}: give a share of a slot's time, at least 0, such as 0.1")


def check_files(*files: Path, flag: str = "--output") -> None:
    """Check early that files can be written, as far as can be known: computing their content may take minutes.

    Raises:
      CommandError: a file's folder does not exist, the file is a folder, or it may not be written.
      ModuleNotFoundError: one is a picture, and matplotlib is not installed.
    """
    for file in files:
        folder = file.absolute().parent
        if not folder.is_dir():
            raise CommandError(f"{flag} {file}: there is no folder {file.parent}")
        if file.is_dir():
            raise CommandError(f"{flag} {file}: is a folder; give the name of a file")
        if not os.access(file if file.exists() else folder, os.W_OK):
            raise CommandError(f"{flag} {file}: may not be written here; give the name of another file")
        if file.suffix.lower() in (".svg", ".png") and importlib.util.find_spec("matplotlib") is None:
            raise ModuleNotFoundError(
                f"{flag} {file}: a picture needs matplotlib, which is not installed; run: "
                + install_command("matplotlib", extra="plot")
            )


def read_text(name: str) -> str:
    """The text of a file, or of standard input if its name is -, without a byte order mark.

    Raises:
      CommandError: the file is empty, or not text.
    """
    try:
        data = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise CommandError(f"{name}: not a text; give a grid, JSON or PyTorch's CSV") from None
    text = data.removeprefix("\ufeff")
    if not text.strip():
        raise CommandError(f"{name}: empty; give a grid, JSON or PyTorch's CSV")
    return text


def check_size(num_ranks: int, num_microbatches: int, shape: Shape, num_schedules: int = 1) -> None:
    """Refuse more schedules of these counts than can be made in minutes.

    Raises:
      CommandError: they have more than ``MOST_ACTIONS`` forwards and backwards.
    """
    stages = max(shape.stages_per_rank or 1, 2 * (shape.waves or 0))
    actions = 2 * num_ranks * num_microbatches * stages * num_schedules
    if min(num_ranks, num_microbatches, stages) > 0 and actions > MOST_ACTIONS:
        finer = f" x {stages:,} stages of a rank" if stages > 1 else ""
        finer += f" x {num_schedules} schedules" if num_schedules > 1 else ""
        raise CommandError(
            f"{num_ranks:,} ranks x {num_microbatches:,} microbatches{finer} are {actions:,} forwards and backwards; "
            f"at most {MOST_ACTIONS:,} can be handled. The order of a long step repeats: look at fewer microbatches."
        )


def with_stash_limit(schedule: Schedule, shape: Shape) -> Schedule:
    """The schedule with no more stashes than the options allow."""
    return schedule if shape.max_stash is None else limit_stash(schedule, shape.max_stash)


def with_shape(recipe: Callable[..., Schedule], shape: Shape) -> Callable[[int, int], Schedule]:
    """The recipe with the options' stages and waves, where it takes them, and with their limit of stashes."""
    taken = {option: count for option, count in shape.given().items() if takes(recipe, option)}

    @functools.wraps(recipe)
    def made(num_ranks: int, num_microbatches: int, **finer: int) -> Schedule:
        return with_stash_limit(recipe(num_ranks, num_microbatches, **(taken | finer)), shape)

    return made
