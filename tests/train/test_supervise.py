"""Faults of real processes: noticed soon, all ended, started again from what was saved, and told."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from datetime import datetime
from pathlib import Path

import pytest

from train.config import configure
from train.supervise import Told, free_port, keep_going, run_once, smaller

WORKER = Path(__file__).with_name("toy_worker.py")
SOON_S = 30


def commands(folder, asked):
    def lines(config, attempt):
        del attempt
        count = config.launch.processes
        line = [
            sys.executable,
            str(WORKER),
            str(folder),
            json.dumps(asked),
            f"127.0.0.1:{free_port()}",
            str(count),
        ]
        return [[*line, str(number)] for number in range(count)]

    return lines


@pytest.fixture(autouse=True)
def path(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


def nobody_left(folder):
    """No process that was started with this folder is there any more."""
    found = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return not [line for line in found.splitlines() if f"{WORKER} {folder} " in line]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "process", "told"),
    [
        ("kill", 1, "process 1 died of SIGKILL in step 7"),
        ("kill", 0, "process 0 died of SIGKILL in step 7"),  # with it the coordinator
        ("stop", 1, "process 1 gave no sign of life for 1"),
        ("raise", 1, "process 1 ended with code 70 in step 7"),
        ("spin", 1, "process 1 ended with code 1 in step 7"),
        ("save", 0, "process 0 died of SIGKILL in saving step 8"),
    ],
)
def test_a_fault_costs_the_steps_since_the_last_checkpoint(tmp_path, capfd, fault, process, told):
    asked = {"fault": fault, "process": process, "step": 6, "patience": 4.0 if fault == "spin" else None}
    config = configure(processes=2, restarts=1)
    assert keep_going(config, commands(tmp_path, asked), tmp_path / "logs", Told()) == 0
    said = [line for line in capfd.readouterr().out.splitlines() if line.startswith("from")]
    assert said == ["from 0", "from 4"]
    story = (tmp_path / "logs" / "story.log").read_text()
    noticed = next(line for line in story.splitlines() if told in line)
    struck = (tmp_path / "struck").stat().st_mtime
    assert datetime.fromisoformat(noticed[:19]).timestamp() - struck < SOON_S
    assert told in story and "restart 1 of 1, from the last good checkpoint" in story
    assert story.rstrip().endswith("all processes ended well")
    assert (tmp_path / "saved").read_text() == "12"
    assert nobody_left(tmp_path)
