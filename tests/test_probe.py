"""`dualpipe probe`: real experiments on virtual devices, one that really hangs, and what is made of results."""

import json
import os
import re
import time
from pathlib import Path

import numpy as np
import pytest

from dualpipe_jax.__main__ import main
from dualpipe_jax.command import child
from dualpipe_jax.command.probe import Probe
from dualpipe_jax.inspect.measured import measured_rates
from dualpipe_jax.probe import units
from dualpipe_jax.probe.experiments import experiment
from dualpipe_jax.probe.findings import (
    DEFAULT_EXPERIMENTS,
    FORMS,
    GUARD_FORMS,
    TRIALS,
    outcome,
    passes,
    rates_file,
    recommend,
)
from dualpipe_jax.probe.place import Place

WORKS = {"ok": True}
EVERYTHING = {f"{trial}-{form}": WORKS for form in GUARD_FORMS for trial in TRIALS} | {"units-none": WORKS}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent))  # for the process, wherever it starts
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_machine_on_which_all_works(here, capfd):
    """Four virtual devices; the units are a step of the engine against plain JAX."""
    only = ["guard-loop", "all-to-all", "permute-beside-loop", "units-loop", "cost-loop", "rate", "layer"]
    assert main(["probe", "--cpu", "4", "--only", *only]) == 0
    said, progress = capfd.readouterr()
    assert said.startswith("4 x cpu (cpu), pp 2 x ep 2, jax ")
    row = r"\nunits-loop: all units of the engine, compared with plain JAX, in loops +works\n"
    assert re.search(row, said)
    assert 'Use Pipeline(..., divergence="loop"), which is the default here' in said
    assert progress.endswith("\nwrote rates.json\n")
    assert progress.count("probe: starting") <= 1, "one process did it all"
    found = json.loads((here / "rates.json").read_text())
    assert found["divergence"] == "loop" and found["devices"]["number"] == 4
    assert set(found["results"]) == {n for n in DEFAULT_EXPERIMENTS if n.startswith(tuple(only))}
    assert not [name for name, result in found["results"].items() if not result.get("ok", True)]
    rates, costs = found["rates"], found["costs"]
    assert rates["all-to-all"]["devices"] == 2
    guards = rates["guards"]["loop"]  # timed less the bare work: none of it may be left beside the noise
    assert 0 <= guards["skipped_seconds"] < 1 and 0 <= guards["taken_seconds"] < 1
    for rate in (rates["all-to-all"], rates["permute"]):
        assert 1e6 < rate["bytes_per_second"] < 1e12 and 0 <= rate["latency"] < 1
    assert 1e8 < rates["memory"] < 1e12 and 1e8 < rates["flops"] < 1e14
    assert [one["size"] for one in rates["products"]] == [2 * width**3 for width in (64, 128, 256, 512)]
    parts = (
        *(one["flops_per_second"] for one in rates["products"]),
        *rates["attention"].values(),
        rates["grouped"],
    )
    assert all(1e6 < rate < 1e14 for rate in parts)
    assert set(rates["attention"]) == {"forward", "backward"}
    assert set(costs) == {"F", "I", "W", "FB", "send"} and all(0 < cost < 1e4 for cost in costs.values())
    assert found["units"] == {"time": "ms"} and costs["F"] == 1e3 * found["results"]["layer"]["F"]
    assert main(["choose", "--ranks", "2", "--microbatches", "4", "--costs", "rates.json", "--json"]) == 0
    chosen_by = json.loads(capfd.readouterr().out)["costs"]
    assert {unit: chosen_by[unit] for unit in costs} == costs
    assert measured_rates("rates.json", 1e9, switched=True).flops == pytest.approx(rates["flops"] / 1e9)


def test_two_processes_probe_together(here, capfd):
    """A device each, which gloo joins: what both hold is compared, and each link is timed by those that have it."""
    only = ["guard-loop", "permute-beside-loop", "units-none", "rate-permute"]
    assert main(["probe", "--cpu", "2", "--processes", "2", "--ep", "1", "--only", *only]) == 0
    said, progress = capfd.readouterr()
    assert said.startswith("2 x cpu (cpu), 2 processes, pp 2 x ep 1, jax ")
    assert progress.count("probe: starting") <= 1, "they found each other at once"
    results = json.loads((here / "rates.json").read_text())["results"]
    assert results["guard-loop"] == results["units-none"] == WORKS
    (alone,) = results["rate-permute"]["by_group"].values()
    assert 1e6 < alone < 1e12


@pytest.mark.thin(2)
@pytest.mark.parametrize("lost", [0, 1])
def test_a_process_that_dies_ends_its_experiment_and_no_more(here, capfd, monkeypatch, lost):
    """Killed as the machine kills what takes too much memory; the others would wait for it for ever."""
    monkeypatch.setenv("PYTHONPATH", f"{here}{os.pathsep}{os.environ['PYTHONPATH']}")
    (here / "sitecustomize.py").write_text(KILLED.format(lost=lost))
    begun = time.monotonic()
    only = ["guard-loop", "guard-switch", "rate-matmul"]
    assert main(["probe", "--cpu", "2", "--processes", "2", "--limit", "60", "--only", *only]) == 1
    assert time.monotonic() - begun < 60, "nobody waited for a limit"
    results = json.loads((here / "rates.json").read_text())["results"]
    assert results["guard-loop"]["why"].startswith(
        f"the process {lost} of 2 was ended by SIGKILL while guard-loop"
    )
    assert results["guard-switch"] == WORKS and results["rate-matmul"]["flops_per_second"] > 0


KILLED = """
import os, signal, sys
if "dualpipe_jax.probe" in sys.orig_argv:
    import dualpipe_jax.probe.diverging as diverging
    whole = diverging.diverging
    def dying(place, form, **more):
        import jax
        if form == "loop" and jax.process_index() == {lost}:
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(place, form, **more)
    diverging.diverging = dying
"""


def test_each_process_on_gpus_takes_its_own_or_all_take_one(monkeypatch):
    """What would be set; nothing starts."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    requests = [request | environment for request, environment in Probe(processes=2)._jobs({})]
    assert [one["JAX_LOCAL_DEVICE_IDS"] for one in requests] == ["0", "1"]
    assert {one["NCCL_LAUNCH_ORDER_IMPLICIT"] for one in requests} == {"1"}
    assert not any("NCCL_MULTI_RANK_GPU_ENABLE" in one for one in requests)
    meeting = [one["processes"] for one in requests]
    assert len({one["coordinator"] for one in meeting}) == 1
    assert [(one["number"], one["count"]) for one in meeting] == [(0, 2), (1, 2)]
    shared = [environment for _, environment in Probe(processes=4, one_gpu=True)._jobs({})]
    assert all(one == shared[0] for one in shared) and len(shared) == 4
    assert shared[0]["JAX_LOCAL_DEVICE_IDS"] == "0" and shared[0]["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert shared[0]["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert 4 * float(shared[0]["XLA_PYTHON_CLIENT_MEM_FRACTION"]) < 1


def test_fewer_gpus_than_processes(here, answering, capsys, monkeypatch):
    asked = answering(
        {"devices": DEVICES, "results": EVERYTHING}, {"devices": DEVICES, "results": EVERYTHING}
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert main(["probe", "--processes", "2"]) == 2
    wanted = (
        "error: --processes 2: each process takes a GPU, and there is 1; give --processes 1, or for tests "
    )
    assert capsys.readouterr().err.startswith(wanted) and not asked


@pytest.mark.slow
def test_an_experiment_that_hangs(here, capfd):
    """A permute that half of the devices never come to: it is reported, and another process goes on after it."""
    assert main(["probe", "--cpu", "4", "--limit", "10", "--only", "permute-inside", "rate-matmul"]) == 1
    said, _ = capfd.readouterr()
    row = "permute-inside: a permute in a loop that only some ranks take"
    assert re.search(rf"{row} +hung: no answer in 10 s while permute-inside\n", said)
    assert re.search(r"rate-matmul: matrix product +[\d.]+ TFLOP/s\n", said)
    assert "Too little was tried to name a setting" in said
    found = json.loads((here / "rates.json").read_text())
    assert found["results"]["permute-inside"]["ok"] is False and found["divergence"] is None


@pytest.fixture
def answering(monkeypatch):
    """Processes that each do what is written for them: results by name, or how they end."""

    def set_up(*ends):
        asked, ends = [], list(ends)

        def ask(module, request, environment, title, limit, beside=()):
            assert not beside
            asked.append((module, request["experiments"], environment, limit))
            answer = ends.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(child, "ask", ask)
        return asked

    return set_up


DEVICES = {"platform": "gpu", "kind": "H100", "number": 8, "pp": 2, "ep": 4, "jax": "0.10.2"}


def test_what_ends_its_process_is_left_out_of_the_next(here, answering, capsys):
    known = {"devices": DEVICES, "results": {"guard-loop": WORKS}}
    asked = answering(
        child.StageTimeout("no answer in 5 s while all-to-all-loop", "all-to-all-loop", known),
        child.ChildDied("the process was ended by SIGSEGV while units-loop", "units-loop", {}),
        {"devices": DEVICES, "results": EVERYTHING | {"all-to-all-loop": {}, "units-loop": {}}},
    )
    only = ["guard", "all-to-all", "permute-beside", "units"]
    assert main(["probe", "--limit", "5", "--json", "--only", *only]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["divergence"] == "switch"
    first, second, third = (names for _, names, _, _ in asked)
    assert (first[0], second[0], third[0]) == ("guard-loop", "permute-beside-loop", "permute-beside-loop")
    assert "all-to-all-loop" not in {*second, *third} and "units-loop" not in third
    module, _, environment, limit = asked[0]
    assert (module, environment) == ("dualpipe_jax.probe", {})
    assert limit("guard-loop") == 5 and limit("starting") == 180


def test_measured_rates_are_not_lost_to_a_probe_that_measures_none(here, answering, capsys):
    file, only = here / "rates.json", ["probe", "--only", "guard", "units"]
    results = {name: result for name, result in EVERYTHING.items() if name.startswith(("guard", "units"))}
    kept = '{"rates": {"memory": 1e12}}'
    for before, after in {kept: kept, '{"rates": {}}': None, "[]": None, "no JSON": None}.items():
        file.write_text(before)
        answering({"devices": DEVICES, "results": results})
        assert main(only) == 0
        said = capsys.readouterr().err
        if after is None:
            assert said == "wrote rates.json\n" and json.loads(file.read_text())["rates"] == {}
        else:
            assert file.read_text() == after
            assert (
                said
                == "rates.json is kept: it has rates, and none were measured now; -o FILE writes another\n"
            )


def test_devices_that_are_never_found(here, answering, capsys):
    answering(child.StageTimeout("no answer in 180 s while starting", "starting", {}))
    assert main(["probe"]) == 2
    assert capsys.readouterr().err == "error: no answer in 180 s while starting\n"
    assert not (here / "rates.json").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--pp", "0"], "--pp 0: must be above 0"),
        (["--cpu", "3", "--pp", "2", "--ep", "2"], "--cpu 3: --pp 2 and --ep 2 take 4 devices; give --cpu 4"),
        (["--limit", "-1"], "--limit -1: must be above 0"),
        (["--limit", "nan"], "--limit nan: must be above 0"),
        (["--processes", "0"], "--processes 0: must be above 0"),
        (
            ["--cpu", "3", "--processes", "2"],
            "--cpu 3: cannot be shared out equally over 2 processes; give --cpu 4",
        ),
        (["--one-gpu"], "--one-gpu: is for several processes on a GPU; give --processes, and no --cpu"),
        (["--one-gpu", "--processes", "2", "--cpu", "2"], "--one-gpu: is for several processes on a GPU"),
        (["--only", "guards"], "--only guards: no experiment; did you mean guard-switch? There are permute-"),
        (["-o", "no/rates.json"], "--output no/rates.json: there is no folder no"),
    ],
)
def test_options_that_cannot_be(here, answering, capsys, options, message):
    asked = answering()
    assert main(["probe", *options]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")
    assert not asked


def test_more_devices_than_there_are(here, capfd):
    assert main(["probe", "--pp", "5", "--ep", "2", "--only", "guard"]) == 2
    assert "make_mesh: pp 5 x ep 2 = 10 devices, but 8 are visible" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("broken", "setting"),
    [
        ([], "loop"),
        (["units-loop"], "switch"),
        (["all-to-all-switch"], "loop"),
        (["permute-beside-loop", "units-switch"], "none"),
        (["guard-loop", "guard-switch", "units-none"], None),
    ],
)
def test_the_setting(broken, setting):
    results = EVERYTHING | {name: {"ok": False, "why": "hung"} for name in broken}
    found = recommend(results, "loop")
    assert found.divergence == setting and found.told
    text = " ".join(found.sentences)
    assert (f'divergence="{setting}"' in text) if setting else "Nothing works" in text
    for form in FORMS:
        assert passes(results, form) == (not any(name.endswith(form) for name in broken)), form


def test_the_setting_is_the_default_of_the_platform():
    found = recommend(EVERYTHING, "switch")
    assert found.divergence == "switch"
    assert found.sentences[0].startswith('Use Pipeline(..., divergence="switch"), which is the default here')
    broken = EVERYTHING | {"guard-switch": {"ok": False, "why": "hung"}}
    assert recommend(broken, "switch").divergence == "loop"


def test_what_was_not_tried_is_not_said_to_work():
    alone = {
        f"{trial}-{form}": {"skipped": "--pp 1: one rank"} for form in GUARD_FORMS for trial in [*TRIALS][:3]
    }
    found = recommend(alone, "loop")
    assert (found.divergence, found.told) == (None, False)
    assert found.sentences[0].startswith("Too little was tried")
    found = recommend(alone | {f"units-{form}": WORKS for form in FORMS}, "loop")
    assert found.divergence == "loop"
    assert "Of ranks that part ways nothing was learnt (--pp 1: one rank)." in found.sentences


@pytest.mark.parametrize(
    ("in_order", "words"),
    [
        (None, "the experiment repeats-in-order tells whether XLA can be told not to."),
        ([], "with scripts/train --deterministic it does not."),
        (["[1]['shared']"], "with scripts/train --deterministic, too, so a resumed run"),
    ],
)
def test_a_step_that_does_not_repeat(in_order, words):
    loose = {"leaves": 6, "differ": ["[0][0]", "[1]['shared']"], "runs": 5}
    results = {"repeats": loose} | (
        {} if in_order is None else {"repeats-in-order": loose | {"differ": in_order}}
    )
    assert outcome(loose) == "differs in 2 of 6 arrays: [0][0], [1]['shared']"
    assert f"Run again, a step differs in its last bits; {words}" in " ".join(
        recommend(results, "loop").sentences
    )
    assert "Run again" not in " ".join(recommend({"repeats": loose | {"differ": []}}, "loop").sentences)


@pytest.mark.slow
def test_a_step_is_run_again_as_it_is_and_with_sums_in_order(here, capfd):
    """A CPU sums in one order anyway."""
    assert main(["probe", "--cpu", "4", "--only", "repeats"]) == 0
    said = capfd.readouterr().out
    for name in ("repeats", "repeats-in-order"):
        assert re.search(rf"\n{name}: .* the same in 5 runs\n", said), said
    results = json.loads((here / "rates.json").read_text())["results"]
    loss, report, gradients = 1, 2, 4
    assert [found["leaves"] for found in results.values()] == [loss + report + gradients] * 2


@pytest.mark.parametrize("asked", [True, False])
def test_the_flags_are_xlas_before_it_looks_for_devices(monkeypatch, asked):
    before = os.environ["XLA_FLAGS"]
    monkeypatch.setenv("XLA_FLAGS", before)
    next(experiment({"pp": 2, "ep": 2, "experiments": [], "sums_in_order": asked}))
    in_order = (
        " --xla_gpu_deterministic_ops=true --xla_gpu_enable_triton_gemm=false --xla_gpu_autotune_level=0"
    )
    assert os.environ["XLA_FLAGS"] == before + (in_order if asked else "")


@pytest.mark.parametrize("wrong", range(3))
def test_a_nan_is_wrong_in_whatever_leaf(wrong):
    """Leaves that come after it are right."""
    leaves = [np.float32(1), np.arange(3, dtype=np.float32), np.arange(2, dtype=np.float32)]
    want = leaves[0], {"a": leaves[1], "b": leaves[2]}
    leaves[wrong] = np.where(np.arange(leaves[wrong].size) == 0, np.nan, leaves[wrong]).reshape(
        leaves[wrong].shape
    )
    name = ["the loss", "params['a']", "params['b']"][wrong]
    assert units.differences(want, want) == ""
    assert f"{name} is off by nan" in units.differences((leaves[0], {"a": leaves[1], "b": leaves[2]}), want)


def test_bits_are_compared(monkeypatch):
    """A step of which one number is another in the last of its runs, by one bit."""
    runs = iter([1.0] * (units.RUNS - 1) + [np.nextafter(np.float32(1), 2)])

    def step(params, batch):
        return (np.float32(0), {}), {"a": np.float32(next(runs)), "b": np.float32(2)}

    monkeypatch.setattr(units.jax, "jit", lambda *_, **__: step)
    found = units.repeats(Place.make(2, 2))
    assert found == {"leaves": 3, "differ": ["[1]['a']"], "runs": units.RUNS}


def test_slow_links_and_cheap_guards_are_named():
    by_group = {f"rank {rank}": 1e9 for rank in range(4)} | {"rank 2": 5e8}
    more = {
        "rate-all-to-all": {"bytes_per_second": 1e9, "latency": 1e-6, "by_group": by_group},
        "cost-loop": {"skipped_seconds": 5e-6, "taken_seconds": 9e-5},
        "cost-switch": {"skipped_seconds": 1e-6, "taken_seconds": 2e-5},
    }
    text = " ".join(recommend(EVERYTHING | more, "loop").sentences)
    assert "Slow links, in the median of all groups, all-to-all within a group: rank 2 50%." in text
    assert 'Guards of the form "switch" take 70 us less a tick' in text
    assert outcome(more["rate-all-to-all"]) == "1 GB/s, 1 us each"
    products = [{"width": 64, "flops_per_second": 1e12}, {"width": 512, "flops_per_second": 2.5e12}]
    assert outcome({"products": products}) == "1 TFLOP/s at 64, 2.5 TFLOP/s at 512"
    assert outcome({"forward": 5e14, "backward": 4e14}) == "F 500 TFLOP/s, B 400 TFLOP/s"
    assert outcome(more["cost-loop"]) == "5 us with none taken, 90 us with one"


def test_rates_that_price_programs(here):
    """By hand: 4 devices of a switch, of which each sends three quarters of its payload."""
    link, latency, clock = 400e9, 2e-6, 1.5e9
    payload = 1 << 26
    seconds = latency + payload * 3 / 4 / link
    speed = payload / (seconds - latency)
    results = {
        "rate-all-to-all": {"bytes_per_second": speed, "latency": latency, "devices": 4},
        "rate-permute": {"bytes_per_second": 25e9, "latency": 1e-6},
        "rate-matmul": {"flops_per_second": 600e12},
        "rate-copy": {"bytes_per_second": 3e12},
        "cost-switch": {"ok": False, "why": "hung"},
    }
    file = rates_file({"devices": DEVICES, "results": results}, "loop")
    assert "guards" not in file["rates"] and "costs" not in file
    (here / "rates.json").write_text(json.dumps(file))
    rates = measured_rates("rates.json", clock, switched=True)
    for kind, group, wanted in (
        ("all-to-all", 4, seconds),
        ("all-to-all", 8, latency + payload * 7 / 8 / link),
        ("collective-permute", None, 1e-6 + payload / 25e9),
    ):
        np.testing.assert_allclose(rates.collective(kind, payload, group), wanted * clock)
    assert (rates.memory, rates.flops) == (3e12 / clock, 600e12 / clock)
    torus = measured_rates("rates.json", clock, switched=False)
    np.testing.assert_allclose(torus.collective("all-to-all", payload, 4), seconds * clock)


def test_of_one_device_the_units_of_a_layer_are_timed(here, capfd):
    """With all-to-alls of one device, which move nothing."""
    assert main(["probe", "--cpu", "1", "--pp", "1", "--ep", "1", "--only", "layer", "rate-matmul"]) == 0
    capfd.readouterr()
    found = json.loads((here / "rates.json").read_text())
    assert all(found["results"]["layer"][unit] > 0 for unit in ("F", "B", "I", "W", "FB"))
    assert found["rates"]["flops"] > 1e8
