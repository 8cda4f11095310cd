"""Trackers: what TensorBoard's and Weights & Biases' own readers find in the files."""

import struct
import time

import pytest

from train import trackers
from train.config import ConfigError
from train.metrics import MetricsFile
from train.trackers import TRACKERS, Trackers, scalars

RECORDS = (
    {
        "step": 1,
        "loss": 2.5,
        "grad_norms": {"head": 0.5, "router": float("nan")},
        "load": [[1, 2]],
        "x": None,
    },
    {"step": 2, "loss": float("nan"), "dropped": 3, "grad_norms": {"head": 0.25}, "load": [[2, 1]]},
)


def test_scalars_are_finite_numbers_by_their_way():
    assert dict(scalars(RECORDS[0])) == {"loss": 2.5, "grad_norms/head": 0.5}
    assert dict(scalars(RECORDS[1])) == {"dropped": 3, "grad_norms/head": 0.25}


def events(path):
    """Scalars of a TFRecord file of Event messages: length, checksum, message, checksum."""
    from tensorboardX.proto.event_pb2 import Event

    data, at = path.read_bytes(), 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        event = Event.FromString(data[at + 12 : at + 12 + length])
        at += 16 + length
        for value in event.summary.value:
            yield event.step, value.tag, value.simple_value


def test_tensorboard_reads_what_was_told(tmp_path):
    pytest.importorskip("tensorboardX")
    with Trackers(
        MetricsFile(tmp_path / "metrics.jsonl"), ("tensorboard",), tmp_path, {}, print
    ) as all_of_them:
        for record in RECORDS:
            all_of_them.write(record)
    (path,) = tmp_path.glob("events.out.tfevents.*")
    first = [(1, "loss", 2.5), (1, "grad_norms/head", 0.5)]
    assert list(events(path)) == [*first, (2, "dropped", 3.0), (2, "grad_norms/head", 0.25)]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def log_entries(data):
    """Of LevelDB's log format behind seven bytes: checksum, length, kind (1: whole), content; one block at most."""
    at = 7
    assert data[:4] == b":W&B" and len(data) < 1 << 15
    while at < len(data):
        length, kind = struct.unpack_from("<HB", data, at + 4)
        assert kind == 1
        yield data[at + 7 : at + 7 + length]
        at += 7 + length


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_wandb_keeps_what_was_told_offline(tmp_path):
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    with Trackers(
        MetricsFile(tmp_path / "m"), ("wandb",), tmp_path, {"mesh": {"pp": 4}}, print
    ) as all_of_them:
        for record in RECORDS:
            all_of_them.write(record)
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    found, options = [], {}
    for _ in range(300):  # its own process writes, and may be behind
        records = list(map(Record.FromString, log_entries(path.read_bytes())))
        if records and records[-1].WhichOneof("record_type") == "exit":
            break
        time.sleep(0.1)
    for record in records:
        items = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
        found += [items] if items else []
        options |= {item.key: item.value_json for item in record.run.config.update}
    steps = [(step["_step"], step.get("loss"), step["grad_norms/head"]) for step in found]
    assert steps == [("1", "2.5", "0.5"), ("2", None, "0.25")]
    assert options["mesh"] == '{"pp":4}'


def test_a_tracker_that_is_not_installed(monkeypatch, tmp_path):
    def missing(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(trackers.importlib, "import_module", missing)
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for name in TRACKERS:
        with pytest.raises(ConfigError, match=rf"--track {name}: .* pip install 'dualpipe-jax\[{name}\]'"):
            Trackers(file, (name,), tmp_path, {}, print)
    assert file._file.closed
