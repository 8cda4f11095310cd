"""Read a run's folder: its options, its metrics, and where it ran."""

import dataclasses
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from train.config import FLAGS, ConfigError, TrainConfig, option
from train.figures.metrics import read_records
from train.options import apply
from train.recipe import is_overridden

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """The content of a run's folder.

    Attributes:
      path: the path of the folder.
      config: the options of the run.
      steps: the records of its steps, in order, without those that the run gave up when it went back.
      evaluations: the records of its held-out losses, likewise.
      events: the records of its events, such as warnings and experts that moved, in order.
      environment: where the run ran; empty if that is not known.
    """

    path: Path
    config: TrainConfig
    steps: tuple[Mapping[str, Any], ...]
    evaluations: tuple[Mapping[str, Any], ...]
    events: tuple[Mapping[str, Any], ...]
    environment: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> "RunFolder":
        """Read a folder. A last line that was cut short is left out.

        Raises:
          ConfigError: it is no run's folder, or its files are damaged.
        """
        config = _json(path, "config.json")
        if config is None or not (path / "metrics.jsonl").is_file():
            raise ConfigError(f"{path}: no run's folder; it should hold config.json and metrics.jsonl")
        records, bad = read_records(path / "metrics.jsonl")
        if bad:
            raise ConfigError(
                f"{path}/metrics.jsonl: line {bad[0]} is damaged; take it out, or resume the run, which leaves it out"
            )
        steps, evaluations = list[Mapping[str, Any]](), list[Mapping[str, Any]]()
        for record in records:
            if "loss" in record:
                # A run that went back has given up its steps from there on.
                for kept in (steps, evaluations):
                    while kept and kept[-1]["step"] >= record["step"]:
                        kept.pop()
                steps.append(record)
            if "heldout_loss" in record:
                evaluations.append(record)
        return cls(
            path=path,
            config=apply(TrainConfig(), config, f"{path}/config.json"),
            steps=tuple(steps),
            evaluations=tuple(evaluations),
            events=tuple(r for r in records if "event" in r),
            environment=_json(path, "environment.json") or {},
        )

    def series(self, name: str) -> tuple[list[int], list[Any]]:
        """(steps that have a metric, its values). ``outer/inner`` is a metric of an inner record. A value is None if it
        was not a finite number."""
        found = [(r["step"], value) for r in self.steps for value in _values_at(r, name)]
        return [step for step, _ in found], [value for _, value in found]


def _values_at(record: Any, name: str) -> list[Any]:
    """[the value of that name], or [] if there is none."""
    for part in name.split("/"):
        if not isinstance(record, Mapping) or part not in record:
            return []
        record = record[part]
    return [record]


def _json(folder: Path, name: str) -> Any:
    try:
        found = json.loads((folder / name).read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}/{name}: cannot read it: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{folder}/{name}: cannot read it: it holds no object")
    return found


def environment(devices: Sequence[Any]) -> dict[str, Any]:
    """Where a run runs, as plain values: versions, machine, devices, the code's commit, and the command line."""
    import jax

    return {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(["scripts/train", *sys.argv[1:]]),
        "commit": _commit(),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in _PACKAGES},
        "machine": f"{platform.system()} {platform.release()}, {platform.machine()}, {os.cpu_count()} CPUs",
        "devices": f"{len(devices)} x {devices[0].device_kind}",
        "processes": jax.process_count(),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
    }


def command_line(config: TrainConfig) -> str:
    """The shortest command with these options, by flags alone, without a preset or a file."""
    words = ["scripts/train"]
    for flag in FLAGS:
        value = option(config, flag)
        if not is_overridden(config, flag):
            continue
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            words += [flag, *map(str, value if isinstance(value, tuple) else (value,))]
    return shlex.join(words)


def _commit() -> str:
    """The commit that is checked out, and whether files differ from it; empty outside of a repository."""
    root = Path(__file__).parent

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=10)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        commit = git("rev-parse", "HEAD")
        changed = commit and git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return f"{commit} with changes" if changed else commit
