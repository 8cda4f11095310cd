"""`dualpipe overlap` and `dualpipe dryrun`: options, tables, exit statuses; and real compilers where there are any."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import jax
import pytest

from dualpipe_jax.__main__ import main
from dualpipe_jax.command import child
from dualpipe_jax.command.options import CommandError
from dualpipe_jax.inspect import read
from dualpipe_jax.inspect import target as targets
from dualpipe_jax.installing import install_command
from dualpipe_jax.pods import Plan
from dualpipe_jax.pods.dryrun import draw, guards_of
from dualpipe_jax.pods.request import Request
from dualpipe_jax.pods.results import Compiled, weigh
from dualpipe_jax.pods.units import scan_body

SMALL = ["--model", "tiny", "--layers-per-stage", "1", "--pp", "2", "--ep", "2", "--microbatches", "4"]
SMALL += ["--microbatch-size", "4", "--sequence", "16"]
TPU = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
CUDA = pytest.mark.skipif(
    not any(targets._is_installed(f"jax_plugins.{name}") for name in targets._CUDA),
    reason="JAX's CUDA plugin is not installed",
)

V5E_PAIR = Path(__file__).parent.parent / "inspect/texts/v5e_pair.hlo"

ALL_TO_ALL = {"name": "all-to-all-start.1", "direction": "forward", "form": "async", "payload": 1 << 20}
ALL_TO_ALL |= {"duration": 1e6, "exposed": 1e4, "hidden": 0.99, "opposite_matmuls": 3}
UNIT = {"cycles": 3e6, "computation": 2.99e6, "communication": 1e6, "exposed": 1e4, "unpriced": 0}
COPY = {"name": "copy.1", "nbytes": 1 << 21, "context": "", "op_name": ""}
COPY |= {"array": "bf16[5,8]", "of_state": False}
GIB = 2**30
SCHEDULES = [
    {"name": "dualpipe", "seconds": 2.0, "mfu": 0.4, "memory": 2**33, "refused": ""},
    {"name": "gpipe", "seconds": 3.0, "mfu": 0.3, "memory": 2**34, "refused": "needs 16.0 GiB of 8.0"},
    {"name": "chimera", "seconds": None, "mfu": None, "memory": None, "refused": "odd ranks"},
]
ANSWER = {
    "target": {"name": "v5e:4x4", "devices": 16, "memory": 16 * GIB, "flops": 197e12, "bandwidth": 819e9}
    | {"clock": 1.5e9, "source": "a data sheet"},
    "program": {"model": "tiny", "schedule": "dualpipe", "pp": 2, "ep": 2, "microbatches": 4, "sequence": 16}
    | {"microbatch_size": 4, "ep_nodes": 1},
    "parameters": {"total": 10**9, "active": 10**8, "device": 10**8},
    "memory": {"kinds": {"stages": 6 * GIB, "optimizer": 4 * GIB, "stash": 2 * GIB}, "total": 12 * GIB}
    | {"beyond": 2 * GIB, "needed": 14 * GIB, "limit": 16 * GIB, "fits": True},
    "compiled": {
        "what": "pair",
        "all_to_all": {"cycles": 1e6, "exposed": 1e4, "hidden": 0.99},
        "all_to_alls": [ALL_TO_ALL],
        "sends": {"count": 2, "cycles": 2e5, "exposed": 1e3, "waits": 0.0, "each": 1e5},
        "sends_exposed": {"": 2e5, "FB": 0.0},
        "units": {"FB": UNIT},
        "copies": [COPY | {"of_state": True, "op_name": "pair/copied"}, COPY],
        "memory": {"peak": 10 * GIB},
    },
    "step": {"costs": {}, "cycles": 3e9, "ideal_cycles": 2.9e9, "overhead_cycles": 0.0, "seconds": 2.0}
    | {"tokens": 1024, "mfu": 0.4, "tokens_per_second": 512.0, "lower_bound": True, "schedules": SCHEDULES}
    | {"assumed": ["I", "W", "FB"], "counted": "6 N and attention"}
    | {
        "account": [
            {"name": "at the peak", "seconds": 0.8},
            {"name": "waiting for collectives", "seconds": 1.2},
        ]
    },
}


@pytest.fixture
def answered(monkeypatch):
    """The process that compiles answers at once; gives what it was asked."""
    asked = []

    def ask(module, request, environment, title):
        asked.append((module, request, environment, title))
        return json.loads(json.dumps(ANSWER))

    monkeypatch.setattr(child, "ask", ask)
    monkeypatch.setattr(targets, "_is_installed", lambda _: True)
    return asked


def test_overlap_prints_what_hides_what(answered, capsys):
    assert main(["overlap", "--target", "v5e:4x4", *SMALL]) == 0
    out = capsys.readouterr().out
    assert "tiny, dualpipe, pp 2 x ep 2 on v5e:4x4 (16 devices)" in out
    assert "hidden: 99.0 % of 1.00 M cycles of all-to-all (enough: 97 % asked for)" in out
    assert "sends: 2 in flight beside it, 1.00 k of 200.00 k exposed, 0 waited for" in out
    assert "in a loop: 1\n  bf16[5,8] pair/copied" in out
    assert "pair: 3.00 M cycles, 1.003 of the larger" in out and "(2.99 : 1), 0.752 of their sum" in out
    ((module, request, environment, title),) = answered
    assert (module, title, request["compile"]) == ("dualpipe_jax.pods", "v5e:4x4", "pair")
    assert request["plan"]["layers_per_stage"] == 1 and request["plan"]["sequence"] == 16
    assert environment["TPU_SKIP_MDS_QUERY"] == "1" and environment["JAX_PLATFORMS"] == "cpu"


def test_overlap_fails_where_too_little_is_hidden(answered, capsys):
    assert main(["overlap", "--target", "v5e:4x4", "--at-least", "99.5", *SMALL]) == 1
    assert "(too little: 99.5 % asked for)" in capsys.readouterr().out
    assert main(["overlap", "--target", "v5e:4x4", "--at-least", "99.5", "--json", *SMALL]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["enough"]
    assert found["compiled"]["all_to_alls"] == [ALL_TO_ALL | {"cycles_between": None, "matmuls": {}}]


def test_overlap_of_a_program_that_does_not_fit(answered, capsys, monkeypatch):
    full = {"what": "pair", "out_of_memory": "RESOURCE_EXHAUSTED: Used 20G of 15.75G hbm"}
    monkeypatch.setitem(ANSWER, "compiled", full)
    assert main(["overlap", "--target", "v5e:4x4", "-o", "pair.hlo", *SMALL]) == 1
    captured = capsys.readouterr()
    assert "does not fit:\nRESOURCE_EXHAUSTED: Used 20G of 15.75G hbm" in captured.out
    assert not captured.err, "nothing was written"


@pytest.mark.parametrize("command", ["overlap", "dryrun"])
def test_files_are_asked_for_by_their_endings(answered, capsys, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    assert main([command, "--target", "v5e:4x4", "-o", "pair.SVG", "pair.trace", "pair.hlo", *SMALL]) == 0
    ((_, request, _, _),) = answered
    assert request["files"] == [str(tmp_path / f"pair.{ending}") for ending in ("SVG", "trace", "hlo")]
    assert capsys.readouterr().err == "wrote pair.SVG\nwrote pair.trace\nwrote pair.hlo\n"
    assert request["compiled"] is None


COMPILED = "--compiled: that program is compiled already; drop --whole and"
BEFORE = {
    "overlap -o pair.json": "--output pair.json: cannot tell what to write; end it in .svg, .png, .trace",
    "overlap -o pair": "--output pair: cannot tell what to write",
    "overlap -o no/pair.svg": "--output no/pair.svg: there is no folder no",
    "overlap --compiled no.hlo": "--compiled no.hlo: there is no such file",
    "overlap --compiled no.hlo --pp 8": COMPILED,
    "overlap --compiled no.hlo --whole": COMPILED,
    "overlap --at-least nan": "--at-least nan: give a percentage, from 0 to 100",
    "overlap --at-least 101": "--at-least 101: give a percentage, from 0 to 100",
    "overlap --rates no.json": "--rates no.json: cannot read it",
    "overlap --target v5x:4x4": "target 'v5x:4x4': did you mean v5",
    "dryrun --rates no.json": "--rates no.json: cannot read it",
    "dryrun -o pair.hlo --compile nothing": "--output: nothing is compiled, so there is nothing to write",
    "dryrun --write-costs no/costs.json": "--write-costs no/costs.json: there is no folder no",
    "dryrun --write-costs c.json --compile nothing": "--write-costs: nothing is compiled, so there are no",
    "dryrun --rates no.json --compile nothing": "--rates: nothing is compiled, so there are no times",
}
"""What is said before anything is compiled."""


@pytest.mark.parametrize("asked", BEFORE)
def test_what_cannot_be_done_is_said_before_compiling(answered, capsys, asked):
    command, *options = asked.split()
    assert main([command, "--target", "v5e:4x4", *options]) == 2
    assert capsys.readouterr().err.startswith(f"error: {BEFORE[asked]}")
    assert not answered


def test_pictures_need_matplotlib(answered, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert main(["overlap", "--target", "v5e:4x4", "-o", "pair.png"]) == 2
    assert capsys.readouterr().err.endswith(f"which is not installed; run: {install_command(extra='plot')}\n")
    assert not answered


NO_COLLECTIVES = """HloModule jit_seed, is_scheduled=true

ENTRY %main (x: f32[8]) -> f32[8] {
  ROOT %x = f32[8]{0} parameter(0)
}
"""


def test_a_program_that_was_compiled_before(capfd, tmp_path, monkeypatch):
    """Through the real process; no compiler is needed."""
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    monkeypatch.setattr(targets, "_is_installed", lambda _: False)
    files = [tmp_path / f"pair.{ending}" for ending in ("png", "trace", "hlo")]
    before = ["overlap", "--target", "v5e:4x4", "--compiled", str(V5E_PAIR)]
    assert main([*before, "--at-least", "50", "-o", *map(str, files)]) == 0
    said = capfd.readouterr().out
    assert said.startswith(f"{V5E_PAIR} on v5e:4x4\n") and "hidden: 50.7 % of" in said
    assert "copies of slots" not in said, "nobody knows which arrays those are"
    picture, trace, text = (file.read_bytes() for file in files)
    assert picture.startswith(b"\x89PNG") and text == V5E_PAIR.read_bytes()
    assert json.loads(trace)["otherData"]["hertz"] == 1.5e9


def test_a_folder_of_xlas_is_read_and_what_is_exposed_explained(capfd, tmp_path, monkeypatch):
    """All kinds of collectives are listed; --json has the same."""
    monkeypatch.setattr(targets, "_is_installed", lambda _: False)
    dumped = tmp_path / "module_0003.jit_step.cl_9.after_codegen.txt"
    dumped.write_text(V5E_PAIR.read_text())
    (tmp_path / "module_0004.jit_seed.cl_9.after_codegen.txt").write_text(NO_COLLECTIVES)
    before = ["overlap", "--target", "v5e:4x4", "--compiled", str(tmp_path), "--at-least", "50"]
    assert main(before) == 0
    said = capfd.readouterr().out
    assert said.startswith(
        f"{dumped} on v5e:4x4\nother programs there, which --compiled FILE reads: module_0004."
    )
    for kind in ("all-to-all", "collective-permute"):
        assert re.search(rf"^{kind} +\d+ ", said, re.M)
    assert re.search(
        r"^  1\. \S+ \(all-to-all.*: (\S+ k) of \1 cycles exposed\. It is synchronous", said, re.M
    )
    assert main([*before, "--json"]) == 0
    facts = json.loads(capfd.readouterr().out)["compiled"]
    assert facts["exposed"][0]["cause"] == "synchronous" and facts["file"] == str(dumped)
    (order,) = facts["orders"]
    assert order["least"] < order["cycles"]
    assert main([*before[:4], str(tmp_path / "none")]) == 2
    assert "there is no such file or folder" in capfd.readouterr().err
    dumped.unlink()
    assert main(before) == 1
    assert "\nno collectives" in capfd.readouterr().out


def test_of_a_pair_of_ours_the_same_is_read_again(answered, capsys, monkeypatch, tmp_path):
    """What a pair's own compilation prints, and why what is exposed is."""
    monkeypatch.setitem(ANSWER["compiled"], "what", "text")
    exchanges = ANSWER["compiled"]["all_to_all"] | {"count": 1}
    monkeypatch.setitem(ANSWER["compiled"], "all_to_all", exchanges)
    monkeypatch.setitem(ANSWER["compiled"], "by_kind", {"all-to-all": exchanges})
    (file := tmp_path / "pair.hlo").write_text("HloModule pair")
    assert main(["overlap", "--target", "v5e:4x4", "--compiled", str(file)]) == 0
    out = capsys.readouterr().out
    assert "sends: 2 in flight beside it, 1.00 k of 200.00 k exposed, 0 waited for" in out
    assert "pair: 3.00 M cycles, 1.003 of the larger" in out and "matmuls of the other" in out
    assert out.count("hidden: 99.0 % of 1.00 M cycles of all-to-all (enough: 97 % asked for)") == 1
    assert "copies of slots" not in out, "nobody knows which arrays those are"


def test_measured_rates_price_a_program(capfd, tmp_path, monkeypatch):
    """Through the real process: over links as slow as these nothing can be hidden."""
    monkeypatch.setattr(targets, "_is_installed", lambda _: False)
    exchange = {"bytes_per_second": 1e6, "latency": 0.0, "devices": 4}
    file = tmp_path / "rates.json"
    file.write_text(json.dumps({"rates": {"all-to-all": exchange, "permute": exchange}}))
    given = ["--compiled", str(V5E_PAIR), "--rates", str(file), "--at-least", "0", "--json"]
    assert main(["overlap", "--target", "v5e:4x4", *given]) == 0
    slow = json.loads(capfd.readouterr().out)["compiled"]["all_to_all"]
    # In cycles of v5e's 1.5 GHz; its all-to-alls are among four devices as the measured ones were.
    assert slow["cycles"] == pytest.approx(slow["payload"] / 1e6 * 1.5e9, rel=1e-3)
    assert slow["hidden"] < 0.01


@pytest.mark.parametrize("command", ["overlap", "dryrun"])
def test_rates_are_asked_for(answered, capsys, tmp_path, command):
    file = tmp_path / "rates.json"
    file.write_text(json.dumps({"rates": {"memory": 1e12, "flops": 1e14}}))
    assert main([command, "--target", "v5e:4x4", "--rates", str(file), *SMALL]) == 0
    assert answered[0][1]["rates"] == str(file)
    if command == "dryrun":
        assert f"a prediction of the rates of {file}, no measurement" in capsys.readouterr().out


def test_guards_that_were_measured_are_part_of_a_tick(tmp_path):
    file = tmp_path / "rates.json"
    guards = {"loop": {"taken_seconds": 2e-6}, "switch": {"taken_seconds": 1e-5}}
    file.write_text(json.dumps({"rates": {"memory": 1e12, "guards": guards}}))
    for target, version, cycles in (
        ("v5e:4x4", (0, 12), 2e-6 * 1.5e9),
        ("h100:1x8", (0, 10), 2e-6 * 1.83e9),
        ("h100:1x8", (0, 11), 1e-5 * 1.83e9),  # its conditionals copy nothing
    ):
        request = Request(Plan(), target, "units", rates=str(file))
        with mock.patch.object(jax, "__version_info__", version):
            assert guards_of(request, targets.Target.parse(target)) == pytest.approx(cycles)
    assert guards_of(Request(Plan(), "v5e:4x4", "units"), targets.Target.parse("v5e:4x4")) == 0


def test_dryrun_prints_memory_and_a_prediction(answered, capsys):
    assert main(["dryrun", "--target", "v5e:4x4", *SMALL]) == 0
    out = capsys.readouterr().out
    assert "parameters: 1.00 G, 0.10 G active, 0.100 G a device" in out
    assert re.search(r"parameters of stages +6.00 +37.5 %", out)
    assert re.search(r"beyond it, by the compiler +2.00 +12.5 %", out)
    assert "fits: 14.00 of 16.00 GiB a device, 87.5 %" in out
    for words in (
        "a prediction of the compiler's model, no measurement; what is done with gradients is not in it",
        "in bfloat16 (a data sheet); counted: 6 N and attention; nothing that is computed again",
        "sends of a tick: 200.00 k; exposed 200.00 k beside no unit, 0 beside FB",
        "step: at least 2 s, 3.00 G cycles",
        "MFU: at most 40.0 % of the published peak, 197 TFLOP/s",
    ):
        assert words in out
    peak = r"the peak +0.8 +40.0 % +100.0 %\nwaiting for collectives +1.2 +60.0 % +40.0 %\nthe step +2 +100"
    assert re.search(peak, out)
    assert re.search(r"dualpipe +2 +40.0 % +8.00\n", out)
    assert re.search(r"gpipe +3 +30.0 % +16.00 +needs 16.0 GiB of 8.0\nchimera +odd ranks", out)
    assert re.search(r"assumed: an input gradient takes two thirds.*\nassumed: a pair takes as long", out)
    assert answered[0][1]["compile"] == "units"


def test_dryrun_writes_costs_that_other_subcommands_read(answered, capsys, tmp_path, monkeypatch):
    costs = {"F": 50.0, "I": 60.0, "W": 40.0, "FB": 120.0, "send": 1.0, "extra": {"-1": [-5.0, 0.0, 0.0]}}
    memory = {"residual_w": 2.0**30, "parameters": 2.0**33, "extra": {}, "fixed": 2.0**31}
    share = {"costs": costs, "memory": memory, "units": {"time": "ms", "memory": "B"}}
    monkeypatch.setitem(ANSWER, "step", ANSWER["step"] | {"share": share})
    file = tmp_path / "costs.json"
    assert main(["dryrun", "--target", "v5e:4x4", *SMALL, "--write-costs", str(file)]) == 0
    capsys.readouterr()
    assert main(["compare", "gpipe", "--ranks", "2", "--microbatches", "4", "--costs", str(file)]) == 0
    head, title, row, *_ = capsys.readouterr().out.splitlines()
    assert head.endswith("F 50, I 60, W 40, FB 120, send 1, last -5/+0/+0 ms")
    # 0F0-3 end at 200, 1F3 46 after the last has come, 1B3 after four of 100, 0B3 of 100 after a send
    assert "makespan, ms" in title and row.split()[2] == f"{200 + 1 + 45 + 400 + 1 + 100}"
    assert " 14 GiB " in row, "2 + 8 GiB at rest, 4 microbatches of 1"
    monkeypatch.setitem(ANSWER, "step", None)
    file.unlink()
    assert main(["dryrun", "--target", "v5e:4x4", *SMALL, "--write-costs", str(file)]) == 2
    assert "costs.json: not written; of a program whose Program.flops is 0" in capsys.readouterr().err
    assert not file.exists()


def test_dryrun_fails_where_it_does_not_fit(answered, capsys, monkeypatch):
    monkeypatch.setitem(ANSWER["memory"], "limit", 13 * 2**30)
    monkeypatch.setitem(ANSWER["memory"], "fits", False)
    assert main(["dryrun", "--target", "v5e:4x4", *SMALL]) == 1
    said = capsys.readouterr().out
    assert "DOES NOT FIT: 14.00 of 13.00 GiB" in said
    assert "no option makes it need less: it takes more devices, by --pp or --ep" in said
    for then, words in ((12, "it fits with these options:"), (13.5, "not even so; more devices help")):
        remedy = {"option": "--max-stash 2", "needed": int(then * 2**30), "price": "larger bubbles"}
        monkeypatch.setitem(ANSWER["memory"], "remedies", [remedy])
        assert main(["dryrun", "--target", "v5e:4x4", *SMALL]) == 1
        said = capsys.readouterr().out
        assert words in said and f"--max-stash 2     {then:.2f}  larger bubbles" in said
    monkeypatch.setitem(ANSWER["memory"], "limit", 15 * 2**30)
    assert main(["dryrun", "--target", "v5e:4x4", *SMALL]) == 1
    assert "what is counted would fit, but the compiler refuses the program" in capsys.readouterr().out
    assert main(["dryrun", "--target", "v5e:4x4", "--json", *SMALL]) == 1
    memory = json.loads(capsys.readouterr().out)["memory"]
    assert memory["needed"] == 14 * 2**30 and memory["fits"] is False


def test_what_is_needed():
    kinds = {"stages": 8, "optimizer": 4}

    def of(what, peak, limit=16, **more):
        return weigh(kinds, Compiled(what, memory=None if peak is None else {"peak": peak}, **more), limit)

    step = of("step", 15)
    assert (step.total, step.beyond, step.needed, step.limit, step.fits) == (12, 3, 15, 16, True)
    assert of("units", 15).needed == 19, "the units' program has no optimizer state"
    assert of("pair", 3).needed == 12, "some of what was counted is not in it"
    assert of("units", None).needed == 12
    assert not of("step", None, out_of_memory="...").fits
    assert not weigh(kinds, None, 11).fits and weigh(kinds, None, 12).fits


@pytest.mark.parametrize("command", ["overlap", "dryrun"])
@pytest.mark.parametrize(("target", "extra"), [("v5e:4x4", "tpu"), ("h100:8x8", "cuda")])
def test_missing_compilers(answered, capsys, monkeypatch, command, target, extra):
    """What is wrong with the options is told first, for that needs none."""
    monkeypatch.setattr(targets, "_is_installed", lambda _: False)
    assert main([command, "--target", target]) == 2
    line = install_command(extra=extra)
    assert capsys.readouterr().err.endswith(f"not installed; it needs no device:\n  {line}\n")
    assert [request["compile"] for _, request, _, _ in answered] == ["draw"]
    monkeypatch.setattr(child, "ask", refuse := mock.Mock(side_effect=CommandError("--ep 3: must divide")))
    assert main([command, "--target", target]) == 2 and refuse.call_count == 1
    assert capsys.readouterr().err == "error: --ep 3: must divide\n"


def test_memory_is_counted_with_no_compiler(capsys, monkeypatch):
    """Through the real process, on this machine's own CPU; what it answers and what is printed of that."""
    asked = ["dryrun", "--target", "v5p:8x8x16", "--compile", "nothing", *SMALL[:2], *SMALL[4:]]
    answers, real = [], child.ask
    monkeypatch.setattr(child, "ask", lambda *given: answers.append(real(*given)) or answers[0])
    assert main([*asked, "--set", "num_layers=3", "--stage-layers", "1", "2"]) == 0
    (found,), table = answers, capsys.readouterr().out
    assert "\nlayers of stages: 1, 2\n\n" in table
    for words in ("parameters of stages", "parameters of all stages", "optimizer state", "counted"):
        assert words in table
    assert len(re.findall("GiB|%", table)) > len(found["memory"]["kinds"])
    assert found["memory"]["fits"] and found["memory"]["total"] == sum(found["memory"]["kinds"].values())
    assert found["memory"]["kinds"]["stash"] > 0 and found["target"]["devices"] == 1024


MISFITS = {
    "--ep 3": "--ep 3: must divide the 16 experts of tiny",
    "--ep-nodes 3": "--ep 2 --ep-nodes 3: as many devices on each node; give a number of nodes that divides --ep",
    "--sequence 0": "--sequence 0: must be at least 1",
    "--pp 0": "--pp 0: must be at least 1",
    "--microbatch-size 3": "--microbatch-size 3: --ep 2 devices must share it equally",
    "--set dims=3": "model tiny: no number dims; there are",
    "--set dim": "--set dim: wants NAME=NUMBER, such as dim=2048",
    "--set dim=wide": "--set dim=wide: wants NAME=NUMBER, such as dim=2048",
    "--schedule dualpipes": "there is no schedule 'dualpipes'; did you mean dualpipe",
    "--target v5e:1x2": "--target v5e:1x2: has 2 devices, --pp 2 x --ep 2 = 4",
    "--model tinny": "model 'tinny': did you mean tiny? there are v3",
}


@pytest.mark.parametrize("option", MISFITS)
def test_options_that_do_not_fit(option):
    name, value = option.removeprefix("--").replace("-", "_").split()
    given = {"model": "tiny", "pp": 2, "ep": 2, "microbatches": 4, "sequence": 16, "target": "v5e:4x4"}
    given[name] = (value,) if name == "set" else int(value) if value.isdigit() else value
    target = targets.Target.parse(given.pop("target"))
    with pytest.raises(ValueError, match="^" + re.escape(MISFITS[option])):
        draw(Plan(**given), target, None)


def compiled(*arguments):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TPU_", "XLA_FLAGS", "JAX_"))}
    done = subprocess.run(
        [sys.executable, "-m", "dualpipe_jax", *arguments, "--json"],
        capture_output=True, text=True, env=environment, timeout=900,
    )  # fmt: skip
    return done.returncode, json.loads(done.stdout) if done.stdout else done.stderr


@TPU
@pytest.mark.slow
def test_a_pod_that_the_compiler_does_not_survive():
    status, said = compiled("overlap", "--target", "v5e:16x32", *SMALL)
    assert status == 2
    assert "ended by SIGABRT while compiling the pair for v5e:16x32; its last words:\n" in said
    assert "Check failed" in said


def of_tokens(found):
    """All-to-alls but those of routing weights, a number a token, of which there are two more."""
    rows = found["compiled"]["all_to_alls"]
    large = [row for row in rows if row["payload"] > max(r["payload"] for r in rows) / 64]
    assert len(rows) == len(large) + 2
    return large


@TPU
@pytest.mark.slow
def test_a_pair_on_v5e_hides_its_all_to_alls():
    """The engine's pair of the real model, with few heads and one shared expert, which are compiled sooner.

    Without overlap three quarters are hidden, behind the direction's own work, and both assertions fail.
    """
    pair = "overlap --target v5e:4x4 --at-least 97 --model v2-lite --layers-per-stage 1 --pp 4 --ep 4 --sequence 512"
    pair += (
        " --dispatch capacity --capacity-factor 1 --set num_dense_layers=0 vocab=1024 dim=1024 num_heads=2"
    )
    pair += " num_experts=16 top_k=2 expert_hidden=2048 num_shared_experts=1"
    status, found = compiled(*pair.split())
    assert status == 0, found
    rows = of_tokens(found)
    assert [row["form"] for row in rows] == 4 * ["async"]
    # One of them may lie beside elementwise work of the other direction: exchanges of weights take turns, too.
    assert sum(row["opposite_matmuls"] >= 1 for row in rows) >= 3, [row["opposite_matmuls"] for row in rows]
    assert found["compiled"]["sends"]["waits"] == 0
    assert not [copy for copy in found["compiled"]["copies"] if copy["of_state"]]


@CUDA
@pytest.mark.slow
def test_a_pair_on_h100s_is_asynchronous(tmp_path):
    """Its all-to-alls inside their guard, and the sends of its tick across the guard, which is the tick's only one."""
    wide = ["--set", "dim=512", "expert_hidden=512", "num_dense_layers=0"]
    size = "--model tiny --layers-per-stage 1 --pp 4 --ep 2 --microbatches 8 --microbatch-size 4"
    size = f"{size} --sequence 512 --dispatch capacity --capacity-factor 1 --at-least 0".split()
    text = tmp_path / "pair.hlo"
    status, found = compiled("overlap", "--target", "h100:1x8", "-o", str(text), *size, *wide)
    assert status == 0, found
    rows = of_tokens(found)
    assert len(rows) == 4 and not any(row["form"] == "sync" for row in rows)
    sends = found["compiled"]["sends"]
    assert sends["count"] and not sends["sync"] and sends["waits"] == 0, sends
    assert not any(copy["of_state"] for copy in found["compiled"]["copies"])
    # A loop whose trips the data say, and a conditional, are a round trip to the host each.
    module = read(text.read_text())
    tick = scan_body(module)
    loops = [loop for holder, loop in module.loops.values() if holder == tick and loop.trips is None]
    assert tick is not None and (len(loops), len(module.branches)) == (1, 0)
