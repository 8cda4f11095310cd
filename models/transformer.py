"""DeepSeek-V3 as kinds of stages: embedding, dense layers, layers with experts, multi-token prediction, losses.

Shape suffixes: B batch, S sequence, D model dim, V vocabulary, E experts, P stages, R rows of the routers' figures.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from dualpipe_jax.arguments import typechecked
from dualpipe_jax.contract import StagedModel
from dualpipe_jax.functional import Tree, pure_nnx
from dualpipe_jax.parallel.wire import Payload
from models.attention import RMSNorm
from models.blocks import Block, DenseBlock, Merge
from models.config import Config
from models.kernels import AUTO, Kernels
from models.moe import Dispatch, Load, update_bias
from models.objective import num_counted
from models.params import Modules, compute_dtype_of, init_params, param_specs_of
from models.plan import Layout, lay_out, layer_plan
from models.stages import StageFunctions, mtp_name
from models.vocabulary import BLOCK

_ALWAYS_SAVED = "middle", "latents", "attended", "routing", "hidden"

recompute_wide = jax.checkpoint_policies.save_only_these_names(*_ALWAYS_SAVED)
"""A policy of ``jax.checkpoint`` that keeps the arrays of a layer that are expensive and narrow.

Wide arrays are computed again: heads from latents, norms, dispatched rows (which costs an all_to_all), and the hidden
activations of a dense layer: few layers are dense, but every rank would have slots for them."""

recompute_local = jax.checkpoint_policies.save_only_these_names(*_ALWAYS_SAVED, "dispatched")
"""Like ``recompute_wide``, but rows from other devices are kept, too: nothing is sent again."""

recompute_keys = jax.checkpoint_policies.save_only_these_names(*_ALWAYS_SAVED, "dispatched", "queries")
"""Like ``recompute_local``, but queries are kept, too: of the heads, only keys and values are computed again."""


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """What ``deepseek`` returns.

    Attributes:
      config: the model's numbers.
      layout: the place of each layer.
      staged: the model in the form that the engine takes.
      init: ``init(key) -> params``, float32; the same weights for every plan. Slots that a stage leaves empty are
        zeros, which no gradient changes.
      param_specs: the PartitionSpec of each leaf of params over the expert axis; for leaves of stages without the stage
        dim.
      compute_dtype: the dtype in which a leaf is read, for leaves that are only read in another dtype than their own;
        None for other leaves. It is a prefix of params for ``Pipeline(compute_dtype=...)``.
    """

    config: Config
    layout: Layout
    staged: StagedModel
    init: Callable[[Array], Tree]
    param_specs: Tree
    compute_dtype: Tree = None


@typechecked
def deepseek(
    config: Config,
    stages: int | Sequence[int] = 1,
    *,
    ep_axis: str | tuple[str, str] | None = None,
    dispatch: Literal["capacity", "dropless"] = "dropless",
    capacity_factor: float | None = None,
    payload: Payload = "plain",
    mtp_weight: float = 0.3,
    mtp_after_norm: bool = False,
    balance_factor: float = 1e-4,
    remat: Callable[..., Any] | None = None,
    loss_block: int = BLOCK,
    kernels: Kernels = AUTO,
    platform: Literal["cpu", "gpu", "tpu"] | None = None,
) -> Model:
    """Build the model, divided into stages.

    Its batch is described in ``models.objective``. Its losses are "lm", the mean cross entropy of the targets that
    count; "mtp_1" and so on, the mean cross entropy of each depth of multi-token prediction, times ``mtp_weight``
    divided by the number of depths; and "balance", the mean over sequences of the sum over layers of
    ``models.moe.sequence_balance``, times ``balance_factor``. Without "targets" in the batch there is only "balance".
    The last stage's x is the result of the final norm.

    Its metrics: "counts", int32 [R, E], the number of live tokens that chose each expert, with a row for each layer
    with experts in model order, then one for each module of multi-token prediction; "dropped", int32, the number of
    choices without room at their expert; "tokens", int32, the number of targets that counted; "mtp_nll" and
    "mtp_tokens", float32 and int32 [depths], the sum of each depth's cross entropies and their number; "balance",
    float32, the sum of sequences' balance losses without factor, and "sequences", int32, their number. See
    ``figures``. If experts do not lie in order, see ``models.placement``, there is also "devices", int32 [R, N], the
    number of live tokens' choices that each device worked on.

    Args:
      config: the model's numbers; it has ``config.num_mtp_layers`` modules of multi-token prediction.
      stages: the number of layers of each stage, see ``layer_plan``; or the number of stages, for that function's plan.
      ep_axis: the mesh axis over which the experts, the embedding's width and the head's words are sharded; or two
        axes, (nodes, devices of a node), for dispatch in two hops; None if each device has all. If embedding and head
        are tied, they stay whole.
      dispatch: the ``method`` of ``models.moe.Dispatch``.
      capacity_factor: the ``factor`` of ``models.moe.Dispatch``; None drops nothing.
      payload: the ``payload`` of ``models.moe.Dispatch``.
      mtp_weight: the paper's lambda: 0.3, later 0.1. "mtp_weight" in a batch overrides it, so that it can change
        without a new compilation.
      mtp_after_norm: whether modules of multi-token prediction take the hidden state after the final norm, as
        published weights need it, or before.
      balance_factor: the paper's alpha; 0 for no such loss, and none of its cost.
      remat: a ``jax.checkpoint`` policy for each layer, for example ``recompute_keys`` or
        ``jax.checkpoint_policies.nothing_saveable``; None to keep all that the backward needs.
      loss_block: the largest number of a device's tokens whose logits are in memory at once.
      kernels: the programs that compute attention and the experts' matmuls.
      platform: the platform that the functions will be compiled for; None is JAX's default backend.

    Raises:
      ValueError: the plan does not fit the layers.
    """
    backend = platform or jax.default_backend()
    attend, matmul = kernels.attend(backend), kernels.multiply(backend)
    tokens = Dispatch(dispatch, capacity_factor, ep_axis, payload)
    layout = lay_out(config, stages if isinstance(stages, Sequence) else layer_plan(config, stages))
    modules = Modules(
        dense=pure_nnx(lambda rngs: DenseBlock(config, rngs, attend)),
        block=pure_nnx(lambda rngs: Block(config, tokens, rngs, attend, matmul)),
        merge=pure_nnx(lambda rngs: Merge(config, rngs)),
        norm=pure_nnx(lambda rngs: RMSNorm(config.dim, config.norm_eps)),
    )

    def with_remat(function: Callable[..., Any]) -> Callable[..., Any]:
        return function if remat is None else jax.checkpoint(function, policy=remat)

    def block(weights: Tree, *args: Any) -> tuple[Array, Load]:
        x_BSD, load = modules.block.apply(weights, *args)
        return x_BSD, load if balance_factor else load._replace(balance=None)

    functions = StageFunctions(
        config=config,
        dense=with_remat(modules.dense.apply),
        block=with_remat(block),
        merge=with_remat(modules.merge.apply),
        norm=modules.norm.apply,
        axis=None if config.tie_embeddings else ep_axis,
        mtp_weight=mtp_weight,
        mtp_after_norm=mtp_after_norm,
        balance_factor=balance_factor,
        loss_block=loss_block,
    )
    kinds = {
        name: functions.stage(content) for name, content in zip(layout.kinds, layout.contents, strict=True)
    }

    def weights(batch: Tree) -> dict[str, Array]:
        depths = range(1, config.num_mtp_layers + 1)
        return {"lm": num_counted(batch)} | {mtp_name(depth): num_counted(batch, depth) for depth in depths}

    def init(key: Array) -> Tree:
        return init_params(config, layout, modules, key)

    params = jax.eval_shape(init, jax.random.key(0))
    return Model(
        config,
        layout,
        StagedModel(kinds, layout.kinds, weights, layout.alike),
        init,
        param_specs_of(config, params, ep_axis),
        compute_dtype_of(config, params),
    )


def update_routing(params: Tree, counts_RE: Array, rate: float | Array, *, center: bool = False) -> Tree:
    """Return params with every layer's selection bias moved by the counts of one whole step.

    Args:
      params: as ``init`` makes them, or with "stages" placed by the engine: each slot has the number of its row of the
        counts.
      counts_RE: int32, the metric "counts" of the whole step.
      rate: see ``models.moe.update_bias``.
      center: see ``models.moe.update_bias``.
    """

    def move(stages: Tree) -> Tree:
        routing = stages["routing"]
        counts = counts_RE[jnp.maximum(routing["row"], 0)]
        moved = update_bias(routing["bias"], counts, rate, center=center)
        bias = jnp.where(routing["row"][..., None] < 0, routing["bias"], moved)
        return stages | {"routing": routing | {"bias": bias}}

    def is_stages(node: Tree) -> bool:
        return isinstance(node, dict) and "routing" in node

    return params | {"stages": jax.tree.map(move, params["stages"], is_leaf=is_stages)}


def figures(losses: Tree, metrics: Tree) -> dict[str, Array]:
    """Return a step's mean losses without their factors: "lm", "mtp" [depths], "balance" per layer; float32."""
    found = {"lm": losses["lm"]} if "lm" in losses else {}
    if "mtp_nll" in metrics:
        found["mtp"] = metrics["mtp_nll"] / jnp.maximum(metrics["mtp_tokens"], 1).astype(jnp.float32)
    if "balance" in metrics:
        terms = metrics["sequences"] * metrics["counts"].shape[0]
        found["balance"] = metrics["balance"] / terms.astype(jnp.float32)
    return found
