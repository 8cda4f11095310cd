"""scripts/prepare --ray: a cluster of three nodes on this machine, against what one process makes of the same."""

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest

from tests.train.prepare.test_data_prepare import prepare, texts, write_lines
from train.data import DataError
from train.prepare import cluster, pipeline
from train.prepare.__main__ import main
from train.prepare.files import open_folder
from train.prepare.workers import versions

ROOT = Path(__file__).parents[3]
MARK = "DUALPIPE_TEST_CLUSTER"
"""In the environment of every process of a cluster that a test has started."""


def whole(out):
    return {file.name: file.read_bytes() for file in out.iterdir()}


def wait_until(happened, given_up):
    while not happened():
        assert not given_up.is_set(), "the preparation ended first"
        time.sleep(0.02)


class Nodes:
    """The cluster of ``ray_nodes``, which runs in a process of its own."""

    def __init__(self, process):
        self._process, self.number = process, 3
        self.address = self._hear("address")

    def lose_one(self):
        """Kill the youngest node; its id."""
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self.number -= 1
        return self._hear("lost")

    def _hear(self, name):
        for line in self._process.stdout:  # Ray's own words are among them
            if line.startswith(f"{name} "):
                return line.split()[1]
        raise AssertionError(f"the cluster ended with {self._process.wait()}")


@pytest.fixture(scope="module")
def nodes():
    pytest.importorskip("ray", reason="needs Ray, the extra ray")
    sign = uuid.uuid4().hex
    command = [sys.executable, Path(__file__).with_name("ray_nodes.py")]
    own = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", MARK: sign}
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with subprocess.Popen(command, env=own, **pipes) as process:
        try:
            yield Nodes(process)
        finally:
            process.stdin.close()
            try:
                process.wait(60)
            finally:
                while left := processes(sign):
                    for one in left:
                        os.kill(one, signal.SIGKILL)


def processes(sign):
    """Those that have the sign in their environment, but for this one."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={sign}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue  # gone, or another's
    return [process for process in found if process != os.getpid()]


class Watch:
    """Passes whose jobs leave a mark on a node, and wait there for a word from the test."""

    def __init__(self, folder, free=()):
        self.folder, self.free = folder, free
        folder.mkdir()

    def over(self, function):
        """The function, whose job ``number`` waits unless it is among those that are free."""
        import ray

        folder, free, name = self.folder, self.free, function.__name__

        def watched(number, *rest):
            node = ray.get_runtime_context().get_node_id()
            (folder / f"{name} {number} {node} {os.getpid()}").touch()
            while number not in free and not (folder / f"go {name}").exists():
                time.sleep(0.02)
            return function(number, *rest)

        return watched

    def begun(self, name):
        """(job, node) of all that began."""
        return [(int(number), node) for _, number, node, _ in self._marks(name)]

    def kill(self, name, node):
        """Kill its workers, which outlive their node for a moment where the machine is the same."""
        for _, _, where, process in self._marks(name):
            if where == node:
                os.kill(int(process), signal.SIGKILL)

    def _marks(self, name):
        return [file.name.split(" ") for file in self.folder.glob(f"{name} *")]

    def go(self, name):
        (self.folder / f"go {name}").touch()


@pytest.mark.slow
def test_a_node_killed_in_each_pass_costs_its_pieces_only(nodes, tmp_path, monkeypatch):
    rows = texts(240)
    inputs = [write_lines(tmp_path / f"{n}.jsonl", rows[n * 30 : n * 30 + 40]) for n in range(8)]
    asked = dict(shard_mb=0.004, train_tokenizer=300, near_duplicates=0.9)
    prepare(tmp_path / "one", inputs, **asked)
    watch, over = Watch(tmp_path / "marks"), threading.Event()
    victims = {}

    def kill_one_in(name, count):
        try:
            wait_until(lambda: len({node for _, node in watch.begun(name)}) == count, over)
            victims[name] = nodes.lose_one()
            watch.kill(name, victims[name])
        finally:
            watch.go(name)

    def kill():
        kill_one_in("partition", 3)
        kill_one_in("tokenise", 2)

    for function in (pipeline.partition, pipeline.tokenise):
        monkeypatch.setattr(pipeline, function.__name__, watch.over(function))
    killer = threading.Thread(target=kill)
    killer.start()
    try:
        prepare(tmp_path / "many", inputs, workers=None, ray=nodes.address, **asked)
    finally:
        over.set()
        killer.join()
    assert whole(tmp_path / "many") == whole(tmp_path / "one"), "manifest and all"
    for name in ("partition", "tokenise"):
        jobs = [number for number, _ in watch.begun(name)]
        lost = [number for number, node in watch.begun(name) if node == victims[name]]
        assert len(lost) == 1, "it has one core"
        assert {number for number in jobs if jobs.count(number) > 1} == set(lost), name


@pytest.mark.slow
def test_interrupted_it_goes_on_with_what_was_not_done(nodes, tmp_path, monkeypatch):
    inputs = [write_lines(tmp_path / f"{n}.jsonl", texts(30, seed=n)) for n in range(6)]
    prepare(tmp_path / "one", inputs)
    watch, over = Watch(tmp_path / "marks", free=(0, 1)), threading.Event()
    monkeypatch.setattr(pipeline, "partition", watch.over(pipeline.partition))
    work, begun = tmp_path / "many" / ".work", len(watch.free) + nodes.number

    def interrupt():
        done = [work / f"read-{number:06d}.json" for number in watch.free]
        wait_until(
            lambda: all(file.exists() for file in done) and len(watch.begun("partition")) == begun, over
        )
        os.kill(os.getpid(), signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            prepare(tmp_path / "many", inputs, workers=None, ray=nodes.address)
    finally:
        over.set()
        interrupter.join()

    def times():
        return {number: (work / f"read-{number:06d}.json").stat().st_mtime_ns for number in watch.free}

    def planning(*arguments):
        assert times() == before, "what had a receipt is not read again"
        return make_plan(*arguments)

    before, make_plan = times(), pipeline.make_plan
    monkeypatch.setattr(pipeline, "make_plan", planning)
    watch.go("partition")
    prepare(tmp_path / "many", inputs, workers=None, ray=nodes.address)
    assert whole(tmp_path / "many") == whole(tmp_path / "one")


@pytest.mark.slow
def test_what_fails_is_told_and_what_is_lost_is_bounded(nodes, tmp_path):
    work, said = open_folder(str(tmp_path)), []
    (tmp_path / "job.json").write_text("{}")

    class Report:
        say = said.append

    def count(number):
        (tmp_path / f"{number} {uuid.uuid4().hex}").touch()
        return len(list(tmp_path.glob(f"{number} *")))

    def job(number, times):
        if count(number) <= times:
            os.kill(os.getpid(), signal.SIGKILL)
        return number * number

    def wrong(number):
        raise DataError(f"piece {number} is not JSON") if number else ZeroDivisionError("a bug")

    with cluster.connected(nodes.address, work, "job.json", Report) as share:
        found = dict(share(job, [(number, number == 2) for number in range(5)]))
        assert found == {number: number**2 for number in range(5)}
        assert said[-1] == "1 of 5 were begun again elsewhere, as their workers were lost"
        with pytest.raises(DataError, match=r"^piece 7 is not JSON$"):
            list(share(wrong, [(7,)]))
        with pytest.raises(ZeroDivisionError, match=r"^a bug$"):
            list(share(wrong, [(0,)]))
        with pytest.raises(DataError, match="4 workers in turn were lost at one piece of work.*--shard-mb"):
            list(share(job, [(9, 99)]))
        assert len(list(tmp_path.glob("9 *"))) == cluster.ATTEMPTS
        (tmp_path / "job.json").unlink()
        with pytest.raises(DataError, match=f"does not see {tmp_path}; let all nodes share that folder"):
            list(share(job, [(3, 0)]))


def test_a_node_with_other_libraries_is_refused(tmp_path):
    """Its tokens might be others."""
    (tmp_path / "job.json").touch()
    work, job = open_folder(str(tmp_path)), (lambda number: number, (3,))
    assert cluster._run_on_node(work, "job.json", versions(), *job) == 3
    with pytest.raises(
        DataError, match="has .*'numpy': .*, and here is .*'0.1'.*; install the same on all nodes"
    ):
        cluster._run_on_node(work, "job.json", versions() | {"numpy": "0.1"}, *job)


def refused(arguments, capsys):
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1, said
    return said


def test_an_address_where_no_cluster_is_is_told_soon(tmp_path, monkeypatch, capsys):
    pytest.importorskip("ray", reason="needs Ray, the extra ray")
    write_lines(tmp_path / "a.jsonl", texts(5))
    command = [str(tmp_path / "out"), "--data", str(tmp_path / "a.jsonl"), "--ray"]
    assert "--ray nowhere: ValueError: Invalid address format: nowhere; give" in refused(
        [*command, "nowhere"], capsys
    )
    monkeypatch.setattr(cluster, "_PATIENCE", 1.0)
    assert "--ray 127.0.0.1:1: no answer in 1 seconds; give HOST:PORT" in refused(
        [*command, "127.0.0.1:1"], capsys
    )
    assert not (tmp_path / "out").exists()


def test_without_ray_it_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    write_lines(tmp_path / "a.jsonl", texts(5))
    said = refused([str(tmp_path / "out"), "--data", str(tmp_path / "a.jsonl"), "--ray", "auto"], capsys)
    assert "--ray: needs Ray: " in said and "[ray]" in said


def test_the_script_installs_ray_where_it_is_asked_for(tmp_path):
    (tmp_path / "prepare").write_bytes((ROOT / "scripts" / "prepare").read_bytes())
    (tmp_path / "_env").write_text('ensure_venv() { echo "$1"; }\npython=true\n')
    for options, extra in (
        (["--ray", "auto"], "ray"),
        (["out", "--ray=h:1", "--data", "x"], "ray"),
        (["out", "--data", "--rays", "my--ray"], "prepare"),
        ([], "prepare"),
    ):
        said = subprocess.run(["bash", tmp_path / "prepare", *options], capture_output=True, text=True)
        assert said.stdout.strip() == extra, options
