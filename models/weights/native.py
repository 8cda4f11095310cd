"""Parameters by our own names, in a folder that Orbax writes, as in the trainer's checkpoints.

They are a flat dict: ``params/stages/layers/3/mlp/gate`` belongs to the fourth layer with experts, whatever the stages
were, and ``params/stages/routing/bias`` is [layers, E]. The model's configuration is written with them, number by
number. The trainer has all layers in one array, ``params/stages/layers/mlp/gate`` [layers, ...]; this form is read,
too. The host holds one array at a time, or several small ones.
"""

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp

from dualpipe_jax.functional import Tree
from models.config import Config
from models.lazy import Lazy, lazily, read_all
from models.transformer import deepseek
from models.weights.errors import WeightsError
from models.weights.faults import root_cause, silence_orbax

FORMAT = 1
PREFIX = "params/"

DIGEST_KEY = "digest"
"""The name of the digest that proves all other facts in the folder's metadata. Earlier trainers wrote no digest, and
``write`` writes none."""


def write(folder: Path, config: Config, params: Tree, published: Mapping[str, Any]) -> None:
    """Write params of one stage; the tree ``params`` is emptied.

    Args:
      folder: the folder to write.
      config: the model.
      params: as ``deepseek(config, 1).init`` makes them.
      published: settings to keep in the folder's metadata, values for JSON.

    Raises:
      WeightsError: the folder exists already.
    """
    if folder.exists():
        raise WeightsError(folder, ["is there already"])
    flat: dict[str, Any] = {}
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    params.clear()
    while leaves:  # one by one, so that no leaf is in memory twice
        path, leaf = leaves.pop(0)
        name = _name(path)
        if name != "stages/routing/row":
            flat[PREFIX + name] = leaf.reshape(leaf.shape[1:]) if name.startswith("stages/") else leaf
        del leaf
    numbers = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    numbers["compute_dtype"] = jnp.dtype(config.compute_dtype).name
    metadata = {
        "format": FORMAT,
        "model": numbers,
        "arrays": {name: [list(leaf.shape), str(leaf.dtype)] for name, leaf in flat.items()},
        "published": dict(published),
    }
    ocp.save(folder.absolute(), flat, custom_metadata=metadata)


Check = Callable[[Mapping[str, Any], Mapping[str, np.ndarray]], list[str]]
"""A function of the folder's metadata, and of some of its arrays by name as they are stored; it lists what is wrong."""


def read(folder: Path) -> tuple[Config, Tree, Mapping[str, Any]]:
    """Read what ``write`` wrote, or a step of the trainer.

    Returns:
      The configuration; params of one stage; the published settings.

    Raises:
      WeightsError: as ``open_lazily``, or a file cannot be read.
    """
    config, params, metadata = open_lazily(folder)
    return config, read_all(lambda leaf: jnp.asarray(np.asarray(leaf)), params), metadata.get("published", {})


def open_lazily(folder: Path, check: Check | None = None) -> tuple[Config, Tree, Mapping[str, Any]]:
    """Open what ``write`` wrote, or a step of the trainer, and read none of its arrays yet.

    Args:
      folder: the folder to open.
      check: a check of every array once it is read.

    Returns:
      The configuration; params of one stage, whose leaves are lazy and raise a WeightsError if they cannot be read or
      ``check`` finds something wrong; the folder's metadata.

    Raises:
      WeightsError: there is no such folder, or it cannot be read; its metadata is not what was saved; or its arrays are
        not those of its configuration, and all that differ are listed.
    """
    metadata = _read_or_raise(folder, lambda: ocp.metadata(folder.absolute()).custom_metadata or {})
    if not metadata:
        raise WeightsError(folder, ["cannot be read: its _CHECKPOINT_METADATA says nothing of a model"])
    if problem := digest_mismatch(metadata):
        raise WeightsError(folder, [problem])
    if metadata.get("format") != FORMAT or "model" not in metadata:
        raise WeightsError(folder, [f"format {metadata.get('format')}, must be {FORMAT}"])
    config = _config(folder, metadata)
    model = deepseek(config, 1)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(jax.eval_shape(model.init, jax.random.key(0)))
    stacked = any(re.match(f"{PREFIX}stages/layers/[^0-9]", name) for name in metadata["arrays"])
    wanted: dict[str, jax.ShapeDtypeStruct] = {}
    wrong = []
    for path, leaf in leaves:
        name, layer = _stored(path, stacked)
        if name == "stages/routing/row":
            continue
        shape = leaf.shape[1:] if name.startswith("stages/") else leaf.shape
        shape = shape if layer is None else (model.layout.rows.size, *shape)
        wanted[PREFIX + name] = jax.ShapeDtypeStruct(shape, leaf.dtype)
        there = metadata["arrays"].get(PREFIX + name)
        if there != [list(shape), str(leaf.dtype)] and not layer:
            wrong.append(f"{PREFIX}{name}: {there or 'missing'}, must be {[list(shape), str(leaf.dtype)]}")
    if wrong:
        raise WeightsError(folder, wrong)
    stored = _Arrays(folder, wanted, metadata, check)

    def lazy(path: Any) -> Lazy:
        name, layer = _stored(path, stacked)
        if name == "stages/routing/row":
            return lazily(model.layout.rows)
        found = stored.lazy(PREFIX + name)
        found = found if layer is None else found[layer]
        return found.expanded() if name.startswith("stages/") else found

    params = jax.tree.unflatten(treedef, [lazy(path) for path, _ in leaves])
    return config, params, metadata


def digest(metadata: Mapping[str, Any]) -> str:
    """Return a hash of the folder's metadata in the form of JSON, without the entry ``DIGEST_KEY``."""
    entries = json.loads(json.dumps({name: value for name, value in metadata.items() if name != DIGEST_KEY}))
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def digest_mismatch(metadata: Mapping[str, Any]) -> str | None:
    """Return a complaint if the metadata is not what was saved; None if it is, or if it has no digest."""
    found = digest(metadata)
    if metadata.get(DIGEST_KEY, found) == found:
        return None
    return "what its _CHECKPOINT_METADATA says is not what was saved"


GROUP_BYTES = 64 << 20
"""The number of bytes of arrays that are read together; a larger array is read alone."""


class _Arrays:
    """The arrays of a folder, read in groups; the group that was read last is held in memory."""

    def __init__(
        self,
        folder: Path,
        wanted: Mapping[str, jax.ShapeDtypeStruct],
        metadata: Mapping[str, Any],
        check: Check | None,
    ):
        self._folder, self._wanted, self._metadata, self._check = folder, wanted, metadata, check
        self._groups: list[list[str]] = [[]]
        room = GROUP_BYTES
        for name, array in wanted.items():
            size = math.prod(array.shape) * array.dtype.itemsize
            if size > room and self._groups[-1]:
                self._groups.append([])
                room = GROUP_BYTES
            self._groups[-1].append(name)
            room -= size
        self._cached_group: tuple[int, dict[str, np.ndarray]] = -1, {}

    def lazy(self, name: str) -> Lazy:
        number = next(n for n, names in enumerate(self._groups) if name in names)
        wanted = self._wanted[name]
        return Lazy(
            wanted.shape, np.dtype(wanted.dtype), lambda index: self._read(number)[name][index], number
        )

    def _read(self, number: int) -> dict[str, np.ndarray]:
        if number != self._cached_group[0]:
            self._cached_group = -1, {}
            # NumPy arrays ask Orbax for NumPy arrays; it looks only at their shape and dtype.
            like = {
                name: np.broadcast_to(np.zeros((), self._wanted[name].dtype), self._wanted[name].shape)
                for name in self._groups[number]
            }
            context = ocp.Context()
            context.pytree.loading.partial_load = True  # the trainer has the optimizer's state there too
            with context:
                found = _read_or_raise(
                    self._folder, lambda: ocp.load(self._folder.absolute(), abstract_state=like)
                )
            if self._check is not None and (wrong := self._check(self._metadata, found)):
                raise WeightsError(self._folder, wrong)
            self._cached_group = number, found
        return self._cached_group[1]


def _read_or_raise(folder: Path, read: Callable[[], Any]) -> Any:
    with silence_orbax():
        try:
            return read()
        except Exception as error:  # an incomplete folder makes Orbax raise errors of many types
            wrong = root_cause(error)
    if not (folder / "_CHECKPOINT_METADATA").exists():
        raise WeightsError(folder, ["neither config.json nor Orbax's files: no _CHECKPOINT_METADATA there"])
    raise WeightsError(folder, [f"cannot be read: {wrong}"])


def _config(folder: Path, metadata: Mapping[str, Any]) -> Config:
    numbers, known = metadata["model"], {field.name for field in dataclasses.fields(Config)}
    # A run may be resumed in another dtype, so the trainer has it among its options, not among the model's numbers.
    options = metadata.get("options", {})
    name = numbers.get("compute_dtype") or options.get("step", {}).get("precision")
    dtype = jnp.bfloat16 if name == "bfloat16" else jnp.float32
    try:
        return Config(**{k: v for k, v in numbers.items() if k in known} | {"compute_dtype": dtype})
    except (TypeError, ValueError) as error:
        raise WeightsError(folder, [str(error)]) from None


def _stored(path: Any, stacked: bool) -> tuple[str, int | None]:
    """Return the name of a leaf's array in the folder and, if layers are stacked in it, the leaf's layer."""
    name = _name(path)
    found = re.fullmatch(r"stages/layers/(\d+)/(.*)", name) if stacked else None
    return (name, None) if found is None else (f"stages/layers/{found[2]}", int(found[1]))


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
