"""The update: gradients from the engine, clipping and AdamW from optax, the routing bias beside them.

The model's contract, as far as the trainer minds it: whatever lies under a key "routing" is state that the
optimizer does not own. A stage's aux is {"counts": int32 [num_stages, layers, experts], "dropped": int32}.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath, tree_map_with_path

from models import update_bias
from train.figures import step_figures
from train.state import TrainState, shardings, trainable, with_trainable

Tree = Any
ValueAndGrad = Callable[[Tree, Tree, Tree], tuple[tuple[jax.Array, Tree], Tree]]
Update = Callable[[TrainState, Tree, Tree], tuple[TrainState, dict[str, jax.Array]]]


def make_optimizer(
    learning_rate: optax.ScalarOrSchedule, *, clip: float, weight_decay: float
) -> optax.GradientTransformation:
    """AdamW after clipping by the global norm; weights decay, norms and biases do not."""
    inner = optax.chain(
        optax.clip_by_global_norm(clip),
        optax.adamw(learning_rate, b1=0.9, b2=0.95, weight_decay=weight_decay, mask=is_decayed),
    )

    def update(grads: Tree, state: optax.OptState, params: Tree | None = None):
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to the power of an integer count
            return inner.update(grads, state, params)

    return optax.GradientTransformation(inner.init, update)


def warmup_cosine(peak: float, num_steps: int, num_warmup: int) -> optax.Schedule:
    """Up in ``num_warmup`` equal steps to ``peak``, then a cosine down to a tenth of it at the last step."""
    num_warmup = min(num_warmup, num_steps - 1)
    curve = optax.warmup_cosine_decay_schedule(0.0, peak, num_warmup, num_steps, 0.1 * peak)
    return lambda step: curve(step + 1)  # the first step is number 0, and should not be idle


def make_update(
    value_and_grad: ValueAndGrad,
    optimizer: optax.GradientTransformation,
    bias_rate: float,
    state: TrainState,
    compiler_options: dict[str, str] | None = None,
) -> Update:
    """``update(state, inputs, targets) -> (state, metrics)``, compiled; the old state's memory is reused.

    The new state lies where ``state`` does, leaf by leaf: the second step is not compiled anew. For the options see
    ``recommended_compiler_options``.

    metrics: loss, grad_norm (before clipping), max_vio (see ``max_violation``), dropped (how often a token found no
    room at an expert of its choice), drop_rate (that as a fraction of all choices),
    counts (int32 [num_stages, layers of a stage, experts]: how often each expert was chosen), and those of
    ``step_figures``.
    """

    def update(state: TrainState, inputs: jax.Array, targets: jax.Array):
        (loss, aux), grads = value_and_grad(state.params, inputs, targets)
        params, grads = trainable(state.params), trainable(grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, params)
        params = with_trainable(state.params, optax.apply_updates(params, updates))
        params = balance(params, aux["counts"], bias_rate)
        metrics = {
            "loss": loss,
            "grad_norm": optax.tree.norm(grads),
            "max_vio": max_violation(aux["counts"]),
            "dropped": aux["dropped"],
            **step_figures(params, grads, aux),
            "drop_rate": aux["dropped"].astype(jnp.float32) / jnp.sum(aux["counts"].astype(jnp.float32)),
        }
        return TrainState(state.step + 1, params, opt_state), metrics

    lies = (shardings(state), None)
    return jax.jit(update, donate_argnums=0, out_shardings=lies, compiler_options=compiler_options)


def balance(params: Tree, counts: jax.Array, rate: float) -> Tree:
    """Params whose routing biases have moved once against a step's load, int32 [num_stages, layers, experts].

    Finds them wherever they lie: a placed stage knows its number in model order.
    """

    def move(stages: Tree) -> Tree:
        routing = stages["routing"]
        bias = update_bias(routing["bias"], counts[routing["stage"]], rate)
        return stages | {"routing": routing | {"bias": bias}}

    def is_stages(node: Tree) -> bool:
        return isinstance(node, dict) and "routing" in node

    return params | {"stages": jax.tree.map(move, params["stages"], is_leaf=is_stages)}


def is_decayed(params: Tree) -> Tree:
    """Whether each leaf is subject to weight decay: by name, for stacked stages hide a leaf's own rank."""

    def decays(path: KeyPath, leaf: Any) -> bool:
        del leaf
        name = jax.tree_util.keystr(path).lower()
        return not any(word in name for word in ("norm", "bias", "scale"))

    return tree_map_with_path(decays, params)


def max_violation(counts: jax.Array) -> jax.Array:
    """Load of the busiest expert over the mean load, less 1, on average over layers: 0 is balance.

    counts: int32 [num_stages, layers of a stage, experts]. A place that holds no layer has counted nothing, and is
    left out: every layer has counted some token.
    """
    loads = counts.astype(jnp.float32)
    filled = jnp.sum(loads, axis=-1) > 0
    excess = jnp.max(loads, axis=-1) / jnp.where(filled, jnp.mean(loads, axis=-1), 1.0) - 1.0
    return jnp.sum(jnp.where(filled, excess, 0.0)) / jnp.maximum(jnp.sum(filled.astype(jnp.float32)), 1.0)
