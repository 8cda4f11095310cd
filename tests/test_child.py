"""The process in which compilers run: what it answers, how it dies, and that nothing of it is left."""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from dualpipe_jax.command import child
from dualpipe_jax.command.child import ChildDied, StageTimeout, ask
from dualpipe_jax.command.options import CommandError

WORKERS = {
    "answers": """
        print("counting", flush=True)
        request = json.loads(sys.stdin.readline())
        open(sys.argv[1], "w").write(json.dumps({"sum": sum(request["numbers"]), "name": os.environ["NAME"]}))
    """,
    "refuses": """
        open(sys.argv[1], "w").write(json.dumps({"error": "no such pod"}))
        sys.exit(1)
    """,
    "aborts": """
        print("compiling", flush=True)
        print("I1121 Linux version", file=sys.stderr)
        print("F1121 10:44:26.2 target.cc:1737] Check failed: y <= 16 (32 vs. 16)", file=sys.stderr, flush=True)
        print("E1121 10:44:27.2 hook.cc:3] RAW: Dumping core locally.", file=sys.stderr, flush=True)
        os.abort()
    """,
    "babbles": """
        os.write(1, b"\\xff\\n")
        open(sys.argv[1], "w").write(json.dumps({"sum": 3}))
    """,
    "raises": """
        print("drawing", flush=True)
        raise RuntimeError("a mistake of ours")
    """,
    "lingers": """
        import subprocess
        other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
        open(os.environ["PIDS"], "w").write(f"{os.getpid()} {other.pid}")
        print("compiling", flush=True)
        time.sleep(120)
    """,
    "leaves one behind": """
        import subprocess
        other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(40)"])
        open(os.environ["PIDS"], "w").write(f"{other.pid}")
        print("compiling", flush=True)
        if json.loads(sys.stdin.readline())["answers"]:
            open(sys.argv[1], "w").write(json.dumps({"sum": 3}))
        os._exit(3)
    """,
    "hangs": """
        print("counting", flush=True)
        open(sys.argv[1] + ".partial", "w").write(json.dumps({"sum": 3}))
        open(os.environ["PIDS"], "w").write(f"{os.getpid()}")
        print("waiting", flush=True)
        time.sleep(120)
    """,
    "hangs at its end": """
        sys.stdout.close()
        os.close(1)
        time.sleep(120)
    """,
    "serves": """
        from dualpipe_jax.worker import say, serve
        def answers(asked):
            say("counting")
            yield {"sum": 1}
            if asked["numbers"] == []:
                raise ValueError("nothing to count")
            if asked["numbers"] == [0]:
                os._exit(3)
            yield {"sum": sum(asked["numbers"])}
        sys.exit(serve(answers))
    """,
    "watches": """
        import threading
        from dualpipe_jax.worker import end_with_parent
        sys.stdin.readline()
        threading.Thread(target=end_with_parent, daemon=True).start()
        open(os.environ["PIDS"], "w").write(f"{os.getpid()}")
        time.sleep(120)
    """,
}


@pytest.fixture
def environment(tmp_path):
    for name, work in WORKERS.items():
        body = "\n".join(line.removeprefix("        ") for line in work.splitlines())
        (tmp_path / f"{name}.py").write_text(f"import json, os, sys, time\n{body}")
    return {"PYTHONPATH": str(tmp_path), "NAME": "pod", "PIDS": str(tmp_path / "pids")}


def test_an_answer(environment, capfd):
    assert ask("answers", {"numbers": [1, 2]}, environment, "v5e:4x4") == {"sum": 3, "name": "pod"}
    out, err = capfd.readouterr()
    assert not out, "figures alone go to standard output"
    assert re.fullmatch(r"v5e:4x4: counting \(\d s\)\n", err)


def test_what_it_prints_may_be_no_text(environment):
    assert ask("babbles", {}, environment, "v5e:4x4", lambda _: 30.0) == {"sum": 3}


def test_what_it_refuses(environment):
    with pytest.raises(CommandError, match="^no such pod$"):
        ask("refuses", {}, environment, "v5e:4x4")


def test_a_compiler_that_ends_its_process(environment):
    with pytest.raises(ChildDied) as died:
        ask("aborts", {}, environment, "v5e:16x32")
    assert str(died.value) == (
        "the process was ended by SIGABRT while compiling; its last words:\n"
        "  F1121 10:44:26.2 target.cc:1737] Check failed: y <= 16 (32 vs. 16)"
    )


def test_a_mistake_of_ours(environment):
    message = r"ended with status 1 while drawing; .*\n  RuntimeError: a mistake of ours$"
    with pytest.raises(ChildDied, match=message):
        ask("raises", {}, environment, "v5e:4x4")


def test_a_stage_that_takes_too_long(environment):
    """Each stage has its own limit; what was found before is not lost, and the process is gone."""
    limits = {"starting": 30.0, "counting": 30.0, "waiting": 0.2}
    with pytest.raises(StageTimeout, match=r"^no answer in 0.2 s while waiting$") as hung:
        ask("hangs", {}, environment, "probe", limits.__getitem__)
    assert (hung.value.stage, hung.value.known) == ("waiting", {"sum": 3})
    assert not is_alive(int(Path(environment["PIDS"]).read_text()))


def test_each_stage_has_its_own_limit(environment, monkeypatch):
    """By a clock on which two stages take six of their ten seconds each, and the third takes all of them."""
    times, clock = {"starting": 6.0, "counting": 6.0, "waiting": 11.0}, [0.0]

    def limit(stage):
        clock[0] += times.pop(stage, 0.0)
        return 10.0

    monkeypatch.setattr(child, "time", types.SimpleNamespace(monotonic=lambda: clock[0]))
    with pytest.raises(StageTimeout, match=r"^no answer in 10 s while waiting$"):
        ask("hangs", {}, environment, "probe", limit)


def test_a_process_that_hangs_on_its_way_out(environment):
    with pytest.raises(StageTimeout, match=r"^no answer in 2 s while starting$") as hung:
        ask("hangs at its end", {}, environment, "probe", lambda stage: 2.0)
    assert hung.value.known == {}


def test_one_that_it_leaves_behind_is_not_waited_for(environment):
    """It has the process's standard output, which so stays open for 40 seconds."""
    began = time.monotonic()
    with pytest.raises(ChildDied, match="^the process ended with status 3 while compiling$"):
        ask("leaves one behind", {"answers": False}, environment, "v5e:4x4")
    assert not is_alive(int(Path(environment["PIDS"]).read_text())) and time.monotonic() - began < 30
    assert ask("leaves one behind", {"answers": True}, environment, "v5e:4x4") == {"sum": 3}


def test_the_far_end(environment):
    """What is known grows; the last is the answer, an error one too, and the others are left where it dies."""
    environment = environment | {"PYTHONPATH": os.pathsep.join([os.getcwd(), environment["PYTHONPATH"]])}
    assert ask("serves", {"numbers": [1, 2]}, environment, "probe") == {"sum": 3}
    with pytest.raises(CommandError, match="^nothing to count$"):
        ask("serves", {"numbers": []}, environment, "probe")
    with pytest.raises(ChildDied, match="^the process ended with status 3 while counting") as died:
        ask("serves", {"numbers": [0]}, environment, "probe")
    assert died.value.known == {"sum": 1}


def killed(environment, worker, number):
    """Process numbers of a worker, and what it has started, whose parent is sent a signal."""
    paths = os.pathsep.join([os.getcwd(), environment["PYTHONPATH"]])
    call = f"from dualpipe_jax.command.child import ask; ask({worker!r}, {{}}, {{}}, 'v5e:4x4')"
    # A shell's background job ignores interrupts, and hands that on: Python then raises no KeyboardInterrupt.
    call = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler); {call}"
    environ = {**os.environ, **environment, "PYTHONPATH": paths}
    parent = subprocess.Popen([sys.executable, "-c", call], env=environ, stderr=subprocess.PIPE)
    pids = waited_for(lambda: Path(environment["PIDS"]).read_text().split())
    assert all(is_alive(int(pid)) for pid in pids)
    os.kill(parent.pid, number)
    parent.communicate(timeout=60)
    return [int(pid) for pid in pids]


def test_of_several_at_once_a_terminal_shows_one(monkeypatch):
    """A line that two change is of neither."""

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    with child._Progress("the first") as first:
        with child._Progress("the second") as second:
            second.show("counting", 1.0, new=True)
        first.show("compiling", 2.0, new=True)
    assert first.status is not None and second.status is None and "second" not in shown.getvalue()
    with child._Progress("the third") as third:
        assert third.status is not None, "the first has ended"


def test_interrupted_it_ends_with_all_that_it_has_started(environment):
    pids = killed(environment, "lingers", signal.SIGINT)
    assert len(pids) == 2 and not any(map(is_alive, pids))


def test_if_its_parent_is_killed_it_ends_by_itself(environment):
    (pid,) = killed(environment, "watches", signal.SIGKILL)
    waited_for(lambda: not is_alive(pid))


def waited_for(found):
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with contextlib.suppress(FileNotFoundError):
            if result := found():
                return result
        time.sleep(0.05)
    raise AssertionError("it did not happen")


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().split(")")[-1].split()[0] != "Z"
    except FileNotFoundError:
        return False
