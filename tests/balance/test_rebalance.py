"""DeepSeek's contract: recorded results, a plain loop, and PyTorch's own sort and sum."""

import pathlib
import runpy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualpipe_jax.balance import rebalance_experts, torch_cpu

RECORDED = np.load(pathlib.Path(__file__).parent / "recorded.npz")
"""Of DeepSeek's function under PyTorch on a CPU; of the two large cases the first five layers."""

CASES = sorted({name.split("/")[0] for name in RECORDED.files})
COUNTS = "num_replicas", "num_groups", "num_nodes", "num_gpus"
PLAIN = runpy.run_path(str(pathlib.Path(__file__).parents[2] / "benchmarks" / "balance.py"))["deepseek"]


@pytest.mark.parametrize("case", CASES)
def test_equal_to_what_was_recorded(case):
    weight = RECORDED[f"{case}/weight"]
    found = rebalance_experts(weight, *(int(RECORDED[f"{case}/{name}"]) for name in COUNTS))
    for got, name in zip(found, ("phy2log", "log2phy", "logcnt"), strict=True):
        wanted = RECORDED[f"{case}/{name}"]
        assert got.dtype == wanted.dtype
        if name == "log2phy":  # of a cut case the layers that are left may need fewer columns
            assert (wanted[..., got.shape[-1] :] == -1).all()
            wanted = wanted[..., : got.shape[-1]]
        np.testing.assert_array_equal(got, wanted)


def test_the_recorded_ties_are_not_those_of_a_stable_sort():
    """If this fails the recorded cases no longer hold what makes the order of ties worth its code."""
    counts = (int(RECORDED[f"case9/{name}"]) for name in COUNTS)
    stable, _, _ = rebalance_experts(RECORDED["case9/weight"], *counts, ties="stable")
    assert (stable != RECORDED["case9/phy2log"]).any()


shapes = st.sampled_from(  # experts, replicas, groups, nodes, devices
    [
        (8, 8, 1, 1, 4),
        (8, 12, 4, 2, 4),
        (12, 16, 4, 2, 8),
        (16, 24, 5, 2, 8),
        (12, 24, 12, 4, 12),
        (6, 30, 3, 3, 6),
    ]
)


@settings(max_examples=60)
@given(shapes, st.integers(0, 2**32 - 1), st.integers(1, 40))
def test_with_stable_ties_equal_to_a_plain_loop(shape, seed, most):
    experts, replicas, groups, nodes, devices = shape
    # Multiples of what all counts divide: every number is exact in float32 and float64, so ties are the same
    weight = 720720 // 13 * np.random.default_rng(seed).integers(0, most + 1, (2, experts))
    found, _, _ = rebalance_experts(weight, replicas, groups, nodes, devices, ties="stable")
    if np.max(np.diff(np.sort(found, -1), axis=-1)) <= 1:  # no expert is left out
        wanted = np.array(PLAIN(weight, replicas, groups, nodes, devices)).reshape(2, -1)
        np.testing.assert_array_equal(found, wanted)


@settings(max_examples=60)
@given(shapes, st.integers(0, 2**32 - 1), st.booleans())
def test_the_three_results_say_the_same(shape, seed, tied):
    random = np.random.default_rng(seed)
    weight = random.integers(0, 3, (3, shape[0])) if tied else random.random((3, shape[0]))
    phy2log, log2phy, logcnt = rebalance_experts(weight, *shape[1:])
    assert logcnt.min() >= 1 and (logcnt.sum(-1) == shape[1]).all() and log2phy.shape[-1] == logcnt.max()
    for layer in range(3):
        for expert in range(shape[0]):
            slots, count = log2phy[layer, expert], logcnt[layer, expert]
            assert (slots >= 0).sum() == count and (slots[count:] == -1).all()
            assert sorted(slots[slots >= 0]) == np.flatnonzero(phy2log[layer] == expert).tolist()


@pytest.mark.parametrize("items", [1, 5, 16, 17, 40, 129, 288, 512])
def test_sorted_and_summed_as_pytorch_does(items):
    torch = pytest.importorskip("torch")
    random = np.random.default_rng(items)
    for kinds in (1, 2, 5, 50):
        tied = random.integers(0, kinds, (20, items)).astype(np.float32)
        wanted = torch.tensor(tied).sort(-1, descending=True).indices.numpy()
        np.testing.assert_array_equal(torch_cpu.sort_descending(tied), wanted)
    # Bad for medians of three: goes over a heap.
    pipe = np.minimum(np.arange(items), items - np.arange(items)) // 3
    for tied in (pipe, -pipe, np.r_[pipe[::2], pipe[1::2]]):
        tied = tied[None].astype(np.float32)
        wanted = torch.tensor(tied).sort(-1, descending=True).indices.numpy()
        np.testing.assert_array_equal(torch_cpu.sort_descending(tied), wanted)
    weights = random.random((50, items), np.float32)
    np.testing.assert_array_equal(torch_cpu.sum_last(weights), torch.tensor(weights).sum(-1).numpy())


@pytest.mark.parametrize(
    ("weight", "counts", "message"),
    [
        (np.ones(8), (8, 1, 1, 1), r"weight is float64 \[8\]; give numbers \[layers, experts\]"),
        ([["a"]], (1, 1, 1, 1), r"weight is <U1 \[1, 1\]"),
        ([[1, np.nan]], (2, 1, 1, 1), "layer 0 has NaN, negative or infinite"),
        ([[1, 2], [1, -2]], (2, 1, 1, 1), "layer 1 has NaN, negative or infinite"),
        ([[3e38, 3e38]], (2, 1, 1, 1), "a sum beyond float32"),
        (np.ones((1, 8)), (6, 1, 1, 2), "num_replicas=6 leaves no slot for some of the 8 experts"),
        (np.ones((1, 8)), (10, 1, 1, 4), "num_replicas=10 is no multiple of num_gpus=4"),
        (np.ones((1, 8)), (9, 3, 1, 3), "8 experts are no multiple of num_groups=3"),
        (np.ones((1, 8)), (9, 4, 2, 3), "num_gpus=3 is no multiple of num_nodes=2; nodes of unequal size go"),
        (np.ones((1, 8)), (8, 1, 0, 1), "num_nodes=0; it must be at least 1"),
    ],
)
def test_what_cannot_be(weight, counts, message):
    with pytest.raises(ValueError, match=f"rebalance_experts: .*{message}"):
        rebalance_experts(weight, *counts)


def test_ties_by_an_unknown_rule():
    with pytest.raises(ValueError, match="ties='random' .*'torch', 'stable'"):
        rebalance_experts(np.ones((1, 2)), 2, 1, 1, 1, ties="random")
