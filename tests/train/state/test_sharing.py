"""What is shared out: where each array lies, that a step's gradients and the steps themselves are the same."""

import math
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import models
from dualpipe_jax.engine import Out, Pipeline, Report, StagedModel, reference_value_and_grad
from dualpipe_jax.parallel import EP, make_mesh
from dualpipe_jax.pods.program import abstract_mesh
from dualpipe_jax.schedule import dualpipe, gpipe
from tests.engine.models import quick
from tests.train.state.test_state import check_lies
from train.state.layout import Layout, shardings, trainable
from train.state.sharing import shard_further
from train.step import make_optimizer, make_update

SCHEDULE, NUM_DP, NUM_PP, NUM_EP = dualpipe(2, 4), 2, 2, 2
SHARDS = "nothing", "optimizer", "parameters"
OPTIMIZER = make_optimizer(0.01, clip=0.5, weight_decay=0.1)


@pytest.mark.parametrize(
    ("spec", "shape", "expected"),
    [
        (P(), (), P()),
        (P(), (128,), P()),
        (P("pp"), (2, 128), P("pp")),  # a vector of each stage
        (P("pp"), (2, 24, 16), P("pp", ("dp", "ep"))),
        (P("pp"), (2, 12, 20), P("pp", "ep", "dp")),
        (P("pp"), (2, 9, 5), P("pp")),
        (P("pp", "ep"), (2, 8, 6, 10), P("pp", "ep", None, "dp")),
        (P(None, "ep"), (6, 64), P(("dp", "pp"), "ep")),
        (P("ep", "dp"), (16, 96), P("ep", ("dp", "pp"))),
        (P("pp"), (2, 256, 1024), P("pp", None, ("dp", "ep"))),  # 128 lanes each
        (P("pp"), (2, 256, 1000), P("pp", ("dp", "ep"))),  # 32 rows, where 125 lanes are no tile
    ],
)
def test_an_array_is_cut_where_all_axes_divide_it_or_each_does(spec, shape, expected):
    """By hand: two replicas, two ranks, or three where they are free, and four devices for experts."""
    lies = NamedSharding(abstract_mesh(3 if "pp" not in spec else 2, 4, dp=2), spec)
    found = shard_further(jax.ShapeDtypeStruct(shape, jnp.float32, sharding=lies))
    assert found.sharding.is_equivalent_to(NamedSharding(lies.mesh, expected), len(shape)), found.sharding
    again = shard_further(found)
    assert again.sharding.spec == found.sharding.spec


def test_matrices_of_v3_are_cut_into_whole_tiles_where_they_can_be():
    """18432 / 1024 = 18 rows are none of 16 each, nor are 7168 / 1024 = 7; 112 rows are, and 9 x 128 lanes."""
    lies = NamedSharding(abstract_mesh(16, 64), P())
    for shape, expected in (((7168, 18432), P("ep", "pp")), ((16384, 7168), P(("pp", "ep")))):
        found = shard_further(jax.ShapeDtypeStruct(shape, jnp.float32, sharding=lies)).sharding
        assert found.is_equivalent_to(NamedSharding(lies.mesh, expected), 2), (shape, found.spec)


def step_of(model, shard, schedule=SCHEDULE):
    """Layout and pipeline on all eight devices, as ``prepare`` makes them."""
    layout = Layout(model, schedule, make_mesh(NUM_PP, NUM_EP, dp=NUM_DP), OPTIMIZER, shard)
    pipeline = Pipeline(
        model.staged,
        schedule,
        layout.mesh,
        param_specs=model.param_specs,
        storage_specs=layout.storage_specs,
        compute_dtype=model.compute_dtype,
    )
    return layout, pipeline


def words():
    tokens = jax.random.randint(jax.random.key(1), (4, 4, 9), 0, 64)
    return {"inputs": tokens[..., :-1], "targets": tokens[..., 1:]}


def check_gradients(model, plain, schedule=SCHEDULE):
    """Of what is stored in parts: leaf by leaf, against ``jax.value_and_grad`` of the model in one piece."""
    layout, pipeline = step_of(model, "parameters", schedule)
    state = layout.init(jax.random.key(0))
    (loss, _), grads = quick(pipeline.value_and_grad)(state.params, words())
    (wanted, _), wanted_grads = quick(reference_value_and_grad(plain.staged))(
        plain.init(jax.random.key(0)), words()
    )
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    lies = shardings(trainable(state.params))
    for grad, lie in zip(jax.tree.leaves(trainable(grads)), jax.tree.leaves(lies), strict=True):
        assert grad.sharding.is_equivalent_to(lie, grad.ndim)
    found, expected = jax.device_get((trainable(pipeline.unplace(grads)), trainable(wanted_grads)))
    leaves = zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True)
    for (path, got), want in leaves:
        most = np.abs(want).max()
        assert most > 0, path
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-5 * most, err_msg=jax.tree_util.keystr(path))


def toy(axis):
    """The trainer's contract in a few products, with matrices that lie over ep."""

    def stage(own, shared, x, at):
        x = shared["table"][at.batch["inputs"]] if x is None else x
        lies = own["experts"]
        experts = lies if axis is None else jax.lax.all_gather(lies, axis, tiled=True)
        x = x + jnp.tanh((x * own["norm"]) @ own["up"]) @ own["down"] + jnp.sin(x @ experts.sum(0))
        mine = jnp.arange(2, dtype=jnp.int32) == own["routing"]["row"]
        counts = jnp.where(mine[:, None], jnp.int32(x.size) * jnp.arange(4, dtype=jnp.int32), 0)
        return Out(x, {}, {"counts": counts, "dropped": jnp.zeros((), jnp.int32)})

    def last(own, shared, x, at):
        out = stage(own, shared, x, at)
        losses = optax.softmax_cross_entropy_with_integer_labels(out.x @ shared["head"], at.batch["targets"])
        return out._replace(losses={"lm": losses.mean()})

    def init(key):
        keys = iter(jax.random.split(key, 5))

        def normal(*shape):
            return 0.3 * jax.random.normal(next(keys), shape)

        stages = {"up": normal(2, 8, 12), "down": normal(2, 12, 8), "experts": normal(2, 4, 8, 8)}
        routing = {"bias": jnp.zeros((2, 1, 4)), "row": jnp.arange(2, dtype=jnp.int32)[:, None]}
        return {
            "stages": stages | {"norm": jnp.ones((2, 8)), "routing": routing},
            "shared": {"table": normal(64, 8), "head": normal(8, 64)},
        }

    own = {"up": None, "down": None, "experts": P(EP), "norm": None, "routing": None}
    staged = StagedModel({"first": stage, "last": last}, ("first", "last"))
    return types.SimpleNamespace(staged=staged, init=init, param_specs={"stages": own}, compute_dtype=None)


def test_gradients_are_the_plain_models():
    check_gradients(toy(EP), toy(None))


@pytest.mark.parametrize(("shard", "size", "other"), [("nothing", 96, 24), ("parameters", 24, 96)])
def test_second_copies_and_their_gradients_cross_ranks_in_the_parts_that_are_stored(shard, size, other):
    """Of DualPipe's 8 x 12 numbers a quarter where two replicas and two devices keep one each, cast before they go."""
    model = toy(EP)
    model.compute_dtype = jnp.bfloat16
    layout, pipeline = step_of(model, shard)
    params = layout.init(jax.random.key(0)).params
    text = jax.jit(pipeline.value_and_grad).lower(params, words()).as_text()
    sent = re.findall(r'"stablehlo.collective_permute".*\(tensor<([\dx]*)x(\w+)>\)', text)
    found = {(math.prod(map(int, shape.split("x"))), dtype) for shape, dtype in sent}
    assert {(size, "bf16"), (size, "f32")} <= found
    assert {
        (128, "bf16"),
        (128, "f32"),
    } <= found  # a device's two experts, cut over replicas alone or not at all
    assert not {(other, "bf16"), (other, "f32")} & found


@pytest.mark.slow
def test_gradients_of_deepseek_are_the_plain_models():
    numbers = models.tiny(
        num_layers=2, num_experts=4, num_groups=1, top_groups=1, top_k=2, dim=16, expert_hidden=8, vocab=64
    )
    check_gradients(models.deepseek(numbers, 2, ep_axis=EP), models.deepseek(numbers, 2), gpipe(2, 4))


def test_steps_are_the_same_whatever_is_shared_out():
    """Two of them, by gradients leaf by leaf; and everything lies afterwards where it is said to lie."""

    def value_and_grad(params, batch):
        counts = jnp.broadcast_to(jnp.arange(4, dtype=jnp.int32), (2, 4))
        metrics = {"counts": counts, "dropped": jnp.int32(0)}
        grads = jax.tree.map(lambda leaf: jnp.cos(5 * leaf.astype(jnp.float32)) - batch, params)
        return (jnp.float32(0), Report({"lm": jnp.float32(0)}, metrics, jnp.int32(0))), grads

    states = {}
    for shard in SHARDS:
        layout, _ = step_of(toy(EP), shard)
        began = layout.init(jax.random.key(0))
        first = jax.device_get(began.params)
        update = make_update(value_and_grad, OPTIMIZER, 0.5, layout.abstract)
        state, one = update(began, np.float32(0.1))
        state, two = update(state, np.float32(0.2))
        check_lies(state, layout.abstract)
        states[shard] = jax.device_get((state, one, two))
    whole = states["nothing"]
    for shard in SHARDS[1:]:
        for ours, theirs in zip(jax.tree.leaves(states[shard]), jax.tree.leaves(whole), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-6)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), trainable(first), trainable(whole[0].params))
    assert min(jax.tree.leaves(moved)) > 0.005


def test_the_update_of_what_is_stored_in_parts_asks_nobody_but_for_norms():
    """Compiled, with parameters for gradients: no more than scalars travel; else parameters are gathered."""

    def value_and_grad(params, batch):
        counts = jnp.ones((2, 4), jnp.int32)
        return (
            jnp.float32(0),
            Report({"lm": jnp.float32(0)}, {"counts": counts, "dropped": counts.sum()}, jnp.int32(0)),
        ), params

    def exchanged(shard):
        state = step_of(toy(EP), shard)[0].abstract
        text = make_update(value_and_grad, OPTIMIZER, 0.5, state).lower(state, {}).compile().as_text()
        found = re.findall(r"= (\S+|\([^=]*\)) (all-gather|all-reduce|reduce-scatter|all-to-all)\(", text)
        return {(op, shape) for shapes, op in found for shape in re.findall(r"\w+\[[\d,]*\]", shapes)}

    assert exchanged("parameters") == {("all-reduce", "f32[]")}
    assert {op for op, _ in exchanged("optimizer")} == {"all-reduce", "all-gather"}


def test_each_device_has_its_part():
    """Of eight: numbers of each leaf on one device, by hand."""

    def numbers(shard):
        state = step_of(toy(EP), shard)[0].abstract
        mu = optax.tree.get(state.opt_state, "mu")
        own, shared = state.params["stages"].local[0], state.params["shared"]
        of_mu = {**mu["stages"].local[0], **mu["shared"]}
        both = {**own, **shared}, of_mu
        names = "up", "down", "experts", "norm", "table", "head"
        return [
            [math.prod(tree[name].sharding.shard_shape(tree[name].shape)) for name in names] for tree in both
        ]

    whole, parts = [96, 96, 128, 8, 512, 512], [24, 24, 64, 8, 64, 64]
    assert numbers("nothing") == [whole, whole]
    assert numbers("optimizer") == [whole, parts]
    assert numbers("parameters") == [parts, parts]
