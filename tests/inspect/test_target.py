"""Targets by name, and what is said where a compiler is missing."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from dualpipe_jax.inspect import gpu_rates, gpus
from dualpipe_jax.inspect import target as module
from dualpipe_jax.inspect.target import DEVICES, MissingCompiler, Target

NAMES = {
    "v5e:4x4": 16,
    "v4:2x2x2": 16,
    "v5p:8x8x16": 1024,
    "v6e:16x16": 256,
    "tpu7x:4x4x4": 128,
    "h100:8x8": 64,
    "a100:2x8": 16,
    "b200:8x8": 64,
    "gb200:4x72": 288,
}
GPUS = "a100", "h100", "h200", "b200", "gb200"


@pytest.mark.parametrize("name", NAMES)
def test_names(name):
    target = Target.parse(name)
    assert str(target) == name
    assert target.num_devices == NAMES[name]
    assert target.platform == ("cuda" if name.startswith(GPUS) else "tpu")
    assert target.rates.collective("all-to-all", 1 << 20, 4) > 0
    assert target.rates.memory * target.device.clock < target.device.bandwidth * 1.01


def test_names_are_read_whatever_their_case():
    assert Target.parse("V5E:4x4") == Target("v5e", (4, 4))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5x:4x4", r"target 'v5x:4x4': did you mean v5\w\? known are v4, v5e, .*for instance v5e:4x4"),
        ("abacus", r"target 'abacus': known are v4"),
        ("v5e", r"target 'v5e': v5e wants 2 sizes with x between them, for instance v5e:4x4.*; got none"),
        ("v5e:4x4x4", r"v5e wants 2 sizes .*; got 4x4x4"),
        ("v5p:16", r"v5p wants 2 or 3 sizes .*; got 16"),
        (
            "h100:64",
            r"h100 wants 2 sizes .*h100:8x8 \(nodes x GPUs of a node\), gb200:2x72, or cpu:8; got 64",
        ),
        ("v5e:4x-4", r"v5e wants 2 sizes .*; got 4x-4"),
        ("v5e:0x4", r"v5e wants 2 sizes .*; got 0x4"),
    ],
)
def test_names_that_are_none(name, message):
    with pytest.raises(ValueError, match=message):
        Target.parse(name)


@pytest.mark.parametrize(("name", "extra"), [("v5e:4x4", "tpu"), ("h100:8x8", "cuda")])
def test_a_missing_compiler_gives_the_line_that_installs_it(monkeypatch, name, extra):
    monkeypatch.setattr(module, "_is_installed", lambda _: False)
    line = rf"target {name}: .*\n  \S+ -m pip install -e '/.*\[{extra}\]'$"
    with pytest.raises(MissingCompiler, match=line):
        Target.parse(name).devices()


def test_every_generation_has_all_its_figures():
    for generation, device in DEVICES.items():
        assert 10e9 < device.memory < 200e9 and 100e12 < device.flops < 3e15, generation
        assert 500e9 < device.bandwidth < 9e12 and 1e9 < device.clock < 2.5e9, generation


@pytest.mark.parametrize(
    ("name", "times"),
    # 1 TFLOP, 1 GB read or written; 1 GB to the next GPU of a node, to one of the next node; in ms.
    [
        ("a100:2x8", (3.205, 0.490, 3.333, 40.0)),
        ("h100:2x8", (1.011, 0.299, 2.222, 20.0)),
        ("h200:2x8", (1.011, 0.208, 2.222, 20.0)),
        ("b200:2x8", (0.444, 0.125, 1.111, 20.0)),
        ("gb200:2x72", (0.400, 0.125, 1.111, 20.0)),
    ],
)
def test_gpus_are_as_fast_as_their_data_sheets_say(name, times):
    target = Target.parse(name)
    node = target.shape[1]
    rates = gpu_rates(target.generation, node=node, published=True)
    cycles = (
        1e12 / rates.flops,
        1e9 / rates.memory,
        rates.collective("collective-permute", 10**9, 2, ((0, node - 1),)),
        rates.collective("collective-permute", 10**9, 2, ((0, node),)),
    )
    assert tuple(each / target.device.clock * 1e3 for each in cycles) == pytest.approx(times, rel=2e-3)


def test_where_a_gpu_was_measured_that_is_what_it_is_taken_to_reach():
    """736 TFLOP/s and 2.43 TB/s of an H100; of a B200 nobody here knows."""
    h100, published = Target.parse("h100:1x8").rates, gpu_rates("h100", published=True)
    clock = gpus.GPUS["h100"].clock
    operations, moved = 2 * 8192**3, 3 * 2 * 8192**2
    whole = operations / h100.flops + moved / h100.operands
    assert operations / (whole / clock) == pytest.approx(736e12, rel=0.03)
    assert h100.memory * clock == pytest.approx(2.43e12, rel=5e-3)
    assert published.launch == published.host == 0 < h100.launch < h100.host and published.operands is None
    assert h100.link == published.link, "nobody here measured a link"
    assert Target.parse("b200:1x8").rates == gpu_rates("b200", published=True)


def test_the_matrix_units_of_a_gpu_reach_its_peak_at_its_clock():
    """As many bfloat16 operations a cycle and multiprocessor as the architecture's white paper has."""
    per_cycle = {"a100": 2048, "h100": 4096, "h200": 4096, "b200": 8192, "gb200": 8192}
    for name, gpu in gpus.GPUS.items():
        assert gpu.multiprocessors * per_cycle[name] * gpu.clock == pytest.approx(gpu.flops, rel=2e-3), name


def test_rates_of_a_gpu_that_is_not_known():
    with pytest.raises(
        ValueError, match=r"gpu_rates: generation 'l40' is none of a100, h100, h200, b200, gb200; for"
    ):
        gpu_rates("l40")


def ask(expression):
    """Evaluate an expression of ``parse`` in a process that has not loaded JAX yet."""
    code = "from dualpipe_jax.inspect.target import Target\nparse = Target.parse\n"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TPU_", "XLA_FLAGS", "JAX_"))}
    done = subprocess.run(
        [sys.executable, "-c", f"{code}import json; print(json.dumps({expression}))"],
        capture_output=True, text=True, env=environment, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_tpu_devices():
    names = ["v5e:2x2", "v5p:8x8x16", "tpu7x:2x2x2", "v4:2x2"]
    assert ask(f"[len(parse(name).devices()) for name in {names}]") == [4, 1024, 16, 8]
    assert [Target.parse(name).num_devices for name in names] == [4, 1024, 16, 8]


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_a_shape_that_no_slice_has():
    code = "from dualpipe_jax.inspect.target import Target; Target.parse('v5e:3x5').devices()"
    failed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "ValueError: target v5e:3x5: " in failed.stderr and "not divisible" in failed.stderr


@pytest.mark.skipif(
    not module._is_installed("jax_plugins.xla_cuda13"), reason="JAX's CUDA plugin is not installed"
)
@pytest.mark.parametrize("name", GPUS)
def test_cuda_devices(name):
    kinds = ask(f"[(device.platform, device.device_kind) for device in parse('{name}:2x8').devices()]")
    assert kinds == 16 * [["gpu", gpus.GPUS[name].name]]
