"""Targets by name, and what is said where a compiler is missing."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from dualpipe_jax.inspect import target as module
from dualpipe_jax.inspect.target import DEVICES, MissingCompiler, Target

NAMES = {
    "v5e:4x4": 16,
    "v4:2x2x2": 16,
    "v5p:8x8x16": 1024,
    "v6e:16x16": 256,
    "tpu7x:4x4x4": 128,
    "h100:8x8": 64,
}


@pytest.mark.parametrize("name", NAMES)
def test_names(name):
    target = Target.parse(name)
    assert str(target) == name
    assert target.num_devices == NAMES[name]
    assert target.platform == ("cuda" if name.startswith("h100") else "tpu")
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
        ("h100:64", r"h100 wants 2 sizes .*h100:8x8 \(nodes x GPUs of a node\), or cpu:8; got 64"),
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
        assert 10e9 < device.memory < 200e9 and 100e12 < device.flops < 2e15, generation
        assert 500e9 < device.bandwidth < 5e12 and 1e9 < device.clock < 2.5e9, generation


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
def test_cuda_devices():
    assert ask("[device.platform for device in parse('h100:2x8').devices()]") == 16 * ["gpu"]
