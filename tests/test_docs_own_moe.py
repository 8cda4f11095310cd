"""The page on a mixture of experts of one's own: its file runs in one process and in two, and goes on where it was."""

import re
import shutil
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.two_processes import what_both_say

PAGE = Path(__file__).parent.parent / "docs" / "own_moe.md"
FILE = "\n\n".join(re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S))

pytestmark = pytest.mark.slow


def run(monkeypatch, folder):
    """What the file defines, run in a folder; it compares its own gradients on the way."""
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["moe.py"])
    names = {"__name__": "moe"}
    with jax.numpy_dtype_promotion("standard"):  # optax raises floats to the power of an integer count
        exec(compile(FILE, "moe.py", "exec"), names)
    return names


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        return run(monkeypatch, tmp_path_factory.mktemp("page") / "one")


def test_it_learns_and_each_device_holds_its_experts(page):
    assert len(page["told"]) == 20 and page["told"][-1] < 0.8 * page["told"][0]
    params, averages = page["state"]["params"], page["state"]["averages"][0]
    assert np.abs(params["shared"]["bias"]).max() == pytest.approx(0.02, abs=1e-6), "20 steps of 0.001"
    for tree in (params, averages.mu, averages.nu):
        experts = [one["experts"] for one in tree["stages"].local]
        assert {leaf.sharding.spec for leaf in jax.tree.leaves(experts)} == {P("pp", "ep")}


def test_it_goes_on_bit_for_bit(page, monkeypatch):
    shutil.rmtree(page["saved"] / "20")
    assert run(monkeypatch, page["saved"].parent)["told"] == page["told"][10:]


def test_two_processes_train_the_same_model(page, tmp_path):
    program = "import json, os, sys; process, address, answer, folder = sys.argv[1:]; os.chdir(folder)\n"
    program += "sys.argv[1:] = [address, '2', process]\n" + FILE
    program += "\nPath(answer).write_text(json.dumps([told, jax.process_count()]))"
    for told, processes in what_both_say("-c", program, arguments=(tmp_path,), devices=4):
        assert processes == 2
        np.testing.assert_allclose(told, page["told"], rtol=1e-5)
    assert sorted(path.name for path in (tmp_path / "moe").iterdir()) == ["10", "20"]


def test_mixtrals_router_is_as_right(page):
    _, weights, uneven = page["like_mixtral"](jnp.zeros((16, 8)), None)
    np.testing.assert_allclose(weights, 0.5)
    assert uneven == pytest.approx(1.0), "1 where scores are even, whoever is chosen"
    model = page["make_model"](page["like_mixtral"])
    pipeline = page["Pipeline"](model, page["pipeline"].schedule, page["mesh"], param_specs=page["specs"])
    params = pipeline.place(page["init"](page["key"]))
    names = page | {"model": model, "pipeline": pipeline, "params": params}
    with jax.numpy_dtype_promotion("standard"):
        types.FunctionType(page["compare"].__code__, names)()
