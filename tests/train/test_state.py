"""A state's forms: where it lies, its canonical form, and that neither knows the other's schedule or mesh."""

import jax
import numpy as np
import optax
import pytest

import models
from dualpipe_jax.parallel import EP, make_mesh
from dualpipe_jax.schedule import dualpipe, dualpipe_v, interleaved_1f1b, one_f_one_b
from train.state import Layout
from train.step import make_optimizer

OPTIMIZER = make_optimizer(lambda step: 1e-3, clip=1.0, weight_decay=0.1)
NUMBERS = models.tiny(
    num_layers=6,
    num_mtp_layers=1,
    num_experts=4,
    num_groups=1,
    top_groups=1,
    top_k=2,
    dim=16,
    expert_hidden=8,
)
"""Five layers with experts and a module of multi-token prediction: on four stages two slots stay empty."""

PLAN = (2, 2, 1, 1)
"""Of four stages; the first layer is dense."""

LAYOUTS = {
    "dualpipe 2x2": (dualpipe, 2, 2, {}),
    "v 2x2": (dualpipe_v, 2, 2, {}),
    "v 2x1": (dualpipe_v, 2, 1, {}),
    "interleaved 4x2": (interleaved_1f1b, 2, 1, {}),
    "1f1b 4x2": (one_f_one_b, 4, 2, {}),
    "1f1b 3x1 shared out": (one_f_one_b, 3, 2, {"shard": "optimizer"}),
    "dualpipe 2x2, parameters too": (dualpipe, 2, 2, {"shard": "parameters"}),
}


def make(name):
    recipe, pp, ep, options = LAYOUTS[name]
    schedule = recipe(pp, 12)
    num_stages = schedule.placement.num_model_stages
    model = models.deepseek(NUMBERS, PLAN if num_stages == 4 else num_stages, ep_axis=EP)
    return Layout(model, schedule, make_mesh(pp, ep), OPTIMIZER, **options)


@pytest.fixture(scope="module")
def layouts():
    return {name: make(name) for name in LAYOUTS}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v 2x2", "1f1b 3x1 shared out"])
def test_the_canonical_form_is_the_models_own_layers_in_order(name, layouts):
    """Against the parameters as the model alone makes them, in one stage."""
    layout = layouts[name]
    state = layout.init(jax.random.key(3))
    check_lies(state, layout.abstract)
    flat = layout.to_canonical(state)
    params = models.deepseek(NUMBERS, 1).init(jax.random.key(3))
    plain = {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
             for path, leaf in jax.tree_util.tree_leaves_with_path(params)}  # fmt: skip
    slots = [jax.tree_util.tree_leaves_with_path(slot) for slot in params["stages"]["layers"]]
    plain = {key: leaf for key, leaf in plain.items() if not key.startswith("stages/")} | {
        "stages/routing/bias": np.asarray(params["stages"]["routing"]["bias"])[0]
    }
    for same in zip(*slots, strict=True):
        key = jax.tree_util.keystr(same[0][0], simple=True, separator="/")
        plain[f"stages/layers/{key}"] = np.concatenate([np.asarray(leaf) for _, leaf in same])
    assert {name.removeprefix("params/") for name in flat if name.startswith("params/")} == plain.keys()
    for key, expected in plain.items():
        np.testing.assert_allclose(flat[f"params/{key}"], expected, rtol=1e-6, atol=1e-8, err_msg=key)
    assert {key.partition("/")[0] for key in flat} == {"step", "count", "params", "mu", "nu"}
    for key, leaf in flat.items():
        if key.startswith("params/") and leaf.size >= 256 and "norm" not in key and "bias" not in key:
            assert np.std(leaf) == pytest.approx(NUMBERS.init_std, rel=0.2), key


def check_lies(real, described):
    assert jax.tree.structure(described) == jax.tree.structure(real)
    for a, b in zip(jax.tree.leaves(described), jax.tree.leaves(real), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert a.sharding.is_equivalent_to(b.sharding, b.ndim)


def numbered(layout):
    """A canonical state whose every value is another, and counters of a later step."""

    def fill(leaf):
        values = np.arange(np.prod(leaf.shape), dtype=leaf.dtype).reshape(leaf.shape)
        return values if leaf.ndim else values + leaf.dtype.type(7)

    return jax.tree.map(fill, layout.canonical)


@pytest.mark.parametrize("name", LAYOUTS)
def test_there_and_back_is_the_same_state(name, layouts):
    layout = layouts[name]
    flat = numbered(layout)
    placed = layout.from_canonical(flat)
    check_lies(placed, layout.abstract)
    again = layout.to_canonical(placed)
    check_lies(again, layout.canonical)
    for key in flat:
        np.testing.assert_array_equal(again[key], flat[key], err_msg=key)
    counts = [int(count) for _, count in optax.tree.get_all_with_path(placed.opt_state, "count")]
    assert counts == [7] * len(counts) and len(counts) == 2 and int(placed.step) == 7


def test_layers_lie_where_their_stages_are(layouts):
    """By hand, on a V, which holds its second half in reverse: placed as it is, it would be another model."""
    layout = layouts["v 2x2"]
    assert layout.model.layout.plan == PLAN
    where = [[0, -1], [1, 2], [3, -1], [4, 5]]
    flat = numbered(layout)
    placed = layout.from_canonical(flat)
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


def test_no_device_makes_the_whole_model(layouts):
    """What the compiled program holds on a device at once is less than the state."""
    layout = layouts["1f1b 4x2"]
    memory = layout.initializer.lower(jax.random.key(0)).compile().memory_analysis()
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(layout.abstract))
    assert memory.output_size_in_bytes + memory.temp_size_in_bytes < 0.9 * whole
