"""`dualpipe plan`: which schedule, microbatches and memory policy make a step shortest on devices that are not here."""

import dataclasses
import heapq
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from tyro.conf import arg

from dualpipe_jax.command.answers import Answers
from dualpipe_jax.command.dryrun import remedies
from dualpipe_jax.command.options import CommandError, Count, Output, check_files
from dualpipe_jax.command.output import say_written, show, show_json
from dualpipe_jax.command.overlap import RatesFile, TargetName
from dualpipe_jax.command.planning import Search
from dualpipe_jax.pods import planner
from dualpipe_jax.pods.bounds import Excluded
from dualpipe_jax.pods.cache import Cache, default_folder
from dualpipe_jax.pods.plain import plain
from dualpipe_jax.pods.plan import Plan as Chosen
from dualpipe_jax.pods.planner import Choice, Wanted, layout_of
from dualpipe_jax.pods.results import Answer
from dualpipe_jax.present.numbers import gib, how_many, in_runs, percent
from dualpipe_jax.present.table import Table
from dualpipe_jax.step_options import AboveZero, Remat, Shard, StepOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedOptions(Chosen):
    """What is not chosen: the program, and whatever would change what it learns."""

    HIDDEN: ClassVar = (
        "schedule", "layers_per_stage", "stage_layers", "stages_per_rank", "max_stash", "pp", "ep", "dp",
        "microbatches", "microbatch_size", "remat", "dispatch", "shard", "overlap",
    )  # fmt: skip

    capacity_factor: AboveZero | None = None
    """Room in multiples of an even load, beyond which tokens are dropped: of each expert with capacity, of each
    pair of devices with dropless. If left out, capacity has 2, and dropless room for all tokens; but where that
    fits in no plan, or takes twice as long as bounded, both have 1.25, and the page says so."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Choose what makes a step shortest within a device's memory, by the compiler's model: schedule, microbatches,
    what is computed again, stashed and shared out. Units of work are compiled once for each case and kept, the
    case with the least bound first, and none whose bound is no shorter than the best step so far. Interrupted, the
    same command goes on where it was. Exit status 1 where nothing fits.

    dualpipe plan --target v5p:8x8x16 --program v3 --pp 16 --sequence 2048 --tokens-per-step 8388608 -o plan.json
    """

    COMMON: ClassVar = (
        "target", "program", "pp", "sequence", "tokens-per-step", "per-device", "schedule", "remat", "dispatch",
        "capacity-factor", "cpu-minutes", "output", "json",
    )  # fmt: skip

    target: TargetName
    """The devices, all of which are used: v5e:4x4 or v5p:8x8x16, likewise v4, v6e and tpu7x, or
    h100:NODESxGPUS, likewise a100, h200, b200 and gb200; or cpu:N, which runs and times the units on this machine."""
    tokens_per_step: Count = None
    """Number of tokens of a step, from which the number of microbatches follows. If left out, four
    microbatches for each rank, of one sequence for each device."""
    pp: tuple[int, ...] = ()
    """Numbers of pipeline ranks to choose from. The experts take the rest of the devices: ep is their number
    divided by pp and dp. If left out, all up to 32 that divide the devices."""
    dp: tuple[int, ...] = (1,)
    """Numbers of replicas of the whole to choose from. Each has its part of the devices for pipeline and
    experts."""
    per_device: tuple[int, ...] = (1, 2)
    """Numbers of sequences of a microbatch on each device to choose from."""
    schedule: tuple[str, ...] = planner.SCHEDULES
    """Schedules to choose from."""
    stages_per_rank: tuple[int, ...] = (2, 4)
    """Numbers of stages of each rank to choose from, for interleaved schedules. Units of each number are compiled
    on their own."""
    remat: tuple[Remat, ...] = planner.REMATS
    """What layers compute again in the backward, to choose from. See `dualpipe dryrun`."""
    dispatch: tuple[Literal["dropless", "capacity"], ...] = planner.DISPATCHES
    """How tokens reach experts, to choose from, if the program sends any. The two do not learn the same:
    capacity drops the tokens that exceed its room."""
    max_stash: tuple[int, ...] = tuple(most for most in planner.STASHES if most is not None)
    """Limits to choose from of how many microbatches of a rank may wait for their weights' gradients. No
    limit is tried, too."""
    shard: tuple[Shard, ...] = planner.SHARDS
    """What is shared out over devices that would each hold the same, to choose from: nothing, the optimizer's
    state (ZeRO-1), or the parameters, too (ZeRO-3). Units are compiled with the least that any plan of a case
    needs, and again with more only where a plan that needs more could be shorter."""
    move_layers: int = 1
    """How many more cases to compile, at most, with layers moved between stages. A case is compiled where the
    units of the first and the last stage promise a step that is 1 % shorter than the best so far. 0 moves no
    layers."""
    cpu_minutes: Annotated[float, arg(metavar="MINUTES")] = 40.0
    """CPU minutes for counting and compiling. The first case is always compiled, another one if it will end
    within them: it is expected to take as long as any so far, and longer if its stages are. 0: no limit."""
    whole: bool = False
    """Compile every case of which a plan fits, and exclude none by its bound. Takes hours for large models."""
    best: int = 10
    """Number of plans to print, and of plans that do not fit."""
    cache: Annotated[Path | None, arg(metavar="DIR")] = None
    """Folder in which compiled costs are kept for the next time. If left out, ~/.cache/dualpipe."""
    output: Output = None
    """JSON file to write the best plan to. `dualpipe dryrun`, `dualpipe overlap` and scripts/train read it
    with --plan."""
    rates_file: RatesFile = None
    """File of rates that `dualpipe probe` measured. Times follow from these instead of the compiler's
    figures."""
    json: bool = False
    """Print JSON, for programs."""
    given: Annotated[FixedOptions, arg(name="program")] = dataclasses.field(default_factory=FixedOptions)

    def run(self) -> int:
        if self.output is not None:
            check_files(self.output)
        if self.cache is not None and self.cache.exists() and not self.cache.is_dir():
            raise CommandError(f"--cache {self.cache}: is no folder")
        cache = Cache(self.cache or default_folder())
        # Now, and not when the first answer is there, which may take minutes.
        cache.folder.mkdir(parents=True, exist_ok=True)
        if not os.access(cache.folder, os.W_OK):
            raise CommandError(f"--cache {cache.folder}: may not be written; give the name of another folder")
        search = Search(Answers(self.target, cache, self.rates_file), self.cpu_minutes or None)
        try:
            search.explore(self.wanted, whole=self.whole)
        except KeyboardInterrupt:
            self.tell(search)
            left = (
                f"cases left: {search.left}; what was compiled is kept, the same command goes on from there"
            )
            print(f"interrupted: {left}", file=sys.stderr)
            return 130
        return self.tell(search, None if planner.ranked(search.choices) else search.nearest())

    @property
    def wanted(self) -> Wanted:
        """The plans to choose from.

        Raises:
          ValueError: a number is too small, or an option cannot be read.
        """
        for name in ("dp", "per_device", "schedule", "remat", "dispatch", "shard"):
            if not getattr(self, name):
                raise CommandError(f"--{name.replace('_', '-')}: give at least one to choose from")
        numbers = {"--pp": self.pp, "--dp": self.dp, "--per-device": self.per_device, "--best": (self.best,)}
        numbers["--stages-per-rank"] = self.stages_per_rank
        numbers["--tokens-per-step"] = () if self.tokens_per_step is None else (self.tokens_per_step,)
        for flag, values in numbers.items():
            if min(values, default=1) < 1:
                raise CommandError(f"{flag} {min(values)}: must be at least 1")
        for flag, value in (("max-stash", min(self.max_stash, default=0)), ("move-layers", self.move_layers)):
            if value < 0:
                raise CommandError(f"--{flag} {value}: must be at least 0")
        if not self.cpu_minutes >= 0:  # "not", for NaN is no limit
            raise CommandError(f"--cpu-minutes {self.cpu_minutes:g}: must be at least 0")
        fields = {field.name: getattr(self.given, field.name) for field in dataclasses.fields(Chosen)}
        base = Chosen(**fields)
        base.check_each()
        return Wanted(
            base=base,
            tokens=self.tokens_per_step,
            pp=self.pp,
            dp=self.dp,
            per_device=self.per_device,
            schedules=self.schedule,
            remats=self.remat,
            dispatches=self.dispatch,
            stashes=(None, *self.max_stash),
            shards=self.shard,
            stages_per_rank=self.stages_per_rank,
            moves=self.move_layers,
        )

    def tell(self, search: Search, nearest: Answer | None = None) -> int:
        """Print what was found, and return the exit status.

        ``nearest`` is the plan that needs least memory of those that do not fit.
        """
        plans, refused = planner.ranked(search.choices), planner.nearest(search.choices)
        if self.output is not None and plans:
            self.output.write_text(json.dumps(as_file(plans[0], self.target), indent=2) + "\n")
            say_written(self.output)
        if self.json:
            found = {"plans": list(map(row, plans)), "refused": list(map(row, refused))}
            found |= {"excluded": list(map(plain, search.excluded))}
            show_json(
                {"target": self.target} | found | {"nearest": None if nearest is None else plain(nearest)}
            )
            return 0 if plans else 1
        fit = f"{how_many(len(plans), 'plan')} {'fits' if len(plans) == 1 else 'fit'}"
        title = f"{self.given.model} on {self.target}: {fit}"
        parts: list[str | Table] = [title]
        if search.answers.dispatches:
            parts += [rooms(self.dispatch, search.capacity_factor)]
            if search.unbounded:
                parts += [f"without a bound dropless {search.unbounded}, where it needs least"]
        if len(search.answers.sizes) > 1:
            sizes = ", ".join(map(str, sorted(search.answers.sizes)))
            parts += [
                f"these are different models, of {sizes} parameters: the program's layers follow its stages"
            ]
        if plans:
            timed = self.target.lower().startswith("cpu:")
            source = "units that were timed" if timed else "the compiler's model"
            parts += [f"a prediction of {source}, no measurement; see `dualpipe dryrun` for its parts\n"]
            parts += [table(plans[: self.best])]
        if search.excluded:
            parts += ["\n" + excluded_words(search.excluded) + "\n", exclusions(search.excluded[: self.best])]
            if not plans:
                more = "these may: --cpu-minutes says how long to go on, 0 is until all are compiled"
                parts += [f"\nno plan that was compiled fits, but {more}"]
        if refused:
            shown = nearest_first(refused, self.best)
            some = "" if len(shown) == len(refused) else f"; {len(shown)} of {len(refused)}, --json has all"
            parts += [f"\nwhat cannot be had, of each kind what needs least{some}\n", refusals(shown)]
        if nearest is not None and nearest.memory is not None:
            parts += [f"\n{_words(nearest)}", *remedies(nearest.memory)]
        if self.output is not None and plans:
            parts += [f"\nthe best is written to {self.output}"]
        show(*parts)
        return 0 if plans else 1


def rooms(dispatches: Sequence[Literal["dropless", "capacity"]], factor: float | None) -> str:
    """The load beyond which tokens are dropped, for each way of dispatch, in words."""
    known = {dispatch: StepOptions(dispatch=dispatch, capacity_factor=factor).room for dispatch in dispatches}
    each = ", ".join(f"{name} {'for all' if room is None else f'{room:g}'}" for name, room in known.items())
    return f"room at the experts, in even loads (--capacity-factor): {each}"


def _words(nearest: Answer) -> str:
    plan, memory = nearest.program, nearest.memory
    assert plan is not None and memory is not None
    stages = "" if plan.stages_per_rank is None else f" --stages-per-rank {plan.stages_per_rank}"
    how = f"--schedule {plan.schedule}{stages} --pp {plan.pp} --ep {plan.ep} --microbatch-size {plan.batch}"
    how += f" --remat {plan.remat}"
    stash = "" if plan.max_stash is None else f" --max-stash {plan.max_stash}"
    return f"{how} --shard {plan.shard}{stash} needs least, {gib(memory.needed)} GiB"


def row(choice: Choice) -> dict[str, Any]:
    """A plan as JSON for programs: its prediction, and all of its options."""
    found = {name: getattr(choice, name) for name in ("mfu", "seconds", "memory", "refused")}
    return found | plain(choice.plan)


def as_file(choice: Choice, target: str) -> dict[str, Any]:
    """The content of the file that --plan reads: it takes the entry "plan", the rest is for people."""
    predicted = {name: getattr(choice, name) for name in ("mfu", "seconds", "memory")}
    return {"plan": plain(choice.plan), "target": target, "predicted": predicted}


_COLUMNS: dict[str, Callable[[Choice | Excluded], str]] = {
    "schedule": lambda found: found.plan.schedule_in_words,
    "pp x ep": lambda found: layout_of(found.plan),
    "microbatches": lambda found: f"{found.plan.num_microbatches} of {found.plan.batch}",
    "remat": lambda found: found.plan.remat,
    "dispatch": lambda found: found.plan.dispatch,
}
"""The columns that all tables of plans share."""


def table(choices: Sequence[Choice]) -> Table:
    """A table of plans, the best first; it has a column for the layers of stages if some were moved."""
    moved = any(choice.plan.stage_layers for choice in choices)
    layout = "pp x ep" if all(choice.plan.dp == 1 for choice in choices) else "(dp x) pp x ep"
    columns: dict[str, Callable[[Choice], str]] = {
        "schedule": _COLUMNS["schedule"],
        "step, s": lambda choice: f"{choice.seconds:.4g}",
        "MFU": lambda choice: percent(choice.mfu),
        layout: _COLUMNS["pp x ep"],
        **({"layers": lambda choice: in_runs(choice.plan.stage_layers) or "own"} if moved else {}),
        "microbatches": _COLUMNS["microbatches"],
        "remat": _COLUMNS["remat"],
        "stash": lambda choice: "" if choice.plan.max_stash is None else str(choice.plan.max_stash),
        "shared out": lambda choice: choice.plan.shard,
        "dispatch": _COLUMNS["dispatch"],
        "GiB": lambda choice: gib(choice.memory or 0),
    }
    return Table.of(columns, choices, best=0)


def nearest_first(refused: Sequence[Choice], most: int) -> list[Choice]:
    """The ``most`` refused plans that need least memory, then one plan for each reason other than memory."""
    sized = (choice for choice in refused if choice.memory is not None)
    others = {choice.refused: choice for choice in refused if choice.memory is None}
    return [*heapq.nsmallest(most, sized, key=lambda choice: choice.memory or 0.0), *others.values()]


def refusals(choices: Sequence[Choice]) -> Table:
    """A table of refused plans, and why."""
    return Table.of({**_COLUMNS, "why": lambda choice: choice.refused}, choices, left=(0, 5))


def excluded_words(excluded: Sequence[Excluded]) -> str:
    """How many cases were not compiled, by reason, with the least bound of each, and how bounds were found."""
    by_why: dict[str, list[float | None]] = {}
    for found in excluded:
        by_why.setdefault(found.why, []).append(found.seconds)
    least = {why: min((s for s in seconds if s is not None), default=None) for why, seconds in by_why.items()}
    counts = ", ".join(
        f"{len(seconds)} {why}" + ("" if least[why] is None else f", from {least[why]:.4g} s on")
        for why, seconds in by_why.items()
    )
    if all(seconds is None for seconds in least.values()):
        return f"not timed: {counts}"
    nearest = "as near to their products' time as the nearest that was compiled"
    return f"not compiled, by what steps take at least with bubbles and units {nearest}: {counts}"


def exclusions(excluded: Sequence[Excluded]) -> Table:
    """A table of cases that were not compiled, with their bounds."""
    columns: dict[str, Callable[[Excluded], str]] = {
        "schedule": _COLUMNS["schedule"],
        "at least, s": lambda found: "" if found.seconds is None else f"{found.seconds:.4g}",
        # The schedule stays in front.
        **_COLUMNS,
        "why": lambda found: found.why,
    }
    return Table.of(columns, excluded, left=(0, 6))
