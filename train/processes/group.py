"""One program in several processes: which of them writes, who waits for whom, and which rows of a batch each has."""

import contextlib
import importlib.metadata
import itertools
import json
import platform
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from rich.console import Console

from dualpipe_jax.parallel.mesh import batch_spec
from train.config import ConfigError, TrainConfig
from train.options import options_as_dict
from train.processes import coordination
from train.processes.heartbeat import Heartbeat

Rows = tuple[slice, ...]
Batch = TypeVar("Batch")
Json = TypeVar("Json")

VERSIONS = ("jax", "jaxlib", "numpy", "optax", "flax", "orbax-checkpoint")
PER_PROCESS_OPTIONS = ("process_id", "coordinator_bind")


class Processes:
    """This process as one of several, with methods to communicate; if it is the only one, they return at once.

    Calls are matched by number, so all processes must call the same methods in the same order.

    Attributes:
      id: the number of this process, from 0.
      count: the number of processes.
      heartbeat: the signs of life of this process.
    """

    def __init__(self, id: int = 0, count: int = 1, heartbeat: Heartbeat | None = None):
        self.id, self.count = id, count
        self.heartbeat = Heartbeat(watched=False) if heartbeat is None else heartbeat
        self._calls = self._decisions = self._stop_checks = 0

    @property
    def leads(self) -> bool:
        """Whether this process prints and writes."""
        return self.id == 0

    def console_if_leader(self, console: Console) -> Console:
        """``console`` for the process that prints, a silent one for the others."""
        return console if self.leads else Console(quiet=True)

    def barrier(self) -> None:
        """Wait until all processes have called this. Runs nothing on a device."""
        if self.count > 1:
            coordination.wait_for_all(f"train/{self._next_number()}")

    def broadcast(self, value: Callable[[], Json]) -> Json:
        """The result of ``value()`` on process 0, which alone calls it, for all processes: a JSON value."""
        if self.count == 1:
            return value()
        key = f"train/{self._next_number()}"
        if self.leads:
            coordination.set_value(key, json.dumps(value()))
        return json.loads(coordination.wait_for_value(key))

    @contextlib.contextmanager
    def entered_by_leader(self, context: AbstractContextManager[Path]) -> Iterator[Path]:
        """Yield the path that a context yields, which process 0 alone enters, on all processes."""
        with context if self.leads else contextlib.nullcontext(Path()) as path:
            yield Path(self.broadcast(lambda: str(path)))

    def decide(self, proposed: Json) -> Json:
        """The value of ``proposed`` on process 0: a JSON value; tuples become lists.

        All processes decide by it, because their clocks differ. Call it once a step, after the step's own collectives.
        """
        if self.count == 1:
            return proposed
        self._decisions += 1
        name = "train/decision/{}".format
        if self.leads:
            coordination.set_value(name(self._decisions), json.dumps(proposed))
            # All processes have finished this step, so all have read the decision before.
            coordination.delete_value(name(self._decisions - 1))
        return json.loads(coordination.wait_for_value(name(self._decisions)))

    def gather(self, value: Json) -> list[Json]:
        """The values of all processes, in their order, on process 0; [] on the others. A value is a JSON value."""
        if self.count == 1:
            return [value]
        key = f"train/{self._next_number()}"
        if not self.leads:
            coordination.set_value(f"{key}/{self.id}", json.dumps(value))
            return []
        others = [json.loads(coordination.wait_for_value(f"{key}/{other}")) for other in range(1, self.count)]
        coordination.delete_value(f"{key}/")
        return [value, *others]

    def check_equal(self, facts: Mapping[str, str]) -> None:
        """Check that all processes have the same facts.

        Nothing else would notice: JAX raises no error for arrays that differ from process to process.

        Raises:
          ConfigError: on every process, if facts differ; it names them and the process.
        """
        found = self.gather(dict(facts))
        differing = self.broadcast(lambda: "\n".join(differences(found)))
        if differing:
            raise ConfigError(f"the processes would not train the same model:\n{differing}")

    def any_problem(self, problem: str | None) -> str | None:
        """The first problem that a process has, on all processes; None if no process has one."""
        found = self.gather(problem)
        return self.broadcast(lambda: next((one for one in found if one is not None), None))

    @property
    def signals(self) -> tuple[signal.Signals, ...]:
        """The signals that this process may handle; none if there are several processes, see ``preempted``."""
        return (signal.SIGINT, signal.SIGTERM) if self.count == 1 else ()

    def preempted(self) -> bool:
        """Whether any of several processes was told to stop. Call it once a step: all learn it at the same step.

        With several processes JAX catches SIGTERM. It needs numbers that only grow, but a run that goes back repeats
        some steps, so calls are counted, not steps.
        """
        self._stop_checks += 1
        return self.count > 1 and multihost_utils.reached_preemption_sync_point(self._stop_checks)

    def connect(self, mesh: Mesh) -> None:
        """Run one collective in every group of devices of a mesh, in all processes at the same time.

        gloo gives the first collective of a group 30 s to find all its members, which no flag changes, and programs
        take longer to compile on one machine than on another. Later collectives of a group wait as long as it takes.
        """
        if self.count == 1:
            return
        axes = mesh.axis_names

        def sum_over_groups(x: jax.Array) -> jax.Array:
            groups = (some for size in range(len(axes)) for some in itertools.combinations(axes, size + 1))
            return x + sum(jax.lax.psum(x, group) for group in groups)

        spec = PartitionSpec(axes)
        ones = jax.make_array_from_callback(
            (mesh.size,), NamedSharding(mesh, spec), lambda index: np.ones(mesh.size, np.float32)[index]
        )
        program = (
            jax.jit(jax.shard_map(sum_over_groups, mesh=mesh, in_specs=spec, out_specs=spec))
            .lower(ones)
            .compile()
        )
        self.barrier()
        jax.block_until_ready(program(ones))

    def leave(self) -> None:
        """End a run that went well. All processes leave together, so that none takes another one for dead."""
        self.heartbeat.phase("leaving")
        if self.count > 1:
            jax.distributed.shutdown()

    def _next_number(self) -> int:
        self._calls += 1
        return self._calls


def connected_processes(heartbeat: Heartbeat) -> Processes:
    """The processes that ``train.processes.launch.initialize`` brought together."""
    return Processes(jax.process_index(), jax.process_count(), heartbeat)


def common_facts(config: TrainConfig, corpus: str) -> dict[str, str]:
    """Facts that must be equal in all processes, short enough to be shown. ``corpus`` is the corpus's fingerprint."""
    options = options_as_dict(config)
    options["launch"] = {
        name: value for name, value in options["launch"].items() if name not in PER_PROCESS_OPTIONS
    }
    versions = {name: importlib.metadata.version(name) for name in VERSIONS}
    facts = {f"option {section}": json.dumps(value, sort_keys=True) for section, value in options.items()}
    return facts | {"corpus": corpus, "Python": platform.python_version()} | versions


def differences(found: list[dict[str, str]]) -> list[str]:
    """A line for each fact that differs between processes: that of process 0, and the first other one."""
    lines = []
    for name in found[0] if found else ():
        others = [number for number, one in enumerate(found) if one.get(name) != found[0][name]]
        if others:
            theirs = found[others[0]].get(name)
            lines.append(
                f"  {name}: {found[0][name]} on process 0, {theirs} on process {others[0]}"
                + (f" and {len(others) - 1} more" if len(others) > 1 else "")
            )
    return lines


def refuse_idle(mesh: Mesh, num_processes: int) -> None:
    """Raise ConfigError if a process has no device of the mesh, so that it could take no part in anything."""
    busy = {device.process_index for device in mesh.devices.flat}
    idle = [number for number in range(num_processes) if number not in busy]
    if idle:
        raise ConfigError(
            f"process {', '.join(map(str, idle))} of {num_processes} has no device of the mesh, whose {mesh.size} "
            "devices are others'; start fewer processes, or raise --dp, --pp or --ep"
        )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of a batch's first two dims, microbatches and the rows of each, as the engine cuts them."""
    return NamedSharding(mesh, batch_spec(mesh))


def make_global_batch(draw: Callable[[Rows], Batch], num_rows: tuple[int, int], sharding: Sharding) -> Batch:
    """A batch of global arrays of which each process draws only what its devices hold.

    Args:
      draw: ``draw((microbatches, rows))`` returns that part of the batch, a tree of NumPy arrays with microbatches and
        the rows of each as their first two dims.
      num_rows: (microbatches, rows of each) of the whole batch.
      sharding: the sharding of the first two dims.
    """
    places = sharding.addressable_devices_indices_map(num_rows)
    held = {_bounds(index, num_rows) for index in places.values()}
    parts = {bounds: draw((slice(*bounds[0]), slice(*bounds[1]))) for bounds in held}

    def whole(*leaves: np.ndarray) -> jax.Array:
        own, shape = dict(zip(parts, leaves, strict=True)), (*num_rows, *leaves[0].shape[2:])
        return jax.make_array_from_callback(shape, sharding, lambda index: own[_bounds(index, num_rows)])

    return jax.tree.map(whole, *parts.values())


def _bounds(index: Rows | None, num_rows: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
    assert index is not None  # every device of a process that is asked holds a part
    return tuple(part.indices(size)[:2] for part, size in zip(index[:2], num_rows, strict=True))
