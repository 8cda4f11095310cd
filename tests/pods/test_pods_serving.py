"""`dualpipe overlap --what prefill|decode`: options, the report, and a real compiler where there is one."""

import copy
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys

import jax
import pytest

from dualpipe_jax.__main__ import main
from dualpipe_jax.command import child
from dualpipe_jax.inspect import target as targets
from dualpipe_jax.inspect.target import Target
from dualpipe_jax.pods.plan import Plan
from dualpipe_jax.pods.request import Request
from tests.pods.test_pods import ANSWER, UNIT
from train.pods import serving

TPU = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")


@pytest.fixture
def answered(monkeypatch):
    """The process that compiles answers at once; gives what it was asked."""
    asked = []

    def ask(module, request, environment, title):
        asked.append(request)
        answer = copy.deepcopy(ANSWER)
        program = request["plan"] | {"ep": 16}
        compiled = answer["compiled"] | {"what": request["compile"], "units": {request["compile"]: UNIT}}
        compiled["followed"] = {"cycles": 9e5, "exposed": 0.0, "hidden": 1.0}
        return json.loads(json.dumps(answer | {"program": program, "compiled": compiled}))

    monkeypatch.setattr(child, "ask", ask)
    monkeypatch.setattr(targets, "_is_installed", lambda _: True)
    return asked


def test_what_is_compiled_and_what_is_said(answered, capsys):
    assert main(["overlap", "--target", "v5e:4x4", "--what", "prefill", "--model", "tiny"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("tiny, prefill in two microbatches, ep 16 on v5e:4x4 (16 devices)")
    hidden = "hidden: 100.0 % of 900.00 k cycles of all-to-all (enough: 97 % asked for)\nthat is without the"
    assert hidden in out
    assert "behind which the model goes on; with it: 99.0 %" in out and "sends" not in out
    both = "1.003 of the larger of its computation and its communication (2.99 : 1), 0.752"
    assert f"prefill: 3.00 M cycles, {both}" in out
    given = ["--what", "decode", "--requests", "64", "--no-overlap", "--sequence", "1024"]
    assert main(["overlap", "--target", "v5e:4x4", *given]) == 0
    assert "decode in one microbatch, ep 16 on v5e:4x4" in capsys.readouterr().out
    assert [(one["compile"], one["requests"]) for one in answered] == [("prefill", None), ("decode", 64)]


TRAINING = "--pp", "2", "--remat", "all"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--requests", "4"], "--requests: a pair has none; add --what prefill or --what decode"),
        (["--what", "decode", *TRAINING], "--what decode: experts lie over all of the target"),
        (["--what", "decode", *TRAINING], "nothing is trained; drop --pp, --remat"),
        (["--what", "prefill", "--whole"], "drop --whole"),
    ],
)
def test_options_of_the_other_kind_are_refused(answered, capsys, options, message):
    assert main(["overlap", "--target", "v5e:4x4", *options]) == 2
    assert message in capsys.readouterr().err
    assert not answered


SMALL = dict(model="tiny", layers_per_stage=2, sequence=128, attention="plain", matmul="ragged")
ONE_GROUP = "num_groups=1", "top_groups=1"
SMALL |= dict(dispatch="capacity", capacity_factor=1.5)


def plan_of(what, requests=None, **program):
    target = Target.parse("v5e:2x4")
    request = Request(Plan(**(SMALL | program)), str(target), what, requests=requests)
    return serving.build_step(request, target, jax.devices())


@pytest.mark.parametrize(("what", "rows", "tokens"), [("prefill", 128, 128), ("decode", 128, 1)])
def test_a_step_has_the_settings_asked_for(what, rows, tokens):
    plan = plan_of(what)
    assert (plan.num_rows, plan.num_tokens, plan.table_size) == (rows, tokens, 2)
    assert plan.mesh.shape["ep"] == 8 and plan.config.num_layers == 2 and not plan.config.num_dense_layers


@pytest.mark.parametrize(
    ("what", "options", "message"),
    [
        ("prefill", {"sequence": 0}, "--sequence 0: must be at least 1"),
        ("prefill", {"compiler_option": ("level",)}, "--compiler-option level: wants NAME=VALUE"),
        ("prefill", {"sequence": 100}, "--sequence 100: must be a multiple of 64"),
        ("decode", {"requests": 3}, "--requests 3: two microbatches must share them equally"),
        ("decode", {"set": ("num_experts=12", *ONE_GROUP)}, "8 devices do not share 12 experts"),
    ],
)
def test_settings_that_do_not_fit_are_refused(what, options, message):
    with pytest.raises(ValueError, match=message):
        plan_of(what, **options)


@pytest.mark.parametrize("what", serving.SERVING_STEPS)
def test_two_microbatches_take_turns(what):
    """A layer's dispatch and combine, of two halves, in two layers: each with a barrier behind it."""
    text = serving.lower(plan_of(what, requests=4), overlap=True).as_text(debug_info=False)
    marks = re.findall(r"stablehlo\.(all_to_all|optimization_barrier)", text)
    assert marks.count("all_to_all") == 8
    assert [kind for kind, _ in itertools.groupby(marks)].count("all_to_all") == 8
    text = serving.lower(plan_of(what, requests=4), overlap=False).as_text(debug_info=False)
    assert text.count("stablehlo.all_to_all") == 4


@TPU
@pytest.mark.slow
def test_a_step_on_v5e_hides_more_than_one_microbatch_does():
    """Decoding, which is compiled in a tenth of the time that a prefill takes."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    arguments = "--what decode --target v5e:2x2 --model tiny --layers-per-stage 2 --sequence 256"
    arguments += (
        " --requests 16 --attention plain --dispatch capacity --capacity-factor 1 --at-least 0 --json"
    )
    arguments += " --set dim=512 expert_hidden=1024 num_experts=16 vocab=1024"
    command = [sys.executable, "-m", "dualpipe_jax", "overlap", *arguments.split(), *ONE_GROUP]

    def hidden(*more):
        done = subprocess.run([*command, *more], capture_output=True, text=True, env=environment, timeout=900)
        assert done.returncode == 0, done.stderr
        compiled = json.loads(done.stdout)["compiled"]
        assert not [copied for copied in compiled["copies"] if copied["of_state"]]
        return compiled

    two, one = hidden(), hidden("--no-overlap")
    assert len(two["all_to_alls"]) == 2 * len(one["all_to_alls"]) == 8
    assert {row["direction"] for row in two["all_to_alls"]} == {"A", "B"}
    assert two["all_to_all"]["hidden"] > one["all_to_all"]["hidden"]
