"""Loading of a published checkpoint directly into sharded arrays, one device's part of a leaf at a time.

The host never holds more than two such parts and one tensor of the file; each process reads what its devices hold.
With ``open_lazily`` the user of the leaves decides which parts are read, and when.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding

from dualpipe_jax.functional import Tree
from dualpipe_jax.parallel.mesh import NODE, expert_axes
from models.config import Config
from models.lazy import Lazy
from models.plan import lay_out
from models.transformer import deepseek
from models.weights.config_json import Published, from_json
from models.weights.errors import WeightsError
from models.weights.files import Folder, Reader, complaints_about
from models.weights.names import Entry, duplicate_names, entries
from models.weights.settings import read_settings
from models.weights.tree import Arrange, Leaf, Part, columns_of, leaves_of, part_of, rotary_order

Progress = Callable[[int, int], None]
"""``progress(bytes done, bytes in all)``, called as bytes are read or written."""


def load(
    folder: str | Path,
    *,
    stages: int | Sequence[int] = 1,
    mesh: Mesh | None = None,
    arrange: Arrange | None = None,
    mtp: bool = True,
    progress: Progress | None = None,
) -> tuple[Config, Tree]:
    """Load a DeepSeek-V3 or V2 checkpoint in the published (Hugging Face) format.

    Args:
      folder: a folder with ``config.json`` and ``*.safetensors``, of any of the types in ``files.DTYPES``; FP8 numbers
        are multiplied by their blocks' scales.
      stages: as ``deepseek`` takes it.
      mesh: a mesh with the axis "pp", over which the stages are sharded, and the axis "ep" (or "node" and "ep"), over
        which experts, embedding and head are sharded; None puts all on JAX's first device.
      arrange: a function that puts the stages' leaves [P, ...] into another order or container, and does nothing else
        to them, for example ``lambda stages: to_placed(stages, schedule.placement)``.
      mtp: False leaves out modules of multi-token prediction.
      progress: called after each leaf, with the bytes that this process has read and will read.

    Returns:
      The configuration, computing in bfloat16 if the checkpoint says so, and float32 params as
      ``deepseek(config, stages).init`` makes them, bit for bit the numbers in the files.

    Raises:
      WeightsError: the configuration is that of another model, or tensors are missing, unknown to the model, of wrong
        shapes or cut off; all of them are listed, and nothing is loaded.
    """
    published, files = inspect(folder, mtp=mtp)
    config = published.config
    axis = None if mesh is None else expert_axes(mesh.shape.get(NODE, 1))
    model = deepseek(config, stages, ep_axis=axis)
    leaves, treedef = leaves_of(model, arrange)
    here = SingleDeviceSharding(jax.local_devices()[0])
    shardings = [here if mesh is None else NamedSharding(mesh, leaf.spec) for leaf in leaves]
    total = sum(
        files.tensors[entry.name].nbytes
        for leaf, sharding in zip(leaves, shardings, strict=True)
        for part in _parts(leaf, sharding)
        for _, entry in _tensors_in_part(leaf, part)
    )
    arrays = []
    with Reader(files.tensors, published.fp8_block) as reader:
        for leaf, sharding in zip(leaves, shardings, strict=True):
            arrays.append(_load_leaf(leaf, sharding, reader, published.rope_interleave))
            if progress:
                progress(min(reader.num_bytes, total), total)
    return config, jax.tree.unflatten(treedef, arrays)


def open_lazily(folder: str | Path, *, mtp: bool = True) -> tuple[Config, Tree]:
    """Open a checkpoint as one stage, as ``load`` does, but read none of its tensors yet.

    Args:
      folder: as ``load`` takes it.
      mtp: as ``load`` takes it.

    Returns:
      The configuration, and params whose leaves are ``models.lazy.Lazy``. ``models.decode.Engine`` reads the parts of
      each leaf that its devices hold, in the dtype in which they hold them, and no device ever holds more.

    Raises:
      WeightsError: as ``load``.
    """
    published, files = inspect(folder, mtp=mtp)
    leaves, treedef = leaves_of(deepseek(published.config, 1), None)

    def lazy(leaf: Leaf) -> Lazy:
        def read(index: tuple[int, ...]) -> np.ndarray:
            rest = leaf.shape[len(index) :]
            part = (*((n, n + 1) for n in index), *((0, size) for size in rest))
            with Reader(files.tensors, published.fp8_block) as reader:
                return _read_part(leaf, part, reader, published.rope_interleave).reshape(rest)

        return Lazy(leaf.shape, np.dtype(leaf.dtype), read)

    return published.config, jax.tree.unflatten(treedef, map(lazy, leaves))


def inspect(folder: str | Path, *, mtp: bool = True) -> tuple[Published, Folder]:
    """Read a checkpoint's configuration and check its tensors as ``load`` does, without reading them.

    Raises:
      WeightsError: as ``load``.
    """
    path = Path(folder)
    published, files = from_json(read_settings(path / "config.json")), Folder(path)
    there = dataclasses.replace(published.config, num_mtp_layers=_num_mtp(files, published.config.num_layers))
    config = there if mtp else dataclasses.replace(there, num_mtp_layers=0)
    wanted = entries(config, lay_out(config, [config.num_layers]))
    ignored = duplicate_names(there) | {
        entry.name for entry in entries(there, lay_out(there, [there.num_layers]))
    }
    wrong = list(complaints_about(files, ((e.name, e.shape) for e in wanted), ignored, published.fp8_block))
    if wrong:
        raise WeightsError(path, wrong)
    return dataclasses.replace(published, config=config), files


def _num_mtp(files: Folder, first: int) -> int:
    """Return the number of multi-token prediction modules whose tensors exist: configurations announce others, too."""
    own = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    names = files.tensors.keys()
    has = (any(f"model.layers.{n}.{part}.weight" in names for part in own) for n in itertools.count(first))
    return sum(1 for _ in itertools.takewhile(bool, has))


def _parts(leaf: Leaf, sharding: Sharding) -> dict[Part, list[jax.Device]]:
    """Return the devices of this process that hold each part of a leaf."""
    parts: dict[Part, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(leaf.shape).items():
        parts.setdefault(part_of(index, leaf.shape), []).append(device)
    return parts


def _tensors_in_part(leaf: Leaf, part: Part) -> list[tuple[tuple[int, ...], Entry]]:
    """List the tensors that fill a part of a leaf, each with its index in the part."""
    lead, (*_, (first, last)) = part[: leaf.num_leading], part
    found = []
    for index in itertools.product(*(range(*bounds) for bounds in lead)):
        inside = tuple(n - start for n, (start, _) in zip(index, lead, strict=True))
        for entry in leaf.entries.get(index, ()):
            columns = columns_of(entry, leaf.shape[-1])
            if first < columns.stop and columns.start < last:
                found.append((inside, entry))
    return found


def _load_leaf(leaf: Leaf, sharding: Sharding, reader: Reader, interleaved: bool) -> Array:
    arrays = []
    for part, devices in _parts(leaf, sharding).items():
        host = _read_part(leaf, part, reader, interleaved)
        arrays += [jax.device_put(host, device) for device in devices]
        jax.block_until_ready(arrays)  # so that at most this part and the next one are on the host
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, arrays, dtype=leaf.dtype)


def _read_part(leaf: Leaf, part: Part, reader: Reader, interleaved: bool) -> np.ndarray:
    host = _aligned_zeros(tuple(stop - start for start, stop in part), leaf.dtype)
    if leaf.numbers is not None:
        host[...] = leaf.numbers[slice(*part[0])]
    for index, entry in _tensors_in_part(leaf, part):
        trailing = leaf.shape[leaf.num_leading :], part[leaf.num_leading :]
        _read_tensor(host[index], entry, *trailing, reader, interleaved)
    return host


def _read_tensor(
    out: np.ndarray, entry: Entry, shape: tuple[int, ...], part: Part, reader: Reader, interleaved: bool
) -> None:
    """Read one tensor into ``out``, a part of the tensor's place in a leaf.

    ``shape`` is the shape of the whole place, which may have the tensor's outputs in several dims.
    """
    order = None
    if entry.rotary is not None and not interleaved:
        order = rotary_order(entry.rotary, entry.shape[0])
    columns, whole = columns_of(entry, shape[-1]), out.shape == shape
    width = columns.stop - columns.start
    target = out[..., columns] if whole else np.empty((*shape[:-1], width), np.float32)
    as_published = target.reshape(entry.shape[::-1] if entry.transposed else entry.shape)  # the same memory
    reader.read_into(as_published.T if entry.transposed else as_published, entry.name, order)
    if not whole:
        *rows, (first, last) = part
        start, stop = max(first, columns.start), min(last, columns.stop)
        found = target[
            (*(slice(*bounds) for bounds in rows), slice(start - columns.start, stop - columns.start))
        ]
        out[..., start - first : stop - first] = found


def _aligned_zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return zeros at an aligned address, so that a CPU device takes over the memory without a copy."""
    size, align = int(np.prod(shape)) * np.dtype(dtype).itemsize, 128
    raw = np.zeros(size + align, np.uint8)
    start = -raw.ctypes.data % align
    return raw[start : start + size].view(dtype).reshape(shape)
