"""Parameters by our own names, in a folder that Orbax writes: what the trainer's checkpoints hold of them.

A flat dict: ``params/stages/layers/3/mlp/gate`` is that of the fourth layer with experts, whatever the stages were, and
``params/stages/routing/bias`` [layers, E]. Beside it stands the model's configuration, number by number. The trainer
has all layers in one array, ``params/stages/layers/mlp/gate`` [layers, ...]; that is read too.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint.experimental.v1 as ocp
from jax.sharding import SingleDeviceSharding

from dualpipe_jax.functional import Tree
from models.config import Config
from models.transformer import deepseek
from models.weights.errors import WeightsError
from models.weights.faults import quiet, reason

FORMAT = 1
PREFIX = "params/"


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


def read(
    folder: Path, check: Callable[[Mapping[str, Any], Mapping[str, Any]], list[str]] | None = None
) -> tuple[Config, Tree, Mapping[str, Any]]:
    """Read what ``write`` wrote, or a step of the trainer's: the configuration, params of one stage, the rest.

    Args:
      folder: what to read.
      check: of what is written there beside the arrays and the arrays by name, as they lie there, says what is wrong.

    Raises:
      WeightsError: there is no such folder, or a file of it cannot be read. Its arrays are not those of its
        configuration; all are listed. Or ``check`` finds something.
    """
    facts = _whole(folder, lambda: ocp.metadata(folder.absolute()).custom_metadata or {})
    if not facts:
        raise WeightsError(folder, ["cannot be read: its _CHECKPOINT_METADATA says nothing of a model"])
    if facts.get("format") != FORMAT or "model" not in facts:
        raise WeightsError(folder, [f"format {facts.get('format')}, must be {FORMAT}"])
    config = _config(folder, facts["model"])
    model = deepseek(config, 1)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(jax.eval_shape(model.init, jax.random.key(0)))
    here = SingleDeviceSharding(jax.devices()[0])
    stacked = any(re.match(f"{PREFIX}stages/layers/[^0-9]", name) for name in facts["arrays"])
    wanted, wrong = {}, []
    for path, leaf in leaves:
        name, layer = _stored(path, stacked)
        if name == "stages/routing/row":
            continue
        shape = leaf.shape[1:] if name.startswith("stages/") else leaf.shape
        shape = shape if layer is None else (model.layout.rows.size, *shape)
        wanted[PREFIX + name] = jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=here)
        there = facts["arrays"].get(PREFIX + name)
        if there != [list(shape), str(leaf.dtype)] and not layer:
            wrong.append(f"{PREFIX}{name}: {there or 'missing'}, must be {[list(shape), str(leaf.dtype)]}")
    if wrong:
        raise WeightsError(folder, wrong)
    context = ocp.Context()
    context.pytree.loading.partial_load = True  # the trainer has the optimizer's state there too
    with context:
        flat = _whole(folder, lambda: ocp.load(folder.absolute(), abstract_state=wanted))
    if check is not None and (wrong := check(facts, flat)):
        raise WeightsError(folder, wrong)
    found = []
    for path, leaf in leaves:
        name, layer = _stored(path, stacked)
        value = flat.get(PREFIX + name)
        if value is None:
            value = jnp.asarray(model.layout.rows)
        found.append((value if layer is None else value[layer]).reshape(leaf.shape))
    return config, jax.tree.unflatten(treedef, found), facts.get("published", {})


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
