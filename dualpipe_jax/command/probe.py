"""`dualpipe probe`: what works on the devices of this machine, and how fast they are."""

import dataclasses
import difflib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from dualpipe_jax.command.options import CommandError, Count, check_files
from dualpipe_jax.command.output import say_written, show, show_json
from dualpipe_jax.present.table import Table
from dualpipe_jax.probe.findings import (
    DEFAULT_EXPERIMENTS,
    MEASURES,
    PERMUTE_INSIDE,
    REPEATS_IN_ORDER,
    outcome,
    rates_file,
    recommend,
    title,
)
from dualpipe_jax.processes import free_port, gpu_environment, too_few_gpus

if TYPE_CHECKING:
    from dualpipe_jax.command.child import Job

_STARTING = 180.0
"""Seconds allowed to load JAX and find the devices, unless --limit is longer."""


@dataclasses.dataclass(frozen=True)
class Probe:
    """Try on the devices of this machine what the engine asks of them, each thing in a process that may hang, say
    which divergence to use, and measure rates. Exit status 1 where no setting works.

    dualpipe probe
    """

    pp: Count = None
    """Number of pipeline ranks. If left out, the number of devices divided by --ep; without --ep, 2 where the
    number of devices is even, else all devices."""
    ep: Count = None
    """Number of devices of each rank. If left out, all devices are shared out over the ranks."""
    cpu: Count = None
    """Probe so many virtual CPU devices instead of real ones."""
    processes: Count = None
    """Start so many processes, one for each GPU, as training does; --cpu shares its devices out over them.
    If left out, one process drives all devices."""
    one_gpu: bool = False
    """Let all processes of --processes share one GPU: for a test of what is computed, not of speed. NCCL allows
    it from version 2.30 on."""
    limit: float = 120.0
    """Seconds that a single experiment may take, compiling included. What takes longer is reported as
    hung."""
    only: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...")] = ()
    """Do only these experiments, by their names or the beginnings of names, such as units or rate-matmul. The
    experiment permute-inside hangs on some devices, and the engine does not need what it tries: it is done
    only if named here."""
    output: Annotated[Path, tyro.conf.arg(metavar="FILE", aliases=["-o"])] = Path("rates.json")
    """File to write the measured rates to. `dualpipe overlap` and `dualpipe dryrun` read it with --rates,
    `dualpipe choose` and `dualpipe search` with --costs."""
    json: bool = False
    """Print JSON, for programs."""

    def run(self) -> int:
        """Probe, write the rates and print what was found; returns the exit status."""
        self._check()
        found = self.explore(_chosen(self.only))
        results = found["results"]
        result = recommend(results, found["devices"].get("usual_divergence", "loop"))
        self._write(rates_file(found, result.divergence))
        if self.json:
            show_json(found | dataclasses.asdict(result))
        else:
            show(_devices(found["devices"]), *_tables(results), "", *result.sentences)
        none_failed = all(result.get("ok", True) for result in results.values())
        worked = result.divergence is not None if result.told else none_failed
        return 0 if worked else 1

    def _write(self, contents: dict[str, Any]) -> None:
        """Write the file of rates, but not over measured rates if this probe has measured none."""
        if not contents["rates"] and _has_rates(self.output):
            print(
                f"{self.output} is kept: it has rates, and none were measured now; -o FILE writes another",
                file=sys.stderr,
            )
            return
        self.output.write_text(json.dumps(contents, indent=2) + "\n")
        say_written(self.output)

    def explore(self, names: list[str]) -> dict[str, Any]:
        """Run experiments; returns the devices, and results by name.

        An experiment that ends its process is reported, and another process goes on after it.
        """
        from dualpipe_jax.command.child import ChildDied, StageTimeout, ask

        found: dict[str, Any] = {"devices": {}, "results": {}}
        left = names
        while left:
            in_order = left[0] == REPEATS_IN_ORDER
            now = [name for name in left if (name == REPEATS_IN_ORDER) == in_order]
            request = {"pp": self.pp, "ep": self.ep, "experiments": now, "sums_in_order": in_order}
            (first, environment), *others = self._jobs(request)
            try:
                known = ask("dualpipe_jax.probe", first, environment, "probe", self._limit, others)
                stage = None
            except ChildDied as death:
                known, stage = death.known, death.stage
                why = f"hung: {death}" if isinstance(death, StageTimeout) else _in_brief(str(death))
                if stage not in left:
                    raise
            found = {
                "devices": known.get("devices") or found["devices"],
                "results": found["results"] | known.get("results", {}),
            }
            if stage is not None:
                found["results"][stage] = {"ok": False, "why": why}
            left = [name for name in left if name not in found["results"]]
        return found

    def _limit(self, stage: str) -> float:
        return max(self.limit, _STARTING) if stage == "starting" else self.limit

    def _jobs(self, request: dict[str, Any]) -> "list[Job]":
        """The request and the environment of each process."""
        if self.processes is None:
            return [(request, self._environment(0, 1))]
        count, address = self.processes, f"127.0.0.1:{free_port()}"
        return [
            (
                request | {"processes": {"coordinator": address, "count": count, "number": number}},
                self._environment(number, count),
            )
            for number in range(count)
        ]

    def _environment(self, number: int, count: int) -> dict[str, str]:
        if self.cpu is not None:
            devices = f"--xla_force_host_platform_device_count={self.cpu // count}"
            return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {devices}"}
        return {} if self.processes is None else gpu_environment(number, count, one_gpu=self.one_gpu)

    def _check(self) -> None:
        for name in ("pp", "ep", "cpu", "processes", "limit"):
            value = getattr(self, name)
            # "not", for NaN is no limit
            if value is not None and not value > 0:
                raise CommandError(f"--{name} {value:g}: must be above 0")
        if self.one_gpu and (self.processes is None or self.cpu is not None):
            raise CommandError("--one-gpu: is for several processes on a GPU; give --processes, and no --cpu")
        if self.processes is not None and self.cpu is not None and self.cpu % self.processes:
            raise CommandError(
                f"--cpu {self.cpu}: cannot be shared out equally over {self.processes} processes; give --cpu "
                f"{-(-self.cpu // self.processes) * self.processes}"
            )
        needed = (self.pp or 1) * (self.ep or 1)
        if self.cpu is not None and self.cpu < needed:
            raise CommandError(
                f"--cpu {self.cpu}: --pp {self.pp or 1} and --ep {self.ep or 1} take {needed} devices; give "
                f"--cpu {needed}"
            )
        takes_gpus = self.processes is not None and self.cpu is None and not self.one_gpu
        if takes_gpus and (why := too_few_gpus(self.processes or 1)):
            raise CommandError(why)
        check_files(self.output)


def _has_rates(file: Path) -> bool:
    try:
        return bool(json.loads(file.read_text())["rates"])
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _in_brief(death: str) -> str:
    """A process's end in a line. Runtimes have watchdogs of their own, which end a process that hangs."""
    words = " ".join(death.split())[:240]
    return f"hung until the runtime ended it: {words}" if "timeout" in death.lower() else words


def _chosen(only: tuple[str, ...]) -> list[str]:
    """Experiments by their names' beginnings, in the order in which they are done."""
    known = [PERMUTE_INSIDE, *DEFAULT_EXPERIMENTS]
    for asked in only:
        if not any(name.startswith(asked) for name in known):
            near = difflib.get_close_matches(asked, known, n=1)
            meant = f"did you mean {near[0]}? There" if near else "there"
            raise CommandError(f"--only {asked}: no experiment; {meant} are {', '.join(known)}")
    if not only:
        return [*DEFAULT_EXPERIMENTS]
    chosen = [name for name in known if any(name.startswith(asked) for asked in only)]
    return [name for name in chosen if name != PERMUTE_INSIDE or name in only]


def _devices(found: dict[str, Any]) -> str:
    what = f"{found['number']} x {found['kind']} ({found['platform']})"
    if found.get("processes", 1) > 1:
        what += f", {found['processes']} processes"
    return f"{what}, pp {found['pp']} x ep {found['ep']}, jax {found['jax']}\n"


def _tables(results: dict[str, Any]) -> list[str | Table]:
    parts: list[str | Table] = []
    for head, chosen in (
        ("does it work?", [name for name in results if name not in MEASURES]),
        ("how fast?", [name for name in results if name in MEASURES]),
    ):
        if chosen:
            rows = tuple((f"{name}: {title(name)}", outcome(results[name])) for name in chosen)
            parts += [*([""] if parts else []), Table((head, ""), rows)]
    return parts
