"""The update of a step: gradients from the engine, clipping and AdamW from optax, and the update of routing biases.

The trainer requires two things of a model: parameters under a key "routing" are state that the optimizer does not
own, and its metrics are those of ``models.deepseek``.
"""

import dataclasses
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
    averages in bfloat16; arXiv:2412.19437, section 3.3.3). Its ``update`` has two options: ``norm``, for gradients
    whose norm is not that of all their leaves, and ``rate``, the step's learning rate if that is a schedule.
    """

    def adamw(rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
        return optax.adamw(rate, b1=b1, b2=b2, weight_decay=weight_decay, mask=is_decayed)

    whole_norm = optax.clip_by_global_norm(clip)
    inner = optax.chain(whole_norm, adamw(learning_rate))

    def init(params: Tree) -> optax.OptState:
        return _floating_as(moments, inner.init(params))

    def update(
        grads: Tree,
        state: optax.OptState,
        params: Tree | None = None,
        *,
        norm: jax.Array | None = None,
        rate: jax.Array | None = None,
        **_: Any,
    ):
        # A schedule's state is a count, so one that gives the rate it was told keeps the state's tree.
        moved = adamw(learning_rate if rate is None else lambda count: rate)
        clipped = optax.chain(whole_norm if norm is None else _clip_norm(clip, norm), moved)
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
    learning_rate: optax.Schedule | None = None,
) -> Update:
    """The compiled function ``update(state, batch) -> (state, metrics)``, which reuses the old state's memory.

    ``bias_rate`` may be a function of the step; ``mtp_weight`` and ``learning_rate`` are functions of the step that
    override the model's own weight and the optimizer's rate, or None, which keeps these. A small program of its own
    computes their values, which are inputs of the step: so the compiled step is the same for any number of steps.

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

    schedules = {"bias_rate": bias_rate, "mtp_weight": mtp_weight, "rate": learning_rate}
    schedules = {name: schedule for name, schedule in schedules.items() if callable(schedule)}

    def update(state: TrainState, batch: Tree, values: dict[str, jax.Array]):
        if mtp_weight is not None:
            batch = batch | {"mtp_weight": jnp.full(batch["inputs"].shape[:2], values["mtp_weight"])}
        (objective, report), grads = value_and_grad(state.params, batch)
        counts, dropped = report.metrics["counts"], report.metrics["dropped"]
        params, grads = trainable(state.params), _floating_as(jnp.float32, trainable(grads))
        grads, once, told = counted_once(grads, state.params)
        if learning_rate is not None:
            told["rate"] = values["rate"]
        updates, opt_state = optimizer.update(grads, state.opt_state, params, **told)
        params = with_trainable(state.params, optax.apply_updates(params, updates))
        params = update_routing(params, counts, values.get("bias_rate", bias_rate))
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
    step = jax.jit(update, donate_argnums=0, out_shardings=lies, compiler_options=compiler_options)
    values = jax.jit(
        lambda count: {name: schedule(count) for name, schedule in schedules.items()},
        out_shardings=lies[0].step,
    )
    return _Scheduled(step, values)


@dataclasses.dataclass(frozen=True)
class _Scheduled:
    """A compiled step whose schedules are inputs.

    Attributes:
      step: ``(state, batch, values) -> (state, metrics)``, compiled.
      values: the values of the schedules by name, a compiled function of the step's number.
    """

    step: Any
    values: Any

    def __call__(self, state: TrainState, batch: Tree) -> tuple[TrainState, dict[str, Any]]:
        return self.step(state, batch, self.values(state.step))

    def lower(self, state: TrainState, batch: Tree) -> Any:
        """Lower the step, as the method of ``jax.jit`` does; the state may be abstract."""
        return self.step.lower(state, batch, self.values.eval_shape(state.step))


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
