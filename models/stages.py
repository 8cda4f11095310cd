"""What a stage of DeepSeek-V3 computes: its layers, and on the last stage the losses of every depth of prediction.

Shape suffixes: B batch, S sequence, T tokens, D model dim, V vocabulary, E experts, X devices of the experts' axis.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array

from dualpipe_jax.arguments import UnfitError
from dualpipe_jax.contract import At, Out
from dualpipe_jax.functional import Tree
from models.config import Config
from models.moe import Load
from models.objective import inputs_ahead, live_tokens, masked_mean, targets_ahead
from models.plan import StageContent
from models.vocabulary import cross_entropy, look_up


def head_kernel(config: Config, shared: Tree) -> Array:
    return shared["embed_tokens"].T if config.tie_embeddings else shared["lm_head"]["kernel"]


def only_stage(params: Tree, who: str) -> Tree:
    """Return the params of the only stage, without the stage dim; a ValueError if there are several stages."""
    num_stages = len(params["stages"]["routing"]["row"])
    if num_stages != 1:
        raise ValueError(f"{who}: params are of {num_stages} stages, must be of 1: deepseek(config, 1).init")
    return jax.tree.map(lambda leaf: leaf[0], params["stages"])


@dataclasses.dataclass(frozen=True)
class StageFunctions:
    """Makes the functions of stages; ``axis`` is the mesh axis over which embedding and head are sharded."""

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

    def stage(self, content: StageContent) -> Callable[..., Out]:
        def run(own: Tree, shared: Tree, x_BSD: Array, at: At) -> Out:
            batch = at.batch
            live_BS = live_tokens(batch) if "valid" in batch else None
            if content.first:
                x_BSD = self._embed(shared, batch["inputs"])
            for layer in content.dense:
                x_BSD = self.dense(shared["layers"][layer], x_BSD, *_positions_and_segments(batch))
            loads: list[Load] = []
            for slot in range(content.num_moe):
                x_BSD, load = self._layer(own, slot, x_BSD, batch, live_BS)
                loads.append(load)
            out = self._last_stage_output(own, shared, x_BSD, batch, loads) if content.last else Out(x_BSD)
            return self._with_loads(out, own, loads)

        return run

    def _embed(self, shared: Tree, tokens_BS: Array) -> Array:
        return look_up(shared["embed_tokens"], tokens_BS, self.config.compute_dtype, self.axis)

    def _layer(
        self, own: Tree, slot: int, x_BSD: Array, batch: Tree, live_BS: Array | None
    ) -> tuple[Array, Load]:
        bias_E = jax.lax.stop_gradient(own["routing"]["bias"][slot])
        # There is one table for each device of the experts' axis; index 0 is this device's own.
        copies_EX = own["routing"]["copies"][slot, 0] if "copies" in own["routing"] else None
        return self.block(
            own["layers"][slot], x_BSD, bias_E, *_positions_and_segments(batch), live_BS, copies_EX
        )

    def _last_stage_output(
        self, own: Tree, shared: Tree, x_BSD: Array, batch: Tree, loads: list[Load]
    ) -> Out:
        """Return the last stage's output with its losses; append the loads of multi-token prediction to ``loads``."""
        normed_BSD = self.norm(shared["norm"], x_BSD)
        out = Out(normed_BSD)
        if "targets" not in batch:
            return out
        nll_BS, counted_BS = self._nll(shared, normed_BSD, batch, 0)
        losses = {"lm": masked_mean(nll_BS, counted_BS)}
        metrics: dict[str, Array] = {"tokens": jnp.sum(counted_BS, dtype=jnp.int32)}
        if self.balance_factor:
            # Counted once, here, even if this stage has no experts.
            metrics["sequences"] = jnp.int32(nll_BS.shape[0])
        sums, numbers = [], []
        hidden_BSD = normed_BSD if self.mtp_after_norm else x_BSD
        for depth in range(1, self.config.num_mtp_layers + 1):
            module = shared["mtp"][depth - 1]
            embedded_BSD = self._embed(shared, inputs_ahead(batch, depth))
            x_BSD = self.merge({name: module[name] for name in _MERGE_PARAMS}, embedded_BSD, hidden_BSD)
            x_BSD, load = self._layer(own, len(loads), x_BSD, batch, live_tokens(batch, depth))
            loads.append(load)
            normed_BSD = self.norm(module["norm"], x_BSD)
            hidden_BSD = normed_BSD if self.mtp_after_norm else x_BSD
            nll_BS, counted_BS = self._nll(shared, normed_BSD, batch, depth)
            weighed_BS = nll_BS * self._mtp_weight(batch)
            losses[mtp_name(depth)] = masked_mean(weighed_BS, counted_BS) / self.config.num_mtp_layers
            sums.append(jnp.sum(jnp.where(counted_BS, nll_BS, 0)))
            numbers.append(jnp.sum(counted_BS, dtype=jnp.int32))
        if sums:
            metrics |= {"mtp_nll": jnp.stack(sums), "mtp_tokens": jnp.stack(numbers)}
        return out._replace(losses=losses, metrics=metrics)

    def _nll(self, shared: Tree, x_BSD: Array, batch: Tree, depth: int) -> tuple[Array, Array]:
        targets_BS, counted_BS = targets_ahead(batch, depth)
        if depth >= targets_BS.shape[1]:
            raise UnfitError(
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


_MERGE_PARAMS = ("enorm", "hnorm", "eh_proj")


def mtp_name(depth: int) -> str:
    return f"mtp_{depth}"


def _positions_and_segments(batch: Tree) -> tuple[Array | None, Array | None]:
    return batch.get("positions"), batch.get("segment_ids")
