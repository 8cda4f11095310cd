"""The mesh: its layout, its axis types, its complaints."""

import jax
import pytest
from jax.sharding import AxisType, PartitionSpec

from dualpipe_jax.parallel import DP, EP, PP, make_mesh
from dualpipe_jax.parallel.mesh import batch_spec, expert_axes, over_nodes, slow_links


@pytest.mark.parametrize("num_pp, num_ep", [(1, 1), (8, 1), (1, 8), (4, 2), (2, 2)])
def test_ep_varies_fastest_and_axes_are_auto(num_pp, num_ep):
    mesh = make_mesh(num_pp, num_ep)
    assert mesh.axis_names == (DP, PP, EP) == ("dp", "pp", "ep")
    assert mesh.shape == {"dp": 1, "pp": num_pp, "ep": num_ep}
    assert mesh.axis_types == (AxisType.Auto,) * 3
    assert list(mesh.devices.ravel()) == jax.devices()[: num_pp * num_ep]


def test_replicas_lie_outermost():
    mesh = make_mesh(2, 2, dp=2)
    assert mesh.shape == {"dp": 2, "pp": 2, "ep": 2}
    assert list(mesh.devices[0].ravel()) == jax.devices()[:4]
    with pytest.raises(ValueError, match="make_mesh: dp 3 x pp 2 x ep 2 = 12 devices, but 8 are visible"):
        make_mesh(2, 2, dp=3)


def test_takes_devices_in_the_order_given():
    devices = jax.devices()[::-1][:4]
    assert list(make_mesh(2, 2, devices).devices.ravel()) == devices


def test_too_few_devices_says_how_many_and_what_to_set():
    with pytest.raises(
        ValueError, match=r"pp 8 x ep 2 = 16 devices, but 8 are visible to JAX \(platform cpu\)"
    ) as e:
        make_mesh(8, 2)
    assert "xla_force_host_platform_device_count=16" in str(e.value)
    with pytest.raises(ValueError, match="but 3 were given"):
        make_mesh(2, 2, jax.devices()[:3])
    with pytest.raises(ValueError, match="but 0 were given"):
        make_mesh(2, 2, [])


@pytest.mark.parametrize("num_pp, num_ep", [(0, 1), (2, -1)])
def test_sizes_below_one_are_refused(num_pp, num_ep):
    with pytest.raises(ValueError, match="at least 1"):
        make_mesh(num_pp, num_ep)


def test_experts_on_nodes_have_an_axis_more():
    mesh = make_mesh(2, (2, 2))
    assert mesh.shape == {"dp": 1, "pp": 2, "node": 2, "ep": 2}
    assert list(mesh.devices.ravel()) == jax.devices()
    assert batch_spec(mesh) == PartitionSpec(None, ("dp", "node", "ep"))
    assert (expert_axes(), expert_axes(2)) == ("ep", ("node", "ep"))
    assert (over_nodes(8), over_nodes(8, 2)) == (8, (2, 4))
    with pytest.raises(ValueError, match="ep 8 on 3 nodes: give a number of nodes that divides it"):
        over_nodes(8, 3)
    with pytest.raises(ValueError, match=r"ep=\(2, 2, 2\) .* int \| tuple\[int, int\]"):
        make_mesh(1, (2, 2, 2))
    with pytest.raises(ValueError, match="pp 2 x node 4 x ep 2 = 16 devices, but 8"):
        make_mesh(2, (4, 2))


class Chip:
    """As much of a device as a mesh looks at."""

    def __init__(self, number, platform, coords=None, process=0, piece=None):
        self.id, self.platform, self.process_index, self.slice_index = number, platform, process, piece
        if coords is not None:
            self.coords = coords

    def __repr__(self):
        return f"{self.platform}:{self.id}"


def test_a_tpu_slices_expert_axis_fills_a_box():
    """JAX lists a slice host by host, 2 x 2 chips each."""
    hosts = [(x, y) for y in (0, 2) for x in (0, 2)]
    places = [(x + i, y + j, z) for z in range(4) for x, y in hosts for j in (0, 1) for i in (0, 1)]
    chips = [Chip(k, "tpu", place) for k, place in enumerate(places)]
    grid = make_mesh(4, (4, 4), chips).devices[0]
    assert {chip.coords[2] for chip in grid[1].ravel()} == {1}
    for line in (*grid[0], *grid[0].T):
        assert len({chip.coords[:1] for chip in line}) * len({chip.coords[1:2] for chip in line}) == 4
    assert list(make_mesh(1, 8, chips[:8]).devices.ravel()) != chips[:8]  # two rows of four: a whole box, too
    assert list(make_mesh(1, 9, chips[:9]).devices.ravel()) == chips[:9]


def test_tpu_slices_are_not_mixed():
    """Two slices have the same coordinates, and between them there is only the network."""
    places = [(x, y, 0) for y in range(4) for x in range(4)]
    chips = [
        Chip(16 * piece + k, "tpu", place, piece=piece) for piece in (0, 1) for k, place in enumerate(places)
    ]
    for mesh in (make_mesh(2, 16, chips), make_mesh(1, 16, chips, dp=2), make_mesh(1, (2, 16), chips)):
        for row in mesh.devices.reshape(2, 16):
            assert len({chip.slice_index for chip in row}) == 1


def test_between_nodes_of_gpus_links_are_slower():
    gpus = [Chip(k, "gpu", process=k // 8) for k in range(64)]
    (slow,) = slow_links(make_mesh(1, (8, 8), gpus)).values()
    assert slow == pytest.approx(450 / 50)
    assert slow_links(make_mesh(4, (2, 8), gpus))["node"] == pytest.approx(9 * (1 / 2) / (7 / 8))
    assert slow_links(make_mesh(8, 8, gpus)) == slow_links(make_mesh(2, (2, 2))) == {}


def test_what_a_nodes_devices_are_lie_on_one():
    gpus = [Chip(k, "gpu", process=k // 4) for k in range(16)]
    assert make_mesh(2, (2, 4), gpus).shape["node"] == 2
    with pytest.raises(
        ValueError,
        match=r"ep \(2, 8\): the 8 devices of a node \(gpu:0 to gpu:7\) lie on 2 nodes \(process 0, 1\), .* 0 has 4",
    ):
        make_mesh(1, (2, 8), gpus)
    alone = [Chip(k, "gpu", process=k) for k in range(16)]  # a process a GPU: nobody knows
    assert make_mesh(1, (2, 8), alone).shape["ep"] == 8
    pieces = [Chip(k, "gpu", process=k, piece=k // 4) for k in range(16)]
    with pytest.raises(ValueError, match="slice 0, 1"):
        make_mesh(1, (2, 8), pieces)
