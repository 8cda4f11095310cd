"""A disk that is full, or full of nonsense, costs what could not be written and nothing else."""

import errno
import json
import os
import platform
import shutil
from contextlib import closing
from types import SimpleNamespace

import jax
import pytest

from train.config import ConfigError, configure
from train.figures.folder import (
    CHECKPOINTS,
    CONFIG,
    METRICS,
    claimed_folder,
    planned_folder,
    reporting_write_errors,
)
from train.figures.metrics import MetricsFile
from train.figures.trackers import Trackers
from train.model import model_config
from train.run import try_write_report
from train.watch import watch_run


class NearlyFull:
    """A file with room for so many bytes more."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, data):
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        part = data[: self.room]
        self.room -= len(part)
        return self.file.write(part)

    def close(self):
        self.file.close()


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_records_wait_for_room(tmp_path):
    """A record that is cut in two is completed; none is lost, and it is said once that one was late."""
    said, path = [], tmp_path / METRICS
    file = MetricsFile(path)
    file._file = full = NearlyFull(file._file, room=20)
    with closing(Trackers(file, (), tmp_path, {}, said.append)) as told:
        for step in range(1, 5):
            told.write({"step": step, "loss": 0.5})
        assert len(path.read_bytes()) == 20 and len(said) == 1
        full.room = 1000
        told.write({"step": 5, "loss": 0.5})
        full.room = 0
        told.write({"step": 6, "loss": 0.5})
        told.write({"step": 7, "loss": 0.5})
    assert lines(path) == [{"step": step, "loss": 0.5} for step in range(1, 6)]
    full = f"{METRICS} cannot be written: [Errno 28] No space left on device"
    assert said[0] == f"warning: {full}; training goes on, and tries again"
    assert said[1] == f"{METRICS} is written again"
    assert said[2].startswith(f"warning: {METRICS} cannot be written")
    assert (
        said[3].startswith(f"warning: {METRICS} is not whole:") and "; lost at its end: 2 records" in said[3]
    )
    assert len(said) == 4


def test_a_tracker_that_fails_ends_no_run(tmp_path):
    class Broken:
        def write(self, record):
            raise RuntimeError("no network")

        def close(self):
            raise RuntimeError("no network")

    said = []
    with closing(Trackers(Broken(), (), tmp_path, {}, said.append)) as told:
        told.write({"step": 1})
        told.write({"step": 2})
    assert [text.split(":")[0] for text in said] == ["warning", "warning"] and "no network" in said[0]


def test_good_lines_are_kept_whatever_stands_between_them(tmp_path):
    """A line that is damaged in the middle takes nothing with it, and the file is kept as it was."""
    path = tmp_path / METRICS
    good = [{"step": step, "loss": 1.0 / step} for step in range(1, 7)]
    text = [json.dumps(record) for record in good]
    text[2:2] = ['{"step": 3, "lo\0\0', "[1]", '{"step": "four"}', "[" * 100_000]
    path.write_text("\n".join(text) + '\n{"step": 7, "lo')  # the last one was cut short by a kill
    before = path.read_bytes()
    (tmp_path / "all").mkdir()
    with closing(MetricsFile(shutil.copy(path, tmp_path / "all" / METRICS), upto=6)) as file:
        assert file.earlier_records == good
    with closing(MetricsFile(path, upto=5)) as file:
        assert file.earlier_records == good[:5]
        (aside,) = tmp_path.glob(f"{METRICS}.damaged.*")
        told = f"{path} has lines that cannot be read (3, 4, 5, 6); as it was it is kept in {aside}"
        assert file.damage == told
        assert aside.read_bytes() == before
    assert lines(path) == good[:5]
    with closing(MetricsFile(path, upto=3)) as file:
        assert file.damage is None and file.earlier_records == good[:3]


def test_no_room_at_the_start_is_one_line(tmp_path):
    words = f"--runs: cannot write into {tmp_path}: No space left on device"
    with pytest.raises(ConfigError, match=words), reporting_write_errors(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("left", ["", '{"step": 0, "heldout_loss": 5.5}\n', '{"step": 0, "hel'])
def test_a_start_that_failed_can_be_made_again(tmp_path, left):
    """With the same command, once what it failed of is mended."""
    config = configure(runs=tmp_path, name="run")
    with pytest.raises(OSError, match="No space left"), claimed_folder(config, resume=False) as folder:
        (folder / CHECKPOINTS).mkdir()
        (folder / CONFIG).write_text("{}")
        (folder / METRICS).write_text(left)
        raise OSError(errno.ENOSPC, "No space left on device")
    assert planned_folder(config, resume=False) == folder
    told = (
        f"--name run: process {os.getpid()} on {platform.node()} is at work in {folder}; let it end, or stop"
    )
    with claimed_folder(config, resume=False), pytest.raises(ConfigError, match=told):
        claimed_folder(config, resume=False).__enter__()


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (METRICS, '{"step": 0}\n{"step": 1}\n'),
        (METRICS, '{"step: 0}\n'),
        (f"{METRICS}/folder", ""),
        (f"{CHECKPOINTS}/1/_CHECKPOINT_METADATA", ""),
    ],
)
def test_what_a_run_has_done_is_not_done_over(tmp_path, part, text):
    config = configure(runs=tmp_path, name="run")
    file = tmp_path / "run" / part
    file.parent.mkdir(parents=True)
    file.write_text(text)
    for start in (
        lambda: planned_folder(config, resume=False),
        lambda: claimed_folder(config, resume=False).__enter__(),
    ):
        with pytest.raises(
            ConfigError, match="holds a run already; pick another name, remove it, or go on with"
        ):
            start()


def test_no_room_for_the_environment_is_one_line(tmp_path, monkeypatch):
    config = configure(sequence=32)
    layout = SimpleNamespace(model=SimpleNamespace(config=model_config(config)))
    this = SimpleNamespace(config=config, layout=layout)
    monkeypatch.setattr("train.watch.used_devices", lambda config: jax.devices()[:1])
    (tmp_path / "environment.json").mkdir()
    with pytest.raises(ConfigError, match=f"--runs: cannot write into {tmp_path}: Is a directory"):
        watch_run(this, tmp_path, 0)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), r"[Errno 28] No space left on device"),
        (ConfigError("a file of it is damaged"), "a file of it is damaged"),
    ],
)
def test_a_report_that_cannot_be_written_is_said(tmp_path, monkeypatch, error, why):
    """It is written where a run ends, whatever ended it: that is what must be told."""

    def fails(folder):
        raise error

    said = []
    monkeypatch.setattr("train.run.write_report", fails)
    try_write_report(tmp_path, said.append)
    (told,) = said
    assert f"no report.html: {why}; scripts/train --report {tmp_path}" in told
