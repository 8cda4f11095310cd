"""Where a schedule comes from: a name and counts, or a file in any format that holds one."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from dualpipe_jax.command.options import (
    CommandError,
    Shape,
    check_size,
    read_text,
    with_shape,
    with_stash_limit,
)
from dualpipe_jax.command.share_files import PartialShare, share_in_text
from dualpipe_jax.schedule import Placement, Schedule, ScheduleError, parse_grid, validate
from dualpipe_jax.schedule.formats.json_text import from_json
from dualpipe_jax.schedule.names import SCHEDULES, find, flag_of, is_known, make, takes


def is_file(name: str) -> bool:
    """Whether a name is that of a file, or - for standard input; the name of a known schedule is not a file's."""
    return name == "-" or (not is_known(name) and Path(name).is_file())


def schedule_of(
    name: str, ranks: int | None, microbatches: int | None, shape: Shape, pipes: str | None = None
) -> tuple[Schedule, PartialShare]:
    """The schedule with a name or in a file, with its stashes limited by ``shape``; and the costs that the file gives.

    Raises:
      CommandError: counts are missing, too large, or given with a file.
      ValueError: there is no schedule of that name, or not with these counts, or the file holds none.
    """
    if is_file(name):
        if ranks or microbatches:
            raise CommandError(f"{name} is a file and says its own counts; drop --ranks and --microbatches")
        if shape.given():
            raise CommandError(f"{name} is a file, cut as it is; drop --stages-per-rank and --waves")
        schedule, given = load(name, pipes)
        return with_stash_limit(schedule, shape), given
    if pipes is not None:
        raise CommandError(f"--pipes: {find(name).__name__} says its own; drop it")
    if ranks is None or microbatches is None:
        raise CommandError(f"show {find(name).__name__}: add --ranks and --microbatches")
    check_size(ranks, microbatches, shape)
    return with_stash_limit(make(name, ranks, microbatches, shape.given()), shape), PartialShare()


def schedules_of(
    names: Sequence[str], ranks: int | None, microbatches: int | None, shape: Shape, pipes: str | None = None
) -> tuple[list[Schedule], dict[str, str], PartialShare]:
    """The schedules named and those in files (all schedules, if none is named), and the reason for each refused one.

    The third result is the costs that the first file gives. A schedule of a file is called by the file's name. Counts
    that are left out are those of the first file.

    Raises:
      CommandError: counts are missing or too large, or no schedule takes an option of ``shape``.
      ValueError: there is no schedule of a name, or a file holds none.
    """
    loaded = {name: load(name, pipes) for name in names if is_file(name)}
    files = {
        name: dataclasses.replace(with_stash_limit(schedule, shape), name=Path(name).name)
        for name, (schedule, _) in loaded.items()
    }
    if pipes is not None and not files:
        raise CommandError("--pipes: schedules by name say their own; drop it")
    recipes = [find(name) for name in names or SCHEDULES if name not in files]
    for choice in shape.given():
        if not any(takes(recipe, choice) for recipe in recipes):
            raise CommandError(f"{flag_of(choice)}: none of these schedules takes it; drop it")
    first = next(iter(files.values()), None)
    if first is not None:
        ranks = first.num_ranks if ranks is None else ranks
        microbatches = first.num_microbatches if microbatches is None else microbatches
    if ranks is None or microbatches is None:
        raise CommandError("add --ranks and --microbatches, or name a file that says its own")
    check_size(ranks, microbatches, shape, len(names or SCHEDULES))
    made: list[Schedule] = []
    refused: dict[str, str] = {}
    for name in names or SCHEDULES:
        if name in files:
            there = files[name].num_ranks, files[name].num_microbatches
            if there == (ranks, microbatches):
                made.append(files[name])
            else:
                refused[name] = f"has {there[0]} ranks and {there[1]} microbatches"
            continue
        recipe = find(name)
        try:
            made.append(with_shape(recipe, shape)(ranks, microbatches))
        except ValueError as error:
            refused[recipe.__name__] = str(error).removeprefix(f"{recipe.__name__}: ")
    given = next((given for _, given in loaded.values()), PartialShare())
    return list(dict.fromkeys(made)), refused, given


def load(name: str, pipes: str | None = None) -> tuple[Schedule, PartialShare]:
    """The valid schedule in a file, and the costs that the file gives.

    Raises:
      CommandError: the file is not text, or neither it nor ``pipes`` says on which ranks stages are placed.
      ScheduleError: it holds no schedule, or an invalid one; says what is wrong.
    """
    placement = None if pipes is None else parse_pipes(pipes)
    text = read_text(name)
    try:
        schedule = validate(read(text, placement, is_csv=name.lower().endswith(".csv")))
    except (CommandError, ScheduleError):
        raise
    except ValueError as error:
        raise ScheduleError(f"{name}: {error}") from None
    return schedule, share_in_text(text, name)


def read(text: str, placement: Placement | None, is_csv: bool = False) -> Schedule:
    """The schedule of a text in any format that holds one, not validated; ``is_csv``: the text is CSV for sure.

    Raises:
      CommandError: the text does not say on which ranks stages are placed, and no placement is given.
      ValueError: it cannot be read.
    """
    if text.lstrip().startswith(("{", "[")):
        schedule = from_json(text)
        if placement not in (None, schedule.placement):
            raise ValueError(f"the file says {schedule.placement}, --pipes {placement}; drop the option")
        return schedule
    if is_csv or _is_csv(text):
        from dualpipe_jax.schedule.formats.torch_csv import from_torch_csv

        return from_torch_csv(text, placement)
    if placement is None and not re.match(r"\s*#.*pipes\s*\(", text):
        raise CommandError('where do the stages live? Add --pipes, such as --pipes "(0 1 2 3)"')
    return parse_grid(text, placement)


def parse_pipes(text: str) -> Placement:
    """Read the rank of each stage: (0 1 2 3) (3 2 1 0), commas or spaces."""
    pipes = [re.findall(r"\d+", pipe) for pipe in re.findall(r"\(([\d\s,]*)\)", text)]
    if not pipes or re.sub(r"\([\d\s,]*\)|[\s,]", "", text):
        raise CommandError(f'--pipes {text!r}: expected ranks in brackets, such as "(0 1 2 3) (3 2 1 0)"')
    return Placement(tuple(tuple(map(int, pipe)) for pipe in pipes))


def _is_csv(text: str) -> bool:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return any("," in line or ";" in line for line in lines)
