"""All-to-alls where their groups lie: every message walked link by link, closed forms, data sheets' figures."""

import math
from collections import Counter

import numpy as np
import pytest

from dualpipe_jax.inspect import gpu_rates, read
from dualpipe_jax.inspect.collectives import _GROUPS, _mesh_groups, collectives
from dualpipe_jax.inspect.fabric import Nodes, Torus
from dualpipe_jax.inspect.rates import Rates
from dualpipe_jax.inspect.target import Target
from dualpipe_jax.torus import busiest_link, closed_dims, near_order

H100_CLOCK = 1.83e9  # at which its matrix units reach 989 TFLOP/s
MIB = 1 << 20


def walked(groups, shape):
    """Each message on its way, one chip at a time; both ways round where they are as long."""
    closed, links = closed_dims(shape), Counter()
    for group in groups:
        for start in group:
            for end in group:
                at = list(start)
                for dim, length in enumerate(shape):
                    ways = [end[dim] - at[dim]]
                    if closed[dim]:
                        right = ways[0] % length
                        ways = [right, right - length]
                        best = min(map(abs, ways))
                        ways = [way for way in ways if abs(way) == best] if right else [0]
                    for way in ways:
                        here = list(at)
                        for _ in range(abs(way)):
                            links[tuple(here), dim, way > 0] += 1 / len(ways) / len(group)
                            here[dim] = (here[dim] + (1 if way > 0 else -1)) % length
                    at[dim] = end[dim]
    return max(links.values(), default=0)


@pytest.mark.parametrize("shape", [(4, 4, 4), (4, 2, 1), (5, 3, 1), (16, 2, 1)])
def test_the_busiest_link_of_any_groups(shape):
    random = np.random.default_rng(0)
    chips = random.permutation(np.indices(shape).reshape(3, -1).T)
    for size in (2, 3, 5):
        groups = chips[: len(chips) // size * size].reshape(-1, size, 3)[:4]
        assert busiest_link(groups, shape) == pytest.approx(walked(groups.tolist(), shape))


@pytest.mark.parametrize("length", [4, 8, 16])
def test_rings_and_rows(length):
    """n (n / 4) / 2 n of a ring; of a row half of the devices send the other half their half over one link."""
    row = np.array([[[x, 0, 0] for x in range(length)]])
    assert busiest_link(row, (length, 4, 4)) == length / 8
    assert busiest_link(row, (length, 2, 2)) == length / 4
    plane = np.array([[[x, y, 0] for x in range(length) for y in range(length)]])
    assert busiest_link(plane, (length, length, 4)) == length / 8  # as if each row were alone


def test_which_slices_are_closed():
    closed = {(4, 4, 8): (True,) * 3, (2, 4, 4): (False,) * 3, (16, 8, 1): (True, False, False)}
    assert {shape: closed_dims(shape) for shape in closed} == closed


@pytest.mark.parametrize(
    "shape, inner, outer", [((8, 8, 16), 64, 1), ((8, 8, 4), 8, 8), ((4, 4, 1), 4, 1), ((4, 4, 4), 2, 4)]
)
def test_what_follows_each_other_is_near(shape, inner, outer):
    order = near_order(shape, inner, outer)
    assert sorted(map(tuple, order.tolist())) == sorted(np.ndindex(shape))
    boxes = order.reshape(-1, inner * outer, 3)
    for block, size in ((boxes, inner * outer), (order.reshape(-1, inner, 3), inner)):
        assert (np.prod(np.ptp(block, axis=1) + 1, axis=1) == size).all()
    corners = boxes.min(axis=1)
    sides = np.ptp(boxes[0], axis=0) + 1
    assert (np.abs(np.diff(corners, axis=0) // sides).sum(axis=1) == 1).all()
    # no arrangement of consecutive chips in the plain order does better
    plain = np.indices(shape[::-1]).reshape(3, -1).T[:, ::-1].reshape(-1, inner * outer, 3)
    assert busiest_link(boxes, shape) <= busiest_link(plain, shape)


def test_no_box_of_that_size():
    assert near_order((4, 4, 4), 3) is None and near_order((4, 4, 4), 8, 3) is None


def seconds(rates, payload, group):
    return rates.collective("all-to-all", payload, len(group), (tuple(group),)) / H100_CLOCK


def test_h100_inside_a_node_and_between():
    rates = gpu_rates("h100")
    assert seconds(rates, 64 * MIB, range(16)) == pytest.approx(32 * MIB / 50e9)  # 671 us: half of it leaves
    assert seconds(rates, 64 * MIB, range(8)) == pytest.approx(56 * MIB / 450e9)
    assert seconds(rates, 64 * MIB, range(0, 64, 8)) == pytest.approx(56 * MIB / 50e9)  # one of each node
    assert seconds(rates, 64 * MIB, range(4, 12)) == pytest.approx(32 * MIB / 50e9)  # four and four
    assert seconds(rates, 64 * MIB, [0, 8, 9, 10]) == pytest.approx(48 * MIB / 50e9)  # the lonely one's
    assert Target.parse("h100:4x4").rates.fabric.size == 4
    placed, anywhere = (rates.collective("all-reduce", MIB, 8, *at) for at in ([(tuple(range(8)),)], []))
    assert placed == anywhere


def test_what_is_gathered_and_reduced_crosses_to_a_node_once():
    """By hand, in seconds; NVLink 450 GB/s each way, a network card of 50 GB/s for each GPU."""
    rates = gpu_rates("h100")

    def taken(kind, *groups):
        return rates.collective(kind, 64 * MIB, len(groups[0]), groups) / H100_CLOCK

    two_nodes, cards = tuple(range(16)), tuple(range(0, 64, 8))
    # A node gets its other half over eight cards: 4 MiB each, less than what a GPU gets over NVLink.
    assert taken("all-gather", two_nodes) == pytest.approx(60 * MIB / 450e9)
    assert taken("all-reduce", two_nodes) == pytest.approx(2 * 60 * MIB / 450e9)
    assert taken("reduce-scatter", cards) == pytest.approx(56 * MIB / 50e9), "one GPU of each of eight nodes"
    assert taken("all-reduce", cards) == pytest.approx(2 * 56 * MIB / 50e9)
    assert taken("all-gather", (0, 1, 8)) == pytest.approx(64 / 3 * 2 * MIB / 50e9), "the lonely one's card"
    assert taken("all-gather", tuple(range(8)), cards) == taken("all-gather", cards), "the slowest group"


def test_a_broadcast_crosses_to_a_node_once():
    """Sixteen GPUs on two nodes, each with a card of 50 GB/s: all, and one of each node. One node: NVLink alone."""
    rates, payload = gpu_rates("h100", network=50e9, node=8), 1e9

    def seconds(*group):
        return rates.collective("collective-broadcast", int(payload), len(group), (group,)) / H100_CLOCK

    assert seconds(*range(16)) == pytest.approx(payload / (8 * 50e9))
    assert seconds(0, 8) == pytest.approx(payload / 50e9)
    assert seconds(*range(8)) == pytest.approx(payload / 450e9)


def test_a_send_inside_a_node_takes_nvlink():
    rates, inside, across = gpu_rates("h100"), ((0, 1), (1, 2)), ((6, 7), (7, 8))
    kinds = inside, across, None
    sends = {pairs: rates.collective("collective-permute", MIB, None, pairs) for pairs in kinds}
    assert sends[inside] == pytest.approx(MIB / 450e9 * H100_CLOCK)
    assert sends[across] == sends[None] == pytest.approx(MIB / 50e9 * H100_CLOCK)


def test_sends_over_a_torus_that_share_links():
    places = tuple((x, y, 0) for x in range(8) for y in range(4))
    rates = Rates(link=2.0, fabric=Torus((8, 4, 4), places, 2.0), latency=7)
    near = tuple((d, (d + 4) % 32) for d in range(32))  # the next along x, round the ring
    far = tuple((d, (d + 12) % 32) for d in range(32))  # three further: three messages on every link
    half = tuple((d, (d + 16) % 32) for d in range(32))  # half of each goes either way round
    for pairs, crossing in ((near, 1), (far, 3), (half, 2)):
        assert rates.collective("collective-permute", 4000, None, pairs) == 7 + crossing * 2000
    gathered = rates.collective("all-gather", 4000, 4, ((0, 1, 2, 3),))
    assert gathered == 7 + 3 / 8 * 2000, "as the compiler has it"


def test_pairs_of_a_permute_are_read():
    line = "%s = f32[4]{0} collective-permute(%x), channel_id=3, source_target_pairs={{0,2},{1,3},{2,0}}"
    text = "HloModule m, is_scheduled=true\n\nENTRY %main (x: f32[4]) -> f32[4] {\n  %x = f32[4]{0} parameter(0)\n"
    module = read(f"{text}  ROOT {line}\n}}\n")
    (pair,) = collectives(module, module.computations["main"])
    assert pair.groups == ((0, 2), (1, 3), (2, 0)) and pair.group_size is None


def test_a_place_never_makes_it_shorter_than_the_compiler_says():
    places = tuple((x, 0, 0) for x in range(16))
    rates = Rates(link=2.0, fabric=Torus((16, 2, 2), places, 2.0), latency=7)
    near, far = (tuple(range(4)),), (tuple(range(16)),)
    assert rates.collective("all-to-all", 4000, 4, near) == 7 + 2 * 3 / 4 * 2000 > 7 + 2000
    assert rates.collective("all-to-all", 4000, 16, far) == 7 + 4 * 2000
    apart = (tuple(range(0, 16, 4)), tuple(range(1, 16, 4)), tuple(range(2, 16, 4)), tuple(range(3, 16, 4)))
    assert rates.collective("all-to-all", 4000, 4, apart) == 7 + 16 / 4 * 2000  # their ways share the middle
    assert rates.collective("all-to-all", 4000, 4) == 7 + 3000


def test_rates_on_the_devices_of_a_mesh():
    class Chip:
        def __init__(self, *coords):
            self.coords = coords

    target = Target.parse("v5e:4x4")
    row = [Chip(x, 0, 0) for x in range(4)]
    rates = target.rates_on(row)
    taken = rates.fabric.collective("all-to-all", 100.0, ((0, 1, 2, 3),))
    assert taken == pytest.approx(100 / target.rates.link)
    assert Target.parse("h100:2x8").rates_on([]).fabric == Nodes(8, 450e9 / H100_CLOCK, 50e9 / H100_CLOCK)


def test_groups_by_axes_of_a_mesh():
    grid, halves = np.arange(24).reshape(2, 3, 4), np.arange(8).reshape(4, 2)
    for mesh, axes, wanted in (
        ("'a'=2,'b'=3,'c'=4", "'b'", grid.transpose(0, 2, 1).reshape(8, 3)),
        ("'a'=2,'b'=3,'c'=4", "'a','c'", grid.transpose(1, 0, 2).reshape(3, 8)),
        ("'x'=8", "'x':(1)4", halves.T),
        ("'x'=8", "'x':(4)2", halves),
    ):
        assert _mesh_groups(mesh, axes, None) == tuple(map(tuple, wanted.tolist())), axes
    assert math.prod(map(int, _GROUPS.search("replica_groups=[8,3]<=[2,3,4]T(0,2,1)").groups()[:2])) == 24
