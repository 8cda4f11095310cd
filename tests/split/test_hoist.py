"""Matmuls of parameters alone: made once, and their gradients led back once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec
from split_checks import BATCH, WIDTH, assert_trees_match, block, block_params, compiled, normal, step_by_step
from test_flops import flops_of, flops_of_vjp

from dualpipe_jax.made_once import made_once
from dualpipe_jax.split import hoist, split_backward
from dualpipe_jax.varying import vary
from tests.jaxprs import applied

X = normal(0, BATCH, WIDTH)
RANK = 2
LORA = {"w": normal(1, WIDTH, WIDTH), "a": normal(2, WIDTH, RANK), "b": normal(3, RANK, WIDTH)}
LAYERS = {name: np.stack([leaf, -leaf, 2 * leaf]) for name, leaf in LORA.items()}
PRODUCT = 2 * WIDTH * RANK * WIDTH  # FLOPs of a @ b
SQUARE = 2 * BATCH * WIDTH * WIDTH  # and of x @ w


def adapted(params):
    return params["w"] + params["a"] @ params["b"]


def lora(params, x):
    return jnp.sin(x @ adapted(params))


def in_halves(params, x):
    return jnp.sin(x.astype(jnp.bfloat16) @ adapted(params).astype(jnp.bfloat16).T).astype(x.dtype)


def scanned(params, x):
    return lax.scan(lambda x, layer: (lora(layer, x), None), x, params)[0]


def repeated(params, x):
    """The same parameters in every iteration."""
    return lax.scan(lambda x, _: (lora(params, x), None), x, None, length=3)[0]


@jax.custom_vjp
def own_rule(x):
    return jnp.sin(x)


own_rule.defvjp(lambda x: (jnp.sin(x), x), lambda x, dy: (2 * dy,))


def with_own_rule(params, x):
    """A derivative that is not the function's."""
    return own_rule(x @ adapted(params))


@jax.custom_vjp
def linear(x, w, turned):
    return x @ w


# Twice the gradient of rows, and so it is seen that the one marked made it.
linear.defvjp(
    lambda x, w, turned: (x @ w, (x, turned)), lambda saved, dy: (2 * dy @ saved[1], saved[0].T @ dy, None)
)


def turned_over(params, x):
    """A copy of a parameter that the backward alone reads."""
    return jnp.sin(linear(x, params["w"], made_once(params["w"].T)))


def factors(params, x):
    """Two products, one made of the other; one is used twice."""
    product = params["a"] @ params["b"]
    return jnp.sin(x @ product) @ (product @ product.T + params["w"])


def in_layers(params, x):
    """Each layer's matrices are read by their index."""
    for layer in range(3):
        x = lora({name: leaf[layer] for name, leaf in params.items()}, x)
    return x


POLICY = jax.checkpoint_policies.dots_saveable
CASES = {
    "lora": (lora, LORA, 1),
    "casts": (in_halves, LORA, 1),
    "scan": (scanned, LAYERS, 3),
    "repeated": (repeated, LORA, 1),
    "remat": (jax.checkpoint(lora), LORA, 1),
    "policy": (jax.checkpoint(lora, policy=POLICY), LORA, 1),
    "scan of remat": (
        lambda p, x: lax.scan(lambda x, layer: (jax.checkpoint(lora)(layer, x), None), x, p)[0],
        LAYERS,
        3,
    ),
    "remat of scan": (jax.checkpoint(scanned), LAYERS, 3),
    "jit": (jax.jit(lora), LORA, 1),
    "own rule": (with_own_rule, LORA, 1),
    "marked": (turned_over, LORA, 0),
    "remat of marked": (jax.checkpoint(turned_over), LORA, 0),
    "scan of marked": (
        lambda p, x: lax.scan(lambda x, layer: (turned_over(layer, x), None), x, p)[0],
        LAYERS,
        0,
    ),
    "factors": (factors, LORA, 1 + WIDTH / RANK),
    "layers": (in_layers, LAYERS, 3),
    "matrices of layers": (lambda p, x: jnp.sin(x @ p["w"][0]) @ p["w"][2] + x @ p["w"][1:2][0], LAYERS, 0),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_exact_and_products_are_made_once(name):
    f, params, products = CASES[name]
    lifted = hoist(f, params, X)
    prepared = params, lifted.values
    plan = split_backward(lifted.function).trace(prepared, X)
    assert flops_of(lifted.prelude, params) == products * PRODUCT

    def ours(params, xs, dys):
        """A step of several microbatches: sums of gradients, led back after the last."""
        prepared = params, lifted.prelude(params)
        ys, dxs, total = [], [], None
        for x, dy in zip(xs, dys, strict=True):
            y, _, residuals_i, residuals_w = plan.forward(prepared, x)
            dx, stash = plan.backward_input(prepared, x, residuals_i, residuals_w, dy)
            gradients = plan.backward_weight(prepared, x, residuals_w, stash)
            total = gradients if total is None else jax.tree.map(jnp.add, total, gradients)
            ys.append(y)
            dxs.append(dx)
        direct, of_values = total
        led_back = lifted.postlude(params, of_values)
        return ys, dxs, jax.tree.map(jnp.add, direct, led_back)

    def theirs(params, xs, dys):
        def step(params, xs):
            return [f(params, x) for x in xs]

        ys, pull = jax.vjp(step, params, xs)
        dparams, dxs = pull(dys)
        return ys, dxs, dparams

    xs, dys = [X, -X, 2 * X], [normal(4, BATCH, WIDTH), X, -X]
    tolerance = 2e-2 if name == "casts" else 3e-6
    want, got = (step_by_step(step, params, xs, dys) for step in (theirs, ours))
    assert_trees_match(want, got, exact=False, tolerance=tolerance)


def test_a_microbatch_spends_what_a_plain_matmul_does():
    """Today's backward of LoRA does its product again, and its gradient's two matmuls, for every microbatch."""
    lifted = hoist(lora, LORA, X)
    plan = split_backward(lifted.function).trace((LORA, lifted.values), X)
    _, plain = flops_of_vjp(lambda w, x: jnp.sin(x @ w), LORA["w"], X)
    assert (
        (plan.flops.forward, plan.flops.input + plan.flops.weight) == (SQUARE, plain) == (SQUARE, 2 * SQUARE)
    )
    assert plan.params.has_gradient == [False, False, False, True], "all that params get comes by the product"
    as_it_was = split_backward(lora).trace(LORA, X)
    assert as_it_was.flops.backward > plain + 2 * PRODUCT


def test_what_the_values_are_made_of():
    params = LORA | {"frozen": normal(5, WIDTH, WIDTH), "bias": normal(6, WIDTH)}

    def f(params, x):
        return lora(params, x) @ (params["frozen"] @ params["frozen"]) + params["bias"]

    lifted = hoist(f, params, X)
    assert [kind.shape for kind in lifted.values] == [(WIDTH, WIDTH)] * 2
    names = sorted(params)
    made_of = [{n for n, has in zip(names, row, strict=True) if has} for row in lifted.sources]
    assert made_of == [{"a", "b", "w"}, {"frozen"}]
    # Wanted are those of which something wanted is made.
    mask = dict.fromkeys(params, False) | {"a": True, "b": True}
    wanted = [any(mask[n] for n in row) for row in made_of]
    plan = split_backward(lifted.function, wanted=((mask, wanted), True)).trace((params, lifted.values), X)
    assert plan.params.num_gradients == 1


@pytest.mark.parametrize("name, layers", [("marked", ()), ("scan of marked", (3,))])
def test_what_is_marked_is_made_once_and_gets_no_gradient(name, layers):
    f, params, _ = CASES[name]
    lifted = hoist(f, params, X)
    assert [kind.shape for kind in lifted.values] == [(*layers, WIDTH, WIDTH)]
    assert lifted.sources == [[False] * len(params)]
    wanted = (jax.tree.map(lambda _: True, params), [False])
    plan = split_backward(lifted.function, wanted=(wanted, True)).trace((params, lifted.values), X)
    assert plan.params.has_gradient[-1] is False
    as_it_was = applied(split_backward(f).trace(params, X), "backward")["transpose"]
    assert as_it_was == applied(plan, "backward")["transpose"] + sum(layers or (1,))


def test_sums_are_as_precise_as_those_of_the_parameters():
    assert [kind.dtype for kind in hoist(in_halves, LORA, X).values] == [jnp.float32]


def test_layers_are_taken_out_of_leaves_that_nothing_else_reads():
    params = {name: normal(number, 3, WIDTH, WIDTH) for number, name in enumerate("abcde")} | {
        "i": np.arange(3)
    }

    def f(params, x):
        for layer in range(3):
            x = jnp.sin(x @ params["a"][layer])
        x = x @ params["b"][0] @ params["b"][0]
        x = x @ params["c"][1] + params["c"].sum(0)[0]
        x = x @ params["d"][:, 1].T @ params["d"][:, 2] @ params["e"][0:2].sum(0)
        return x + params["i"][0].astype(jnp.float32)

    lifted = hoist(f, params, X)
    assert [(layer.leaf, layer.at) for layer in lifted.layers] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert [value.shape for value in lifted.values] == [(WIDTH, WIDTH)] * 4
    for layer, value in zip(lifted.layers, lifted.prelude(params), strict=True):
        np.testing.assert_array_equal(value, params["ab"[layer.leaf]][layer.at])
    plan = split_backward(lifted.function).trace((params, lifted.values), X)
    assert not plan.params.has_gradient[0], "the leaf's own sum is not needed"


def chosen(params, x):
    """Of matrices alone, but x says which."""
    return x @ lax.cond(x.sum() > 0, lambda w: w @ w, lambda w: w, params["w"])


def carried(params, x):
    """A carry that begins as a parameter."""
    return x @ lax.scan(lambda w, _: (w @ w * x.sum(), None), params["w"], None, length=2)[0]


@pytest.mark.parametrize(("f", "params"), [(block, block_params()), (chosen, LORA), (carried, LORA)])
def test_nothing_is_taken_out_where_nothing_is_made_of_parameters_alone(f, params):
    lifted = hoist(f, params, X)
    assert lifted.values == [] and lifted.prelude(params) == []
    want = split_backward(f).trace(params, X)
    got = split_backward(lifted.function).trace((params, []), X)
    assert want.flops == got.flops
    assert want.residuals_w == got.residuals_w and want.stash == got.stash


@pytest.mark.parametrize("check_vma", [True, False])
def test_on_a_mesh(check_vma):
    """A product of gathered parameters, beside an exchange."""
    mesh = jax.make_mesh((2, 4), ("pp", "ep"), axis_types=(AxisType.Auto,) * 2)

    def f(params, x):
        product = lax.all_gather(params["a"], "ep", axis=1, tiled=True) @ params["b"]
        y = jnp.sin(lax.all_to_all(x, "ep", 0, 0, tiled=True) @ product)
        return y + vary(lax.pmean(y, "ep"), ("ep",))

    def both(params, x):
        params, x = vary((params, x), ("pp", "ep") if check_vma else ())
        lifted = hoist(f, params, x)
        prepared = params, lifted.prelude(params)
        plan = split_backward(lifted.function).trace(prepared, x)
        assert applied(plan, "input")["all_gather"] == applied(plan, "input")["reduce_scatter"] == 0
        y, _, residuals_i, residuals_w = plan.forward(prepared, x)
        (_, of_values), dx = plan.backward(prepared, x, residuals_i, residuals_w, y)
        want_y, pull = jax.vjp(f, params, x)
        return (y, (lifted.postlude(params, of_values), dx)), (want_y, pull(y))

    params = {"a": normal(1, WIDTH, RANK), "b": normal(2, 4 * RANK, WIDTH)}
    every = PartitionSpec(("pp", "ep"))
    specs = {"in_specs": (PartitionSpec(), every), "out_specs": every, "check_vma": check_vma}
    got, want = compiled(jax.shard_map(both, mesh=mesh, **specs), params, normal(3, 32, WIDTH))
    assert_trees_match(want, got, exact=False, tolerance=3e-6)
