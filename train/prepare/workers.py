"""Distribute work to processes, and show its progress."""

import concurrent.futures
import contextlib
import multiprocessing
import os
import platform
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from train.data import DataError

JobRunner = Callable[[Callable[..., Any], Sequence[tuple]], Iterator[tuple[int, Any]]]
"""A function that runs jobs like ``run_jobs``, by workers or by the nodes of a cluster (``train.prepare.cluster``)."""


def run_jobs(
    function: Callable[..., Any], jobs: Sequence[tuple], num_workers: int
) -> Iterator[tuple[int, Any]]:
    """Run all jobs and yield (number, result) of each when it is done; in this process if one worker or job is all.

    Raises:
      DataError: a worker was killed. Errors of ``function`` are raised as they are.
    """
    if num_workers == 1 or len(jobs) < 2:
        yield from ((number, function(*job)) for number, job in enumerate(jobs))
        return
    # Not forked: a fork would inherit locks that threads of this process hold.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(num_workers, context, _end_with_parent) as pool:
        numbers = {pool.submit(function, *job): number for number, job in enumerate(jobs)}
        try:
            for done in concurrent.futures.as_completed(numbers):
                yield numbers[done], done.result()
        except concurrent.futures.process.BrokenProcessPool:
            raise DataError(
                "a worker was killed, by a lack of memory perhaps; the same command goes on, with fewer --workers or "
                "a smaller --shard-mb it takes less"
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def versions() -> dict[str, str]:
    """The versions of Python and of all packages that could make other bytes of the same text."""
    found = {"python": platform.python_version()}
    for name in ("numpy", "tokenizers", "pyarrow", "duckdb"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


class Report:
    """Prints the progress: a bar for each pass on a terminal, elsewhere a line for each tenth of a pass."""

    def __init__(self, console: Console):
        self._console = console

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def track(self, what: str, results: Iterator[tuple[int, Any]], total: int) -> dict[int, Any]:
        """All results by their numbers, with the progress shown while they arrive."""
        found = {}
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with Progress(*columns, console=self._console, disable=not self._console.is_terminal) as progress:
            task = progress.add_task(what, total=total)
            for number, result in results:
                found[number] = result
                progress.advance(task)
                another_tenth = len(found) * 10 // total > (len(found) - 1) * 10 // total
                if another_tenth and not self._console.is_terminal:
                    self.say(f"{what}: {len(found)}/{total}")
        return found


def _end_with_parent() -> None:
    """End this worker when its parent ends: after a kill of the parent it would wait for work forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    # Ctrl-C is for the parent, too, which tells of it; what is half written has a name of its own.
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process a core is enough
