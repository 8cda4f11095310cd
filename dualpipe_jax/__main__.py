"""The `dualpipe` command: ``dualpipe`` or ``python -m dualpipe_jax``.

It starts fast: help and version load no NumPy, and a subcommand's module is imported only when that
subcommand runs.
"""

import contextlib
import dataclasses
import difflib
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from dualpipe_jax import __version__

COMMANDS = {
    "show": "Draw one schedule to time, or write it for other tools.",
    "compare": "Compare schedules on the same ranks, microbatches and costs.",
    "choose": "Rank the schedules that fit the memory, and say why the rest are refused.",
    "search": "Search for a schedule for these costs in this memory.",
    "check": "Check a schedule in a file.",
    "diff": "Say where two schedules part on each rank, in order and in time.",
    "replay": "Say where a measured step and its simulation differ: by rank, by unit and by slot.",
    "overlap": "Compile an overlapped pair for devices that are not here, and read what hides behind what.",
    "dryrun": "Memory of each device, time of a step and share of the peak, for devices that are not here.",
    "plan": "Choose schedule, microbatches and memory policy for devices that are not here: the shortest step first.",
    "probe": "Try what works on the devices of this machine, and measure how fast they are.",
    "balance": "Place experts on devices by their loads, and say what that gains and moves.",
}
"""The summary of each subcommand. Each subcommand is a class with a method ``run``, in a module of its own:
``show`` is ``dualpipe_jax.command.show.Show``."""


SILENT = ("show", "compare", "check", "diff", "replay")
"""The subcommands that show no progress of their own."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments (those of ``sys.argv`` if None).

    Returns the exit status: 0; 1 for an invalid schedule or where nothing fits; 2 for what cannot be done;
    130 after Ctrl-C; 141 where the reader of the output has closed it. Exits with 2 where the options cannot
    be read.
    """
    given = sys.argv[1:] if arguments is None else [*arguments]
    try:
        status = _command(given)
    except BrokenPipeError:  # the reader has seen enough
        status = 141
    except OSError as error:
        status = _fail(f"{error.filename}: {error.strerror}" if error.filename else error, 2)
    except SystemExit as ended:  # after help, or options that cannot be read
        sys.exit(_flushed(ended.code))
    return _flushed(status)


def _flushed(status: Any) -> Any:
    """The exit status; another one where what was printed cannot be written, to a closed pipe or a full disk."""
    try:
        sys.stdout.flush()
    except OSError as error:
        from dualpipe_jax.command.output import discard_output

        discard_output()
        return 141 if isinstance(error, BrokenPipeError) else status or _fail(error, 2)
    return status


def _command(given: list[str]) -> int:
    if given == ["--version"]:
        print(f"dualpipe {__version__}")
        return 0
    if given and not given[0].startswith("-") and given[0] not in COMMANDS:
        near = difflib.get_close_matches(given[0], COMMANDS, 1)
        names = f"did you mean {near[0]}?" if near else f"they are {', '.join(COMMANDS)}."
        return _fail(f"dualpipe has no command {given[0]!r}; {names} dualpipe --help says what each does.", 2)
    if not given or given[0] not in COMMANDS:
        _print_help_or_error(given)
    return _run(options_of(given[0]), given[0], given[1:])


def options_of(name: str) -> Callable[..., Any]:
    """The class of a subcommand's options, with its ``run``."""
    module = importlib.import_module(f"dualpipe_jax.command.{name}")
    own = (value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__)
    (found,) = (value for value in own if hasattr(value, "run"))
    return found


def _print_help_or_error(given: list[str]) -> None:
    """Print the help, or what is wrong with the arguments; always exits."""
    import tyro

    from dualpipe_jax.command.line import wide_enough, wrapped

    said = wrapped(
        "Pipeline schedules: drawn, compared, chosen, searched, checked, and compiled for pods; measured steps "
        "replayed, devices probed, experts placed. `dualpipe NAME --help` says more of each, `dualpipe --version` "
        "which version this is."
    )
    classes: dict[str, Any] = {
        name: dataclasses.make_dataclass(name, [], namespace={"__doc__": summary})
        for name, summary in COMMANDS.items()
    }
    with wide_enough():
        tyro.extras.subcommand_cli_from_dict(classes, prog="dualpipe", description=said, args=given)


def _run(options_class: Callable[..., Any], name: str, given: list[str]) -> int:
    from dualpipe_jax.command.line import read
    from dualpipe_jax.command.options import ChildDied, NothingFits
    from dualpipe_jax.command.output import print_if_long
    from dualpipe_jax.schedule import ScheduleError

    try:
        options = read(options_class, f"dualpipe {name}", given)
        with print_if_long(f"dualpipe {name}: at work") if name in SILENT else contextlib.nullcontext():
            return options.run()
    except (ScheduleError, NothingFits) as error:
        return _fail(error, 1)
    except (ValueError, ModuleNotFoundError, ChildDied) as error:
        return _fail(error, 2)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)


def _fail(error: object, status: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
