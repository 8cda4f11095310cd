"""The two sides of `benchmarks/peers.py` compute the same, so that what it compares is comparable."""

import numpy as np
import pytest

from benchmarks.sides import in_jax
from benchmarks.sides.case import Case

KINDS = "mlp", "moe"
SMALL = dict(microbatches=2, layers=2, sequence=12, width=16, hidden=24, experts=4, expert_hidden=8)


@pytest.mark.parametrize("block", KINDS)
def test_blocks_and_gradients_are_equal(block):
    pytest.importorskip("torch", reason="PyTorch is not installed: pip install -e '.[torch]'")
    from benchmarks.sides import in_torch

    case = Case(block, **SMALL)
    weights = case.weights()
    theirs, their_gradients = in_torch.plain(case, weights)
    ours, our_gradients = in_jax.plain(case, weights)
    np.testing.assert_allclose(ours(), theirs(), rtol=1e-6)
    expected, found = their_gradients(), our_gradients()
    assert found.keys() == expected.keys() and len(found) == case.layers * len(case.shapes())
    for name, value in expected.items():
        assert np.abs(value).max() > 0, name
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


def test_experts_drop_what_has_no_place():
    """Against a loop over tokens: some of their choices find no place, and some do."""
    case = Case("moe", **SMALL, capacity_factor=0.5)
    weights = {name: leaf[0].astype(np.float64) for name, leaf in case.weights().items()}
    x = np.random.default_rng(2).standard_normal((case.tokens, case.width))
    expected, taken, dropped = np.zeros_like(x), [0] * case.experts, 0
    for token, row in enumerate(x):
        likely = np.exp(row @ weights["router"])
        for expert in np.argsort(-likely)[: case.top]:
            taken[expert] += 1
            if taken[expert] > case.capacity:
                dropped += 1
                continue
            h = row @ weights["up"][expert]
            y = (h / (1 + np.exp(-h))) @ weights["down"][expert]
            expected[token] += likely[expert] / likely.sum() * y
    assert 0 < dropped < case.tokens * case.top
    single = {name: leaf.astype(np.float32) for name, leaf in weights.items()}
    found = in_jax.mixture(case, single, x.astype(np.float32))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
