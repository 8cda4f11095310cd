"""A state's forms: where it lies, its canonical form, and that neither knows the other's schedule or mesh."""

import math

import jax
import numpy as np
import optax
import pytest

import models
from dualpipe_jax.parallel import EP, make_mesh
from dualpipe_jax.schedule import dualpipe, dualpipe_v, interleaved_1f1b, one_f_one_b
from train.state.layout import Layout
from train.step import make_optimizer

OPTIMIZER = make_optimizer(lambda step: 1e-3, clip=1.0, weight_decay=0.1)
NUMBERS = models.tiny(
    num_layers=4, num_mtp_layers=1, num_experts=4, num_groups=1, top_groups=1, top_k=2, dim=16, expert_hidden=8,
    q_lora_rank=0,
)  # fmt: skip
"""A dense layer, three with experts and a module of multi-token prediction."""

LAYOUTS = {
    "v 2x2": (dualpipe_v, 2, 2, (1, 2, 0, 1), {}),
    "1f1b 3x2, shared out": (one_f_one_b, 3, 2, 3, {"shard": "optimizer"}),
    "dualpipe 2x2, parameters too": (dualpipe, 2, 2, (3, 1), {"shard": "parameters"}),
    "interleaved 2x1": (interleaved_1f1b, 2, 1, (1, 2, 0, 1), {}),
}


def make(name):
    recipe, pp, ep, plan, options = LAYOUTS[name]
    model = models.deepseek(NUMBERS, plan, ep_axis=EP)
    return Layout(model, recipe(pp, 12), make_mesh(pp, ep), OPTIMIZER, **options)


def by_name(params):
    """Parameters of one stage as a checkpoint has them: layers in one array, all by their names."""
    layers = jax.tree.map(lambda *leaves: np.concatenate(leaves), *params["stages"]["layers"])
    stages = {"layers": layers, "routing": {"bias": np.asarray(params["stages"]["routing"]["bias"])[0]}}
    leaves = jax.tree_util.tree_leaves_with_path({"params": {"stages": stages, "shared": params["shared"]}})
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in leaves}


@pytest.mark.slow
def test_the_canonical_form_is_the_models_own_layers_in_order():
    """Against the parameters as the model alone makes them, in one stage; no device ever makes the whole state."""
    layout, key = make("1f1b 3x2, shared out"), jax.random.key(3)
    initialize = layout.initializer.lower(key).compile()
    memory = initialize.memory_analysis()
    everything = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(layout.abstract))
    assert memory.output_size_in_bytes + memory.temp_size_in_bytes < 0.9 * everything
    state = initialize(key)
    check_lies(state, layout.abstract)
    flat = layout.to_canonical(state)
    plain = by_name(jax.jit(models.deepseek(NUMBERS, 1).init)(key))
    assert {name for name in flat if name.startswith("params/")} == plain.keys()
    for key, expected in plain.items():
        np.testing.assert_allclose(flat[key], expected, rtol=1e-6, atol=1e-8, err_msg=key)
    assert {key.partition("/")[0] for key in flat} == {"step", "count", "params", "mu", "nu"}
    for key, leaf in flat.items():
        if key.startswith("params/") and leaf.size >= 256 and "norm" not in key and "bias" not in key:
            assert np.std(leaf) == pytest.approx(NUMBERS.init_std, rel=0.2), key


def check_lies(real, described):
    assert jax.tree.structure(described) == jax.tree.structure(real)
    for a, b in zip(jax.tree.leaves(described), jax.tree.leaves(real), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert a.sharding.is_equivalent_to(b.sharding, b.ndim)


@pytest.mark.parametrize(
    "name", [*list(LAYOUTS)[:-1], pytest.param("interleaved 2x1", marks=pytest.mark.slow)]
)
def test_there_and_back_is_the_same_state(name):
    """A canonical state whose every value is another, in all its arrays, and whose counters are of a later step."""
    layout, flat, number = make(name), {}, 0
    for key, leaf in layout.canonical.items():
        begun, number = number, number + math.prod(leaf.shape)
        values = np.arange(begun, number, dtype=leaf.dtype).reshape(leaf.shape)
        flat[key] = values if leaf.shape else np.full_like(values, 7)
    assert number < 2**24, "beyond, float32 has not all of them"
    norms = layout.canonical["mu/stages/layers/input_layernorm/weight"]
    rows = norms.sharding.shard_shape(norms.shape)[0]
    assert rows == (4 if "3x2" in name else 2), "four layers, over two ranks or whole on each of three"
    placed = layout.from_canonical(flat)
    check_lies(placed, layout.abstract)
    again = layout.to_canonical(placed)
    check_lies(again, layout.canonical)
    for key in flat:
        np.testing.assert_array_equal(again[key], flat[key], err_msg=key)
    counts = [int(count) for _, count in optax.tree.get_all_with_path(placed.opt_state, "count")]
    assert counts == [7] * len(counts) and len(counts) == 2 and int(placed.step) == 7
    if name == "v 2x2":
        check_layers_lie_where_their_stages_are(placed, flat)


def check_layers_lie_where_their_stages_are(placed, flat):
    """By hand, on a V, which holds its second half in reverse: placed as it is, it would be another model."""
    where = [[-1, -1], [0, 1], [-1, -1], [2, 3]]
    rows = flat["mu/stages/layers/input_layernorm/weight"]
    moments = optax.tree.get(placed.opt_state, "mu")["stages"].local
    for half, stages in enumerate([[0, 1], [3, 2]]):
        for rank, stage in enumerate(stages):
            for slot, row in enumerate(where[stage]):
                found = np.asarray(moments[half]["layers"][slot]["input_layernorm"]["weight"])[rank]
                np.testing.assert_array_equal(found, 0 * found if row < 0 else rows[row])
    routing = placed.params["stages"].local[1]["routing"]
    np.testing.assert_array_equal(routing["row"], [where[3], where[2]])
    biases = flat["params/stages/routing/bias"]
    expected = [[biases[row] if row >= 0 else 0 * biases[0] for row in where[stage]] for stage in (3, 2)]
    np.testing.assert_array_equal(routing["bias"], expected)
