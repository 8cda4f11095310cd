"""The `dualpipe` command: ``dualpipe`` or ``python -m dualpipe_jax``."""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import tyro

from dualpipe_jax import __version__
from dualpipe_jax.command.check import Check
from dualpipe_jax.command.child import Died
from dualpipe_jax.command.choose import Choose
from dualpipe_jax.command.compare import Compare
from dualpipe_jax.command.diff import Diff
from dualpipe_jax.command.dryrun import Dryrun
from dualpipe_jax.command.options import NothingFits
from dualpipe_jax.command.overlap import Overlap
from dualpipe_jax.command.probe import Probe
from dualpipe_jax.command.replay import ReplayStep
from dualpipe_jax.command.search import Search
from dualpipe_jax.command.show import Show
from dualpipe_jax.schedule import ScheduleError

COMMANDS: dict[str, Callable[..., Any]] = {
    "show": Show,
    "compare": Compare,
    "choose": Choose,
    "search": Search,
    "check": Check,
    "diff": Diff,
    "replay": ReplayStep,
    "overlap": Overlap,
    "dryrun": Dryrun,
    "probe": Probe,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line (``sys.argv`` if None).

    Returns the exit status: 1 for an invalid schedule or where nothing fits, 2 for what cannot be done.
    Exits with 2 where the options cannot be read.
    """
    given = sys.argv[1:] if arguments is None else [*arguments]
    if given == ["--version"]:
        print(f"dualpipe {__version__}")
        return 0
    try:
        command = tyro.extras.subcommand_cli_from_dict(
            COMMANDS,
            prog="dualpipe",
            description="Pipeline schedules: drawn, compared, chosen, searched, checked, and compiled for pods; "
            "measured steps replayed, devices probed. `dualpipe --version` says which version this is.",
            args=given,
            config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
        )
        status = command.run()
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader has seen enough; nothing more may be flushed at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ScheduleError, NothingFits) as error:
        return _fail(error, 1)
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else error, 2)
    except (ValueError, ModuleNotFoundError, Died) as error:
        return _fail(error, 2)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)


def _fail(error: object, status: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
