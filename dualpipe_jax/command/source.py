"""Where a schedule comes from: a name and counts, or a file in any format that holds one."""

import re
import sys
from pathlib import Path

from dualpipe_jax.command.options import CommandError, Shape, find, is_known, make
from dualpipe_jax.schedule import Placement, Schedule, ScheduleError, parse_grid, validate
from dualpipe_jax.schedule.formats.json_text import from_json


def is_file(name: str) -> bool:
    """Whether a name is a file's: - is standard input, and a schedule's own name comes first."""
    return name == "-" or (not is_known(name) and Path(name).is_file())


def schedule_of(name: str, ranks: int | None, microbatches: int | None, shape: Shape) -> Schedule:
    """The schedule of that name, or in that file.

    Raises:
      CommandError: counts are missing, or there are too many.
      ValueError: there is none of that name, not with these counts, or the file holds none.
    """
    if is_file(name):
        if ranks or microbatches:
            raise CommandError(f"{name} is a file and says its own counts; drop --ranks and --microbatches")
        return load(name)
    if ranks is None or microbatches is None:
        raise CommandError(f"show {find(name).__name__}: add --ranks and --microbatches")
    return make(name, ranks, microbatches, shape)


def load(name: str, pipes: str | None = None) -> Schedule:
    """The valid schedule in a file.

    Raises:
      CommandError: the file is no text, or does not say where stages live and ``pipes`` does not either.
      ScheduleError: it holds no schedule, or an invalid one; says what is wrong.
    """
    placement = None if pipes is None else parse_pipes(pipes)
    text = read_text(name)
    try:
        return validate(read(text, placement))
    except (CommandError, ScheduleError):
        raise
    except ValueError as error:
        raise ScheduleError(f"{name}: {error}") from None


def read_text(name: str) -> str:
    """What a file holds, without a byte order mark.

    Raises:
      CommandError: nothing, or no text.
    """
    try:
        data = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise CommandError(f"{name}: not a text; give a grid, JSON or PyTorch's CSV") from None
    text = data.removeprefix("\ufeff")
    if not text.strip():
        raise CommandError(f"{name}: empty; give a grid, JSON or PyTorch's CSV")
    return text


def read(text: str, placement: Placement | None) -> Schedule:
    """The schedule of a text in any format that holds one; not validated.

    Raises:
      CommandError: the text does not say where stages live, and no placement is given.
      ValueError: it cannot be read.
    """
    if text.lstrip().startswith("{"):
        return from_json(text)
    if _is_csv(text):
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
