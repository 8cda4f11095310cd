"""The two sides of `benchmarks/peers.py` compute the same, so that what it compares is comparable."""

import dataclasses
import pathlib
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install -e '.[torch]'")
sys.path.append(str(pathlib.Path(__file__).parents[2] / "benchmarks"))

from sides import in_jax, in_torch
from sides.case import BLOCKS, Case

TINY = Case(microbatches=2, layers=2, sequence=12, width=16, hidden=24, experts=4, expert_hidden=8)


@pytest.mark.parametrize("block", BLOCKS)
def test_blocks_and_gradients_are_equal(block):
    case = dataclasses.replace(TINY, block=block)
    weights = case.weights()
    (theirs, their_gradients), (ours, our_gradients) = (
        side.plain(case, weights) for side in (in_torch, in_jax)
    )
    np.testing.assert_allclose(ours(), theirs(), rtol=1e-6)
    expected, found = their_gradients(), our_gradients()
    assert found.keys() == expected.keys() and len(found) == case.layers * len(case.shapes())
    for name, value in expected.items():
        assert np.abs(value).max() > 0, name
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


def test_experts_drop_what_has_no_place():
    """Against a loop over tokens; of 24 tokens with 2 experts each some find no place, and some do."""
    case = dataclasses.replace(TINY, block="moe", capacity_factor=0.5)
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
    found = in_jax.mixture(case, {n: w.astype(np.float32) for n, w in weights.items()}, x.astype(np.float32))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
