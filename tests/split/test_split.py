"""Every construct a stage may hold: the same gradients as ``jax.vjp``, from two parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from split_checks import (
    BATCH,
    HIDDEN,
    WIDTH,
    assert_trees_match,
    block,
    block_params,
    check_split,
    compiled,
    mlp,
    normal,
    run_parts,
    step_by_step,
    vjp,
)

from dualpipe_jax.split import split_backward
from tests.jaxprs import applied, total_bytes
from tests.jaxprs import named as named_in

POLICIES = jax.checkpoint_policies
X = normal(10, BATCH, WIDTH)
TOKENS = np.arange(BATCH, dtype=np.int32) % 5
LAYERS = block_params(num_layers=3)


def scanned(body):
    """``body`` once per layer."""
    return lambda params, x: lax.scan(lambda x, layer: (body(layer, x), None), x, params)[0]


def cast(f):
    """``f`` in bfloat16, of float32 parameters."""

    def half(tree):
        return jax.tree.map(lambda a: a.astype(jnp.bfloat16), tree)

    return lambda params, x: f(half(params), half(x)).astype(x.dtype)


def choose(params, x):
    return lax.cond(x.sum() > 0, lambda x: block(params, x), lambda x: 2 * mlp(params, x), x)


def switch(params, x):
    branches = [
        lambda x: block(params, x),
        lambda x: x,
        lambda x: mlp(params, x),
        lambda x: x * params["scale"],
    ]
    return lax.switch(TOKENS[2] + (x.sum() > 0).astype(jnp.int32), branches, x)


def pick(params, x):
    """Branches that compute nothing."""
    h = x @ params["up"]
    return lax.cond(x.sum() > 0, lambda a, b: a, lambda a, b: b, jnp.sin(h), jnp.cos(h)) @ params["down"]


def shared(params, x):
    for _ in range(3):
        x = block(params, x)
    return x


def shared_scan(params, x):
    return lax.scan(lambda x, _: (block(params, x), None), x, None, length=3)[0]


def named(params, x):
    h = checkpoint_name(x @ params["up"], "up")
    return x + jnp.sin(h) @ params["down"]


@jax.custom_jvp
def softsign(x):
    return x / (1 + jnp.abs(x))


@softsign.defjvp
def _softsign_jvp(primals, tangents):
    (x,), (t,) = primals, tangents
    return softsign(x), t / (1 + jnp.abs(x)) ** 2


@jax.custom_vjp
def scaled_matmul(x, w):
    return 0.5 * (x @ w)


scaled_matmul.defvjp(
    lambda x, w: (scaled_matmul(x, w), (x, w)), lambda res, dy: (0.5 * (dy @ res[1].T), 0.5 * (res[0].T @ dy))
)


def custom(params, x):
    return softsign(scaled_matmul(x, params["up"])) @ params["down"]


def attention(params, x):
    """[B, T, D] with two heads and a causal mask."""
    T = x.shape[1]
    q, k, v = (jnp.einsum("btd,dhk->bthk", x, params[name]) for name in "qkv")
    scores = jnp.einsum("bthk,bshk->bhts", q, k)
    causal = jnp.arange(T)[:, None] >= jnp.arange(T)
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9))
    return x + jnp.einsum("bthk,hkd->btd", jnp.einsum("bhts,bshk->bthk", weights, v), params["o"])


ATTENTION = {name: normal(20 + i, WIDTH, 2, 8) for i, name in enumerate("qkv")} | {
    "o": normal(24, 2, 8, WIDTH)
}


def convolve(params, x):
    x = lax.conv_general_dilated(x, params["k"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jax.nn.relu(x)


def ragged(params, x):
    return jnp.tanh(lax.ragged_dot(x, params["experts"], jnp.array([3, 1, 4])))


def loop(params, x):
    """A while loop (not differentiated) sets how much a layer counts."""
    count = lax.while_loop(lambda n: n < 3, lambda n: n + 1, TOKENS[1])
    return block(params, x) * count.astype(x.dtype)


CASES = {
    "linear": (lambda w, x: x @ w, normal(1, WIDTH, WIDTH), X),
    "mlp": (mlp, block_params(), X),
    "block": (block, block_params(), X),
    "attention": (attention, ATTENTION, normal(30, 2, 6, WIDTH)),
    "remat": (jax.checkpoint(block), block_params(), X),
    "nothing_saveable": (jax.checkpoint(block, policy=POLICIES.nothing_saveable), block_params(), X),
    "dots_saveable": (jax.checkpoint(block, policy=POLICIES.dots_saveable), block_params(), X),
    "everything_saveable": (jax.checkpoint(block, policy=POLICIES.everything_saveable), block_params(), X),
    "only_names": (jax.checkpoint(named, policy=POLICIES.save_only_these_names("up")), block_params(), X),
    "scan": (scanned(block), LAYERS, X),
    "scan of remat": (scanned(jax.checkpoint(block)), LAYERS, X),
    "scan of dots_saveable": (
        scanned(jax.checkpoint(block, policy=POLICIES.dots_saveable, prevent_cse=False)),
        LAYERS,
        X,
    ),
    "remat of scan": (jax.checkpoint(scanned(block)), LAYERS, X),
    "nested scan": (scanned(scanned(block)), jax.tree.map(lambda a: np.stack([a, -a]), LAYERS), X),
    "reverse scan": (lambda p, x: lax.scan(lambda x, p: (block(p, x), x), x, p, reverse=True), LAYERS, X),
    "shared": (shared, block_params(), X),
    "shared in scan": (shared_scan, block_params(), X),
    "cond": (choose, block_params(), np.abs(X)),
    "cond, other branch": (choose, block_params(), -np.abs(X)),
    "switch": (switch, block_params(), np.abs(X)),
    "cond that picks": (pick, block_params(), X),
    # Two of its layers take one branch, one the other.
    "cond in scan": (scanned(choose), LAYERS, -X),
    "scan in cond": (lambda p, x: lax.cond(x[0, 0] < 9, scanned(block), lambda p, x: x, p, x), LAYERS, X),
    "remat of cond": (jax.checkpoint(choose), block_params(), np.abs(X)),
    "custom rules": (custom, block_params(), X),
    "remat of custom rules": (jax.checkpoint(custom), block_params(), X),
    "convolution": (convolve, {"k": normal(2, 3, 3, 4, 6)}, normal(3, 2, 5, 5, 4)),
    "ragged_dot": (ragged, {"experts": normal(4, 3, WIDTH, HIDDEN)}, X),
    "while": (loop, block_params(), X),
    "jit inside": (jax.jit(block), block_params(), X),
    "embedding": (lambda p, t: p["up"][t], block_params(), TOKENS),
    "embedding and block": (lambda p, t: block(p, p["down"][t]), block_params(), TOKENS),
    "several inputs": (
        lambda p, x: {"x": block(p, x["x"]) * x["gain"], "tokens": x["tokens"]},
        block_params(),
        {"x": X, "gain": normal(5, WIDTH), "tokens": TOKENS},
    ),
    "integer parameter": (lambda p, x: block(p[0], x)[p[1]], (block_params(), TOKENS), X),
    "unused parameter": (lambda p, x: x * p["scale"], block_params(), X),
    "unused input": (lambda p, x: p["up"] @ p["down"], block_params(), X),
    "identity": (lambda p, x: x, block_params(), X),
    "weight product": (lambda p, x: x @ (p["up"] @ p["down"]), block_params(), X),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_vjp_bit_for_bit(name):
    f, params, x = CASES[name]
    check_split(f, params, x)


CAST = {
    "block": (cast(block), block_params()),
    "scan": (scanned(cast(block)), LAYERS),
    "scan of remat": (scanned(jax.checkpoint(cast(block))), LAYERS),
}


@pytest.mark.parametrize("name", CAST)
def test_bfloat16_casts(name):
    f, params = CAST[name]
    plan = check_split(f, params, X)
    assert all(kept.dtype == jnp.bfloat16 or kept.shape[-2:] == X.shape for kept in plan.residuals_i)
    assert all(kept.dtype == jnp.bfloat16 for kept in (*plan.residuals_w, *plan.stash))


WHOLE = ["reverse scan", "scan of dots_saveable", "nested scan", "cond in scan", "remat of cond", "switch"]
WHOLE += ["scan in cond", "custom rules", "attention", "ragged_dot", "several inputs", "shared in scan"]


@pytest.mark.thin(12)
@pytest.mark.parametrize("name", WHOLE)
def test_programs_compiled_whole_give_the_same_bits(name):
    f, params, x = CASES[name]
    check_split(f, params, x, run=compiled)


@pytest.mark.slow
def test_bfloat16_compiled_whole():
    """XLA may keep more than bfloat16 within a program, so equality is up to a few of its steps."""
    f, params = CAST["scan of remat"]
    check_split(f, params, X, run=compiled, exact=False, tolerance=2e-2)


def test_auxiliary_output_of_integer_counts():
    def f(params, x):
        return mlp(params, x), {"positive": (x > 0).sum(0), "mean": x.mean()}

    plan = check_split(f, block_params(), X, has_aux=True)
    assert plan.aux["positive"].dtype == jnp.int32


def test_front_door_agrees_with_vjp():
    split = split_backward(lambda params, x: (block(params, x), TOKENS), has_aux=True)

    def ours(params, x, dy):
        y_and_aux, residuals = split.forward(params, x)
        dx, stash = split.backward_input(params, x, residuals, dy)
        dparams = split.backward_weight(params, x, residuals, stash)
        return y_and_aux, (dparams, dx), split.backward(params, x, residuals, dy)

    def theirs(params, x, dy):
        y, pull = jax.vjp(block, params, x)
        return (y, TOKENS), pull(dy), pull(dy)

    arguments = block_params(), X, normal(6, BATCH, WIDTH)
    assert_trees_match(step_by_step(theirs, *arguments), step_by_step(ours, *arguments), exact=True)


def test_plan_is_traced_once_per_type_and_computes_nothing():
    calls = []

    def f(params, x):
        calls.append(1)
        return block(params, x)

    split = split_backward(f)
    types = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (block_params(), X))
    plan = split.trace(*types)
    assert split.trace(*types) is plan
    assert len(calls) == 1
    split.trace(types[0], jax.ShapeDtypeStruct((2, WIDTH), jnp.float32))
    assert len(calls) == 2


def test_a_plan_is_of_one_size_of_a_named_axis():
    split = split_backward(lambda w, x: jax.lax.psum(x @ w, "batch") / jax.lax.axis_size("batch"))
    for size in (2, 4):
        xs, w = np.stack([k * X for k in range(size)]), np.eye(WIDTH, dtype=np.float32)
        y, _ = jax.vmap(lambda x, w=w: split.forward(w, x), axis_name="batch")(xs)
        np.testing.assert_allclose(y, np.broadcast_to(xs.mean(0), xs.shape), rtol=1e-5)


def test_captured_tracers_are_not_kept():
    def outer(scale):
        split = split_backward(lambda w, x: scale * (x @ w))
        return split.trace(X, X.T) is split.trace(X, X.T)

    captured = []
    jax.make_jaxpr(lambda s: captured.append(outer(s)) or s)(1.0)
    assert captured == [False]


def test_works_under_vmap_and_in_a_cond():
    plan = split_backward(mlp).trace(block_params(), X)

    def guarded(params, x, dy):
        def gradients(*arguments):
            return run_parts(plan, *arguments)[1]

        return lax.cond(x[0, 0] < 9, gradients, lambda params, x, dy: (params, x), params, x, dy)

    xs = np.stack([X, 2 * X])
    ours = step_by_step(jax.vmap(guarded, (None, 0, 0)), block_params(), xs, xs)
    want = step_by_step(jax.vmap(vjp(mlp), (None, 0, 0)), block_params(), xs, xs)
    assert_trees_match(want, ours, exact=False, tolerance=2e-6)


def test_what_is_recomputed_is_behind_barriers_where_jax_has_them():
    """In one program, XLA would undo ``jax.checkpoint`` without them."""
    fenced = []
    for f in (block, jax.checkpoint(block), jax.checkpoint(block, prevent_cse=False)):
        plan = split_backward(f).trace(block_params(), X)

        def ours(params, x, dy, plan=plan):
            y, _, residuals_i, residuals_w = plan.forward(params, x)
            return y, plan.backward(params, x, residuals_i, residuals_w, dy)

        texts = [jax.jit(g).lower(block_params(), X, X).as_text() for g in (ours, vjp(f))]
        fenced.append(["optimization_barrier" in text for text in texts])
    assert fenced == [[False] * 2, [True] * 2, [False] * 2]


def test_side_effects_happen_once():
    """The backward's own, in the input part; and though nobody reads what it makes."""
    seen, led_back = [], []

    @jax.custom_vjp
    def watched(x):
        return x

    def backward(_, dy):
        jax.debug.callback(lambda v: led_back.append(float(v)), dy[0, 0])
        return (dy,)

    watched.defvjp(lambda x: (x, None), backward)

    def f(params, x):
        jax.debug.callback(lambda v: seen.append(float(v)), x[0, 0])
        return jnp.sin(watched(x @ params))

    w = normal(1, WIDTH, WIDTH)
    plan = split_backward(f).trace(w, X)
    _, _, residuals_i, residuals_w = jax.jit(plan.forward)(w, X)
    jax.effects_barrier()
    assert (len(seen), len(led_back)) == (1, 0)
    _, stash = jax.jit(plan.backward_input)(w, X, residuals_i, residuals_w, X)
    jax.effects_barrier()
    assert (len(seen), len(led_back)) == (1, 1)
    jax.block_until_ready(plan.backward_weight(w, X, residuals_w, stash))
    jax.effects_barrier()
    assert (len(seen), len(led_back)) == (1, 1)


def test_wrong_tree_is_named():
    plan = split_backward(block).trace(block_params(), X)
    with pytest.raises(ValueError, match="split: params is not the tree that was traced"):
        plan.forward({"up": X}, X)
    with pytest.raises(ValueError, match="split: x is not the tree"):
        plan.forward(block_params(), (X, X))
    wrong = block_params() | {"up": X}
    with pytest.raises(ValueError, match=r"params\['up'\]: traced float32\[16, 32\], given float32\[8,16\]"):
        plan.forward(wrong, X)
    with pytest.raises(ValueError, match=r"dy: traced float32\[8, 16\], given bfloat16\[8,16\]"):
        plan.backward_input(block_params(), X, [], [], X.astype(jnp.bfloat16))


def test_input_part_is_empty_for_integer_inputs():
    plan = split_backward(lambda p, t: block(p, p["down"][t])).trace(block_params(), TOKENS)
    assert not applied(plan, "input")
    assert total_bytes(plan.stash) == 4 * BATCH * WIDTH
    # Not even the sum over the batch that a gain's gradient is, though it takes less room.
    gain = split_backward(lambda p, t: p * jnp.sin(t.astype(p.dtype))[:, None]).trace(X[0], TOKENS)
    assert not applied(gain, "input")


def test_scatter_add_belongs_to_the_weights():
    def f(params, x):
        return block(params, x) + params["down"][TOKENS]

    plan = check_split(f, block_params(), X)
    assert applied(plan, "weight")["scatter-add"] == 1
    assert applied(plan, "input")["scatter-add"] == 0


def of_rule(rule):
    """A matrix product with a backward of the user's own: ``rule(x, w, dy) -> (dx, dw)``."""
    product = jax.custom_vjp(lambda x, w: x @ w)
    product.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, dy: rule(*saved, dy))
    return lambda w, x: product(x, w)


def both_in_one_cond(x, w, dy):
    dx, dw = dy @ w.T, x.T @ dy
    doubled = lambda dx, dw: (2 * dx, jnp.broadcast_to(dw.sum(0), dw.shape))  # noqa: E731
    return lax.cond(dx.sum() > 9, doubled, lambda dx, dw: (dx, 3 * dw), dx, dw)


def both_summed_in_one_cond(x, w, dy):
    def step(carry, row):
        x, dy = row
        add = lambda dx, dw: (dx + dy @ w.T, dw + x[:, None] * dy)  # noqa: E731
        carry = lax.cond(dy.sum() > 0, add, lambda dx, dw: (-dx, 2 * dw), *carry)
        return carry, carry[0]

    (_, dw), dx = lax.scan(step, (0 * x[0], 0 * w), (x, dy))
    return dx, dw


def both_in_one_scan(x, w, dy):
    dx, sums = lax.scan(lambda dx, row: (-dx, row.sum()), dy @ w.T, x.T @ dy)
    return dx, jnp.broadcast_to(sums, w.shape)


@pytest.mark.parametrize("rule", [both_in_one_cond, both_in_one_scan, both_summed_in_one_cond])
def test_what_holds_both_gradients_takes_no_weight_gradient_into_the_input_part(rule):
    """What it does to dw is cheap enough to move, but what that reads is W's."""
    plan = check_split(of_rule(rule), normal(1, WIDTH, WIDTH), X)
    if rule is not both_summed_in_one_cond:
        assert plan.flops.input == plan.flops.weight == 2 * BATCH * WIDTH * WIDTH


def test_dx_needs_no_weight_gradient():
    """I spends the FLOPs of dx alone."""
    for f, params in ((block, block_params()), (scanned(block), LAYERS)):
        plan = split_backward(f).trace(params, X)
        alone = split_backward(lambda _, x, f=f, params=params: f(params, x)).trace((), X)
        assert plan.flops.input == alone.flops.backward


def test_captured_scalars_that_print_alike_are_told_apart():
    near = np.float32(0.1), np.float32(0.1) + np.float32(2**-27)
    assert near[0] != near[1]

    def f(params, x, captured):
        zeros_of_both_signs = jnp.atan2(0.0 * x[:, :1] ** 2, -1.0) - jnp.atan2(-0.0 * x[:, :1] ** 2, -1.0)
        return sum(jnp.sin(x * c) for c in captured) @ params["up"] * zeros_of_both_signs

    check_split(lambda params, x: f(params, x, near), block_params(), X)

    def traced(c):
        return split_backward(lambda p, x: f(p, x, (c, 2 * c))).forward(block_params(), X)[0]

    want = step_by_step(lambda c: f(block_params(), X, (c, 2 * c)), near[0])
    assert_trees_match(want, step_by_step(traced, near[0]), exact=True)


def test_arrays_of_jax_and_constants():
    mask = np.tril(np.ones((BATCH, BATCH), np.float32))
    w, x = jnp.asarray(normal(1, WIDTH, WIDTH)), jnp.asarray(X)
    check_split(lambda w, x: mask @ jnp.tanh(x @ w) + np.float32(1), w, x)


def test_what_is_saved_by_name_is_not_rounded_to_what_it_is():
    """``jax.checkpoint`` does so to all that a policy saves. What rounds to fewer bits stays."""

    def rounds(params, x):
        h = lax.reduce_precision(x @ params["up"], exponent_bits=8, mantissa_bits=7)
        return jnp.tanh(checkpoint_name(h, "up")) @ params["down"]

    saved = jax.checkpoint(rounds, policy=POLICIES.save_only_these_names("up"))
    params, x = block_params(), X
    jaxpr = jax.make_jaxpr(lambda params, x: jax.vjp(saved, params, x)[1](x))(params, x)
    assert {eqn.params["mantissa_bits"] for eqn in named_in(jaxpr.jaxpr, "reduce_precision")} == {7, 23}
    programs = split_backward(saved).trace(params, x).programs
    roundings = [n for program in programs for n in program.equations if n.name == "reduce_precision"]
    assert roundings and {node.params["mantissa_bits"] for node in roundings} == {7}
