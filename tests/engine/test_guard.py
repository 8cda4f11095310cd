"""Work that only some want, on what guards must be able to carry."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dualpipe_jax.engine.guard import run_if


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
