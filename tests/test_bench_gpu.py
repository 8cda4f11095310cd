"""``scripts/bench gpu`` where there is no GPU: what it says, what goes on when a part fails, and that all compiles."""

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from benchmarks import gpu
from benchmarks.on_gpu import peers, repeat
from dualpipe_jax.inspect.target import MissingCompiler, Target

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "benchmarks" / "gpu.py"


def run(*options, timeout=120):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *options], capture_output=True, text=True, timeout=timeout, cwd=ROOT
    )


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU here")
def test_without_a_gpu_it_says_what_it_can_do(tmp_path):
    done = run("--output", str(tmp_path / "gpu.json"))
    assert done.returncode == 1
    assert "JAX finds no GPU here, only 'cpu'; --compile-only compiles everything for one" in done.stderr


def test_a_part_that_is_not_known():
    done = run("--parts", "products,layers")
    assert done.returncode == 2 and "no part named layers; there are products, attention" in done.stderr


CHILD = """
import json, sys, time
parts = sys.argv[sys.argv.index("--parts") + 1].split(",")
for part in parts:
    if part == "attention":
        print("about to fall", flush=True); sys.exit(139)
    print(json.dumps({"part": part, "name": "begins"}), flush=True)
    if part == "shapes":
        sys.exit(1)
    if part == "dropless":
        time.sleep(60)
    print(json.dumps({"part": part, "name": "took", "seconds": 0.0}), flush=True)
"""


def test_parts_go_on_past_one_that_takes_its_process_with_it(tmp_path, monkeypatch):
    """One before it said a word, one in its middle."""
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    monkeypatch.setattr(gpu, "__file__", str(script))
    options = type("Options", (), dict(minutes=1.0, texts=None, output=tmp_path / "gpu.json"))
    records = gpu.in_processes(options, ["products", "attention", "grouped", "shapes", "step"])
    assert json.loads((tmp_path / "gpu.json").read_text()) == records
    done = [record["part"] for record in records if record["name"] == "took"]
    failed = {record["part"]: record for record in records if record["name"] == "failed"}
    assert done == ["products", "grouped", "step"]
    assert list(failed) == ["attention", "shapes"]
    assert failed["attention"]["tail"] == ["about to fall"]


def test_transformers_layer_has_gradients_of_all_but_its_selection_bias():
    torch = pytest.importorskip("torch")
    small = peers.LAYER | dict(hidden_size=64, moe_intermediate_size=32, num_attention_heads=4, num_key_value_heads=4,
        q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16)  # fmt: skip
    forward, both = peers.transformers_layer(small, 32, "cpu")
    assert forward().shape == (1, 32, 64)
    assert all(torch.isfinite(g).all() for g in both() if g is not None)


def test_parts_that_compile_for_nothing_that_is_not_here_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    records = []
    made = SimpleNamespace(
        records=records, say=lambda name, **facts: records.append({"part": made.part, "name": name})
    )
    monkeypatch.setattr("benchmarks.on_gpu.bench.Bench", lambda *given: made)
    monkeypatch.setattr(gpu, "functions", dict)
    how = dict(compile_only=True, target="h100:1x1", minutes=1.0, texts=None, output=tmp_path / "gpu.json")
    gpu.in_this_process(None, SimpleNamespace(**how), ["trainer", "probe"])
    told = [{"part": part, "name": "left out"} for part in ("trainer", "probe")]
    assert json.loads((tmp_path / "gpu.json").read_text()) == told


def test_bits_are_compared_between_runs_of_one_program(monkeypatch):
    """The timed program is compiled by other options, so its bits may be others each time."""
    said, ones = {}, {"w": jnp.ones(3), "b": jnp.ones(2)}
    bench = SimpleNamespace(
        device=jax.devices()[0], compiles_only=False, given=lambda values: values,
        made=lambda make, *args: make(*args), say=lambda name, **facts: said.update({name: facts["number"]}),
        time=lambda *_, **facts: (0.0, jax.tree.map(lambda leaf: 1.001 * leaf, ones)),
    )  # fmt: skip
    model = SimpleNamespace(staged=None, init=lambda key: ones)
    monkeypatch.setattr(repeat.models, "deepseek", lambda *_, **how: model)
    step = SimpleNamespace(value_and_grad=lambda params, batch: (0.0, params))
    monkeypatch.setattr(repeat, "Pipeline", lambda *_, **how: step)
    repeat.repeat(bench)
    assert set(said.values()) == {0} and len(said) == 2


def test_a_part_that_hangs_is_ended_and_the_next_one_runs(tmp_path, monkeypatch):
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    monkeypatch.setattr(gpu, "__file__", str(script))
    monkeypatch.setattr(gpu, "SILENT_S", 3.0)
    options = type("Options", (), dict(minutes=1.0, texts=None, output=tmp_path / "gpu.json"))
    records = gpu.in_processes(options, ["dropless", "step"])
    (failed,) = [record for record in records if record["name"] == "failed"]
    assert failed["part"] == "dropless" and failed["reason"] == "killed, for nothing was said for 3 s"
    assert [record["part"] for record in records if record["name"] == "took"] == ["step"]


def test_parts_for_which_there_is_no_time_are_named(tmp_path):
    options = type("Options", (), dict(minutes=0.0, texts=None, output=tmp_path / "gpu.json"))
    records = gpu.in_processes(options, ["products", "trainer"])
    assert [(r["part"], r["name"]) for r in records[1:]] == [
        ("products", "not done"),
        ("trainer", "not done"),
    ]


@pytest.mark.slow
def test_parts_compile_for_an_h100_that_is_not_here(tmp_path):
    """The experts' products are kernels: nothing multiplies all rows once for each expert."""
    try:
        Target.parse("h100:1x1").check_compiler()
    except MissingCompiler as error:
        pytest.skip(str(error))
    output = tmp_path / "gpu.json"
    began = time.monotonic()
    done = run(
        "--compile-only", "--parts", "attention,grouped,dropless", "--output", str(output), timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    records = json.loads(output.read_text())
    assert not [record for record in records if record["name"] == "failed"], time.monotonic() - began
    calls = {record["name"]: record["calls"] for record in records if "calls" in record}
    assert [record["dense_ragged"] for record in records if "calls" in record] == [0] * len(calls)
    assert all(record["bytes_outside_loops"] > 0 for record in records if "calls" in record)
    assert not any(record["unordered_scatters"] for record in records if "calls" in record)
    kernels = {
        name: sum(n for target, n in each.items() if "mosaic" in target) for name, each in calls.items()
    }
    units = {name.removeprefix("dropless: "): n for name, n in kernels.items() if name.startswith("dropless")}
    assert units == {"F": 3, "B": 6, "I": 3, "W": 3, "FB": 9}
