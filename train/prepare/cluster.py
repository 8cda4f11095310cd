"""Distribute work to the nodes of a Ray cluster, as ``run_jobs`` does to processes of this machine.

Ray places tasks, sends them this checkout's code and reports nodes that die. Tasks write files and receipts where all
nodes can reach them, so only a task whose node died is run again, on another node.
"""

import collections
import contextlib
import functools
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dualpipe_jax.installing import install_command
from dualpipe_jax.present.numbers import how_many
from train.data import DataError
from train.prepare.files import Folder, url_of
from train.prepare.workers import JobRunner, Report, versions

ATTEMPTS = 4
"""The number of lost workers after which a piece of work is given up; Spark tries a task as often."""

_PATIENCE = 30.0
"""Seconds within which a cluster must answer."""

_ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def connected(address: str, work: Folder, mark: str, report: Report) -> Iterator[JobRunner]:
    """Connect to the cluster at an address; yields the function that distributes work to it.

    Args:
      address: ``HOST:PORT`` of its head, or ``auto`` for the cluster that this machine is a node of.
      work: a folder that every node must reach.
      mark: the name of a file in it, by which a node sees that it is the same folder.
      report: receives the cluster's size, and the number of tasks that were run again.

    Raises:
      DataError: Ray is missing, or there is no such cluster.
    """
    try:
        import ray
    except ModuleNotFoundError:
        raise DataError(f"--ray: needs Ray: {install_command('ray', extra='ray')}") from None
    _check_answers(address)
    code = [str(_ROOT / package) for package in ("train", "dualpipe_jax")]
    at_end = signal.getsignal(signal.SIGTERM)
    ray.init(address, runtime_env={"py_modules": code}, log_to_driver=False, logging_level=logging.ERROR)
    # Ray's own handler would end this process in another way than without a cluster.
    signal.signal(signal.SIGTERM, at_end)
    try:
        nodes = sum(node["Alive"] for node in ray.nodes())
        cores = round(ray.cluster_resources().get("CPU", 0))
        report.say(f"Ray cluster of {how_many(nodes, 'node')}, {how_many(cores, 'core')}")
        # No retries by Ray itself: they never end if memory runs out.
        task = ray.remote(num_cpus=1, max_retries=0)(_run_on_node)
        yield functools.partial(_run_jobs, functools.partial(task.remote, work, mark, versions()), report)
    finally:
        ray.shutdown()


def _run_jobs(
    submit: Callable[..., Any], report: Report, function: Callable[..., Any], jobs: Sequence[tuple]
) -> Iterator[tuple[int, Any]]:
    """See ``train.prepare.workers.run_jobs``."""
    from ray import exceptions

    gone = (
        exceptions.WorkerCrashedError,
        exceptions.NodeDiedError,
        exceptions.OutOfMemoryError,
        exceptions.ObjectLostError,
    )
    done: queue.SimpleQueue = queue.SimpleQueue()
    lost: collections.Counter[int] = collections.Counter()

    def start(number: int) -> None:
        submit(function, jobs[number]).future().add_done_callback(lambda future: done.put((number, future)))

    for number in range(len(jobs)):
        start(number)
    left = len(jobs)
    while left:
        number, future = done.get()
        try:
            result = future.result()
        except gone as error:
            lost[number] += 1
            if lost[number] == ATTEMPTS:
                raise DataError(
                    f"{ATTEMPTS} workers in turn were lost at one piece of work, by a lack of memory perhaps; the same "
                    f"command goes on, with a smaller --shard-mb it takes less; the last: {_first_line(error)}"
                ) from None
            start(number)
        # Raised by the function itself.
        except exceptions.RayTaskError as error:
            raise error.cause from error
        except exceptions.RayError as error:
            raise DataError(f"--ray: {_first_line(error)}") from error
        else:
            left -= 1
            yield number, result
    if lost:
        report.say(f"{lost.total()} of {len(jobs)} were begun again elsewhere, as their workers were lost")


def _run_on_node(
    work: Folder, mark: str, known: dict[str, str], function: Callable[..., Any], job: tuple
) -> Any:
    """Run one job on a node. Raises DataError if the node has other versions or does not see the folder ``work``."""
    if (here := versions()) != known:
        raise DataError(
            f"--ray: {socket.gethostname()} has {here}, and here is {known}; install the same on all nodes"
        )
    if not work.exists(mark):
        raise DataError(
            f"--ray: {socket.gethostname()} does not see {url_of(work)}; let all nodes share that folder, or name one "
            "that they share, or a URL, by --work"
        )
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process a core is enough
    return function(*job)


def _check_answers(address: str) -> None:
    """Raise DataError if no cluster answers. Tried in another process: Ray takes minutes, and then ends its process."""
    code = "import ray, sys; ray.init(sys.argv[1], log_to_driver=False, logging_level=40)"
    try:
        tried = subprocess.run(
            [sys.executable, "-c", code, address], capture_output=True, text=True, timeout=_PATIENCE
        )
        why = tried.stderr.strip().rpartition("\n")[2] if tried.returncode else ""
    except subprocess.TimeoutExpired:
        why = f"no answer in {_PATIENCE:g} seconds"
    if why:
        raise DataError(
            f"--ray {address}: {why}; give HOST:PORT of a cluster's head, or auto where `ray start` was run"
        )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
