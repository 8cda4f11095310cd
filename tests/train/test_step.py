"""The update: who moves what. Optimizer for weights, loads for routing biases."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dualpipe_jax.engine import Out, PlacedStages, Report, StagedModel, reference_value_and_grad
from dualpipe_jax.parallel import make_mesh
from models import update_routing
from train.state.layout import init_state, trainable, with_trainable
from train.step import make_optimizer, make_update, max_violation

SHAPE = (2, 2, 8)
RATE = 0.25


def replicated(tree):
    return jax.device_put(tree, NamedSharding(make_mesh(1), PartitionSpec()))


class ToyModel:
    """A model that keeps the trainer's contract and compiles in no time."""

    num_stages, dim, experts = 2, 8, 4

    def init(self, key):
        def normal(*shape):
            return 0.1 * jax.random.normal(key, shape)

        routing = {
            "bias": jnp.zeros((self.num_stages, 1, self.experts)),
            "row": jnp.arange(self.num_stages, dtype=jnp.int32)[:, None],
        }
        square = normal(self.num_stages, 1, self.dim, self.dim)
        weights = {"w": square, "norm": jnp.ones((self.num_stages, 1, self.dim))}
        shared = {"embed": {"table": normal(256, self.dim)}, "head": {"w": normal(self.dim, 256)}}
        return {"stages": {"layers": weights, "routing": routing}, "shared": shared}

    def stage(self, own, shared, x, at):
        routing, weights = own["routing"], own["layers"]
        x = shared["embed"]["table"][at.batch["inputs"]] if x is None else x
        chosen = jnp.argmax(jax.lax.stop_gradient(x[..., : self.experts]) + routing["bias"][0], axis=-1)
        counts = jnp.sum(jax.nn.one_hot(chosen, self.experts, dtype=jnp.int32), axis=(0, 1), dtype=jnp.int32)
        mine = jnp.arange(self.num_stages, dtype=jnp.int32) == routing["row"]
        metrics = {"counts": jnp.where(mine[:, None], counts, 0), "dropped": jnp.zeros((), jnp.int32)}
        return Out(x + jnp.tanh((x * weights["norm"][0]) @ weights["w"][0]), {}, metrics)

    def last(self, own, shared, x, at):
        out = self.stage(own, shared, x, at)
        logits = out.x @ shared["head"]["w"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, at.batch["targets"])
        return out._replace(losses={"lm": losses.mean()})

    def staged(self):
        return StagedModel({"first": self.stage, "last": self.last}, ("first", "last"))


@pytest.fixture(scope="module")
def model():
    return ToyModel()


@pytest.fixture(scope="module")
def batch():
    tokens = np.random.default_rng(0).integers(0, 256, (*SHAPE[:2], SHAPE[2] + 1)).astype(np.int32)
    return {"inputs": tokens[..., :-1], "targets": tokens[..., 1:]}


def test_placed_biases_find_their_counts():
    """On a V the second half of the stages lies in reverse."""
    counts = jnp.array([[3, 1], [1, 3], [2, 2], [4, 0]], jnp.int32)

    def stages(numbers):
        routing = {"bias": jnp.zeros((2, 1, 2)), "row": jnp.array(numbers, jnp.int32)[:, None]}
        return {"layers": {}, "routing": routing}

    placed = PlacedStages((stages([0, 1]), stages([3, 2])), ((0, 1), (3, 2)))
    near, far = jax.jit(update_routing)({"stages": placed}, counts, 1.0)["stages"].local
    np.testing.assert_array_equal(near["routing"]["bias"][:, 0], [[-1, 1], [1, -1]])
    np.testing.assert_array_equal(far["routing"]["bias"][:, 0], [[-1, 1], [0, 0]])


def test_the_gradient_is_clipped():
    optimizer = make_optimizer(1.0, clip=1.0, weight_decay=0.0)
    gradient = {"w": np.array([30.0, 40.0], np.float32)}
    _, state = jax.jit(lambda grads: optimizer.update(grads, optimizer.init(grads), grads))(gradient)
    np.testing.assert_allclose(optax.tree.get(state, "mu")["w"], [0.06, 0.08], rtol=1e-6)


def adamw_by_hand(params, gradients, rates, clip=1, decay=0.1, b1=0.9, b2=0.95, eps=1e-8, kept=lambda m: m):
    """Clipped AdamW in float64 (Loshchilov and Hutter, arXiv:1711.05101), a list of gradients' dicts after another.

    ``kept`` is what becomes of a moment between two steps.
    """
    params = {name: np.asarray(value, np.float64) for name, value in params.items()}
    mu, nu = ({name: np.zeros_like(value) for name, value in params.items()} for _ in range(2))
    for count, rate in enumerate(rates, start=1):
        grads = gradients(params)
        norm = np.sqrt(sum(np.sum(g**2) for g in grads.values()))
        for name, g in grads.items():
            g = g * min(1.0, clip / norm)
            mu[name] = b1 * mu[name] + (1 - b1) * g
            nu[name] = b2 * nu[name] + (1 - b2) * g**2
            step = mu[name] / (1 - b1**count) / (np.sqrt(nu[name] / (1 - b2**count)) + eps)
            params[name] = params[name] - rate * (step + (0 if "norm" in name else decay) * params[name])
            mu[name], nu[name] = kept(mu[name]), kept(nu[name])
    return params


def named(tree):
    """Trainable leaves by name."""
    leaves = jax.tree_util.tree_leaves_with_path(trainable(tree))
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


KEPT = {"float32": lambda m: m, "bfloat16": lambda m: m.astype(jnp.bfloat16).astype(np.float64)}


@pytest.mark.parametrize(
    ("moments", "told_rates"), [("float32", False), ("float32", True), ("bfloat16", True)]
)
def test_three_steps_move_every_leaf_as_adamw_by_hand_does(model, batch, moments, told_rates):
    """And the bias by the loads; the optimizer owns weights alone, and the old state's memory is reused.

    The optimizer computes the rates, or is told them: then it asks its own schedule for nothing.
    """
    rates = [0.02, 0.05, 0.01]

    def rate(count):
        return jnp.asarray(rates)[count]

    own = (lambda count: jnp.float32(jnp.nan)) if told_rates else rate
    optimizer = make_optimizer(own, clip=1.0, weight_decay=0.1, moments=moments)
    value_and_grad = reference_value_and_grad(model.staged())
    began = jax.device_get(jax.jit(model.init)(jax.random.key(0)))
    state = first = init_state(replicated(began), optimizer)
    schedules = {"learning_rate": rate} if told_rates else {}
    update, biases, told = make_update(value_and_grad, optimizer, RATE, state, **schedules), [], []
    for _ in rates:
        state, metrics = update(state, batch)
        biases.append(np.asarray(state.params["stages"]["routing"]["bias"])[:, 0])
        told.append(metrics)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first.params["shared"]))
    assert update.step._cache_size() == 1 and int(state.step) == 3

    compiled = jax.jit(value_and_grad)
    (_, report), grads = compiled(began, batch)
    counts = np.asarray(report.metrics["counts"], np.int64)
    expected = RATE * np.sign(counts.mean(-1, keepdims=True) - counts)
    assert np.any(expected)
    np.testing.assert_array_equal(biases[0], expected)
    np.testing.assert_array_equal(state.params["stages"]["routing"]["row"], [[0], [1]])
    norm = np.sqrt(sum(np.square(np.asarray(leaf, np.float64)).sum() for leaf in named(grads).values()))
    np.testing.assert_allclose(told[0]["grad_norm"], norm, rtol=1e-5)

    def gradients(now):
        leaves = [value.astype(np.float32) for value in now.values()]
        params = with_trainable(began, jax.tree.unflatten(jax.tree.structure(trainable(began)), leaves))
        return {name: np.asarray(g, np.float64) for name, g in named(compiled(params, batch)[1]).items()}

    assert jax.tree.structure(optax.tree.get(state.opt_state, "mu")) == jax.tree.structure(trainable(began))
    averages = [leaf for leaf in jax.tree.leaves(state.opt_state) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert {leaf.dtype for leaf in averages} == {jnp.dtype(moments)}
    expected, found = adamw_by_hand(named(began), gradients, rates, kept=KEPT[moments]), named(state.params)
    paths = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(began)}
    assert paths - expected.keys() == {"['stages']['routing']['bias']", "['stages']['routing']['row']"}
    for name, value in expected.items():
        moved = np.abs(value - named(began)[name]).max()
        assert moved > 0.02, f"{name} has hardly moved, so nothing is compared"
        np.testing.assert_allclose(found[name], value, rtol=0, atol=2e-4 * moved, err_msg=name)


def test_max_violation_is_of_layers_that_counted():
    """Loads 6 2, 1 7, 4 4 of three layers in four places: 1/2, 3/4 and 0; an empty place is no layer."""
    violation = jax.jit(max_violation)
    counts = np.array([[[6, 2], [1, 7]], [[4, 4], [0, 0]]], np.int32)
    assert float(violation(counts)) == pytest.approx((0.5 + 0.75 + 0) / 3)
    assert float(violation(np.zeros((2, 2, 2), np.int32))) == 0


ROUTING = {
    "stages": {"routing": {"bias": np.zeros((1, 1, 2), np.float32), "row": np.zeros((1, 1), np.int32)}}
}


def test_metrics_of_a_step_by_hand():
    """Two of eight choices are dropped; a weight of multi-token prediction for each sequence, by the step."""
    optimizer = make_optimizer(1e-3, clip=1.0, weight_decay=0.0)
    state = init_state(replicated(ROUTING), optimizer)

    def value_and_grad(params, batch):
        found = {"counts": [[6, 2]], "dropped": 2, "sequences": 2, "mtp_tokens": [3, 2]}
        metrics = {name: jnp.asarray(value, jnp.int32) for name, value in found.items()}
        metrics |= {"mtp_nll": jnp.asarray([6.0, 3.0]), "balance": jnp.float32(8)}
        losses = {"lm": jnp.float32(2.5)}
        return (batch["mtp_weight"].sum(), Report(losses, metrics, jnp.int32(0))), params

    update = make_update(
        value_and_grad, optimizer, RATE, state, mtp_weight=lambda step: step.astype(jnp.float32) + 0.5
    )
    wanted = {
        "loss": 2.5,
        "mtp_1": 2,
        "mtp_2": 1.5,
        "balance": 4,
        "max_vio": 0.5,
        "dropped": 2,
        "drop_rate": 0.25,
    }
    for step in range(2):
        state, metrics = update(state, {"inputs": jnp.zeros((2, 3, 4), jnp.int32)})
        assert {name: metrics[name].item() for name in wanted} == wanted
        assert metrics["objective"] == 6 * (step + 0.5)
    assert state.params["stages"]["routing"]["bias"].tolist() == [[[-2 * RATE, 2 * RATE]]]


def test_the_compiler_is_given_its_options():
    """CPU's compiler refuses what it does not know, so a wrong name must surface."""
    state = init_state(replicated(ROUTING), make_optimizer(1e-3, clip=1.0, weight_decay=0.0))

    def value_and_grad(params, batch):
        del batch
        metrics = {"counts": jnp.ones((1, 2), jnp.int32), "dropped": jnp.int32(0)}
        return (jnp.float32(0), Report({"lm": jnp.float32(0)}, metrics, jnp.int32(0))), params

    optimizer = make_optimizer(1e-3, clip=1.0, weight_decay=0.0)
    update = make_update(value_and_grad, optimizer, RATE, state, {"xla_no_such_option": "true"})
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option: 'xla_no_such_option'"):
        update(state, {})
