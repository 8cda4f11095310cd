"""The mesh: its layout, its axis types, its complaints."""

import jax
import pytest
from jax.sharding import AxisType

from dualpipe_jax.parallel import DP, EP, PP, make_mesh


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
