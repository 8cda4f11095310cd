"""What is wrong with all cases of a plan is told after two of them, and with options before a compiler is asked for."""

import pytest

from dualpipe_jax.__main__ import main
from dualpipe_jax.command import answers, child, overlap
from dualpipe_jax.command.options import CommandError
from dualpipe_jax.inspect.target import MissingCompiler, Target
from dualpipe_jax.pods.planner import REMATS


def test_what_no_case_can_have_is_told_after_two(monkeypatch, tmp_path, capsys):
    """A change that the program does not take: in all of dozens of cases the same words."""
    asked = []

    def refuse(words):
        def study(request, title):
            given = request.plan
            asked.append((given.pp, given.ep))
            raise CommandError(words(given))

        monkeypatch.setattr(answers, "ask_pods", study)
        asked.clear()
        return main(["plan", "--target", "v5p:2x2x4", "--program", "tiny", "--cache", str(tmp_path)])

    assert refuse(lambda given: "--set nosuch=1: there is no such number") == 2
    assert capsys.readouterr().err == "error: --set nosuch=1: there is no such number\n"
    assert len(asked) == 2 and asked[0] != asked[1]
    assert refuse(lambda given: f"--ep {given.ep}: must divide the 6 experts") == 1  # each tells its own
    words = capsys.readouterr().out
    for layout in ((2, 8), (4, 4), (8, 2), (16, 1)):
        assert 1 <= asked.count(layout) <= 3 and f"--ep {layout[1]}: must divide the 6 experts" in words
    assert refuse(lambda given: f"--ep {given.ep}: no {given.remat}, {given.batch} and {given.dispatch}") == 1
    words = capsys.readouterr().out
    for remat in REMATS:
        assert f"--ep 8: no {remat}, 8 and dropless" in words, "what differs in a layout is told of each"


@pytest.mark.parametrize("command", ["dryrun", "overlap"])
def test_options_are_looked_at_without_a_compiler(monkeypatch, capsys, command):
    asked = []

    def ask(module, request, environment, title):
        asked.append(request["compile"])
        raise CommandError("--ep 7: must divide the 64 experts")

    def missing(target):
        raise MissingCompiler("libtpu is not installed")

    monkeypatch.setattr(child, "ask", ask)
    monkeypatch.setattr(Target, "check_compiler", missing)
    options = [command, "--target", "v5e:4x4", "--program", "tiny", "--ep", "7"]
    assert main([*options, *(["--compile", "units"] if command == "dryrun" else [])]) == 2
    assert asked == ["draw"] and "error: --ep 7: must divide" in capsys.readouterr().err
    monkeypatch.setattr(child, "ask", lambda *_: asked.append("right") or {})
    with pytest.raises(MissingCompiler):
        overlap.ask_pods(overlap.Request(overlap.Plan("tiny"), "v5e:4x4", "units"))
    assert asked == ["draw", "right"]
