"""The minimum cut against every cut there is."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dualpipe_jax.split.crossing import partition_by_min_cut
from dualpipe_jax.split.graph import is_cheap
from dualpipe_jax.split.mincut import UNCUTTABLE, FlowGraph
from dualpipe_jax.split.trace import trace_program


def cost(edges, side):
    return sum(capacity for (tail, head), capacity in edges.items() if tail in side and head not in side)


def test_least_and_nearest_the_source():
    pairs = [(a, b) for a in range(7) for b in range(7) if a != b and b != 0 and a != 6]
    inner = range(1, 6)
    sides = [{0, *some} for size in range(6) for some in itertools.combinations(inner, size)]
    for seed in range(400):  # few of them need a flow to be led back
        rng = np.random.default_rng(seed)
        chosen = rng.choice(len(pairs), 14, replace=False)
        edges = {pairs[i]: int(rng.integers(1, 5)) for i in chosen}
        graph = FlowGraph()
        for (tail, head), capacity in edges.items():
            graph.connect(tail, head, capacity)
        least = min(cost(edges, side) for side in sides)
        smallest = set.intersection(*(side for side in sides if cost(edges, side) == least))
        assert graph.source_side(0, 6) == smallest, seed


def test_what_reads_late_inputs_is_late():
    """Their sum would cross in one array instead of two, if only the early part had the third."""
    kind = jax.ShapeDtypeStruct((4,), jnp.float32)
    whole, _ = trace_program(lambda a, b, late: late + jnp.sin(a) + jnp.sin(b), kind, kind, kind)
    nodes = {name: [node for node in whole.equations if node.name == name] for name in ("sin", "add")}
    found = partition_by_min_cut(
        nodes["sin"], nodes["add"], whole.outputs, free=(), late_inputs=whole.inputs[2:], movable=is_cheap
    )
    assert found.crossing == tuple(node.outputs[0] for node in nodes["sin"])
    assert list(found.late) == nodes["add"]


def test_no_cut():
    graph = FlowGraph()
    graph.connect("s", "a", UNCUTTABLE)
    graph.connect("a", "t")
    with pytest.raises(ValueError, match="No cut"):
        graph.source_side("s", "t")
