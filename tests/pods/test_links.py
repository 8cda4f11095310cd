"""Copies of a token by kind of link, of a dry run: published and closed forms."""

import math

import pytest

from dualpipe_jax.command.dryrun import links_table
from dualpipe_jax.inspect import Target
from dualpipe_jax.pods import Plan
from dualpipe_jax.pods.links import count_links
from train.pods import dispatch_of, size


def test_deepseek_v3_on_8_nodes():
    found = count_links(
        Plan(pp=16, ep=64, ep_nodes=8), dispatch_of(size("v3")), Target.parse("v5p:8x8x16"), 4096
    )
    one, two = found.ways["one hop"], found.ways["two hops"]
    assert one.across == pytest.approx(7.0, abs=0.04)  # 8 experts, 7 of 8 nodes are others
    assert two.across == pytest.approx(3.5, abs=0.06)  # DeepSeek's 4 groups are 4 nodes at most
    assert two.bytes_across == two.across * 4096 * 7168 * 2
    assert two.inside == pytest.approx(8 * 7 / 8, abs=0.03)  # 7 of 8 devices are others
    assert (found.nodes, found.used) == (8, "two hops")
    rows = links_table(found.ways).rows
    assert rows[1] == ("two hops", f"{two.across:.2f}", f"{two.inside:.2f}", *rows[1][3:])
    assert float(rows[1][3]) == pytest.approx(two.bytes_across / 2**20, abs=0.06)


def test_nodes_of_gpus_are_the_targets():
    numbers = dispatch_of(size("v2-lite", None, {"num_experts": 64, "top_k": 6}))
    found = count_links(Plan(pp=4, ep=16), numbers, Target.parse("h100:8x8"), 1)
    assert found.nodes == 2 and found.used == "one hop"
    missed = math.comb(32, 6) / math.comb(64, 6)
    assert found.ways["two hops"].across == pytest.approx(1 - missed, abs=0.01)
    assert count_links(Plan(pp=4, ep=8), numbers, Target.parse("h100:8x8"), 1) is None
    assert count_links(Plan(pp=4, ep=16), numbers, Target.parse("v5p:4x4x4"), 1) is None
