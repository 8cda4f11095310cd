"""Leaves that have no gradient, that want none, or that the function does not use."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from split_checks import (
    BATCH,
    HIDDEN,
    WIDTH,
    assert_trees_match,
    block,
    block_params,
    check_split,
    mlp,
    normal,
    step_by_step,
    vjp,
)

from dualpipe_jax.split import split_backward
from tests.jaxprs import total_bytes

X = normal(0, BATCH, WIDTH)
SEGMENTS = np.arange(BATCH) // 3
KEPT = np.arange(BATCH) % 4 > 0


def travelling(params, x):
    """Dropout, segments and a mask; all of x but its floats is handed on."""
    key, own = jax.random.split(x["key"])
    alike = x["segments"][:, None] == x["segments"]
    mixed = jax.nn.softmax(jnp.where(alike, x["x"] @ x["x"].T, -1e9)) @ x["x"]
    h = jnp.where(x["kept"][:, None], block(params["block"], mixed), x["x"])
    shift = jax.random.normal(params["key"], h.shape)
    dropped = (
        jnp.where(jax.random.bernoulli(own, 0.8, h.shape), h + shift, 0.0) * params["gain"][params["row"]]
    )
    return x | {"x": dropped, "key": key}


def scanned(params, x):
    """A key in a scan's carry, in its xs and in a cond, under remat."""

    def layer(x, item):
        key, own = jax.random.split(x["key"])
        w, dropout = item
        h = jnp.tanh(x["x"] @ w)
        noise = lax.cond(
            h.sum() > 0,
            lambda h, key: h * jax.random.normal(key, h.shape),
            lambda h, key: jnp.sin(h),
            h,
            jax.random.fold_in(dropout, 3),
        )
        return x | {"x": noise + jax.random.uniform(own, h.shape), "key": key}, None

    return lax.scan(jax.checkpoint(layer), x, (params["w"], params["keys"]))[0]


# With these numbers the layers of ``scanned`` take both branches.
TRAVELLER = {"x": normal(1, BATCH, WIDTH), "key": jax.random.key(3), "segments": SEGMENTS, "kept": KEPT}
PARAMS = {
    "block": block_params(),
    "key": jax.random.key(1),
    "gain": 1 + normal(2, 5, WIDTH),
    "row": np.int32(2),
}
STACKED = {"w": normal(3, 3, WIDTH, WIDTH), "keys": jax.random.split(jax.random.key(2), 3)}


def parts(plan, params, x, dy):
    """y, gradients by I and W, and gradients by B."""
    y, _, residuals_i, residuals_w = plan.forward(params, x)
    dx, stash = plan.backward_input(params, x, residuals_i, residuals_w, dy)
    dparams = plan.backward_weight(params, x, residuals_w, stash)
    return y, (dparams, dx), plan.backward(params, x, residuals_i, residuals_w, dy)


@pytest.mark.parametrize(("f", "params"), [(travelling, PARAMS), (scanned, STACKED)])
@pytest.mark.parametrize("handed", ["anything", "none"])
def test_integers_bools_and_keys_everywhere(f, params, handed):
    x = TRAVELLER if f is travelling else {name: TRAVELLER[name] for name in ("x", "key")}
    dy = normal(4, BATCH, WIDTH)

    def reference(params, x, dy):
        y, pull = jax.vjp(f, params, x)
        return y, pull(jax.tree.map(lambda leaf: np.zeros(leaf.shape, jax.dtypes.float0), y) | {"x": dy})

    y, want = step_by_step(reference, params, x, dy)
    plan = split_backward(f).trace(params, x)
    given = (y if handed == "anything" else dict.fromkeys(y)) | {"x": dy}
    got_y, halves, whole = step_by_step(
        lambda params, x, dy: parts(plan, params, x, given | {"x": dy}), params, x, dy
    )
    assert jax.tree.map(lambda a: a.dtype, got_y) == jax.tree.map(lambda a: a.dtype, y)
    assert_trees_match(jax.tree.map(bare, y), jax.tree.map(bare, got_y), exact=True)
    for got in (halves, whole):
        assert_trees_match(want, got, exact=True)


def bare(leaf):
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def test_branches_that_hand_over_keys_share_a_place():
    """The branch that makes no key fills the place with one."""

    def f(params, x):
        def noisy(x, key):
            key = jax.random.fold_in(key, x.astype(jnp.int32).sum())
            return jax.checkpoint(lambda x, key: jnp.sin(x * jax.random.normal(key, x.shape)))(x, key)

        return lax.cond(x.sum() > 0, noisy, lambda x, key: x, x @ params["w"], params["key"])

    params = {"w": normal(0, WIDTH, WIDTH), "key": jax.random.key(0)}
    for x in (X, -X):
        plan = check_split(f, params, x)
    assert any(jnp.issubdtype(kind.dtype, jax.dtypes.prng_key) for kind in plan.residuals_i)


# ------------------------------------------------------------------------------- masks


def test_what_is_frozen_costs_nothing():
    """Of a LoRA layer the large matrices have no gradient, keep nothing, and want no FLOPs."""

    def layer(params, x):
        def adapted(name, x):
            return x @ params[name] + (x @ params["lora"][name]["a"]) @ params["lora"][name]["b"]

        return x + adapted("down", jax.nn.silu(adapted("up", x)))

    rank = 2
    lora = {
        name: {"a": normal(1, rows, rank), "b": normal(2, rank, columns)}
        for name, rows, columns in (("up", WIDTH, HIDDEN), ("down", HIDDEN, WIDTH))
    }
    params = {name: block_params()[name] for name in ("up", "down")} | {"lora": lora}
    mask = {"up": False, "down": False, "lora": True}
    plan = split_backward(layer, wanted=(mask, True)).trace(params, X)
    _, halves, whole = step_by_step(lambda *arguments: parts(plan, *arguments), params, X, X)
    want = step_by_step(vjp(lambda lora, x: layer(params | {"lora": lora}, x)), lora, X, X)
    for dparams, dx in (halves, whole):
        assert dparams["up"] is None and dparams["down"] is None
        assert_trees_match(want, (dparams["lora"], dx), exact=True)
    assert plan.params.wanted == plan.params.has_gradient == [False, *[True] * 4, False]
    # a and b of both: [rows, rank] from x and what dy makes of b, [rank, columns] from x @ a and dy.
    assert plan.flops.weight == 2 * BATCH * 2 * rank * (WIDTH + HIDDEN)
    held = total_bytes(plan.residuals_w) + total_bytes(plan.stash)
    # Of up: x itself, x @ a, dy, dy @ b.T; of down: its input, that @ a, its dy (which is y's), dy @ b.T.
    assert held <= 4 * BATCH * (HIDDEN + 2 * rank + HIDDEN + 2 * rank + WIDTH)


def test_masks_of_x():
    def f(params, x):
        return mlp(params, x["a"]) * x["b"] + x["c"]

    x = {name: normal(k, BATCH, WIDTH) for k, name in enumerate("abc")}
    plan = split_backward(f, wanted=(True, {"a": True, "b": False, "c": True})).trace(block_params(), x)
    dparams, dx = step_by_step(vjp(f), block_params(), x, X)
    _, halves, whole = step_by_step(lambda *arguments: parts(plan, *arguments), block_params(), x, X)
    for got in (halves, whole):
        assert_trees_match((dparams, dx | {"b": None}), got, exact=True)
    frozen = split_backward(f, wanted=(False, False)).trace(block_params(), x)
    assert frozen.flops.backward == 0 and frozen.residuals_i == frozen.residuals_w == frozen.stash == []
    assert frozen.keep_input == "F"


def test_a_mask_must_be_a_prefix():
    with pytest.raises(ValueError, match="wanted must have bools in place of leaves or of whole branches"):
        split_backward(mlp, wanted=({"up": True}, True)).trace(block_params(), X)
    with pytest.raises(ValueError, match="at_hand must have bools"):
        split_backward(mlp, at_hand={"x": True}).trace(block_params(), X)


# ------------------------------------------------------------------- what is not used


def unused_in_a_scan(params, x):
    """The body is given all of the layers' parameters, and uses some."""

    def body(x, layer):
        return jnp.tanh(x @ layer["up"]) @ layer["down"] + 0 * x, None

    return lax.scan(body, x, params["layers"])[0] + params["shift"]


def unused_in_a_cond(params, x):
    return lax.cond(x.sum() > 0, lambda p: p["layers"]["up"][0].sum() * x, lambda p: p["shift"] * x, params)


@jax.custom_vjp
def own_rule(params, x):
    return x * params["shift"]


own_rule.defvjp(
    lambda params, x: (own_rule(params, x), (params, x)),
    lambda kept, dy: (
        jax.tree.map(jnp.zeros_like, kept[0]) | {"shift": (dy * kept[1]).sum(0)},
        dy * kept[0]["shift"],
    ),
)

USES = {
    "plain": (lambda params, x: x + params["shift"], {"shift"}),
    "scan": (unused_in_a_scan, {"up", "down", "shift"}),
    "cond": (unused_in_a_cond, {"up", "shift"}),
    "remat": (jax.checkpoint(lambda params, x: jnp.sin(x + params["shift"])), {"shift"}),
    "own rule": (own_rule, {"shift"}),
    "times zero": (lambda params, x: x + 0.0 * params["shift"], {"shift"}),
    "stopped": (lambda params, x: x + lax.stop_gradient(params["shift"]), set()),
}


@pytest.mark.parametrize("name", USES)
def test_leaves_that_are_not_used_have_no_entry(name):
    f, used = USES[name]
    params = {"layers": block_params(num_layers=2), "shift": normal(7, WIDTH), "number": np.int32(3)}
    plan = check_split(f, params, X)
    want, _ = step_by_step(vjp(f), params, X, X)
    paths = [path[-1].key for path, _ in jax.tree.leaves_with_path(params)]
    assert {path for path, has in zip(paths, plan.params.has_gradient, strict=True) if has} == used
    assert len(plan.programs.weight.outputs) == len(used)
    zeros = [not np.any(leaf) for leaf in jax.tree.leaves(want)]
    assert all(zero or has for zero, has in zip(zeros, plan.params.has_gradient, strict=True)), "oracle"


def test_an_input_that_is_not_used_has_no_entry():
    plan = check_split(lambda params, x: mlp(params, x["a"]), block_params(), {"a": X, "b": X})
    assert plan.x.has_gradient == [True, False] and plan.x.wanted == [True, True]


# ------------------------------------------------------------- how long x is read, leaf by leaf


def test_each_leaf_of_x_is_kept_as_long_as_it_is_read():
    def f(params, x):
        return x["early"] ** 2 + (x["late"] @ params["up"]) @ params["down"] + x["gain"] * params["scale"]

    params = block_params()
    x = {"early": X, "gain": normal(1, BATCH, WIDTH), "late": normal(2, BATCH, WIDTH), "unread": X}
    plan = split_backward(f).trace(params, x)
    assert plan.keep == ("I", "I", "W", "F") and plan.keep_input == "W"

    def parts(params, x, dy):
        _, _, residuals_i, residuals_w = plan.forward(params, x)
        dx, stash = plan.backward_input(params, x | {"unread": None}, residuals_i, residuals_w, dy)
        late = dict.fromkeys(x) | {"late": x["late"]}
        with pytest.raises(ValueError, match="x is not the tree"):
            plan.backward_weight(params, late | {"late": None}, residuals_w, stash)
        return plan.backward_weight(params, late, residuals_w, stash), dx

    want, got = (step_by_step(function, params, x, X) for function in (vjp(f), parts))
    assert_trees_match(want, got, exact=True)


def test_what_is_at_hand_is_read_again_and_not_kept():
    """A mask takes less room than the integers that it is made of, but these need none."""

    def f(params, x):
        x, tokens = x
        return jnp.where(tokens > 40, jnp.sin(x), 0.0) @ params["up"]

    tokens = jnp.arange(BATCH * WIDTH).reshape(BATCH, WIDTH)
    kept = split_backward(f).trace(block_params(), (X, tokens))
    plan = split_backward(f, at_hand=(False, True)).trace(block_params(), (X, tokens))
    assert jnp.bool_ in [kind.dtype for kind in kept.residuals_i] and kept.keep == ("F", "F")
    assert jnp.bool_ not in [kind.dtype for kind in plan.residuals_i]
    assert plan.keep == ("F", "I") and plan.keep_input == "F"

    def whole(params, x, dy):
        _, _, residuals_i, residuals_w = plan.forward(params, x)
        return plan.backward(params, (None, x[1]), residuals_i, residuals_w, dy)

    arguments = block_params(), (X, tokens), normal(1, BATCH, HIDDEN)
    want, got = (step_by_step(function, *arguments) for function in (vjp(f), whole))
    assert_trees_match(want, got, exact=True)
