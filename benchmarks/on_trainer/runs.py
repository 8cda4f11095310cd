"""Runs of the trainer's own command, in a process of its own, and what they recorded."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def run_trainer(
    name: str, options: Sequence[str], runs: Path, environ: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """Train the run of this name in the folder of runs; return the records of its ``metrics.jsonl``.

    Without ``environ`` it has this process's environment. If it fails, SystemExit has the end of what it printed.
    """
    # With -P, or a folder named train where one stands would be run.
    command = [sys.executable, "-P", "-m", "train", "--name", name, "--runs", str(runs), *options]
    done = subprocess.run(command, capture_output=True, text=True, env=environ)
    if done.returncode:
        raise SystemExit(f"{name} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}")
    return read_records(runs / name)


def read_records(run: Path) -> list[dict[str, Any]]:
    """The records of a run's ``metrics.jsonl`` so far, in order; a line that is being written is left out."""
    file = run / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
