"""Trackers: what TensorBoard's and Weights & Biases' own readers find in the files."""

import struct
import time
from contextlib import closing

import pytest

from train.config import ConfigError
from train.figures import trackers
from train.figures.metrics import MetricsFile
from train.figures.trackers import TRACKERS, TensorBoard, Trackers, scalars

NAN = float("nan")
RECORDS = (
    {"step": 1, "loss": 2.5, "grad_norms": {"head": 0.5, "router": NAN}, "load": [[1, 2]], "x": None},
    {"step": 2, "loss": NAN, "dropped": 3, "grad_norms": {"head": 0.25}, "load": [[2, 1]]},
)


def test_scalars_are_finite_numbers_by_their_way():
    assert dict(scalars(RECORDS[0])) == {"train/loss": 2.5, "grad_norms/head": 0.5}
    assert dict(scalars(RECORDS[1])) == {"experts/dropped": 3, "grad_norms/head": 0.25}


def messages(path, kind):
    """Of a TFRecord file: length, checksum, message, checksum."""
    data, at = path.read_bytes(), 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        yield kind.FromString(data[at + 12 : at + 12 + length])
        at += 16 + length


def events(path):
    """Scalars of a file of Event messages."""
    from tensorboardX.proto.event_pb2 import Event

    for event in messages(path, Event):
        for value in event.summary.value:
            yield event.step, value.tag, value.simple_value


def test_tensorboard_reads_what_was_told(tmp_path):
    pytest.importorskip("tensorboardX")
    file = MetricsFile(tmp_path / "metrics.jsonl")
    with closing(Trackers(file, ("tensorboard",), tmp_path, {}, print)) as all_of_them:
        for record in RECORDS:
            all_of_them.write(record)
    (path,) = tmp_path.glob("events.out.tfevents.*")
    first = [(1, "train/loss", 2.5), (1, "grad_norms/head", 0.5)]
    assert list(events(path)) == [*first, (2, "experts/dropped", 3.0), (2, "grad_norms/head", 0.25)]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_what_a_resumed_run_does_again_is_shown_once(tmp_path):
    """TensorBoard passes over events from the step on at which a later session says that it starts."""
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    def starts(name, first, *there):
        folder = tmp_path / name
        folder.mkdir()
        for file in there:
            (folder / file).touch()
        TensorBoard(folder, {}, first).close()
        (path,) = set(folder.glob("events.out.tfevents.*")) - {folder / file for file in there}
        return [event.step for event in messages(path, Event) if event.session_log.status == SessionLog.START]

    earlier = "events.out.tfevents.1.host"
    assert starts("fresh", 0) == [] and starts("resumed", 3, earlier) == [4]
    assert starts("begun anew, as nothing was saved", 0, earlier) == [0]


def test_steps_that_a_run_gave_up_are_shown_no_more(tmp_path):
    """By TensorBoard's rule: a start drops all events before it in the file that are of its step or a later one."""
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    told = [{"step": step, "loss": float(step)} for step in (1, 2, 3)]
    told += [{"step": 2, "heldout_loss": 2.5}, {"step": 3, "event": "back to step 1"}]
    told += [{"step": step, "loss": 10.0 * step} for step in (2, 3)]
    with closing(TensorBoard(tmp_path, {})) as board:
        for record in told:
            board.write(record)
    (path,) = tmp_path.glob("events.out.tfevents.*")
    shown = []
    for event in messages(path, Event):
        if event.session_log.status == SessionLog.START:
            shown = [one for one in shown if one[0] < event.step]
        shown += [(event.step, value.simple_value) for value in event.summary.value]
    assert shown == [(1, 1.0), (2, 20.0), (3, 30.0)]


def test_numbers_stand_under_headings():
    wanted = [
        "train/loss",
        "held out/heldout_bits_per_byte",
        "speed/tokens_per_s",
        "speed/step_s",
        "speed/mfu",
        "experts/max_vio",
        "experts/drop_rate",
        "memory/memory_gib",
        "train/tokens",
    ]
    record = {"step": 1, "time": 5.0} | {name.partition("/")[2]: 1.0 for name in wanted}
    assert [name for name, _ in scalars(record)] == wanted


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

    file = MetricsFile(tmp_path / "m")
    with closing(Trackers(file, ("wandb",), tmp_path, {"mesh": {"pp": 4}}, print)) as all_of_them:
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
    steps = [(step["_step"], step.get("train/loss"), step["grad_norms/head"]) for step in found]
    assert steps == [("1", "2.5", "0.5"), ("2", None, "0.25")]
    assert options["mesh"] == '{"pp":4}'


def test_a_tracker_that_is_not_installed(monkeypatch, tmp_path):
    def missing(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(trackers.importlib, "import_module", missing)
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for name in TRACKERS:
        told = rf"--track {name}: \w+ is not installed; run: .* install -e '.*\[{name}\]'$"
        with pytest.raises(ConfigError, match=told):
            Trackers(file, (name,), tmp_path, {}, print)
    assert file._file.closed
