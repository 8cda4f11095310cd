"""Saving of our params as a published checkpoint, one file at a time."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.tree_util import keystr, tree_leaves_with_path
from safetensors.numpy import save_file

from dualpipe_jax.functional import Tree
from models.config import Config
from models.transformer import deepseek
from models.weights.config_json import to_json
from models.weights.errors import WeightsError
from models.weights.files import from_float32
from models.weights.names import Entry, entries
from models.weights.reading import Progress
from models.weights.tree import Arrange, Leaf, Part, columns_of, leaves_of, part_of

BIAS_SUFFIX = "e_score_correction_bias"
"""The end of the selection biases' names. Biases are always float32: in bfloat16 steps of 0.001 vanish."""


def save(
    folder: str | Path,
    config: Config,
    params: Tree,
    *,
    stages: Sequence[int] | None = None,
    arrange: Arrange | None = None,
    dtype: Literal["float32", "bfloat16"] = "float32",
    max_file_bytes: int = 5 * 10**9,
    extra: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> None:
    """Save params in the published (Hugging Face) format; from float32 files ``load`` returns them bit for bit.

    The host holds one file's tensors at a time. With several processes, each one writes the tensors of which it has
    the first copy, and process 0 writes ``config.json`` and the index, so all processes must see the same folder.

    Args:
      folder: the folder to write, created if it does not exist; it must not hold tensors yet.
      config: the model.
      params: as ``deepseek(config, stages).init`` makes them, with the stages arranged.
      stages: as ``deepseek`` takes it; None for its own plan for the number of stages that params have.
      arrange: as ``load`` takes it.
      dtype: the dtype of the tensors; the selection biases stay float32.
      max_file_bytes: the largest number of bytes of the tensors in a file; a single tensor may be larger.
      extra: additional entries of ``config.json``, for example ``{"eos_token_id": 1}``.
      progress: called after each file, with the bytes that this process has written and will write.

    Raises:
      WeightsError: there are tensors in the folder; params do not fit this configuration; the published format has no
        such model; or no process has all pieces of a tensor on its devices. All complaints of one kind are listed.
    """
    path = Path(folder)
    settings = to_json(config, dtype) | dict(extra or {})
    sources = _sources(config, params, stages, arrange)
    if there := sorted(file.name for file in path.glob("*.safetensors*")):
        raise WeightsError(path, [f"{name}: is there already" for name in there])
    if jax.process_count() > 1:  # without this, files of other processes could already be there when we look
        multihost_utils.sync_global_devices("models.weights.save: the folder is empty")
    path.mkdir(parents=True, exist_ok=True)
    files = _pack_files(sources, dtype, max_file_bytes)
    mine = [file for file in files if file.process == jax.process_index()]
    total, done = sum(file.nbytes for file in mine), 0
    for file in mine:
        tensors = {source.entry.name: source.read(dtype) for source in file.sources}
        save_file(tensors, path / file.name, metadata={"format": "pt"})
        # Whoever may read the folder may read the file: safetensors 0.8 would let only its owner read it.
        (path / file.name).chmod(path.stat().st_mode & 0o666)
        done += file.nbytes
        if progress:
            progress(done, total)
    if jax.process_index() == 0:
        _write_json(path / "config.json", settings)
        index = {source.entry.name: file.name for file in files for source in file.sources}
        about = {"metadata": {"total_size": sum(file.nbytes for file in files)}, "weight_map": index}
        _write_json(path / "model.safetensors.index.json", about)


@dataclasses.dataclass(frozen=True)
class _Source:
    """A tensor to be written, and the devices of a process that have its first copy, whole or in pieces."""

    entry: Entry
    index: tuple[int, ...]
    array: jax.Array
    pieces: tuple[tuple[jax.Device, Part], ...]

    @property
    def process(self) -> int:
        return self.pieces[0][0].process_index

    def dtype(self, wanted: str) -> str:
        return "float32" if self.entry.name.endswith(BIAS_SUFFIX) else wanted

    def nbytes(self, wanted: str) -> int:
        return math.prod(self.entry.shape) * (4 if self.dtype(wanted) == "float32" else 2)

    def read(self, wanted: str) -> np.ndarray:
        columns = columns_of(self.entry, self.array.shape[-1])
        if len(self.pieces) == 1:
            ours = self._piece(*self.pieces[0], columns)
        else:
            lead = len(self.index)
            whole = np.empty(self.array.shape[lead:], self.array.dtype)
            for device, part in self.pieces:
                whole[tuple(slice(*bounds) for bounds in part[lead:])] = self._piece(device, part)
            ours = whole[..., columns]
        published = self.entry.shape
        return from_float32(
            ours.reshape(published[::-1]).T if self.entry.transposed else ours, self.dtype(wanted)
        )

    def _piece(self, device: jax.Device, part: Part, columns: slice = slice(None)) -> np.ndarray:
        shard = next(s.data for s in self.array.addressable_shards if s.device == device)
        # NumPy views a CPU's array without a copy; from another device only the tensor itself is copied to the host.
        data: Any = np.asarray(shard) if device.platform == "cpu" else shard
        inside = tuple(n - start for n, (start, _) in zip(self.index, part, strict=False))
        return np.asarray(data[(*inside, ..., columns)])


@dataclasses.dataclass(frozen=True)
class _File:
    name: str
    process: int
    sources: tuple[_Source, ...]
    nbytes: int


def _sources(
    config: Config, params: Tree, stages: Sequence[int] | None, arrange: Arrange | None
) -> list[_Source]:
    model = deepseek(config, _num_stages(params) if stages is None else stages)
    leaves, treedef = leaves_of(model, arrange)
    wrong = _complaints(params, leaves, treedef)
    if wrong:
        raise WeightsError("params to save", wrong)
    order = {entry.name: n for n, entry in enumerate(entries(config, model.layout))}
    found: dict[str, _Source] = {}
    for leaf, array in zip(leaves, map(jnp.asarray, jax.tree.leaves(params)), strict=True):
        held = _parts_by_device(array)
        for index, entry in ((index, entry) for index, there in leaf.entries.items() for entry in there):
            source = _source(entry, index, array, held)
            if source is None:
                wrong.append(f"{entry.name}: lies in pieces, must be whole on one process's devices")
            else:
                found[entry.name] = source
        if leaf.numbers is not None and bool(jnp.any(array != leaf.numbers)):
            # Every shape may fit, and yet the layers lie elsewhere: they would be written under others' names.
            wrong.append(
                f"routing.row: layers do not lie as in the plan {model.layout.plan}: give the stages, and arrange, "
                "that params were made with"
            )
        unheld = config.score == "softmax" and not leaf.entries and leaf.numbers is None
        if unheld and bool(jnp.any(array != 0)):
            wrong.append("routing.bias: deepseek_v2 has no selection bias, it must be zero")
    if wrong:
        raise WeightsError("params to save", wrong)
    return sorted(found.values(), key=lambda source: order[source.entry.name])


def _num_stages(params: Tree) -> int:
    """Return the number of stages, in any arrangement: every tree of stages has a "row" leaf, one row per stage."""
    flat = tree_leaves_with_path(params["stages"])
    return sum(leaf.shape[0] for path, leaf in flat if getattr(path[-1], "key", None) == "row")


def _complaints(params: Tree, leaves: list[Leaf], treedef: Any) -> list[str]:
    wanted = jax.tree.unflatten(treedef, leaves)
    ours, theirs = (
        {keystr(path): leaf.shape for path, leaf in tree_leaves_with_path(tree)} for tree in (params, wanted)
    )
    wrong = [f"{name}: missing, must be {list(theirs[name])}" for name in theirs.keys() - ours.keys()]
    wrong += [f"{name}: the model has no such parameter" for name in ours.keys() - theirs.keys()]
    wrong += [
        f"{name}: {list(ours[name])}, must be {list(theirs[name])}"
        for name in ours.keys() & theirs.keys()
        if ours[name] != theirs[name]
    ]
    return sorted(wrong)


def _parts_by_device(array: jax.Array) -> list[tuple[jax.Device, Part]]:
    where = array.sharding.devices_indices_map(array.shape)
    return [(device, part_of(index, array.shape)) for device, index in where.items()]


def _source(
    entry: Entry, index: tuple[int, ...], array: jax.Array, held: list[tuple[jax.Device, Part]]
) -> _Source | None:
    """Return a tensor's source: the device that has it whole, or else the first process that has all its pieces.

    None if no process has all pieces.
    """
    lead = len(index)
    holders = [
        (device, part)
        for device, part in held
        if all(start <= n < stop for n, (start, stop) in zip(index, part, strict=False))
    ]

    def size(part: Part) -> int:
        return math.prod(stop - start for start, stop in part[lead:])

    whole = math.prod(array.shape[lead:])
    for piece in holders:
        if size(piece[1]) == whole:
            return _Source(entry, index, array, (piece,))
    for process in sorted({device.process_index for device, _ in holders}):
        pieces = {part: device for device, part in holders if device.process_index == process}
        if sum(map(size, pieces)) == whole:
            return _Source(entry, index, array, tuple((device, part) for part, device in pieces.items()))
    return None


def _pack_files(sources: list[_Source], dtype: str, max_bytes: int) -> list[_File]:
    """Pack tensors into files in their order; a file has tensors of one process only."""
    piles: list[list[_Source]] = []
    sizes: list[int] = []
    for source in sorted(sources, key=lambda source: source.process):
        nbytes = source.nbytes(dtype)
        if not piles or piles[-1][0].process != source.process or sizes[-1] + nbytes > max_bytes:
            piles.append([])
            sizes.append(0)
        piles[-1].append(source)
        sizes[-1] += nbytes
    return [
        _File(f"model-{n:05}-of-{len(piles):05}.safetensors", pile[0].process, tuple(pile), size)
        for n, (pile, size) in enumerate(zip(piles, sizes, strict=True), 1)
    ]


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n")
