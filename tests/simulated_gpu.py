"""Pallas' simulator of a GPU, under the name that this version of JAX has for it."""

import contextlib
from unittest import mock

import jax
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from dualpipe_jax.parallel import mosaic

NEW = hasattr(plgpu, "force_gpu_interpret_mode")
"""Whether it is the public one, of jax 0.11 or later."""


@contextlib.contextmanager
def interpreted(races: bool = False):
    """A context in which Mosaic GPU's kernels run on the CPU; what they read past an array is anything.

    Where there is a GPU they run there. With ``races`` a newer simulator raises where two warpgroups, or a copy and a
    warpgroup, touch the same memory in no order.
    """
    if jax.default_backend() == "gpu":
        yield
        return
    if NEW:
        params = plgpu.InterpretGPUParams(out_of_bounds_reads="uninitialized", detect_races=races)
        with plgpu.force_gpu_interpret_mode(params), _new_sums():
            yield
        return
    internal = pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.params")
    params = internal.InterpretGPUParams(out_of_bounds_reads="uninitialized")
    with internal.force_gpu_interpret_mode(params), _transposed_views(), _sums():
        yield


def simulated(function, *args, races=False):
    """What a function of arrays gives, jitted, in such a context; see ``interpreted``."""
    with interpreted(races):
        # A jitted function returns before its kernels have run, and the context must hold until they have.
        return jax.block_until_ready(jax.jit(function)(*args))


class _Transposed(tuple):
    """A range whose content is turned over."""


@contextlib.contextmanager
def _transposed_views():
    """Transposed operands of products, which the simulator of jax 0.10 does not know."""
    from jax._src.pallas.mosaic.interpret import utils
    from jax._src.pallas.mosaic_gpu.interpret import shared_memory
    from jax._src.state.types import TransposeTransform

    to_range, content = utils.to_range, shared_memory.GPUSharedMemory.get_buffer_content

    def to_range_or_transposed(transforms):
        *before, last = transforms or (None,)
        return _Transposed(to_range(before)) if isinstance(last, TransposeTransform) else to_range(transforms)

    def content_or_transposed(self, key, where, *more, **named):
        found, *rest = content(self, key, tuple(where), *more, **named)
        return (np.swapaxes(found, 0, 1) if isinstance(where, _Transposed) else found), *rest

    with (
        mock.patch.object(utils, "to_range", to_range_or_transposed),
        mock.patch.object(shared_memory.GPUSharedMemory, "get_buffer_content", content_or_transposed),
    ):
        yield


@contextlib.contextmanager
def _sums():
    """What no simulator knew yet: copies to memory that add to what is there, layouts of registers, and global memory
    that is read into them."""
    from jax._src.pallas.mosaic.interpret import utils
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    copy = gpu_callbacks.copy_smem_to_gmem

    def copy_or_add(*, token, device_id, thread_id, reduction_op, **given):
        if reduction_op is None:
            named = dict(token=token, device_id=device_id, thread_id=thread_id, reduction_op=None)
            return copy(**named, **given)
        assert reduction_op == "add"
        memory = gpu_callbacks._get_shared_memory()
        thread = memory.get_global_thread_id(int(device_id), int(thread_id))

        def at(end):
            key = gpu_callbacks.HostAllocationKey.from_array(given[f"{end}_allocation_key_as_array"])
            transforms = gpu_callbacks._remove_noop_transforms(given[f"{end}_transforms"])
            return key, utils.to_range(jax.tree.map(int, transforms))

        added, before = (memory.get_buffer_content(*at(end), thread)[0] for end in ("src", "dst"))
        memory.store_buffer_content(*at("dst"), before + added, thread)
        return token

    with (
        mock.patch.object(gpu_callbacks, "copy_smem_to_gmem", copy_or_add),
        mock.patch.object(plgpu, "layout_cast", lambda array, layout: array),
        mock.patch.object(mosaic, "loaded", lambda ref: ref[...]),
    ):
        yield


@contextlib.contextmanager
def _new_sums():
    """Copies to memory that add to what is there, likewise."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    copy = gpu_callbacks.copy_smem_to_gmem

    def copy_or_add(*, reduction_op, **given):
        if reduction_op is None:
            return copy(reduction_op=None, **given)
        assert reduction_op == "add"
        memory = gpu_callbacks._get_shared_memory()

        def at(end):
            key = gpu_callbacks.HostAllocationKey.from_array(given[f"{end}_allocation_key_as_array"])
            transforms = gpu_callbacks._remove_noop_transforms(given[f"{end}_transforms"])
            return key, memory.access(key, jax.tree.map(int, transforms))

        thread = given["thread"]
        added, before = (memory.get_buffer_content(*at(end), thread)[0] for end in ("src", "dst"))
        memory.store_buffer_content(*at("dst"), before + added, thread)
        return given["token"]

    with mock.patch.object(gpu_callbacks, "copy_smem_to_gmem", copy_or_add):
        yield
