"""Work that only some want, on what guards must be able to carry."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dualpipe_jax import Pipeline, PipelineModel, make_mesh, staged
from dualpipe_jax.engine.guard import run_if, run_one
from dualpipe_jax.engine.state import Entry, State
from dualpipe_jax.schedule import dualpipe_v
from tests.jaxprs import named


@pytest.mark.parametrize("wanted", [False, True])
def test_state_and_operands_may_hold_keys_and_integers(wanted):
    state = {"key": jax.random.key(0), "sum": jnp.zeros(3), "count": jnp.int32(2)}
    operands = {"keys": jax.random.split(jax.random.key(1), 2), "scale": jnp.float32(2)}

    def work(state, operands):
        key = jax.random.fold_in(operands["keys"][1], state["count"])
        return {"key": key, "sum": state["sum"] + operands["scale"], "count": state["count"] + 1}

    got = jax.jit(lambda wanted, *rest: run_if(wanted, work, *rest))(jnp.bool_(wanted), state, operands)
    want = work(state, operands) if wanted else state
    np.testing.assert_array_equal(jax.random.key_data(got["key"]), jax.random.key_data(want["key"]))
    np.testing.assert_array_equal(got["sum"], want["sum"])
    assert got["count"] == want["count"]


@pytest.mark.parametrize("wanted", [False, True])
def test_a_pool_may_lie_in_the_hosts_memory(wanted):
    """As what a policy offloads does."""
    host, device = jax.memory.Space.Host, jax.memory.Space.Device

    def step(wanted, x):
        pool = jax.device_put(jnp.zeros((3, *x.shape)), host)

        def work(pool, x):
            pool = jax.lax.dynamic_update_index_in_dim(pool, jax.device_put(jnp.sin(x), host), 1, 0)
            assert jax.typeof(pool).memory_space is host
            return pool

        return jax.device_put(run_if(wanted, work, pool, x), device)

    x = jnp.arange(4.0)
    got = jax.jit(step)(jnp.bool_(wanted), x)
    want = np.zeros((3, 4))
    want[1] = wanted * np.sin(np.arange(4.0))
    np.testing.assert_allclose(got, want, rtol=1e-6)


SUM = Entry("own", (0, 0))


def add(state, x):
    return state.put(own={(0, 0): state.own[0, 0] + 2 * x}, losses={"loss": state.losses["loss"] + x.sum()})


@pytest.mark.parametrize("form", ["loop", "switch"])
def test_sums_go_around_the_barrier(form):
    """On GPU no product adds to what comes out of one: it is written, and the sum after it."""
    state = State(own={(0, 0): jnp.zeros((5, 3))}, losses={"loss": jnp.zeros(())})

    def run(state, x):
        if form == "loop":
            return run_if(jnp.bool_(True), add, state, x, sums=[SUM])
        return run_one(jnp.int32(0), [add], state, x, sums=[SUM])

    program = jax.make_jaxpr(run)(state, jnp.ones((5, 3)))
    (barrier,) = named(program.jaxpr, "optimization_barrier")
    shapes = sorted(v.aval.shape for v in barrier.invars)
    assert shapes == [()] * (2 if form == "loop" else 1) + [(5, 3)], "the loss, x, and a loop's number"
    made = jax.jit(run)(state, jnp.ones((5, 3)))
    np.testing.assert_array_equal(made.own[0, 0], np.full((5, 3), 2.0))
    assert made.losses["loss"] == 15


@pytest.mark.parametrize("number", [0, 1, -1, 2])
def test_a_branch_begins_with_what_holds_nothing_yet(number):
    """It is no operand of the conditional, and the branch that does nothing has it, too."""
    state = State(own={(0, 0): jnp.zeros(4)})

    def begin(state):
        return state.put(under_way={"y": jnp.full(7, -1.0)})

    def send(state, x):
        return state.put(under_way={"y": state.under_way["y"] + x})

    def keep(state, x):
        return state.put(own={(0, 0): state.own[0, 0] + x})

    def run(number, state, x):
        return run_one(number, [send, keep], state, x, sums=[SUM], begin=begin)

    program = jax.make_jaxpr(run)(jnp.int32(number), state, jnp.float32(3))
    (conditional,) = named(program.jaxpr, "cond")
    assert (7,) not in [v.aval.shape for v in conditional.invars]
    made = jax.jit(run)(jnp.int32(number), state, jnp.float32(3))
    np.testing.assert_array_equal(made.under_way["y"], np.full(7, 2.0 if number == 0 else -1.0))
    np.testing.assert_array_equal(made.own[0, 0], np.full(4, 3.0 if number == 1 else 0.0))


@pytest.mark.parametrize("form", ["loop", "switch"])
def test_no_guard_of_the_engine_has_a_sum_pass_its_barrier(form):
    """Weights pass as bfloat16, so what passes as float32 in their shape would be a sum. What is sent is no operand."""
    width, schedule = 6, dualpipe_v(1, 3)
    model = PipelineModel(
        lambda p, tokens: p[tokens],
        lambda p, x: x + jnp.tanh(x @ p["w"]),
        lambda p, x, targets: jnp.mean(x @ p).astype(jnp.float32),
    )
    pipeline = Pipeline(
        staged(model, 2),
        schedule,
        make_mesh(1, 1),
        divergence=form,
        compute_dtype=jnp.bfloat16,
        fuse_pairs=True,
    )
    params = {
        "stages": {"w": jnp.ones((2, width, width))},
        "shared": {"embed": jnp.ones((5, width)), "head": jnp.ones((width, 3))},
    }
    tokens = jnp.zeros((3, 1, 4), jnp.int32)
    program = jax.make_jaxpr(pipeline.value_and_grad)(params, {"inputs": tokens, "targets": tokens})
    columns = (len(pipeline.table(params, {"inputs": tokens, "targets": tokens}).columns),)
    barriers = [[v.aval for v in e.invars] for e in named(program.jaxpr, "optimization_barrier")]
    # Those that a tick's row passes.
    guards = [avals for avals in barriers if columns in [a.shape for a in avals]]
    passing = [(a.shape, a.dtype) for avals in guards for a in avals]
    assert ((width, width), jnp.bfloat16) in passing and ((width, width), jnp.float32) not in passing
    for conditional in named(program.jaxpr, "cond"):
        sent = [v for v in conditional.invars if v.aval.shape == (1, 4, width)]
        assert not sent, "neither an output nor a gradient; pools have a dim for their slots"
