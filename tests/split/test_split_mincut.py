"""The minimum cut against every cut there is."""

import itertools

import numpy as np
import pytest

from dualpipe_jax.split.mincut import UNCUTTABLE, FlowGraph


def cost(edges, side):
    return sum(capacity for (tail, head), capacity in edges.items() if tail in side and head not in side)


@pytest.mark.parametrize("seed", range(20))
def test_least_and_nearest_the_source(seed):
    rng = np.random.default_rng(seed)
    pairs = [(a, b) for a in range(7) for b in range(7) if a != b and b != 0 and a != 6]
    chosen = rng.choice(len(pairs), 14, replace=False)
    edges = {pairs[i]: int(rng.integers(1, 5)) for i in chosen}
    graph = FlowGraph()
    for (tail, head), capacity in edges.items():
        graph.connect(tail, head, capacity)
    inner = range(1, 6)
    sides = [{0, *some} for size in range(6) for some in itertools.combinations(inner, size)]
    least = min(cost(edges, side) for side in sides)
    smallest = set.intersection(*(side for side in sides if cost(edges, side) == least))
    assert graph.source_side(0, 6) == smallest


def test_no_cut():
    graph = FlowGraph()
    graph.connect("s", "a", UNCUTTABLE)
    graph.connect("a", "t")
    with pytest.raises(ValueError, match="No cut"):
        graph.source_side("s", "t")
