"""What dispatch drops inside stages is in the report of every step, whatever the model says of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dualpipe_jax import Out, Pipeline, StagedModel, make_mesh, reference_value_and_grad
from dualpipe_jax.parallel import (
    combine,
    dispatch,
    expert_matmul,
    plan_capacity,
    plan_dropless,
    plan_two_hops,
)
from dualpipe_jax.schedule import dualpipe, one_f_one_b
from tests.engine.models import assert_close, quick

MICROBATCHES, TOKENS, EXPERTS, WIDTH, LAYERS, NUM_STAGES = 4, 8, 4, 3, 2, 2


def layer(own, x, plan):
    """Top-1 experts of tokens [T, D]; nobody reads what the handle says of drops."""
    scores = x @ own["router"]
    topk = jnp.argmax(scores, -1).astype(jnp.int32)[:, None]
    handle = plan(topk)
    y = expert_matmul(dispatch(x, handle), own["w"], handle)
    return x + combine(y, jnp.tanh(jnp.max(scores, -1, keepdims=True)), handle)


def in_scan(own, x, plan):
    again = jax.checkpoint(lambda one, x: layer(one, x, plan))
    return jax.lax.scan(lambda x, one: (again(one, x), ()), x, own)[0]


def in_branches(own, x, plan):
    """The second layer has no experts."""
    for number in range(LAYERS):
        one = jax.tree.map(lambda leaf, number=number: leaf[number], own)
        branches = lambda one, x: layer(one, x, plan), lambda one, x: x
        x = jax.lax.switch(jnp.int32(number), branches, one, x)
    return x


def in_jit(own, x, plan):
    """One layer after the other, each in a function that is compiled by itself and traced once."""
    inner = jax.jit(lambda one, x: layer(one, x, plan))
    for number in range(LAYERS):
        x = inner(jax.tree.map(lambda leaf, number=number: leaf[number], own), x)
    return x


def first_of_expert(choice):
    """The first token of each expert has its slot."""
    return np.array([expert not in choice[:t] for t, expert in enumerate(choice)])


def first_of_pair(choice):
    """The first token for each two experts, whichever of the two it is for."""
    return first_of_expert(choice // 2)


def lowest_of_pair(choice):
    """The first token of the lower of two experts, or of the higher if nobody wants the lower."""
    return first_of_expert(choice) & ((choice % 2 == 0) | ~np.isin(choice - 1, choice))


def by_numpy(params, batch, num_devices, kept, layers):
    """Drops of the plain model, each device with its own tokens."""
    dropped = 0
    for x in batch.reshape(MICROBATCHES * num_devices, TOKENS // num_devices, WIDTH).astype(np.float64):
        for router, w in zip(params["stages"]["router"], params["stages"]["w"], strict=True):
            for number in range(layers):
                scores = x @ router[number]
                choice = np.argmax(scores, -1)
                there = kept(choice)
                dropped += np.sum(~there)
                x = x + np.einsum("t,td,tdf->tf", there * np.tanh(scores.max(-1)), x, w[number][choice])
    return dropped


def two_hops(topk):
    """A device may send each of two nodes one token."""
    return plan_two_hops(topk, EXPERTS, ("node", "ep"), lambda t, e: plan_dropless(t, e, "ep"), 1)


CASES = {
    # layers, plan, ep, what the plan keeps of a device's choices, layers with experts, schedule
    "capacity, in a scan": (
        in_scan,
        lambda topk: plan_capacity(topk, EXPERTS, 1, "ep"),
        2,
        first_of_expert,
        LAYERS,
        dualpipe(2, MICROBATCHES),
    ),
    "bounded buffers, in a branch": (
        in_branches,
        lambda topk: plan_dropless(topk, EXPERTS, "ep", 0.5),
        2,
        lowest_of_pair,
        1,
        one_f_one_b(2, MICROBATCHES),
    ),
    "two hops, compiled apart": (
        in_jit,
        two_hops,
        (2, 2),
        first_of_pair,
        LAYERS,
        one_f_one_b(2, MICROBATCHES),
    ),
    "dropless": (
        in_scan,
        lambda topk: plan_dropless(topk, EXPERTS, "ep"),
        2,
        lambda choice: np.ones(len(choice), bool),
        LAYERS,
        one_f_one_b(2, MICROBATCHES),
    ),
}


def experts_model(layers, plan):
    def stage(own, shared, x, at):
        y = layers(own, at.batch if x is None else x, plan)
        return Out(y, {"l": jnp.mean(y**2)})

    return StagedModel({"moe": stage}, ("moe",) * NUM_STAGES)


def given():
    rng = np.random.default_rng(0)
    stages = {
        "router": rng.standard_normal((NUM_STAGES, LAYERS, WIDTH, EXPERTS), np.float32),
        "w": rng.standard_normal((NUM_STAGES, LAYERS, EXPERTS, WIDTH, WIDTH), np.float32) / 2,
    }
    return {"stages": stages, "shared": {}}, rng.standard_normal((MICROBATCHES, TOKENS, WIDTH), np.float32)


@pytest.mark.parametrize("case", CASES)
def test_the_report_counts_what_is_dropped(case):
    layers, plan, ep, kept, with_experts, schedule = CASES[case]
    params, batch = given()
    wanted = by_numpy(params, batch, np.prod(ep), kept, with_experts)
    assert (wanted > 0) == (case != "dropless")
    experts = PartitionSpec(None, "ep" if ep == 2 else ("node", "ep"))
    pipeline = Pipeline(
        experts_model(layers, plan),
        schedule,
        make_mesh(2, ep),
        param_specs={"stages": {"router": None, "w": experts}},
    )
    (_, report), _ = quick(pipeline._step)(params, batch)
    assert report.metrics == {} and report.dropped.dtype == jnp.int32
    assert report.dropped == wanted
    if "scan" in case:
        assert quick(pipeline._apply)(params, batch).report.dropped == wanted


@pytest.mark.slow
def test_counting_leaves_losses_and_gradients_alone():
    """Of stages whose drops are counted: those of the plain layers."""
    params, batch = given()
    plan = lambda topk: plan_capacity(topk, EXPERTS, 1)  # noqa: E731
    model = experts_model(in_scan, plan)

    def loss(params):
        total = 0.0
        for x in batch:
            for stage in range(2):
                x = in_scan(jax.tree.map(lambda leaf, stage=stage: leaf[stage], params["stages"]), x, plan)
                total += jnp.mean(x**2) / MICROBATCHES
        return total

    objective, gradients = quick(jax.value_and_grad(loss))(params)
    wanted = by_numpy(params, batch, 1, first_of_expert, LAYERS)
    for step in (
        reference_value_and_grad(model),
        Pipeline(model, one_f_one_b(2, MICROBATCHES), make_mesh(2, 1))._step,
    ):
        (found, report), found_gradients = quick(step)(params, batch)
        np.testing.assert_allclose(found, objective, rtol=1e-6)
        assert_close(found_gradients, gradients)
        assert report.dropped == wanted > 0


def test_a_plan_out_of_sight_is_warned_of():
    """A function with a derivative of its own is not looked into."""

    @jax.custom_vjp
    def opaque(own, x):
        return in_jit(own, x, lambda topk: plan_capacity(topk, EXPERTS, 1))

    opaque.defvjp(lambda own, x: (opaque(own, x), (own, x)), lambda kept, dy: (kept[0], dy))
    model = experts_model(lambda own, x, plan: opaque(own, x), None)
    pipeline = Pipeline(model, one_f_one_b(2, MICROBATCHES), make_mesh(2, 1))
    with pytest.warns(UserWarning, match="'dualpipe_dropped' inside custom_vjp_call is not seen"):
        jax.eval_shape(pipeline._apply, *given())
