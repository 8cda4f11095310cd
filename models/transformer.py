"""DeepSeek-V3 as kinds of stages: embedding, dense layers, layers with experts, multi-token prediction, losses.

Shape suffixes: B batch, S sequence, D model dim, V vocabulary, E experts, P stages, R rows of the routers' figures.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from dualpipe_jax.arguments import typechecked
from dualpipe_jax.contract import At, Out, StagedModel
from dualpipe_jax.functional import Tree, num_params, pure_nnx
from dualpipe_jax.parallel import Payload
from models.attention import RMSNorm, linear
from models.blocks import Block, DenseBlock, Merge
from models.config import Config
from models.kernels import AUTO, Kernels
from models.moe import Dispatch, Load, update_bias
from models.objective import (
    inputs_ahead,
    live_tokens,
    masked_mean,
    num_counted,
    targets_ahead,
)
from models.plan import Content, Layout, lay_out, layer_plan
from models.vocabulary import BLOCK, cross_entropy, look_up

recompute_wide = jax.checkpoint_policies.save_only_these_names(
    "middle", "latents", "attended", "routing", "hidden"
)
"""A policy of ``jax.checkpoint``: of a layer keep what is dear and narrow, and compute again what is wide: heads from
latents, norms, rows as they were dispatched, which costs an all_to_all."""


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """What ``deepseek`` returns.

    Attributes:
      config: the model's numbers.
      layout: which layer stands where.
      staged: the model as the engine sees it.
      init: ``init(key) -> params``, float32; the same weights for every plan. Slots that a stage leaves empty are
        zeros, which no gradient moves.
      param_specs: for each leaf of params, for those of stages without the stage dim, how it lies on the expert axis.
      compute_dtype: of leaves that are only ever read in another dtype than their own, which; a prefix of params for
        ``Pipeline(compute_dtype=...)``.
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
    """Build the model, cut into stages.

    Its batch is described in ``models.objective``. Its losses are "lm", the mean cross entropy of the targets that
    count; "mtp_1" and so on, that of each depth of multi-token prediction, times ``mtp_weight`` over their number; and
    "balance", the mean over sequences of the sum over layers of ``models.moe.sequence_balance``, times
    ``balance_factor``. Without "targets" in the batch there are none of the first two. The last stage's x is what the
    final norm returns.

    Its metrics: "counts", int32 [R, E], live tokens that chose each expert: a row for each layer with experts in model
    order, then one for each module of multi-token prediction; "dropped", int32, choices without room at their expert;
    "tokens", int32, targets that counted; "mtp_nll" and "mtp_tokens", float32 and int32 [depths], the sum of each
    depth's cross entropies and how many they are; "balance", float32, the sum of sequences' balance losses without
    factor, and "sequences", int32, their number. See ``figures``. Experts may lie otherwise than in order, see
    ``models.placement``; then there is "devices", int32 [R, N], live tokens' choices that each device worked on.

    Args:
      config: the numbers; ``config.num_mtp_layers`` modules of multi-token prediction.
      stages: layers of each stage, see ``layer_plan``; or how many stages, for its default.
      ep_axis: the mesh axis that the experts, the embedding's width and the head's words are shared out over, or two,
        (nodes, devices of a node), for dispatch in two hops; None if each device has all. Tied, embedding and head
        stay whole.
      dispatch: see ``models.moe.Dispatch``.
      capacity_factor: the same; None drops nothing.
      payload: the same.
      mtp_weight: the paper's lambda: 0.3, later 0.1. A batch that has "mtp_weight" overrules it, so that it changes
        with no new compilation.
      mtp_after_norm: whether modules of multi-token prediction hear the hidden state behind the final norm, as
        published weights want it, or before.
      balance_factor: the paper's alpha; 0 for no such loss, and none of its cost.
      remat: a ``jax.checkpoint`` policy for each layer, such as ``recompute_wide`` or
        ``jax.checkpoint_policies.nothing_saveable``; None to keep what the backward needs.
      loss_block: tokens of a device whose logits stand at once, at most.
      kernels: what computes attention and the experts' matmuls.
      platform: what the functions will be compiled for; None is JAX's default backend.

    Raises:
      ValueError: the plan does not fit the layers.

    """
    platform = platform or _platform()
    attend, matmul = kernels.attend(platform), kernels.multiply(platform)
    tokens = Dispatch(dispatch, capacity_factor, ep_axis, payload)
    layout = lay_out(config, stages if isinstance(stages, Sequence) else layer_plan(config, stages))
    modules = _Modules(
        *(
            pure_nnx(create)
            for create in (
                lambda rngs: DenseBlock(config, rngs, attend),
                lambda rngs: Block(config, tokens, rngs, attend, matmul),
                lambda rngs: Merge(config, rngs),
                lambda rngs: RMSNorm(config.dim, config.norm_eps),
            )
        )
    )

    def kept(function: Callable[..., Any]) -> Callable[..., Any]:
        return function if remat is None else jax.checkpoint(function, policy=remat)

    def block(weights: Tree, *args: Any) -> tuple[Array, Load]:
        x_BSD, load = modules.block.apply(weights, *args)
        return x_BSD, load if balance_factor else load._replace(balance=None)

    runs = _Runs(
        config=config,
        dense=kept(modules.dense.apply),
        block=kept(block),
        merge=kept(modules.merge.apply),
        norm=modules.norm.apply,
        axis=None if config.tie_embeddings else ep_axis,
        mtp_weight=mtp_weight,
        mtp_after_norm=mtp_after_norm,
        balance_factor=balance_factor,
        loss_block=loss_block,
    )
    kinds = {name: runs.stage(content) for name, content in zip(layout.kinds, layout.contents, strict=True)}

    def weights(batch: Tree) -> dict[str, Array]:
        depths = range(1, config.num_mtp_layers + 1)
        return {"lm": num_counted(batch)} | {_mtp(depth): num_counted(batch, depth) for depth in depths}

    def init(key: Array) -> Tree:
        return _init(config, layout, modules, key)

    staged = StagedModel(kinds, layout.kinds, weights)
    return Model(
        config, layout, staged, init, _param_specs(config, init, ep_axis), _compute_dtype(config, init)
    )


def update_routing(params: Tree, counts_RE: Array, rate: float | Array, *, center: bool = False) -> Tree:
    """Return params with every layer's selection bias moved by the counts of one whole step.

    Args:
      params: as init made them, or with "stages" placed by the engine: a slot knows its row of the counts.
      counts_RE: the metric "counts" of the whole step.
      rate: see ``models.moe.update_bias``.
      center: the same.

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


def head_kernel(config: Config, shared: Tree) -> Array:
    return shared["embed_tokens"].T if config.tie_embeddings else shared["lm_head"]["kernel"]


def figures(losses: Tree, metrics: Tree) -> dict[str, Array]:
    """Return a step's mean losses without their factors: "lm", "mtp" [depths], "balance" a layer; float32."""
    found = {"lm": losses["lm"]} if "lm" in losses else {}
    if "mtp_nll" in metrics:
        found["mtp"] = metrics["mtp_nll"] / jnp.maximum(metrics["mtp_tokens"], 1).astype(jnp.float32)
    if "balance" in metrics:
        terms = metrics["sequences"] * metrics["counts"].shape[0]
        found["balance"] = metrics["balance"] / terms.astype(jnp.float32)
    return found


def num_padding(model: Model) -> int:
    """Count the parameters of empty slots: zeros that ``num_params`` counts and the model does not have."""
    slots = jax.eval_shape(model.init, jax.random.key(0))["stages"]["layers"]
    return num_params(slots) // model.layout.rows.size * int((model.layout.rows < 0).sum())


class _Modules(NamedTuple):
    """Each kind of module as two functions, ``init(key)`` and ``apply(params, ...)``."""

    dense: Any
    block: Any
    merge: Any
    norm: Any


@dataclasses.dataclass(frozen=True)
class _Runs:
    """Makes stage functions; ``axis`` is what embedding and head are shared out over."""

    config: Config
    dense: Callable[..., Array]
    block: Callable[..., tuple[Array, Load]]
    merge: Callable[..., Array]
    norm: Callable[..., Array]
    axis: str | tuple[str, str] | None
    mtp_weight: float
    mtp_after_norm: bool
    balance_factor: float
    loss_block: int

    def stage(self, content: Content) -> Callable[..., Out]:
        def run(own: Tree, shared: Tree, x_BSD: Array, at: At) -> Out:
            batch = at.batch
            live_BS = live_tokens(batch) if "valid" in batch else None
            if content.first:
                x_BSD = self._embed(shared, batch["inputs"])
            for layer in content.dense:
                x_BSD = self.dense(shared["layers"][layer], x_BSD, *_where(batch))
            loads: list[Load] = []
            for slot in range(content.num_moe):
                x_BSD, load = self._layer(own, slot, x_BSD, batch, live_BS)
                loads.append(load)
            out = self._ends(own, shared, x_BSD, batch, loads) if content.last else Out(x_BSD)
            return self._with_loads(out, own, loads)

        return run

    def _embed(self, shared: Tree, tokens_BS: Array) -> Array:
        return look_up(shared["embed_tokens"], tokens_BS, self.config.compute_dtype, self.axis)

    def _layer(
        self, own: Tree, slot: int, x_BSD: Array, batch: Tree, live_BS: Array | None
    ) -> tuple[Array, Load]:
        bias_E = jax.lax.stop_gradient(own["routing"]["bias"][slot])
        # A table for each device of the experts' axis, of which this one has its own.
        copies_EX = own["routing"]["copies"][slot, 0] if "copies" in own["routing"] else None
        return self.block(own["layers"][slot], x_BSD, bias_E, *_where(batch), live_BS, copies_EX)

    def _ends(self, own: Tree, shared: Tree, x_BSD: Array, batch: Tree, loads: list[Load]) -> Out:
        """Adds the last stage's losses, and to ``loads`` those of multi-token prediction."""
        normed_BSD = self.norm(shared["norm"], x_BSD)
        out = Out(normed_BSD)
        if "targets" not in batch:
            return out
        nll_BS, counted_BS = self._nll(shared, normed_BSD, batch, 0)
        losses = {"lm": masked_mean(nll_BS, counted_BS)}
        metrics: dict[str, Array] = {"tokens": jnp.sum(counted_BS, dtype=jnp.int32)}
        if self.balance_factor and self.config.num_moe_layers + self.config.num_mtp_layers:
            metrics["sequences"] = jnp.int32(nll_BS.shape[0])  # here, once, even if no expert is
        sums, numbers = [], []
        hidden_BSD = normed_BSD if self.mtp_after_norm else x_BSD
        for depth in range(1, self.config.num_mtp_layers + 1):
            module = shared["mtp"][depth - 1]
            embedded_BSD = self._embed(shared, inputs_ahead(batch, depth))
            x_BSD = self.merge({name: module[name] for name in _MERGE}, embedded_BSD, hidden_BSD)
            x_BSD, load = self._layer(own, len(loads), x_BSD, batch, live_tokens(batch, depth))
            loads.append(load)
            normed_BSD = self.norm(module["norm"], x_BSD)
            hidden_BSD = normed_BSD if self.mtp_after_norm else x_BSD
            nll_BS, counted_BS = self._nll(shared, normed_BSD, batch, depth)
            weighed_BS = nll_BS * self._mtp_weight(batch)
            losses[_mtp(depth)] = masked_mean(weighed_BS, counted_BS) / self.config.num_mtp_layers
            sums.append(jnp.sum(jnp.where(counted_BS, nll_BS, 0)))
            numbers.append(jnp.sum(counted_BS, dtype=jnp.int32))
        if sums:
            metrics |= {"mtp_nll": jnp.stack(sums), "mtp_tokens": jnp.stack(numbers)}
        return out._replace(losses=losses, metrics=metrics)

    def _nll(self, shared: Tree, x_BSD: Array, batch: Tree, depth: int) -> tuple[Array, Array]:
        targets_BS, counted_BS = targets_ahead(batch, depth)
        if depth >= targets_BS.shape[1]:
            raise ValueError(
                f"deepseek: sequences of {targets_BS.shape[1]} tokens have no target for {depth} tokens ahead; "
                "give longer ones, or a config with fewer num_mtp_layers."
            )
        kernel_DV = head_kernel(self.config, shared)
        x_TD = x_BSD.reshape(-1, x_BSD.shape[-1])
        nll_T = cross_entropy(x_TD, kernel_DV, targets_BS.reshape(-1), self.axis, self.loss_block)
        return nll_T.reshape(targets_BS.shape), counted_BS

    def _mtp_weight(self, batch: Tree) -> Array | float:
        if "mtp_weight" not in batch:
            return self.mtp_weight
        return jax.lax.stop_gradient(batch["mtp_weight"].astype(jnp.float32))[:, None]

    def _with_loads(self, out: Out, own: Tree, loads: list[Load]) -> Out:
        if not loads:
            return out
        num_rows = self.config.num_moe_layers + self.config.num_mtp_layers

        def by_row(counts: Sequence[Array]) -> Array:
            rows = jnp.zeros((num_rows, *counts[0].shape), jnp.int32)
            first = own["routing"]["row"][0]
            return jax.lax.dynamic_update_slice(rows, jnp.stack(counts), (first, jnp.int32(0)))

        counts_RE = by_row([load.counts for load in loads])
        dropped = sum((load.dropped for load in loads), jnp.int32(0))
        metrics = {**out.metrics, "counts": counts_RE, "dropped": dropped}
        if devices := [load.devices for load in loads if load.devices is not None]:
            metrics["devices"] = by_row(devices)
        if not self.balance_factor:
            return out._replace(metrics=metrics)
        balance_B = jnp.sum(jnp.stack([load.balance for load in loads]), axis=0)
        losses = {**out.losses, "balance": self.balance_factor * jnp.mean(balance_B)}
        metrics["balance"] = jax.lax.stop_gradient(jnp.sum(balance_B))
        return out._replace(losses=losses, metrics=metrics)


_MERGE = ("enorm", "hnorm", "eh_proj")


def _mtp(depth: int) -> str:
    return f"mtp_{depth}"


def _where(batch: Tree) -> tuple[Array | None, Array | None]:
    return batch.get("positions"), batch.get("segment_ids")


def _init(config: Config, layout: Layout, modules: _Modules, key: Array) -> Tree:
    embed_key, dense_key, block_key, mtp_key, head_key = jax.random.split(key, 5)
    num_rows, num_mtp = config.num_moe_layers + config.num_mtp_layers, config.num_mtp_layers
    # Made where they stand, not picked from all rows: over stages that lie on ranks no device makes the whole model.
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


def _param_specs(
    config: Config, init: Callable[[Array], Tree], ep_axis: str | tuple[str, str] | None
) -> Tree:
    def spec(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
        del leaf
        names = {getattr(key, "key", None) for key in path}
        if ep_axis and "experts" in names:
            return PartitionSpec(ep_axis)
        if ep_axis and not config.tie_embeddings and names & {"embed_tokens", "lm_head"}:
            return PartitionSpec(None, ep_axis)
        return PartitionSpec()

    return jax.tree_util.tree_map_with_path(spec, jax.eval_shape(init, jax.random.key(0)))


def _compute_dtype(config: Config, init: Callable[[Array], Tree]) -> Tree:
    """Matrices of layers are multiplied in ``compute_dtype``; norms and routers are float32.

    So are the sums of the head's gradients over blocks of words, which are as wide as the head.
    """

    def dtype(path: tuple[Any, ...], leaf: Any) -> Any:
        del leaf
        names = {getattr(key, "key", None) for key in path}
        return config.compute_dtype if names & {"kernel", "experts"} and "lm_head" not in names else None

    whole = jax.tree_util.tree_map_with_path(dtype, jax.eval_shape(init, jax.random.key(0)))
    return whole | {"stages": whole["stages"] | {"routing": None}}


def _platform() -> Literal["cpu", "gpu", "tpu"]:
    name = jax.default_backend()
    return "tpu" if name == "tpu" else "cpu" if name == "cpu" else "gpu"
