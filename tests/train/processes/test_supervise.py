"""Faults of real processes: noticed soon, all ended, started again from what was saved, and told."""

import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from datetime import datetime
from pathlib import Path

import pytest

from dualpipe_jax.processes import free_port, too_few_gpus
from train.checks import check
from train.config import ConfigError, configure
from train.options import parse, resumed
from train.processes import watcher
from train.processes.heartbeat import Heartbeat
from train.processes.supervise import (
    command_lines,
    own_environment,
    run_with_restarts,
    supervise,
    without_failed,
)
from train.processes.watcher import StopRequests, run_once

WORKER = Path(__file__).with_name("toy_worker.py")
SOON_S = 60
"""On a machine that has much else to do; left to itself, JAX would notice after minutes."""


def commands(folder, asked):
    def lines(config, attempt):
        del attempt
        count = config.launch.processes
        line = [sys.executable, str(WORKER), str(folder), json.dumps(asked), f"127.0.0.1:{free_port()}"]
        return [[*line, str(count), str(number)] for number in range(count)]

    return lines


@pytest.fixture(autouse=True)
def path(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))


def nobody_left(folder):
    """No process that was started with this folder is there any more."""
    found = subprocess.run(["ps", "-ww", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return not [line for line in found.splitlines() if f"{WORKER} {folder} " in line]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "process", "told"),
    [
        ("stop", 1, "process 1 gave no sign of life for "),
        ("spin", 1, "process 1 ended with code 1 in step 7"),
        ("raise", 1, "process 1 ended with code 70 in step 7; then process 0 ended with code 71"),
        ("save", 0, "process 0 died of SIGKILL in saving step 8"),  # with it the coordinator
    ],
)
def test_a_fault_costs_the_steps_since_the_last_checkpoint(
    tmp_path, capfd, monkeypatch, fault, process, told
):
    monkeypatch.setattr(watcher, "SILENT_S", 3.0)  # one that runs has longer, and may be slow
    asked = {"fault": fault, "process": process, "step": 6, "patience": 4.0 if fault == "spin" else None}
    config = configure(processes=2, restarts=1)
    assert run_with_restarts(config, commands(tmp_path, asked), tmp_path / "logs", StopRequests()) == 0
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


@pytest.mark.slow
def test_what_would_only_come_again_is_not_started_again(tmp_path, capfd):
    asked = {"fault": "exit 2", "process": 1, "step": 1}
    assert (
        run_with_restarts(
            configure(processes=2), commands(tmp_path, asked), tmp_path / "logs", StopRequests()
        )
        == 2
    )
    said = capfd.readouterr().err
    assert "process 1 gave up (options or data that will not do)" in said
    assert "error: this will not do" in said and "restart" not in said


@pytest.mark.slow
def test_fewer_processes_go_on(tmp_path, capfd):
    asked = {"fault": "kill", "process": 1, "step": 5}
    config = configure(processes=2, restarts=1, shrink=True, schedule="one_f_one_b", pp=2, ep=1)
    assert run_with_restarts(config, commands(tmp_path, asked), tmp_path / "logs", StopRequests()) == 0
    captured = capfd.readouterr()
    assert "going on with 1 process, pp 1 x ep 1" in captured.err
    assert [line for line in captured.out.splitlines() if line.startswith("from")] == ["from 0", "from 4"]


def test_a_step_may_take_ten_times_the_median(monkeypatch):
    """And twenty seconds at least; what is compiled may take any time."""
    clock, limits = [0.0], []
    monkeypatch.setattr("train.processes.heartbeat.time.monotonic", lambda: clock[0])
    monkeypatch.setattr(
        "train.processes.heartbeat.faulthandler.dump_traceback_later",
        lambda s, exit: limits.append((s, exit)),
    )
    monkeypatch.setattr("train.processes.heartbeat.faulthandler.cancel_dump_traceback_later", limits.clear)
    heartbeat = Heartbeat()
    heartbeat.step(1, compiles=True)
    assert limits == []
    for number, seconds in enumerate((100.0, 1.0, 3.0, 7.0, 4.0), 1):  # the first is that of compiling
        clock[0] += seconds
        heartbeat.step(number + 1)
    assert limits == [(20.0, True), (20.0, True), (20.0, True), (30.0, True), (35.0, True)]
    heartbeat.phase("saving step 6")
    assert limits == [] and Heartbeat(patience=4.0).limit == 4.0


QUICK = """
import sys, time
time.sleep(0.1 * int(sys.argv[1]))
print("words", file=sys.stderr)
sys.exit(int(sys.argv[2]))
"""


def quick(*codes):
    """Commands of processes that end with these codes, a tenth of a second after one another."""
    return [[sys.executable, "-c", QUICK, str(number), str(code)] for number, code in enumerate(codes)]


def test_each_process_on_gpus_takes_its_own(tmp_path):
    """The variables of one process per GPU; on CPU there are none."""
    show = "import os, sys; print(os.environ.get('JAX_LOCAL_DEVICE_IDS'), file=sys.stderr)"
    config = configure(processes=2, devices="accelerator", pp=2, ep=1)
    lines = [[sys.executable, "-c", show]] * 2
    assert run_once(lines, tmp_path / "0", StopRequests(), os.environ, own_environment(config)).code == 0
    assert [(tmp_path / f"0.{number}.log").read_text() for number in (0, 1)] == ["0\n", "1\n"]
    assert own_environment(configure(processes=2))(1) == {}


def test_all_processes_share_a_gpu_if_asked():
    environment = own_environment(configure(processes=2, devices="accelerator", pp=2, ep=1, one_gpu=True))
    assert environment(0) == environment(1) and environment(1)["JAX_LOCAL_DEVICE_IDS"] == "0"
    assert environment(1)["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert float(environment(1)["XLA_PYTHON_CLIENT_MEM_FRACTION"]) < 1 / 2


def test_a_process_of_several_is_one_by_itself(tmp_path):
    """What it is started with passes the checks of a process that something else starts."""
    config = configure(processes=2, devices="accelerator", pp=2, ep=1, one_gpu=True, name="run")
    for line in command_lines(configure(config, restarts=1, shrink=True), tmp_path / "0", resume=False):
        check(parse(line[line.index("train") + 1 :]).options)


@pytest.mark.parametrize(
    ("visible", "found"),
    [("0", "is 1; give --pro.* --one-gpu"), ("", "is none"), ("-1", "is none; take CPU devices")],
)
def test_fewer_gpus_than_processes(monkeypatch, visible, found):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ConfigError, match=f"--processes 2: each process takes a GPU, and there {found}"):
        supervise(configure(processes=2, devices="accelerator", pp=2, ep=1), resume=False)


@pytest.mark.parametrize(
    ("listed", "why"),
    [
        ("echo 'GPU 0: NVIDIA H100 (UUID: GPU-1)'", "there is 1"),
        ("echo 'GPU 0: A'; echo 'GPU 1: B'", ""),
        ("echo 'no devices were found' >&2; exit 6", ""),
    ],
)
def test_gpus_are_counted_without_jax(tmp_path, monkeypatch, listed, why):
    """As nvidia-smi lists them; one that fails tells nothing, and JAX will say what is wrong."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{listed}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = too_few_gpus(2)
    assert why in found and bool(why) == bool(found)


def test_on_gpus_there_are_as_many_processes_as_devices():
    config = configure(processes=2, devices="accelerator", pp=2, ep=2)
    with pytest.raises(
        ConfigError, match="--processes 2: .* one GPU, and --pp 2 --ep 2 needs 4: give --processes 4"
    ):
        supervise(config, resume=False)


@pytest.mark.parametrize(
    ("name", "told"), [("a" * 300, "File name too long"), ("x", "Not a directory"), (None, "File exists")]
)
def test_a_folder_that_cannot_be_made_is_one_line(tmp_path, name, told):
    runs = tmp_path / "runs"
    if told == "File name too long":
        runs.mkdir()
    else:
        runs.touch()
    config = configure(processes=2, pp=2, ep=1, name=name, runs=runs)
    with pytest.raises(ConfigError, match=f"--runs: cannot make {runs}.*: {told}"):
        supervise(config, resume=False)
    if name is not None:
        assert resumed(name, runs).name == name  # its options are those of a run that has not begun


def test_what_the_supervisor_cannot_write_is_one_line(tmp_path):
    """Options that processes read; its own story may be missing, and ends no run."""
    config = configure(processes=2, pp=2, ep=1, name="x", runs=tmp_path)
    (tmp_path / "x" / "processes" / "0.options.json").mkdir(parents=True)
    (tmp_path / "x" / "processes" / "story.log").mkdir()
    with pytest.raises(ConfigError, match=f"--runs: cannot write into {tmp_path}/x: Is a directory"):
        supervise(config, resume=False)
    folder = tmp_path / "x" / "processes"
    assert run_with_restarts(config, lambda *_: quick(0, 0), folder, StopRequests()) == 0


SUPERVISES = """
import sys
from pathlib import Path
from train.config import configure
from train.processes import supervise

def run_with_restarts(*_):
    print("at work", flush=True)
    sys.stdin.read()

supervise.run_with_restarts = run_with_restarts
supervise.supervise(configure(processes=2, pp=2, ep=1, name="x", runs=Path(sys.argv[1])), resume=True)
"""


def test_one_supervisor_at_a_time(tmp_path, monkeypatch):
    """The second is told of the first; of one that was killed nothing stays."""
    monkeypatch.setattr("train.processes.supervise.run_with_restarts", lambda *_: 7)
    config = configure(processes=2, pp=2, ep=1, name="x", runs=tmp_path)
    line = [sys.executable, "-c", SUPERVISES, str(tmp_path)]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "at work\n"
        with pytest.raises(ConfigError) as refused:
            supervise(config, resume=True)
        first.kill()
    assert str(refused.value) == (
        f"--name x: process {first.pid} on {platform.node()} is at work in {tmp_path}/x; let it end, or stop it there "
        "with SIGTERM, at which it saves"
    )
    assert supervise(config, resume=True) == 7


def test_restarts_come_to_an_end(tmp_path, capfd):
    starts = []

    def lines(config, attempt):
        starts.append(attempt)
        return quick(70, 0)

    assert run_with_restarts(configure(processes=2, restarts=2), lines, tmp_path, StopRequests()) == 1
    assert starts == [0, 1, 2]
    story = (tmp_path / "story.log").read_text()
    assert story.count("process 0 ended with code 70 in its start; then process 1 ended well") == 3
    assert "    words" in story and story.rstrip().endswith("given up after 2 restarts")
    assert (tmp_path / "2.1.log").read_text() == "words\n"


@pytest.mark.parametrize(
    ("codes", "code"), [((0, 0), 0), ((0, 70), None), ((143, 143), 143), ((2, 70), 2), ((70, 3), 3)]
)
def test_codes(tmp_path, codes, code):
    assert run_once(quick(*codes), tmp_path / "0", StopRequests(), os.environ).code == code


TOLD = """
import os, signal, sys, time
from pathlib import Path
code, folder, number = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
def end(*_):
    print("error: step 40 could not be saved" if code == 1 else "saved at step 40", file=sys.stderr, flush=True)
    os._exit(code)
if code != -signal.SIGTERM:
    signal.signal(signal.SIGTERM, end)
(folder / f"{number}").touch()
if number == 0:
    while not (folder / "1").exists():
        time.sleep(0.05)
    os.kill(os.getppid(), signal.SIGTERM)
time.sleep(120)
"""


@pytest.mark.parametrize(
    ("codes", "code", "told"),
    [
        ((143, 143), 143, "told to stop: process 0 ended with code 143, process 1 ended with code 143\n    saved"),
        ((71, 1), 1, "told to stop, and not saved: process 1 ended with code 1 in its start; then process 0 ended "
         "with code 71\n    error: step 40 could not be saved"),
        ((2, 71), 2, "process 0 gave up (options or data that will not do)"),
        ((-signal.SIGTERM, 71), 143, "told to stop: process 0 died of SIGTERM, process 1 ended with code 71"),
    ],
)  # fmt: skip
def test_who_was_told_to_stop_and_could_not_save_has_failed(tmp_path, codes, code, told):
    """143 is for what may be taken away: a job with that code is not queued again."""
    lines = [[sys.executable, "-c", TOLD, str(one), str(tmp_path), str(n)] for n, one in enumerate(codes)]
    with StopRequests() as requests:
        outcome = run_once(lines, tmp_path / "log", requests, os.environ)
    assert outcome.code == code and outcome.why.startswith(told)


def test_who_does_not_stop_in_time_has_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(watcher, "STOPPING_S", 0.5)
    stays = "import os, signal, time; signal.signal(15, signal.SIG_IGN); os.kill(os.getppid(), 15); time.sleep(120)"
    with StopRequests() as requests:
        outcome = run_once([[sys.executable, "-c", stays]], tmp_path / "log", requests, os.environ)
    assert outcome.code == 1 and outcome.why == "told to stop, and not done after 0 s"


def test_what_an_earlier_start_wrote_explains_no_later_end(tmp_path):
    """A resumed run begins with number 0 again, in the same logs: "saved at step 40" is of the start before."""
    die = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    (tmp_path / "0.0.log").write_text("SIGTERM: saved at step 40\n")
    told = StopRequests()
    told.count, told.code = 2, 130
    assert run_once([die], tmp_path / "0", told, os.environ).why == "told to stop: process 0 died of SIGKILL"
    why = run_once([die], tmp_path / "0", StopRequests(), os.environ).why
    assert why == "process 0 died of SIGKILL in its start"
    assert run_once(quick(70), tmp_path / "0", StopRequests(), os.environ).why.endswith(
        "its start\n    words"
    )


def test_who_raised_or_died_is_told_from_who_noticed(tmp_path):
    outcome = run_once(quick(71, 70, 71), tmp_path / "0", StopRequests(), os.environ)
    assert outcome.failed == (1,)
    told = "process 1 ended with code 70 in its start; then process 0 ended with code 71"
    assert outcome.why.startswith(told)
    abort = [sys.executable, "-c", "import os; os.abort()"]  # as JAX does when the coordinator is gone
    killed = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    outcome = run_once([abort, killed, *quick(0, 70)[1:]], tmp_path / "1", StopRequests(), os.environ)
    assert outcome.failed == (1,)
    told = "process 1 died of SIGKILL in its start; then process 0 died of SIGABRT, process 2"
    assert outcome.why.startswith(told)


STOPS = """
import os, signal, sys
from pathlib import Path
Path(sys.argv[1]).write_text(str(os.getpid()))
os.kill(os.getpid(), signal.SIGSTOP)
"""

WAITS = """
import sys, time
from pathlib import Path
pid = Path(sys.argv[1])
while not (pid.exists() and pid.read_text()) or ") T " not in Path(f"/proc/{pid.read_text()}/stat").read_text():
    time.sleep(0.1)
sys.exit(1)
"""


def test_who_is_stopped_is_told_from_who_waited_too_long(tmp_path, monkeypatch):
    """With a ``--patience`` shorter than a silence has to be, the timer of the process that waits ends that first."""
    monkeypatch.setattr(watcher, "GRACE_S", 0.0)
    lines = [[sys.executable, "-c", code, str(tmp_path / "pid")] for code in (WAITS, STOPS)]
    outcome = run_once(lines, tmp_path / "0", StopRequests(), os.environ)
    assert outcome.failed == (1,)
    assert outcome.why == "process 1 was stopped in its start; then process 0 ended with code 1"


def test_who_gives_no_sign_of_life_is_told_from_who_takes_long(tmp_path, monkeypatch):
    """One that is not stopped may be silent for longer: Python starts slowly on a busy machine."""
    monkeypatch.setattr(watcher, "SILENT_S", 0.3)
    requests = StopRequests()
    # Nobody would end a stopped process that is not noticed.
    end = threading.Timer(60, lambda: [requests.handle(signal.SIGTERM, None) for _ in range(2)])
    end.start()
    outcome = run_once(
        [[sys.executable, "-c", STOPS, str(tmp_path / "pid")]], tmp_path / "0", requests, os.environ
    )
    end.cancel()
    assert (outcome.code, outcome.failed) == (None, (0,))
    assert outcome.why.endswith(" s (it is stopped), last in its start")
    slow = [sys.executable, "-c", "import time; time.sleep(1)"]
    assert run_once([slow], tmp_path / "1", StopRequests(), os.environ).code == 0
    monkeypatch.setattr(watcher, "STARTING_S", 0.3)
    outcome = run_once([slow], tmp_path / "2", StopRequests(), os.environ)
    assert outcome.failed == (0,) and outcome.why.startswith("process 0 gave no sign of life for ")


STUBBORN = """
import signal, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, signal.SIG_IGN)
Path(sys.argv[1]).touch()
time.sleep(30)
"""


@pytest.mark.parametrize(
    ("times", "patience", "code", "told"),
    [
        (1, 0.8, 1, "told to stop, and not done after 1 s"),
        (2, 60.0, 143, "told to stop: process 0 died of SIGKILL"),
    ],
)
def test_who_does_not_save_in_time_or_is_told_twice_is_ended(
    tmp_path, monkeypatch, times, patience, code, told
):
    monkeypatch.setattr(watcher, "STOPPING_S", patience)
    requests = StopRequests()

    def ask():
        wait_for((tmp_path / "there").exists)
        for _ in range(times):
            requests.handle(signal.SIGTERM, None)
            time.sleep(0.5)

    asking = threading.Thread(target=ask)
    asking.start()
    line = [sys.executable, "-c", STUBBORN, str(tmp_path / "there")]
    outcome = run_once([line], tmp_path / "0", requests, os.environ)
    asking.join()
    assert (outcome.code, outcome.why) == (code, told)


@pytest.mark.parametrize(
    ("changes", "lost", "left"),
    [
        (dict(processes=4, pp=4), 1, (3, 3)),
        (dict(processes=4, pp=4, schedule="dualpipe"), 1, (2, 2)),  # takes even numbers only
        (dict(processes=4, pp=4), 3, (1, 1)),
        (dict(processes=8, pp=4), 1, (6, 3)),  # ep stays
        (dict(processes=4, dp=2, pp=2), 1, (2, 1)),  # dp too
        (dict(processes=1, pp=4), 1, (1, 4)),
    ],
)
def test_what_is_left(changes, lost, left):
    whole = dict(ep=2, schedule="one_f_one_b", microbatches=8, stage_layers=(1,) * changes["pp"])
    before = configure(**whole | changes)
    fewer = without_failed(before, lost)
    assert fewer.step.stage_layers == (() if fewer != before else before.step.stage_layers), "of other ranks"
    assert (fewer.launch.processes, fewer.step.pp) == left
    assert fewer.step.ep == 2 and fewer.step.microbatches == 8


def wait_for(holds, seconds=180):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


SUPERVISOR = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_supervise import commands
from train.config import configure
from train.processes.supervise import run_with_restarts
from train.processes.watcher import StopRequests
folder = Path(sys.argv[2])
with StopRequests() as requests:
    line = commands(folder, {"fault": None, "process": 0, "step": 0, "pause": 0.5})
    sys.exit(run_with_restarts(configure(processes=2), line, folder / "logs", requests))
"""


@pytest.fixture
def supervisor(tmp_path):
    """A supervisor of two processes that are at work, in a process of its own."""
    line = [sys.executable, "-c", SUPERVISOR, str(WORKER.parent), str(tmp_path)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_for(lambda: (tmp_path / "saved").exists())
            yield process
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("who", ["supervisor", "worker"])
def test_a_notice_saves_and_ends(tmp_path, supervisor, who):
    """Whoever gets it: all stop after the same step."""
    line = ["ps", "-ww", "--ppid", str(supervisor.pid), "-o", "pid=,args="]
    found = subprocess.run(line, capture_output=True, text=True, check=True).stdout.splitlines()
    (worker,) = [int(line.split()[0]) for line in found if line.endswith(" 2 1")]
    os.kill(supervisor.pid if who == "supervisor" else worker, signal.SIGTERM)
    _, said = supervisor.communicate(timeout=60)
    assert supervisor.returncode == 143
    assert "told to stop: process 0 ended with code 143, process 1 ended with code 143\n    saved " in said
    assert 4 < int((tmp_path / "saved").read_text()) < 12
    assert nobody_left(tmp_path)


@pytest.mark.slow
def test_without_their_supervisor_processes_end(tmp_path, supervisor):
    supervisor.kill()
    wait_for(lambda: nobody_left(tmp_path), SOON_S)
    logs = [(tmp_path / "logs" / f"0.{process}.log").read_text() for process in (0, 1)]
    # Whoever sees it first takes the other with it.
    assert any("the supervisor is gone" in log for log in logs)


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "process"), [("stop", 1), ("raise", 0)])
def test_without_any_supervisor_the_others_end_too(tmp_path, fault, process):
    """As on a cluster: whoever is not stopped itself ends soon."""
    started, asked = [], {"fault": fault, "process": process, "step": 2, "patience": 4.0}
    for line in commands(tmp_path, asked)(configure(processes=2), 0):
        with (tmp_path / f"out.{len(started)}").open("w") as out:
            started.append(subprocess.Popen(line, stdout=out, stderr=out))
    try:
        wait_for((tmp_path / "struck").exists)
        assert started[1 - process].wait(SOON_S) != 0
    finally:
        for one in started:
            one.kill()
            one.wait()
