"""What is kept and what is handed over, in bytes counted by hand."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from split_checks import BATCH, HIDDEN, WIDTH, block, block_params, mlp, norm, normal
from test_split import ATTENTION, LAYERS, X, attention, cast, choose, scanned

from dualpipe_jax.split import split_backward
from tests.jaxprs import total_bytes

F32 = 4
ROWS = F32 * BATCH * WIDTH  # one [B, D]
WIDE = F32 * BATCH * HIDDEN  # one [B, F]
GAIN = F32 * WIDTH  # one [D]


def plan_of(f, params, x, **options):
    return split_backward(f, **options).trace(params, x)


def held_for_weights(plan):
    """What W waits with: from F on, and from I on."""
    return total_bytes(plan.residuals_w) + total_bytes(plan.stash)


def shapes(types):
    return sorted(kind.shape for kind in types)


def test_mlp_hands_over_the_cotangent_of_each_linear():
    plan = plan_of(mlp, block_params(), X)
    assert shapes(plan.stash) == [(BATCH, WIDTH), (BATCH, HIDDEN)]
    assert shapes(plan.residuals_w) == [(BATCH, HIDDEN)]
    assert plan.residuals_i == [], "I reads it there, too"
    assert plan.keep_input == "W"


def test_norm_hands_over_its_summed_gradient():
    """Not the two [B, D] that it sums: they would have to wait for W."""
    plan = plan_of(block, block_params(), X)
    assert held_for_weights(plan) == 2 * (ROWS + WIDE) + GAIN  # inputs and cotangents of the two linears
    assert plan.keep_input == "F"


def test_arithmetic_is_done_again_rather_than_kept():
    """gelu keeps its argument and its tanh, not the polynomials of them that jax.vjp saves."""

    def f(params, x):
        return jax.nn.gelu(x @ params["up"]) @ params["down"]

    plan = plan_of(f, block_params(), X)
    assert shapes([*plan.residuals_i, *plan.residuals_w]) == [(BATCH, HIDDEN)] * 2
    _, vjp = jax.vjp(f, block_params(), X)
    assert sum(leaf.shape == (BATCH, HIDDEN) for leaf in jax.tree.leaves(vjp)) > 2


def transformer_layer(params, x):
    x = attention(params, norm(params["scale1"], x)) + x
    h = jax.nn.silu(norm(params["scale2"], x) @ params["up"])
    return x + h @ params["down"]


def test_transformer_layer():
    """W holds the inputs of six linears, and is handed their six cotangents and two gains."""
    params = ATTENTION | {k: v for k, v in block_params().items() if k in ("up", "down")}
    params |= {"scale1": np.ones(WIDTH, np.float32), "scale2": np.ones(WIDTH, np.float32)}
    x = normal(30, 2, 4, WIDTH)  # as many rows as BATCH
    plan = plan_of(transformer_layer, params, x)
    cotangents = 4 * ROWS + WIDE + ROWS  # of q, k, v, o; up; down
    inputs = ROWS + ROWS + ROWS + WIDE  # of q, k and v together; o; up; down
    assert held_for_weights(plan) == inputs + cotangents + 2 * GAIN


def test_scanned_layers_cost_as_many_single_layers():
    single, layers = plan_of(block, block_params(), X), plan_of(scanned(block), LAYERS, X)
    for part in ("residuals_i", "residuals_w", "stash"):
        assert total_bytes(getattr(layers, part)) == 3 * total_bytes(getattr(single, part))


def test_what_all_iterations_read_is_kept_once():
    """Its bfloat16 copy is smaller, but every iteration makes one."""

    def f(params, x):
        same = jnp.sin(x)

        def layer(x, _):
            return jnp.tanh(x + (same.astype(jnp.bfloat16) @ params).astype(x.dtype)), None

        return lax.scan(jax.checkpoint(layer), x, None, length=3)[0]

    plan = plan_of(f, normal(0, WIDTH, WIDTH, dtype=jnp.bfloat16), X)
    assert held_for_weights(plan) == ROWS + 3 * ROWS // 2  # and each iteration's cotangent in bfloat16


def test_remat_keeps_only_the_input():
    for prevent_cse in (True, False):
        plan = plan_of(jax.checkpoint(block, prevent_cse=prevent_cse), block_params(), X)
        assert (plan.residuals_i, plan.residuals_w, plan.keep_input) == ([], [], "I")
        # The recomputed inputs of the linears are handed over, but not what they are recomputed from.
        assert total_bytes(plan.stash) == 2 * (ROWS + WIDE) + GAIN
    layers = plan_of(scanned(jax.checkpoint(block)), LAYERS, X)
    assert shapes(layers.residuals_i) == [(3, BATCH, WIDTH)]
    assert layers.residuals_w == []


def test_policies_keep_what_they_name():
    policies = jax.checkpoint_policies
    dots = plan_of(jax.checkpoint(block, policy=policies.dots_saveable), block_params(), X)
    assert shapes([*dots.residuals_i, *dots.residuals_w]) == [(BATCH, HIDDEN)]
    assert dots.flops.backward == 2 * dots.flops.forward
    nothing = plan_of(jax.checkpoint(block, policy=policies.nothing_saveable), block_params(), X)
    assert nothing.flops.backward > 2 * nothing.flops.forward


def test_casts_of_parameters_are_made_again():
    plan = plan_of(cast(block), block_params(), X)
    assert held_for_weights(plan) == (2 * (ROWS + WIDE) + GAIN) // 2
    layers = plan_of(scanned(cast(block)), LAYERS, X)
    assert held_for_weights(layers) == 3 * (2 * (ROWS + WIDE) + GAIN) // 2
    assert all(kind.shape[1] == BATCH for kind in (*layers.residuals_i, *layers.residuals_w))


def test_a_cond_keeps_no_parameter_and_shares_places():
    """Each branch would keep two [B, F] of its own; the parameters it reads are not among its outputs."""

    def f(params, x):
        def branch(act):
            return lambda x: x + act(x @ params["up"]) @ params["down"]

        return lax.cond(x.sum() > 0, branch(jnp.sin), branch(jnp.cos), x)

    plan = plan_of(f, block_params(), X)
    assert shapes([*plan.residuals_i, *plan.residuals_w]) == [(), (BATCH, HIDDEN), (BATCH, HIDDEN)]
    assert shapes(plan.stash) == [(BATCH, WIDTH), (BATCH, HIDDEN)]


def test_a_scan_in_a_cond_keeps_no_parameter():
    def f(params, x):
        return lax.cond(x.sum() > 0, scanned(cast(block)), lambda params, x: x, params, x)

    plan = plan_of(f, LAYERS, X)
    kept = [kind.shape for kind in (*plan.residuals_i, *plan.residuals_w)]
    assert all(shape == () or shape[:2] == (3, BATCH) for shape in kept)
    choice = plan_of(scanned(choose), LAYERS, X)
    assert all(kind.shape[:2] in ((3,), (3, BATCH)) for kind in (*choice.residuals_i, *choice.residuals_w))


def test_views_of_the_input_are_read_from_the_input():
    def f(params, x):
        transposed = x.T.reshape(-1)[None]
        return jnp.sin(transposed) @ params, x.astype(jnp.bfloat16)

    def g(params, x):
        folded = x.reshape(2, -1, WIDTH)
        return folded @ params["up"] + (x.astype(jnp.float16) @ params["half"]).astype(x.dtype).reshape(
            2, -1, HIDDEN
        )

    plan = plan_of(
        g, {"up": normal(0, WIDTH, HIDDEN), "half": normal(1, WIDTH, HIDDEN, dtype=jnp.float16)}, X
    )
    assert (plan.residuals_i, plan.residuals_w, plan.keep_input) == ([], [], "W")
    plan = plan_of(f, normal(0, BATCH * WIDTH, 2), X)
    assert shapes(plan.residuals_w) == [(1, BATCH * WIDTH)]  # sin of it


def test_broadcasts_and_masks_are_not_kept():
    def f(params, x):
        mask = jnp.tril(jnp.ones((BATCH, BATCH)))
        wide = jnp.broadcast_to(jnp.sin(x.sum(0)), x.shape) * x
        return (mask @ wide * jnp.exp(params["scale"])) @ params["up"]

    plan = plan_of(f, block_params(), X)
    kept = shapes([*plan.residuals_i, *plan.residuals_w])
    assert (BATCH, BATCH) not in kept
    # What the gain scales; the input of the linear is made of it again.
    assert kept.count((BATCH, WIDTH)) == 1
    assert (WIDTH,) in kept  # the root of the broadcast


def test_equal_values_are_kept_once():
    def f(params, x):
        h = jnp.sin(x)
        return sum(h.astype(jnp.bfloat16) @ params[name] for name in "abc")

    params = {name: normal(i, WIDTH, WIDTH, dtype=jnp.bfloat16) for i, name in enumerate("abc")}
    plan = plan_of(f, params, X)
    assert [(kind.shape, kind.dtype) for kind in plan.residuals_w] == [(X.shape, jnp.bfloat16)]
    assert [(kind.shape, kind.dtype) for kind in plan.stash] == [(X.shape, jnp.bfloat16)]


def test_a_parameter_of_a_frozen_layer_costs_nothing():
    plan = plan_of(lambda p, x: (x @ lax.stop_gradient(p["up"])) @ p["down"], block_params(), X)
    assert plan.flops.weight == plan.flops.input // 2
    assert shapes(plan.residuals_w) == [(BATCH, HIDDEN)]


def test_integer_input_of_an_embedding_waits_for_the_weights():
    plan = plan_of(lambda table, t: jnp.take(table, t, axis=0, mode="clip"), X, np.arange(5, dtype=np.int32))
    assert total_bytes(plan.stash) == 5 * WIDTH * F32
    assert total_bytes(plan.residuals_w) <= 5 * 4


def test_unrolled_layers_hold_as_many_times_what_one_does():
    def deep(params, x):
        for index in range(12):
            x = transformer_layer(jax.tree.map(lambda a, index=index: a[index], params), x)
        return x

    params = ATTENTION | {k: v for k, v in block_params().items() if k in ("up", "down")}
    params |= {"scale1": np.ones(WIDTH, np.float32), "scale2": np.ones(WIDTH, np.float32)}
    types = jax.tree.map(lambda a: jax.ShapeDtypeStruct((12, *a.shape), a.dtype), params)
    plan = plan_of(deep, types, jax.ShapeDtypeStruct((2, 4, WIDTH), jnp.float32))
    assert held_for_weights(plan) == 12 * (8 * ROWS + 2 * WIDE + 2 * GAIN)
