"""Copies of tokens by kind of link: by sets, in closed form, and as published for DeepSeek-V3."""

import math
import random

import numpy as np
import pytest

from dualpipe_jax.balance import Layout, count_traffic, random_traffic


def by_hand(source, target, num_nodes, size):
    """Each message as (from device, to device), token by token."""
    sent = {"by_expert": [], "by_device": [], "two_hops": [], "two_hops_by_expert": []}
    for at, devices in zip(source, target, strict=True):
        sent["by_expert"] += [(at, to) for to in devices if to != at]
        sent["by_device"] += [(at, to) for to in set(devices) if to != at]
        for node in {to // size for to in devices}:
            gate = node * size + at % size
            first = [(at, gate)] if gate != at and node != at // size else []
            sent["two_hops"] += first + [
                (gate, to) for to in set(devices) if to // size == node and to != gate
            ]
            sent["two_hops_by_expert"] += first + [
                (gate, to) for to in devices if to // size == node and to != gate
            ]
    count = len(source)
    across = {how: sum(a // size != b // size for a, b in pairs) for how, pairs in sent.items()}
    return {how: (across[how] / count, (len(pairs) - across[how]) / count) for how, pairs in sent.items()}


@pytest.mark.parametrize(("nodes", "size", "chosen"), [(1, 4, 2), (2, 2, 3), (3, 2, 4), (4, 1, 2), (2, 4, 8)])
def test_counted_by_hand(nodes, size, chosen):
    draw = random.Random(nodes)
    source = [draw.randrange(nodes * size) for _ in range(40)]
    target = [[draw.randrange(nodes * size) for _ in range(chosen)] for _ in source]
    found = count_traffic(source, target, Layout(nodes * size, 1, nodes))
    for how, (across, inside) in by_hand(source, target, nodes, size).items():
        assert getattr(found, how).across == pytest.approx(across)
        assert getattr(found, how).inside == pytest.approx(inside)


def test_256_experts_on_8_nodes_of_8_devices():
    free = random_traffic(Layout(64, 4, 8), 256, 8)
    assert free.by_expert.across == pytest.approx(7.0, abs=0.03)  # 8 x 7/8
    missed = math.comb(252, 8) / math.comb(256, 8)  # by all of a token's experts, of a device
    assert free.by_device.across == pytest.approx(56 * (1 - missed), abs=0.03)
    missed = math.comb(224, 8) / math.comb(256, 8)  # of a node
    assert free.two_hops.across == pytest.approx(7 * (1 - missed), abs=0.03)
    limited = random_traffic(Layout(64, 4, 8, num_groups=8), 256, 8, num_limited=4)
    assert limited.by_expert.across == pytest.approx(7.0, abs=0.04)
    assert limited.two_hops.across == pytest.approx(3.47, abs=0.04)


def test_limited_routing_against_a_loop_over_tokens():
    """With few experts a group, for then it matters that groups go by their two best, not by the best alone."""
    draw, across = np.random.default_rng(9), []
    for token in range(4000):
        scores = draw.random((8, 4))
        kept = sorted(range(8), key=lambda group: -sum(sorted(scores[group])[-2:]))[:4]
        best = sorted(((scores[group, e], group) for group in kept for e in range(4)), reverse=True)[:4]
        across.append(len({group for _, group in best} - {token % 8}))
    limited = random_traffic(Layout(8, 4, 8, num_groups=8), 32, 4, num_limited=4)
    assert limited.two_hops.across == pytest.approx(np.mean(across), abs=0.06)


def test_devices_in_as_few_bits_as_hold_their_numbers():
    source, target = np.array([0, 255], np.uint8), np.array([[0, 7], [0, 255]], np.uint8)
    copies = count_traffic(source, target, Layout(256, 1)).by_device
    assert (copies.across, copies.inside) == (0.0, 1.0)  # 0 to 7, and 255 to 0


def test_bytes():
    found = random_traffic(Layout(16, 1, 2), 16, 4, num_tokens=100).two_hops
    assert found.bytes(4096, 14336.0) == (found.across * 4096 * 14336, found.inside * 4096 * 14336)


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (lambda: count_traffic([0], [0], Layout(2, 1)), r"source \[1\] and target \[1\]; give \[tokens\]"),
        (lambda: count_traffic([2], [[0]], Layout(2, 1)), "source must be devices, integers 0 to 1"),
        (lambda: count_traffic([0], [[0.5]], Layout(2, 1)), "target must be devices, integers 0 to 1"),
        (lambda: count_traffic([0], [[0]], Layout(3, 1, 2)), "3 devices on 2 nodes of unequal size"),
        (lambda: random_traffic(Layout(3, 1), 8, 2), "8 experts on 3 devices in 1 groups; give experts"),
        (
            lambda: random_traffic(Layout(2, 1, 1, 2), 8, 5, 1),
            "num_chosen 5 of num_limited 1 of 2 groups of 4 experts",
        ),
    ],
)
def test_what_cannot_be_counted(work, message):
    with pytest.raises(ValueError, match=message):
        work()
