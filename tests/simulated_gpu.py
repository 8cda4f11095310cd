"""Pallas' simulator of a GPU, under the name that this version of JAX has for it."""

import contextlib
from unittest import mock

import jax
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

NEW = hasattr(plgpu, "force_gpu_interpret_mode")
"""Whether it is the public one, of jax 0.11 or later."""


@contextlib.contextmanager
def interpreted():
    """A context in which Mosaic GPU's kernels run on the CPU; what they read past an array is anything.

    Where there is a GPU they run there.
    """
    if jax.default_backend() == "gpu":
        yield
        return
    if NEW:
        params = plgpu.InterpretGPUParams(out_of_bounds_reads="uninitialized")
        with plgpu.force_gpu_interpret_mode(params):
            yield
        return
    internal = pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.params")
    params = internal.InterpretGPUParams(out_of_bounds_reads="uninitialized")
    with internal.force_gpu_interpret_mode(params), _transposed_views():
        yield


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
