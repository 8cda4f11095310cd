"""Parameters by our own names, in a folder that Orbax writes: what the trainer's checkpoints hold of them.

A flat dict: ``params/stages/layers/3/mlp/gate`` is that of the fourth layer with experts, whatever the stages were, and
``params/stages/routing/bias`` [layers, E]. Beside it stands the model's configuration, number by number. The trainer
has all layers in one array, ``params/stages/layers/mlp/gate`` [layers, ...]; that is read too. The host holds one array
at a time, or some small ones.
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
from models.weights.faults import quiet, reason

FORMAT = 1
PREFIX = "params/"

PROOF = "digest"
"""Name of what proves all else that is written beside the arrays. Earlier trainers wrote none, nor does ``write``."""


def write(folder: Path, config: Config, params: Tree, published: Mapping[str, Any]) -> None:
    """Write params of one stage, which are taken apart; ``published`` is kept beside them, values for JSON.

    Raises:
      WeightsError: something is there already.
    """
    if folder.exists():
        raise WeightsError(folder, ["is there already"])
    flat: dict[str, Any] = {}
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    params.clear()
    while leaves:  # one by one, so that none is there twice
        path, leaf = leaves.pop(0)
        name = _name(path)
        if name != "stages/routing/row":
            flat[PREFIX + name] = leaf.reshape(leaf.shape[1:]) if name.startswith("stages/") else leaf
        del leaf
    numbers = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    numbers["compute_dtype"] = jnp.dtype(config.compute_dtype).name
    facts = {
        "format": FORMAT,
        "model": numbers,
        "arrays": {name: [list(leaf.shape), str(leaf.dtype)] for name, leaf in flat.items()},
        "published": dict(published),
    }
    ocp.save(folder.absolute(), flat, custom_metadata=facts)


Check = Callable[[Mapping[str, Any], Mapping[str, np.ndarray]], list[str]]
"""Of what is written beside the arrays, and of some arrays by name, as they lie there: says what is wrong with them."""


def read(folder: Path) -> tuple[Config, Tree, Mapping[str, Any]]:
    """Read what ``write`` wrote, or a step of the trainer's: the configuration, params of one stage, the rest.

    Raises:
      WeightsError: as ``open_lazily``, or a file cannot be read.
    """
    config, params, facts = open_lazily(folder)
    return config, read_all(lambda leaf: jnp.asarray(np.asarray(leaf)), params), facts.get("published", {})


def open_lazily(folder: Path, check: Check | None = None) -> tuple[Config, Tree, Mapping[str, Any]]:
    """Open what ``write`` wrote, or a step of the trainer's, and read none of its arrays yet.

    Args:
      folder: what to open.
      check: of every array once it is read.

    Returns:
      The configuration; params of one stage, whose leaves are lazy and raise a WeightsError if they cannot be read or
      ``check`` finds something; what is written beside the arrays.

    Raises:
      WeightsError: there is no such folder, or nothing can be read of it. What is written beside its arrays is not
        what was saved. Its arrays are not those of its configuration; all are listed.
    """
    facts = _whole(folder, lambda: ocp.metadata(folder.absolute()).custom_metadata or {})
    if not facts:
        raise WeightsError(folder, ["cannot be read: its _CHECKPOINT_METADATA says nothing of a model"])
    if problem := altered(facts):
        raise WeightsError(folder, [problem])
    if facts.get("format") != FORMAT or "model" not in facts:
        raise WeightsError(folder, [f"format {facts.get('format')}, must be {FORMAT}"])
    config = _config(folder, facts["model"])
    model = deepseek(config, 1)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(jax.eval_shape(model.init, jax.random.key(0)))
    stacked = any(re.match(f"{PREFIX}stages/layers/[^0-9]", name) for name in facts["arrays"])
    wanted: dict[str, jax.ShapeDtypeStruct] = {}
    wrong = []
    for path, leaf in leaves:
        name, layer = _stored(path, stacked)
        if name == "stages/routing/row":
            continue
        shape = leaf.shape[1:] if name.startswith("stages/") else leaf.shape
        shape = shape if layer is None else (model.layout.rows.size, *shape)
        wanted[PREFIX + name] = jax.ShapeDtypeStruct(shape, leaf.dtype)
        there = facts["arrays"].get(PREFIX + name)
        if there != [list(shape), str(leaf.dtype)] and not layer:
            wrong.append(f"{PREFIX}{name}: {there or 'missing'}, must be {[list(shape), str(leaf.dtype)]}")
    if wrong:
        raise WeightsError(folder, wrong)
    stored = _Arrays(folder, wanted, facts, check)

    def lazy(path: Any) -> Lazy:
        name, layer = _stored(path, stacked)
        if name == "stages/routing/row":
            return lazily(model.layout.rows)
        found = stored.lazy(PREFIX + name)
        found = found if layer is None else found[layer]
        return found.expanded() if name.startswith("stages/") else found

    params = jax.tree.unflatten(treedef, [lazy(path) for path, _ in leaves])
    return config, params, facts


def digest(facts: Mapping[str, Any]) -> str:
    """A hash of what is written beside the arrays, of which ``PROOF`` is none, as JSON holds it."""
    told = json.loads(json.dumps({name: value for name, value in facts.items() if name != PROOF}))
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def altered(facts: Mapping[str, Any]) -> str | None:
    """What to say of facts that are not those that were saved; None where they are, or nothing proves them."""
    found = digest(facts)
    if facts.get(PROOF, found) == found:
        return None
    return "what its _CHECKPOINT_METADATA says is not what was saved"


AT_ONCE = 64 << 20
"""Bytes of arrays that are read together; one of more is read alone."""


class _Arrays:
    """The arrays of a folder, of which those that were read last are held."""

    def __init__(
        self,
        folder: Path,
        wanted: Mapping[str, jax.ShapeDtypeStruct],
        facts: Mapping[str, Any],
        check: Check | None,
    ):
        self._folder, self._wanted, self._facts, self._check = folder, wanted, facts, check
        self._groups: list[list[str]] = [[]]
        room = AT_ONCE
        for name, array in wanted.items():
            size = math.prod(array.shape) * array.dtype.itemsize
            if size > room and self._groups[-1]:
                self._groups.append([])
                room = AT_ONCE
            self._groups[-1].append(name)
            room -= size
        self._held: tuple[int, dict[str, np.ndarray]] = -1, {}

    def lazy(self, name: str) -> Lazy:
        number = next(n for n, names in enumerate(self._groups) if name in names)
        wanted = self._wanted[name]
        return Lazy(
            wanted.shape, np.dtype(wanted.dtype), lambda index: self._read(number)[name][index], number
        )

    def _read(self, number: int) -> dict[str, np.ndarray]:
        if number != self._held[0]:
            self._held = -1, {}
            # Asked for as NumPy's arrays, of which Orbax looks at shape and dtype alone.
            like = {
                name: np.broadcast_to(np.zeros((), self._wanted[name].dtype), self._wanted[name].shape)
                for name in self._groups[number]
            }
            context = ocp.Context()
            context.pytree.loading.partial_load = True  # the trainer has the optimizer's state there too
            with context:
                found = _whole(self._folder, lambda: ocp.load(self._folder.absolute(), abstract_state=like))
            if self._check is not None and (wrong := self._check(self._facts, found)):
                raise WeightsError(self._folder, wrong)
            self._held = number, found
        return self._held[1]


def _whole(folder: Path, read: Callable[[], Any]) -> Any:
    with quiet():
        try:
            return read()
        except Exception as error:  # whatever half a folder makes Orbax raise
            wrong = reason(error)
    if not (folder / "_CHECKPOINT_METADATA").exists():
        raise WeightsError(folder, ["neither config.json nor Orbax's files: no _CHECKPOINT_METADATA there"])
    raise WeightsError(folder, [f"cannot be read: {wrong}"])


def _config(folder: Path, numbers: Mapping[str, Any]) -> Config:
    known = {field.name for field in dataclasses.fields(Config)}
    dtype = jnp.bfloat16 if numbers.get("compute_dtype") == "bfloat16" else jnp.float32
    try:
        return Config(**{k: v for k, v in numbers.items() if k in known} | {"compute_dtype": dtype})
    except (TypeError, ValueError) as error:
        raise WeightsError(folder, [str(error)]) from None


def _stored(path: Any, stacked: bool) -> tuple[str, int | None]:
    """A leaf's name there and, if layers are stacked, which of them it is of."""
    name = _name(path)
    found = re.fullmatch(r"stages/layers/(\d+)/(.*)", name) if stacked else None
    return (name, None) if found is None else (f"stages/layers/{found[2]}", int(found[1]))


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
