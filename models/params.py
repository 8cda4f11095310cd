"""Parameters of DeepSeek-V3 divided into stages: their first values, their sharding, the dtypes they are read in.

Shape suffixes: P stages, K slots of a stage.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from dualpipe_jax.functional import Tree, pure_nnx
from models.attention import linear
from models.config import Config
from models.plan import Layout


class Modules(NamedTuple):
    """The kinds of modules, each as two functions, ``init(key)`` and ``apply(params, ...)``."""

    dense: Any
    block: Any
    merge: Any
    norm: Any


def init_params(config: Config, layout: Layout, modules: Modules, key: Array) -> Tree:
    embed_key, dense_key, block_key, mtp_key, head_key = jax.random.split(key, 5)
    num_rows, num_mtp = config.num_moe_layers + config.num_mtp_layers, config.num_mtp_layers
    # Each layer is made at its place, not picked from an array of all layers: with stages sharded over ranks, no device
    # makes the whole model.
    rows_KP = jnp.asarray(layout.rows.T)
    keys_KP = jax.random.split(block_key, num_rows)[jnp.maximum(rows_KP, 0)]
    blocks = jax.tree.map(
        lambda w: jnp.where(rows_KP.reshape(*rows_KP.shape, *(1,) * (w.ndim - 2)) < 0, 0, w),
        jax.vmap(jax.vmap(modules.block.init))(keys_KP),
    )

    normal = jax.nn.initializers.normal(config.init_std)
    shared = {
        "embed_tokens": normal(embed_key, (config.vocab, config.dim), jnp.float32),
        "layers": [modules.dense.init(k) for k in jax.random.split(dense_key, config.num_dense_layers)],
        "norm": modules.norm.init(head_key),
        "mtp": [
            modules.merge.init(k) | {"norm": modules.norm.init(k)} for k in jax.random.split(mtp_key, num_mtp)
        ],
    }
    if not config.tie_embeddings:
        head = pure_nnx(lambda rngs: linear(config, config.dim, config.vocab, rngs))
        shared["lm_head"] = head.init(head_key)
    routing = {
        "bias": jnp.zeros((*layout.rows.shape, config.num_experts), jnp.float32),
        "row": jnp.asarray(layout.rows),
    }
    return {
        "stages": {
            "layers": [jax.tree.map(lambda w, k=k: w[k], blocks) for k in range(len(rows_KP))],
            "routing": routing,
        },
        "shared": shared,
    }


def param_specs_of(config: Config, params: Tree, ep_axis: str | tuple[str, str] | None) -> Tree:
    def spec(names: set[str]) -> PartitionSpec:
        if ep_axis and "experts" in names:
            return PartitionSpec(ep_axis)
        if ep_axis and not config.tie_embeddings and names & {"embed_tokens", "lm_head"}:
            return PartitionSpec(None, ep_axis)
        return PartitionSpec()

    return _map_names(spec, params)


def compute_dtype_of(config: Config, params: Tree) -> Tree:
    """Return for each leaf the dtype in which it is read, None for its own.

    Matrices of layers are multiplied in ``compute_dtype``; norms and routers stay float32. So does the head: the sums
    of its gradients over blocks of tokens have the dtype that it is read in.
    """

    def dtype(names: set[str]) -> Any:
        return config.compute_dtype if names & {"kernel", "experts"} and "lm_head" not in names else None

    whole = _map_names(dtype, params)
    return whole | {"stages": whole["stages"] | {"routing": None}}


def _map_names(function: Callable[[set[str]], Any], params: Tree) -> Tree:
    """Return a tree with the function's value for each leaf, from the set of names on the path to it."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: function({getattr(key, "key", "") for key in path}), params
    )
