"""The page on a mixture of experts of one's own: its file runs in one process and in two, and goes on where it was."""

import re
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.two_processes import what_both_say

PAGE = Path(__file__).parent.parent / "docs" / "own_moe.md"
TEXT = PAGE.read_text()


def joined(text):
    return "\n\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S))


FILE, MORE = map(joined, TEXT.split("\n## On a laptop\n"))
"""The file that the page shows, and the blocks that continue it."""

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


@pytest.fixture(scope="module")
def continued(page):
    """What the rest of the page defines: it compares gradients with dropout, nnx, linen and frozen parts."""
    names = dict(page)
    with jax.numpy_dtype_promotion("standard"):
        exec(compile(MORE, PAGE, "exec"), names)
    return names


def test_it_learns_and_each_device_holds_its_experts(page):
    assert len(page["told"]) == 20 and page["told"][-1] < 0.8 * page["told"][0]
    params, averages = page["state"]["params"], page["state"]["averages"][0]
    assert np.abs(params["shared"]["bias"]).max() == pytest.approx(0.02, abs=1e-6), "20 steps of 0.001"
    for tree in (params, averages.mu, averages.nu):
        experts = [one["experts"] for one in tree["stages"].local]
        assert {leaf.sharding.spec for leaf in jax.tree.leaves(experts)} == {P("pp", "ep")}


def test_it_prints_what_the_page_shows(page):
    """The text that it learns from is of this Python, so the digits may be others."""
    shown = {int(step): float(loss) for step, loss in re.findall(r"^step (\d+)  loss ([\d.]+)", TEXT, re.M)}
    assert sorted(shown) == [1, 20]
    for step, loss in shown.items():
        assert page["told"][step - 1] == pytest.approx(loss, abs=0.3)


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
    plain = page["init"](page["key"])
    with jax.numpy_dtype_promotion("standard"):
        page["compare"](pipeline, pipeline.place(plain), plain)


def test_the_comparison_sees_a_wrong_gradient(page, monkeypatch):
    """Of one leaf, by one part in a hundred."""
    step = page["pipeline"].value_and_grad

    def wrong(params, batch, key):
        result, grads = step(params, batch, key)
        return result, grads | {"shared": grads["shared"] | {"table": 1.01 * grads["shared"]["table"]}}

    monkeypatch.setitem(page["pipeline"].__dict__, "value_and_grad", wrong)
    plain = page["init"](page["key"])
    with jax.numpy_dtype_promotion("standard"), pytest.raises(AssertionError, match="Mismatched elements"):
        page["compare"](page["pipeline"], page["pipeline"].place(plain), plain)


def test_dropout_follows_the_key(continued):
    """Other keys give other masks; to evaluate, none gives none, and a stage is the module in its eval mode."""
    nnx, pure_nnx, made = continued["nnx"], continued["pure_nnx"], continued["Layer"]
    layer = pure_nnx(made, evaluate=True)
    params, x = layer.init(jax.random.key(0)), jnp.ones((2, 3, continued["DIM"]))
    one, again, other = (layer.apply(params, x, key=jax.random.key(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    assert np.any(one != other)
    module = made(nnx.Rngs(0))
    nnx.update(module, nnx.State(params))
    module.eval()
    np.testing.assert_allclose(layer.apply(params, x), module(x), rtol=1e-6)
    with pytest.raises(ValueError, match="given no key"):
        pure_nnx(made).apply(params, x)


def test_a_step_draws_masks_by_its_key(continued):
    """In every layer of every stage of the page's model."""
    layer = continued["pure_nnx"](continued["Layer"])
    model, params = continued["flax_model"](layer), continued["make_init"](layer)(jax.random.key(0))
    loss = jax.jit(continued["reference_value_and_grad"](model))
    batch = jax.device_get(continued["draw"](0))
    with jax.numpy_dtype_promotion("standard"):
        (one, _), _ = loss(params, batch, jax.random.key(1))
        (again, _), _ = loss(params, batch, jax.random.key(1))
        (other, _), grads = loss(params, batch, jax.random.key(2))
    assert one == again != other
    assert len(grads["stages"]["layers"]) == continued["LAYERS"]
    assert all(np.any(leaf) for leaf in jax.tree.leaves(grads))


def test_linens_layer_has_gradients_everywhere(continued):
    layer = continued["pure_linen"](continued["LinenLayer"](), jnp.zeros((2, 3, continued["DIM"])))
    with jax.numpy_dtype_promotion("standard"):
        grads = continued["compare_flax"](layer)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(jax.device_get(grads)))


def test_what_is_frozen_stays_and_the_rest_is_trained(continued):
    before, after, grads = (continued["partly"].unplace(continued[name]) for name in ("old", "new", "grads"))
    for part, name in (("shared", "table"), ("shared", "bias"), ("stages", "attention")):
        assert not jax.tree.leaves(grads[part][name])
        jax.tree.map(np.testing.assert_array_equal, after[part][name], before[part][name])
    for name in ("router", "experts"):
        moved = jax.tree.map(
            lambda new, old: np.any(new != old), after["stages"][name], before["stages"][name]
        )
        assert all(jax.tree.leaves(moved)), name
