"""What `scripts/bench kills` removes, and what it says that it killed."""

import random
import subprocess
import sys

import pytest

from benchmarks import kills


@pytest.mark.parametrize("name", ["thesis.txt", None])
def test_only_what_it_made_is_removed(name, tmp_path, monkeypatch, capsys):
    def start(trainer, log):
        raise SystemExit("started")

    monkeypatch.setattr(kills.Trainer, "start", start)
    monkeypatch.setattr(sys, "argv", ["kills", "--folder", str(tmp_path)])
    for left in ("text.txt", "log.txt", name):
        if left is not None:
            (tmp_path / left).write_text("kept")
    with pytest.raises(SystemExit) as ended:
        kills.main()
    if name is None:
        assert ended.value.code == "started" and not (tmp_path / "log.txt").exists()
    else:
        assert "has thesis.txt, which is not of this benchmark" in capsys.readouterr().err
        assert all((tmp_path / left).read_text() == "kept" for left in ("text.txt", name))


class Life:
    """A run that is killed early, with the steps that its file has each time that somebody looks."""

    def __init__(self, *steps: int):
        self.steps = list(steps)

    def start(self, log):
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])

    def lines(self):
        return {self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]: (1.0, 1.0)}

    def is_saving(self):
        return False


class Early(random.Random):
    """Every life is a short one."""

    def random(self):
        return 0.0

    def uniform(self, least, most):
        return 0.5


@pytest.mark.parametrize(("life", "doing"), [(Life(7), "starting"), (Life(7, 7, 7, 8), "training")])
def test_a_life_that_wrote_a_step_was_not_starting(life, doing, tmp_path):
    assert kills.live_and_die(life, tmp_path / "log", Early(), 2.0) == doing
