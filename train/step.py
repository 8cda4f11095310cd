"""The update of a step: gradients from the engine, clipping and AdamW from optax, and the update of routing biases.

The trainer requires two things of a model: parameters under a key "routing" are state that the optimizer does not
own, and its metrics are those of ``models.deepseek``.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath, tree_map_with_path

from models import count_once, figures, sum_copies, update_routing
from train.figures.step import step_figures
from train.state.layout import TrainState, shardings, trainable, with_trainable
from train.state.placement import is_placed

Tree = Any
ValueAndGrad = Callable[[Tree, Tree], tuple[tuple[jax.Array, Any], Tree]]
"""A function from (params, batch) to ((objective, Report), gradients); see ``Pipeline.value_and_grad``."""
Update = Callable[[TrainState, Tree], tuple[TrainState, dict[str, Any]]]


def make_optimizer(
    learning_rate: optax.ScalarOrSchedule,
    *,
    clip: float,
    weight_decay: float,
    b1: float = 0.9,
    b2: float = 0.95,
    moments: Any = jnp.float32,
) -> optax.GradientTransformationExtraArgs:
    """AdamW after clipping by the global norm; weights decay, norms and biases do not.

    All is computed in float32, whatever dtype the ``moments`` are kept in between steps (DeepSeek-V3 keeps both
    averages in bfloat16; arXiv:2412.19437, section 3.3.3). Its ``update`` takes the gradient's ``norm`` as an option,
    for gradients whose norm is not that of all their leaves.
    """
    adamw = optax.adamw(learning_rate, b1=b1, b2=b2, weight_decay=weight_decay, mask=is_decayed)
    inner = optax.chain(optax.clip_by_global_norm(clip), adamw)

    def init(params: Tree) -> optax.OptState:
        return _floating_as(moments, inner.init(params))

    def update(
        grads: Tree,
        state: optax.OptState,
        params: Tree | None = None,
        *,
        norm: jax.Array | None = None,
        **_: Any,
    ):
        clipped = inner if norm is None else optax.chain(_clip_norm(clip, norm), adamw)
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to the power of an integer count
            updates, state = clipped.update(grads, _floating_as(jnp.float32, state), params)
        return updates, _floating_as(moments, state)

    return optax.GradientTransformationExtraArgs(init, update)


def _clip_norm(largest: float, norm: jax.Array) -> optax.GradientTransformation:
    """Like ``optax.clip_by_global_norm``, but with a given norm."""

    def clipped(gradient: jax.Array) -> jax.Array:
        return jnp.where(norm < largest, gradient, gradient / norm * largest)

    return optax.stateless(lambda grads, params: jax.tree.map(clipped, grads))


def _floating_as(dtype: Any, tree: Tree) -> Tree:
    def cast(leaf: Any) -> Any:
        return leaf.astype(dtype) if jnp.issubdtype(getattr(leaf, "dtype", int), jnp.floating) else leaf

    return jax.tree.map(cast, tree)


def make_update(
    value_and_grad: ValueAndGrad,
    optimizer: optax.GradientTransformationExtraArgs,
    bias_rate: optax.ScalarOrSchedule,
    state: TrainState,
    compiler_options: dict[str, str] | None = None,
    mtp_weight: optax.Schedule | None = None,
) -> Update:
    """The jitted function ``update(state, batch) -> (state, metrics)``, which reuses the old state's memory.

    ``bias_rate`` may be a function of the step. ``mtp_weight``, a function of the step, overrides the model's own
    weight; None keeps that.

    Each leaf of the new state has the sharding of that leaf in ``state``, so the second step is not compiled again. For
    the options see ``recommended_compiler_options``. If experts are placed (``models.placement``), all copies of an
    expert are updated by the sum of their gradients, and every norm counts the expert once.

    metrics: loss (of the model's own targets, in nats per token), objective (the loss with all terms that are added to
    it), mtp_1 and so on (the loss of each depth, if there are modules of multi-token prediction), balance (the balance
    loss of a layer, if it is part of the objective), grad_norm (before clipping), max_vio (see ``max_violation``),
    dropped (how often a token found no room at an expert of its choice), drop_rate (that as a fraction of all choices),
    counts (int32 [rows, experts]: how often each expert was chosen, by layer), and those of ``step_figures``; if
    experts are placed also devices (int32 [rows, devices]: the number of choices that each device worked on).
    """

    def counted_once(grads: Tree, params: Tree) -> tuple[Tree, Tree, dict[str, jax.Array]]:
        """(gradients for the update, gradients for norms, keyword arguments for the optimizer's update)."""
        if not is_placed(params):
            return grads, grads, {}
        grads = sum_copies(grads, params, jax.tree.leaves(shardings(state.params))[0].mesh)
        once = count_once(grads, params)
        return grads, once, {"norm": optax.tree.norm(once)}

    def update(state: TrainState, batch: Tree):
        if mtp_weight is not None:
            batch = batch | {"mtp_weight": jnp.full(batch["inputs"].shape[:2], mtp_weight(state.step))}
        (objective, report), grads = value_and_grad(state.params, batch)
        counts, dropped = report.metrics["counts"], report.metrics["dropped"]
        params, grads = trainable(state.params), _floating_as(jnp.float32, trainable(grads))
        grads, once, told = counted_once(grads, state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, params, **told)
        params = with_trainable(state.params, optax.apply_updates(params, updates))
        moved = bias_rate(state.step) if callable(bias_rate) else bias_rate
        params = update_routing(params, counts, moved)
        metrics = {
            **_losses(figures(report.losses, report.metrics)),
            "objective": objective,
            "grad_norm": optax.tree.norm(once),
            "max_vio": max_violation(counts),
            "dropped": dropped,
            **step_figures(params, once, report.metrics),
            "drop_rate": dropped.astype(jnp.float32) / jnp.sum(counts.astype(jnp.float32)),
        }
        return TrainState(state.step + 1, params, opt_state), metrics

    lies = (shardings(state), None)
    return jax.jit(update, donate_argnums=0, out_shardings=lies, compiler_options=compiler_options)


def _losses(found: dict[str, jax.Array]) -> dict[str, Any]:
    """The losses of ``models.figures`` by the names of metrics: "lm" is the loss, and each depth has its own name."""
    own = {"loss": found["lm"]} | {name: found[name] for name in ("balance",) if name in found}
    depths = enumerate(found["mtp"], start=1) if "mtp" in found else ()
    return own | {f"mtp_{depth}": loss for depth, loss in depths}


def is_decayed(params: Tree) -> Tree:
    """A tree of bools: whether each leaf is subject to weight decay, judged by its name, because the stacking of
    stages hides a leaf's own rank."""

    def decays(path: KeyPath, leaf: Any) -> bool:
        del leaf
        name = jax.tree_util.keystr(path).lower()
        return not any(word in name for word in ("norm", "bias", "scale"))

    return tree_map_with_path(decays, params)


def max_violation(counts: jax.Array) -> jax.Array:
    """MaxVio: the load of the busiest expert over the mean load, minus 1, averaged over layers; 0 is perfect balance.

    counts: int32 [..., experts]. Rows of zeros are left out: they belong to no layer, since every layer counts tokens.
    """
    loads = counts.astype(jnp.float32)
    filled = jnp.sum(loads, axis=-1) > 0
    excess = jnp.max(loads, axis=-1) / jnp.where(filled, jnp.mean(loads, axis=-1), 1.0) - 1.0
    return jnp.sum(jnp.where(filled, excess, 0.0)) / jnp.maximum(jnp.sum(filled.astype(jnp.float32)), 1.0)
