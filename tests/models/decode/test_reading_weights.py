"""Weights go from the disk to the devices that serve: the very numbers, and never more than a device's own part."""

import functools
import math
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import pytest

from dualpipe_jax.parallel import make_mesh
from models import Dispatch, weights
from models.decode import Engine, Limits, PrefixFolder, SamplingParams, decoder
from models.weights import WeightsError, native
from models.weights.files import Reader
from tests.models.decode.small_models import random_params, small
from tests.train.state.test_state import by_name
from train.config import TrainConfig
from train.state.facts import describe

NUM_DEVICES = 4
CONFIG = small(
    num_layers=4, num_groups=1, num_experts=16, expert_hidden=40, num_mtp_layers=1, compute_dtype=jnp.bfloat16
)
"""Nine tenths are experts, so that a device's part is a third of the whole."""

LIMITS = Limits(max_requests=4, max_positions=24, block_size=4, chunk_size=4)
TWICE = np.tile(np.roll(np.arange(24) % 16, 5).reshape(1, 4, 6), (4, 1, 1))
"""Some experts on two devices."""


def publish(folder):
    weights.save(folder, CONFIG, random_params(CONFIG), dtype="float32")
    return weights.open_lazily(folder)[1]


def convert(folder):
    native.write(folder, CONFIG, dict(random_params(CONFIG)), {})
    return native.open_lazily(folder)[1]


def train(folder):
    """As the trainer leaves one, layers in one array."""
    flat = jax.tree.map(jnp.asarray, by_name(random_params(CONFIG)))
    ocp.save(folder, flat, custom_metadata=describe(TrainConfig(), CONFIG, "corpus", flat, "tokens"))
    return native.open_lazily(folder)[1]


@pytest.fixture(params=[publish, convert, train])
def opened(request, tmp_path):
    return request.param(tmp_path / "model")


@functools.cache
def model(on_mesh):
    return decoder(CONFIG, dispatch=Dispatch(axis_name="ep") if on_mesh else Dispatch())


def mesh():
    return make_mesh(1, NUM_DEVICES, jax.devices()[:NUM_DEVICES])


def part_of_a_device():
    """Bytes of all weights, and of those that a device is to hold: its experts, and all else."""
    whole = part = 0
    shapes = jax.eval_shape(model(False).prepare, random_params(CONFIG))
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        size = math.prod(leaf.shape) * leaf.dtype.itemsize
        whole += size
        part += size // NUM_DEVICES if "'experts'" in jax.tree_util.keystr(path) else size
    return whole, part


def held(others):
    """Bytes of arrays on each device, without those that were there before."""
    found, before = dict.fromkeys(jax.devices(), 0), set(map(id, others))
    for array in jax.live_arrays():
        if id(array) not in before:
            shard = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
            for device in array.sharding.device_set:
                found[device] += shard
    return max(found.values())


def test_no_device_ever_holds_more_than_its_part(opened, monkeypatch):
    seen, others = [], jax.live_arrays()

    def watched(function):
        def watch(*given, **named):
            seen.append(held(others))
            found = function(*given, **named)
            seen.append(held(others))
            return found

        return watch

    monkeypatch.setattr(Reader, "read_into", watched(Reader.read_into))
    monkeypatch.setattr(ocp, "load", watched(ocp.load))
    monkeypatch.setattr(jax, "make_array_from_callback", watched(jax.make_array_from_callback))
    serving = Engine(model(True), opened, LIMITS, mesh=mesh())
    whole, part = part_of_a_device()
    beside = sum(array.nbytes for array in (serving._cache, *serving._running)) // NUM_DEVICES
    tables = sum(own["copies"].nbytes for own in serving._weights["layers"] if "copies" in own)
    assert len(seen) > 100 and whole > 2.5 * part
    assert max(seen) - beside <= part <= held(others) - beside <= part + tables
    assert seen == sorted(seen), "nothing is put there to be taken away again"


@pytest.mark.parametrize("placement", [None, TWICE])
def test_they_are_what_is_prepared_of_the_whole(opened, placement):
    """Bit for bit what one program makes of params on one device; of copies of experts, too."""
    wanted = model(False).prepare(random_params(CONFIG))
    chex.assert_trees_all_equal(Engine(model(False), opened, LIMITS)._weights, wanted)
    spread = Engine(model(True), opened, LIMITS, mesh=mesh(), placement=placement)._weights
    slots = np.arange(16) if placement is None else placement[0].reshape(-1)

    def check(path, found, want):
        experts = "'experts'" in jax.tree_util.keystr(path)
        np.testing.assert_array_equal(found, np.asarray(want)[slots] if experts else want)

    without = {
        name: [{key: value for key, value in own.items() if key != "copies"} for own in spread[name]]
        for name in ("layers", "mtp")
    }
    jax.tree_util.tree_map_with_path(check, spread | without, wanted)


def test_nothing_is_read_for_what_is_refused(tmp_path):
    opened = publish(tmp_path / "model")
    few, elsewhere = np.tile(np.arange(4), (4, 4, 1)), make_mesh(1, 3, jax.devices()[:3])
    for message, how in (
        ("3 devices must share it equally", dict(mesh=elsewhere)),
        ("16 experts do not divide over 3 devices", dict(mesh=elsewhere, limits=Limits(6, 24))),
        ("not two equal halves", dict(mesh=mesh(), microbatches=2)),
        ("a block alone takes", dict(mesh=mesh(), prefixes=PrefixFolder(tmp_path, 99))),
        ("no copy of expert 4", dict(mesh=mesh(), placement=few)),
    ):
        arguments = dict(limits=LIMITS) | how
        with mock.patch.object(Reader, "read_into") as read, pytest.raises(ValueError, match=message):
            Engine(model(True), opened, **arguments)
        read.assert_not_called()


@pytest.mark.slow
def test_beginnings_are_shared_by_engines_on_other_devices(tmp_path):
    """Weights are the same whoever holds which of them, and so is what is kept of them."""
    config = small(num_groups=1)
    opened, prompt, found = random_params(config), np.arange(13), []
    placement = np.asarray([[[3, 0], [1, 3], [2, 1], [0, 2]]])
    for how in (dict(), dict(mesh=mesh()), dict(mesh=mesh(), placement=placement)):
        one = decoder(config, dispatch=Dispatch(axis_name="ep") if how else Dispatch())
        serving = Engine(one, opened, LIMITS, prefixes=PrefixFolder(tmp_path / "kept"), **how)
        serving.add(prompt, SamplingParams(max_tokens=4))
        found += serving.run()
        serving._disk_blocks.flush()
    assert [one.num_reused for one in found] == [0, 12, 12]
    assert len(list((tmp_path / "kept").iterdir())) == 1
    assert len({one.tokens for one in found}) == 1


def test_a_file_that_is_lost_or_damaged_while_it_is_read(tmp_path):
    opened = train(tmp_path / "model")
    for file in (tmp_path / "model").glob("state/d/*"):
        file.unlink()
    with pytest.raises(WeightsError, match="cannot be read: "):
        Engine(model(False), opened, LIMITS)
    convert(tmp_path / "whole")
    _, opened, _ = native.open_lazily(tmp_path / "whole", lambda facts, arrays: [f"{min(arrays)} is bad"])
    with pytest.raises(WeightsError, match="whole:\n  params/shared/embed_tokens is bad"):
        Engine(model(False), opened, LIMITS)
