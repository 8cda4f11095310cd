"""Two programs in one order: the same results, and collectives that alternate."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from dualpipe_jax import make_mesh, split_backward
from dualpipe_jax.pair import by_itself, interleave, side_by_side
from dualpipe_jax.pair.interleave import Pool
from dualpipe_jax.split.run import evaluate
from dualpipe_jax.varying import vary
from tests.engine import models

NUM_EP = 2


def mapped(function, in_specs, out_specs, check_vma=False):
    """On the devices of ep."""
    mesh = make_mesh(1, NUM_EP, jax.devices()[:NUM_EP])
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)


def groups(text):
    """Of what a program's text holds in a row, collectives or barriers: how many groups of collectives."""
    marks = re.findall(r"stablehlo\.(all_to_all|optimization_barrier)", text)
    return [kind for kind, _ in itertools.groupby(marks)].count("all_to_all"), marks.count("all_to_all")


@functools.cache
def case(remat=None):
    """A MoE stage of two layers on two devices, traced there; arguments of a forward and of a backward."""
    params, specs = models.init("moe", 2)
    specs = {
        name: PartitionSpec(None, "ep") if spec else PartitionSpec() for name, spec in specs["stages"].items()
    }
    x = np.random.default_rng(1).standard_normal((2, 4, models.SEQ, models.WIDTH), np.float32)
    return params["stages"], specs, x, models.model("moe", remat).stage


def run(work, remat=None):
    params, specs, x, stage = case(remat)

    def layers(params, x):
        for k in range(2):
            x, _ = stage(jax.tree.map(lambda leaf, k=k: leaf[k], params), x)
        return x

    def on_device(params, x):
        plan = split_backward(layers).trace(params, x[0])
        return work(plan, params, x)

    spec = PartitionSpec(None, "ep")
    return mapped(on_device, (specs, spec), PartitionSpec("ep")), params, x


def forward_backward(ahead, forward, behind, backward, pools, sums):
    """A forward and a full backward of two plans, to whose sums the gradients of parameters are added.

    Pools count from the residuals on; all of the backward's are in them.
    """
    params, x, dy = backward
    kept = ([None] * len(kinds) for kinds in (behind.residuals_i, behind.residuals_w))
    made, used = len(jax.tree.leaves((ahead.y, ahead.aux))), len(jax.tree.leaves((params, x)))
    outputs, gradients = interleave(
        ahead.programs.forward,
        ahead.forward_arguments(*forward),
        behind.programs.backward,
        behind.backward_arguments(params, x, *kept, dy),
        pools=[
            dataclasses.replace(pool, output=made + pool.output, argument=used + pool.argument)
            for pool in pools
        ],
        finish={k: functools.partial(jnp.add, total) for k, total in enumerate(sums)},
        fixed=(range(len(ahead.params.types)), range(len(behind.params.types))),
    )
    new_sums, dx = behind.backward_results(gradients)
    return ahead.forward_results(outputs), new_sums, behind.x.gradients(dx)


SLOTS = 3


def is_floating(leaf):
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def pools(kept):
    """For each value a pool of sevens with the value in slot 1."""
    return [jnp.full((SLOTS, *a.shape), 7, a.dtype).at[1].set(a) for a in kept]


def slots(kept, read_at, written_at):
    """A pool in which a backward reads and a forward writes, for each kind of residuals."""

    def pool(number, array, read, write):
        return Pool(
            array,
            read=lambda array: array[read],
            write=lambda array, value: array.at[write].set(value),
            argument=number,
            output=number,
        )

    places = zip(kept, read_at, written_at, strict=True)
    where = [(array, *at) for arrays, *at in places for array in arrays]
    return [pool(number, *one) for number, one in enumerate(where)]


def both(pair):
    """A backward that reads its residuals from slot 1, a forward that writes its own to slot 1 or 2."""

    def work(plan, params, x):
        y, _, *saved = plan.forward(params, x[0])
        sums = [jnp.ones_like(p) for p in filter(is_floating, jax.tree.leaves(params))]
        kept = list(map(pools, saved))
        if pair:
            (y, aux, *kept), *grads = forward_backward(
                plan, (params, x[1]), plan, (params, x[0], y), slots(kept, (1, 1), (1, 2)), sums
            )
        else:
            dparams, dx = plan.backward(params, x[0], *saved, y)
            added = [s + g for s, g in zip(sums, filter(is_floating, jax.tree.leaves(dparams)), strict=True)]
            grads = added, dx
            y, aux, *made = plan.forward(params, x[1])
            kept = [
                [pool.at[slot].set(a) for pool, a in zip(pools, new, strict=True)]
                for slot, pools, new in zip((1, 2), kept, made, strict=True)
            ]
        return jax.tree.map(lambda a: jnp.asarray(a, x.dtype)[None], (y, aux, kept, list(grads)))

    return work


@pytest.mark.parametrize("remat", [None, "all"])
def test_a_pair_is_its_forward_and_its_backward(remat):
    cases = [run(both(pair), remat) for pair in (True, False)]
    with jax.enable_x64(True):
        outcome = [jax.jit(function)(*map(in_float64, arguments)) for function, *arguments in cases]
        together, apart = (jax.tree.leaves(jax.device_get(tree)) for tree in outcome)
    assert len(together) >= 7, "y, residuals, sums and dx"
    for got, want in zip(together, apart, strict=True):
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("remat", [None, "all"])
def test_a_backward_by_itself_is_a_backward(remat):
    def work(ordered, plan, params, x):
        y, _, *saved = plan.forward(params, x[0])
        arguments = plan.backward_arguments(params, x[0], *saved, y)
        sums = [jnp.ones_like(p) for p in filter(is_floating, jax.tree.leaves(params))]
        if ordered:
            finish = {k: functools.partial(jnp.add, total) for k, total in enumerate(sums)}
            made = by_itself(
                plan.programs.backward, arguments, finish=finish, fixed=range(len(plan.params.types))
            )
        else:
            dparams, dx = plan.backward_results(evaluate(plan.programs.backward, arguments))
            made = [*(total + g for total, g in zip(sums, dparams, strict=True)), *dx]
        return [jnp.asarray(a, x.dtype)[None] for a in made]

    cases = [run(functools.partial(work, ordered), remat) for ordered in (True, False)]
    text = jax.jit(cases[0][0]).lower(*cases[0][1:]).as_text()
    count = 8 if remat else 4
    assert groups(text) == (count + 1, count + 4), "between any two a barrier, but for the forward's four"
    with jax.enable_x64(True):
        got, want = (jax.device_get(jax.jit(function)(*map(in_float64, given))) for function, *given in cases)
    assert len(got) >= 5, "sums and dx"
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


def test_a_backward_without_collectives_is_left_to_the_compiler():
    plan = split_backward(lambda w, x: jnp.tanh(x @ w)).trace(jnp.ones((4, 4)), jnp.ones((2, 4)))
    rng = np.random.default_rng(0)
    w, x, dy = (rng.standard_normal(shape).astype(np.float32) for shape in [(4, 4), (2, 4), (2, 4)])

    def work(w, x, dy):
        _, _, *saved = plan.forward(w, x)
        return by_itself(
            plan.programs.backward, plan.backward_arguments(w, x, *saved, dy), finish={0: lambda g: g + 1}
        )

    assert "optimization_barrier" not in jax.jit(work).lower(w, x, dy).as_text()
    d = dy * (1 - np.tanh(x @ w) ** 2)
    for got, want in zip(jax.jit(work)(w, x, dy), (x.T @ d + 1, d @ w.T), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def in_float64(tree):
    return jax.tree.map(lambda a: a.astype(jnp.float64) if jnp.issubdtype(a.dtype, jnp.floating) else a, tree)


def pair_alone(plan, params, x):
    kept = [
        [jnp.ones((SLOTS, *kind.shape), kind.dtype) for kind in kinds]
        for kinds in (plan.residuals_i, plan.residuals_w)
    ]
    sums = [jnp.zeros(p.shape) for p in jax.tree.leaves(params) if p.dtype == jnp.float32]
    pools = slots(kept, (0, 0), (1, 1))
    outcome = forward_backward(plan, (params, x[1]), plan, (params, x[0], x[0]), pools, sums)
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.float32)[None], outcome)


@pytest.mark.parametrize(("remat", "count"), [(None, 8), ("all", 12)])
def test_collectives_are_tied_to_each_other(remat, count):
    """Between any two there is a barrier: no two are in flight together, and none is waited for too early."""
    function, *arguments = run(pair_alone, remat)
    text = jax.jit(function).lower(*arguments).as_text()
    assert groups(text) == (count, count), "two layers, each there and back, forwards and backwards"


def test_two_forwards_hide_each_others_collectives():
    """Microbatches of different layers."""
    params, specs, x, stage = case()

    def work(together, params, x):
        halves = [(jax.tree.map(lambda leaf, k=k: leaf[k], params), x[k]) for k in range(2)]
        apart = [stage(*half) for half in halves]
        made = side_by_side(stage, halves[0], stage, halves[1]) if together else apart
        return jax.tree.map(lambda a: jnp.asarray(a, x.dtype)[None], tuple(made))

    in_specs = specs, PartitionSpec(None, "ep")
    both = [jax.jit(mapped(functools.partial(work, t), in_specs, PartitionSpec("ep"))) for t in (True, False)]
    assert groups(both[0].lower(params, x).as_text())[0] == 4, (
        "each there and back, a barrier between any two"
    )
    got, want = (function(params, x) for function in both)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


SHARED = {
    "sum beside": lambda w, x: jnp.sin(x @ w) + lax.psum(jnp.cos(x @ w), "ep"),
    "mean": lambda w, x: lax.pmean(jnp.sin(x @ w), "ep") * lax.all_to_all(x, "ep", 0, 0, tiled=True),
    "ratio": lambda w, x: x @ w / lax.psum(jnp.sum(x * x), "ep"),
}


@pytest.mark.parametrize("ahead", SHARED)
@pytest.mark.parametrize("behind", SHARED)
def test_stages_of_two_kinds_whose_values_do_not_all_vary(ahead, behind):
    """A forward of one function, a backward of another, under check_vma; pools of their own."""
    rng = np.random.default_rng(0)
    w, x = rng.standard_normal((2, 6, 6), np.float32), rng.standard_normal((3, 8, 6), np.float32)

    def on_device(w, x):
        w, x = (vary(a, ("pp", "ep")) for a in (w, x))
        plan_f, plan_b = (split_backward(SHARED[name]).trace(w[0], x[0]) for name in (ahead, behind))
        y, pull = jax.vjp(SHARED[behind], w[1], x[1])
        dy = jnp.cos(y)
        _, _, *saved = plan_b.forward(w[1], x[1])
        read = [
            Pool(jnp.stack([a, a + 1]), read=lambda pool: pool[0], argument=k)
            for k, a in enumerate([*saved[0], *saved[1]])
        ]
        written = [
            Pool(
                vary(jnp.zeros((2, *kind.shape), kind.dtype), ("pp", "ep")),
                write=lambda pool, a: pool.at[1].set(a),
                output=k,
            )
            for k, kind in enumerate([*plan_f.residuals_i, *plan_f.residuals_w])
        ]
        (made, _, *kept), sums, dx = forward_backward(
            plan_f, (w[0], x[2]), plan_b, (w[1], x[1], dy), [*read, *written], [jnp.ones_like(w[1])]
        )
        _, _, *residuals = plan_f.forward(w[0], x[2])
        dw, want_dx = pull(dy)
        got = made, [pool[1] for pool in (*kept[0], *kept[1])], sums[0], dx
        want = SHARED[ahead](w[0], x[2]), [*residuals[0], *residuals[1]], dw + 1, want_dx
        return jax.tree.map(lambda a: vary(a, ("pp", "ep"))[None], (got, want))

    mesh, everywhere = make_mesh(2, NUM_EP, jax.devices()[:4]), PartitionSpec(("pp", "ep"))
    in_specs = PartitionSpec(), PartitionSpec(None, ("pp", "ep"))
    made = jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=in_specs, out_specs=everywhere))(w, x)
    for a, b in zip(*map(jax.tree.leaves, made), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("products", [1, 2])
def test_what_is_put_together_for_several_products_is_put_together_once(products):
    """XLA would fuse the concatenation into one of them, and make it again for the other."""

    def work(w, x):
        both = jnp.concatenate([jnp.sin(x), jnp.cos(x)], axis=-1)
        return [both @ w, both @ jnp.sin(w)][:products]

    def pair(w, x):
        return side_by_side(jnp.add, (1, 2), work, (w, x))[1]

    w, x = jnp.full((6, 2), 0.5), jnp.arange(12.0).reshape(4, 3)
    text = jax.jit(pair).lower(w, x).as_text()
    assert len(re.findall(r"optimization_barrier .*tensor<4x6xf32>", text)) == products - 1
    for made, expected in zip(jax.jit(pair)(w, x), work(w, x), strict=True):
        np.testing.assert_allclose(made, expected, rtol=1e-6)


def test_a_product_is_added_to_the_sum_that_was_given_in_its_own_phase():
    """Held between two phases, it would be written, and read again for the sum, which is as large."""

    def backward(x, dy, total):
        sent = lax.all_to_all(jnp.sin(x @ x.T), "ep", 0, 0, tiled=True)
        gradient = jnp.einsum("sa,sb->ab", x, dy)
        added = (total.reshape(gradient.shape) + gradient).reshape(total.shape)
        return lax.all_to_all(jnp.cos(sent @ x), "ep", 0, 0, tiled=True), added

    def pair(x, dy, total):
        return side_by_side(jnp.add, (1, 2), backward, (x, dy, total))[1]

    kinds = (8, 4), (8, 5), (20,)
    x, dy, total = (
        np.random.default_rng(k).standard_normal(kind, np.float32) for k, kind in enumerate(kinds)
    )
    every = PartitionSpec()
    program = jax.jit(mapped(pair, (every,) * 3, (every,) * 2))
    names = re.findall(
        r"= (?:stablehlo\.|\")*([a-z_.]+).*?((?:tensor<[0-9x]*xf32>)|$)\n",
        program.lower(x, dy, total).as_text(),
    )
    order = [
        name for name, kind in names if name.endswith("optimization_barrier") or kind == "tensor<4x5xf32>"
    ]
    order = [name.removeprefix("stablehlo.") for name in order if "reshape" not in name]
    made = order.index("dot_general")
    assert order[made + 1] == "add" and "optimization_barrier" in order[made:], order
    np.testing.assert_allclose(
        program(x, dy, total)[1].reshape(4, 5), total.reshape(4, 5) + x.T @ dy, rtol=1e-5
    )


def test_one_function_may_take_what_the_other_makes():
    """Under shard_map with and without types; collectives still take turns, and what nobody wants is not done."""

    def lead(scale, x, wasteful=False):
        first = lax.all_to_all(jnp.sin(x @ x), "ep", 0, 0, tiled=True) * scale
        second = lax.all_to_all(jnp.cos(first @ x), "ep", 0, 0, tiled=True)
        if wasteful:
            lax.all_to_all(jnp.cos(second) @ x, "ep", 0, 0, tiled=True)
        return second, {"heard": [first, second @ x]}

    def follow(scale, x, heard):
        first = lax.all_to_all(jnp.sin(x @ x) + heard[0], "ep", 0, 0, tiled=True) * scale
        return lax.all_to_all(jnp.cos(first @ x) - heard[1], "ep", 0, 0, tiled=True)

    def both(together, x, lead=lead):
        scale = jnp.float32(1.5)
        if together:
            second, (first, _) = side_by_side(
                follow, (scale, x[1]), lead, (scale, x[0]), lambda r: r[1]["heard"]
            )
        else:
            first, told = lead(scale, x[0])
            second = follow(scale, x[1], told["heard"])
        return jnp.stack([first, second])

    x, spec = np.random.default_rng(0).standard_normal((2, 8, 4), np.float32), PartitionSpec(None, "ep")
    for check_vma in (True, False):
        together_, apart = (
            jax.jit(mapped(functools.partial(both, together), spec, spec, check_vma))
            for together in (True, False)
        )
        np.testing.assert_allclose(together_(x), apart(x), rtol=1e-5, atol=1e-5)
        text = together_.lower(x).as_text()
        assert groups(text)[0] == 4
    wasteful = functools.partial(both, True, lead=functools.partial(lead, wasteful=True))
    made = jax.jit(mapped(wasteful, spec, spec)).lower(x).as_text()
    assert made == text, "what nobody wants has no turn"
