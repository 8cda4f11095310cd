"""Figures of a step against plain NumPy: by name, by hand."""

import jax
import numpy as np
import pytest

from dualpipe_jax.engine import PlacedStages
from train.figures.step import PARTS, expert_load, load_entropy, part_of, step_figures, step_record

RANDOM = np.random.default_rng(0)


def array(*shape):
    return RANDOM.standard_normal(shape).astype(np.float32)


ATTENTION = {"o_proj": array(3, 3), "kv_a_layernorm": {"weight": array(3)}}
FIRST = {"experts": {"gate_proj": array(2, 4, 3)}, "gate": array(3, 4)}
SECOND = {"shared_experts": {"gate_proj": array(3, 3)}, "up_proj": array(3)}
GRADS = {
    "embed": {"embed_tokens": array(7, 3), "layers": {"0": {"self_attn": ATTENTION}}},
    "stages": PlacedStages(({"layers": {"mlp": FIRST}}, {"layers": {"mlp": SECOND}}), ((0,), (1,))),
    "head": {"lm_head": array(3, 7), "norm": {"weight": array(3)}, "extra": array(2)},
}


def params():
    def stage(bias):
        return {"layers": {"mlp": {"gate": array(3, 4)}}, "routing": {"bias": bias, "stage": np.arange(2)}}

    one = np.array([[[0.5, -0.5, 0.0], [0.0, 0.0, 0.0]]], np.float32)
    other = np.array([[[0.25, 0.25, 0.25], [2.0, 0.5, 1.0]]], np.float32)
    return {
        "embed": {"bias": np.array([9.0, -9.0])},
        "stages": PlacedStages((stage(one), stage(other)), ((0,), (1,))),
    }


def norm(*leaves):
    return np.sqrt(sum(np.square(leaf.astype(np.float64)).sum() for leaf in leaves))


def test_gradient_norms_by_part():
    counts = np.zeros((1, 4), np.int32)
    found = jax.jit(step_figures)(params(), GRADS, {"counts": counts})["grad_norms"]
    embed, head = GRADS["embed"], GRADS["head"]
    expected = {
        "embedding": norm(embed["embed_tokens"]),
        "norms": norm(ATTENTION["kv_a_layernorm"]["weight"], head["norm"]["weight"]),
        "attention": norm(ATTENTION["o_proj"]),
        "router": norm(FIRST["gate"]),
        "experts": norm(FIRST["experts"]["gate_proj"]),
        "shared": norm(SECOND["shared_experts"]["gate_proj"]),
        "dense": norm(SECOND["up_proj"]),
        "head": norm(head["lm_head"]),
        "other": norm(head["extra"]),
    }
    assert set(found) == set(expected) == set(PARTS)
    for part in expected:
        np.testing.assert_allclose(found[part], expected[part], rtol=1e-6, err_msg=part)


def test_every_parameter_of_a_model_has_a_part():
    import models

    tree = jax.eval_shape(models.deepseek(models.tiny(), 2).init, jax.random.key(0))
    found = {
        part_of(path)
        for path, _ in jax.tree_util.tree_leaves_with_path(tree)
        if "routing" not in jax.tree_util.keystr(path)
    }
    assert found == set(PARTS) - {"other"}


def test_the_range_of_biases_is_that_of_the_widest_layer():
    found = step_figures(params(), GRADS, {"counts": np.zeros((1, 4), np.int32)})["bias_range"]
    assert found == pytest.approx(1.5)
    assert step_figures({}, GRADS, {"counts": np.zeros((1, 4), np.int32)})["bias_range"] == 0


COUNTS = np.array([[[3, 1, 0, 0], [0, 0, 0, 0]], [[1, 1, 1, 1], [4, 0, 0, 0]]])
"""[stages, places, experts]: of the first stage the second place is empty."""


def test_load_and_its_entropy_are_by_layer_and_expert_without_empty_places():
    assert expert_load(COUNTS).tolist() == [[3, 1, 0, 0], [1, 1, 1, 1], [4, 0, 0, 0]]
    assert expert_load(COUNTS[1]).tolist() == [[1, 1, 1, 1], [4, 0, 0, 0]], "in model order already"
    quarter = -(0.75 * np.log2(0.75) + 0.25 * np.log2(0.25)) / 2  # bits of (3, 1, 0, 0), of two at most
    assert load_entropy(expert_load(COUNTS)) == pytest.approx((quarter + 1 + 0) / 3)
    assert load_entropy(np.ones((2, 1), int)) == 1, "one expert alone is balanced"


def test_a_record_is_numbers():
    metrics = {"loss": np.float32(1.5), "grad_norms": {"head": np.float32(0.5)}, "counts": COUNTS}
    plain = {"loss": 1.5, "grad_norms": {"head": 0.5}, "load_entropy": load_entropy(expert_load(COUNTS))}
    assert step_record(metrics, with_load=False) == plain
    assert step_record(metrics, with_load=True) == plain | {"load": expert_load(COUNTS).tolist()}
    assert step_record({"loss": np.float32(2)}, with_load=True) == {"loss": 2.0}
