"""Copies of a token by kind of link, of a dry run: published and closed forms."""

import dataclasses
import math

import numpy as np
import pytest

from dualpipe_jax.command.dryrun import links_table
from dualpipe_jax.inspect.target import Target
from dualpipe_jax.pods import Plan
from dualpipe_jax.pods.links import Dispatch, count_links, share_dropped
from train.model import named_config
from train.pods.training import dispatch_of


def test_deepseek_v3_on_8_nodes():
    plan = Plan(pp=16, ep=64, ep_nodes=8)
    found = count_links(plan, dispatch_of(named_config("v3")), Target.parse("v5p:8x8x16"), 4096)
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
    numbers = dispatch_of(named_config("v2-lite", None, {"num_experts": 64, "top_k": 6}))
    found = count_links(Plan(pp=4, ep=16), numbers, Target.parse("h100:8x8"), 1)
    assert found.nodes == 2 and found.used == "one hop"
    missed = math.comb(32, 6) / math.comb(64, 6)
    assert found.ways["two hops"].across == pytest.approx(1 - missed, abs=0.01)
    assert count_links(Plan(pp=4, ep=8), numbers, Target.parse("h100:8x8"), 1) is None
    assert count_links(Plan(pp=4, ep=16), numbers, Target.parse("v5p:4x4x4"), 1) is None
    of_twelve = Dispatch(48, 6, 2)  # 8 on one node and 4 on the next, or 4 and 8: no two nodes alike
    assert count_links(Plan(pp=4, ep=12), of_twelve, Target.parse("h100:6x8"), 1) is None


def by_throwing_dice(plan, dispatch, tokens, rounds):
    """The share dropped by each device, of tokens that choose their groups and then their experts by lot."""
    rng = np.random.default_rng(0)
    experts, groups = dispatch.num_experts, dispatch.num_groups
    of = experts if plan.dispatch == "capacity" else plan.ep
    room = math.ceil(plan.capacity_factor * tokens * dispatch.top_k / of)
    shares = []
    for _ in range(rounds):
        keys = rng.random((tokens, groups, experts // groups))
        best = np.argsort(rng.random((tokens, groups)))[:, dispatch.top_groups :]
        np.put_along_axis(keys, best[:, :, None], 2.0, axis=1)
        chosen = np.argsort(keys.reshape(tokens, experts))[:, : dispatch.top_k]
        counts = np.bincount(chosen.ravel() // (experts // of), minlength=of)
        shares.append(np.maximum(counts - room, 0).sum() / chosen.size)
    return np.mean(shares), np.std(shares) / math.sqrt(rounds)


@pytest.mark.parametrize("dispatch", ["capacity", "dropless"])
@pytest.mark.parametrize(
    "size, tokens, factor",
    [(Dispatch(64, 6, 0), 256, 1.0), (Dispatch(64, 6, 0), 256, 1.1), (Dispatch(32, 4, 0, 8, 4), 128, 1.1)],
)
def test_what_is_dropped_is_what_dice_tell(dispatch, size, tokens, factor):
    compare_with_dice(Plan(ep=8, dispatch=dispatch, capacity_factor=factor), size, tokens)


@pytest.mark.parametrize("ep, size", [(4, Dispatch(32, 4, 0, 8, 2)), (6, Dispatch(24, 3, 0, 4, 2))])
def test_devices_hold_several_groups_or_parts_of_two(ep, size):
    compare_with_dice(Plan(ep=ep, dispatch="dropless", capacity_factor=1.1), size, 128)


def compare_with_dice(plan, size, tokens):
    mean, error = by_throwing_dice(plan, size, tokens, 400)
    assert error < 0.2 * mean
    assert share_dropped(plan, size, tokens) == pytest.approx(mean, abs=4 * error)


def test_what_deepseek_v3_drops():
    """An expert has room for 64 or 80 of a device's 2048 tokens, of which each comes with a chance of 1 in 32."""
    plan, v3 = Plan(pp=16, ep=64, dispatch="capacity", capacity_factor=1.0), dispatch_of(named_config("v3"))
    for factor, room in ((1.0, 64), (1.25, 80)):
        come = (math.comb(2048, n) * 31 ** (2048 - n) // 32**2028 / 32**20 for n in range(room + 1, 2049))
        lost = sum((n - room) * float(chance) for n, chance in enumerate(come, room + 1)) / 64
        found = share_dropped(dataclasses.replace(plan, capacity_factor=factor), v3, 2048)
        assert found == pytest.approx(lost, rel=1e-6)
    assert share_dropped(Plan(ep=64), v3, 2048) == 0
    assert share_dropped(dataclasses.replace(plan, ep_nodes=8), v3, 2048) is None
