"""Expert dispatch: against loops in NumPy, against its own transpose, and over 1, 2, 4 and 8 devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dualpipe_jax.parallel import (
    capacity_for,
    combine,
    count,
    dispatch,
    plan_capacity,
    plan_dropless,
    plan_two_hops,
)
from dualpipe_jax.parallel.mesh import expert_axes
from tests.parallel import expert_layers
from tests.parallel.expert_layers import (
    METHODS,
    TOKENS,
    D,
    K,
    check_dropped,
    close,
    layer,
    layer_case,
    on_devices,
    plain_layer,
    with_gradients,
)

T, E = 16, 8  # T tokens per device
plan_of = functools.partial(expert_layers.plan_of, num_experts=E)
choices = functools.partial(expert_layers.choices, num_experts=E)


def dispatched_by_loops(x, topk, num_ep, method, bound):
    """What each expert should receive, in order, and how many choices of each device fit nowhere."""
    rows, dropped = [[] for _ in range(E)], [0] * num_ep
    local = E // num_ep
    width = T * min(K, local)
    if method == "dropless" and bound is not None:
        width = min(width, int(np.ceil(bound * T * K / num_ep)))
    for source in range(num_ep):
        sent = [0] * num_ep
        for expert in range(E):
            mine = [t for t in range(source * T, source * T + T) if expert in topk[t]]
            room = (bound or T) if method == "capacity" else width - sent[expert // local]
            kept = mine[:room]
            sent[expert // local] += len(kept)
            dropped[source] += len(mine) - len(kept)
            rows[expert].append(x[kept])
    return rows, dropped


@pytest.mark.parametrize(
    "num_ep, method, bound",
    [
        (1, "capacity", 5),
        (2, "dropless", None),
        (4, "capacity", None),
        (4, "dropless", 0.7),
        (8, "capacity", 5),
        (8, "dropless", 0.7),
    ],
)
def test_every_expert_gets_its_tokens_in_order(num_ep, method, bound):
    x = np.random.default_rng(1).normal(size=(num_ep * T, D)).astype(np.float32)
    make = plan_of(method, bound=bound)

    def run(x, topk):
        handle = make(topk)
        sizes = jnp.zeros(1, jnp.int32) if handle.group_sizes_L is None else handle.group_sizes_L
        return dispatch(x, handle), dispatch(x, handle, fill=False), sizes, handle.dropped[None]

    run = on_devices(num_ep, run)
    for skew in (0.0, 0.7, 3.0):
        topk = choices(num_ep * T, skew=skew)
        rows, unfilled, *rest = map(np.asarray, run(x, topk))
        check_rows(rows, *rest, x, topk, num_ep, method, bound)
        past = np.all(rows == 0, axis=-1, keepdims=True)
        np.testing.assert_array_equal(np.where(past, 0, unfilled), rows)
        if method == "capacity":
            np.testing.assert_array_equal(unfilled, rows)
        assert np.all(np.any(unfilled[..., None, :] == [*x, 0 * x[0]], axis=-2)), (
            "rows of some tokens, or none's"
        )


def check_rows(rows, sizes, dropped, x, topk, num_ep, method, bound):
    wanted, dropped_wanted = dispatched_by_loops(x, topk, num_ep, method, bound)
    np.testing.assert_array_equal(dropped, dropped_wanted)
    if method == "capacity":
        capacity = bound or T
        padded = [np.stack([np.pad(r, ((0, capacity - len(r)), (0, 0))) for r in per]) for per in wanted]
        np.testing.assert_array_equal(rows, np.stack(padded))
        return
    np.testing.assert_array_equal(sizes, [sum(map(len, per)) for per in wanted])
    for device, got in enumerate(np.split(rows, num_ep)):
        local = wanted[device * E // num_ep : (device + 1) * E // num_ep]
        flat = np.concatenate([r for per in local for r in per])
        np.testing.assert_array_equal(got, np.pad(flat, ((0, len(got) - len(flat)), (0, 0))))


@pytest.mark.parametrize(
    "num_ep, method, bound",
    [(1, "capacity", 3), (4, "capacity", None), (1, "dropless", None), (4, "dropless", 0.6)],
)
def test_dispatch_and_combine_are_each_others_transposes(num_ep, method, bound):
    rng = np.random.default_rng(2)
    x = rng.normal(size=(num_ep * T, D)).astype(np.float32)
    weights = rng.normal(size=(num_ep * T, K)).astype(np.float32)
    make = plan_of(method, bound=bound)

    def run(x, weights, topk):
        handle = make(topk)
        rows, back = jax.vjp(lambda x: dispatch(x, handle), x)
        y = jnp.sin(jnp.arange(rows.size, dtype=x.dtype)).reshape(rows.shape) + rows
        out, d_combine = jax.vjp(lambda y: combine(y, weights, handle), y)
        weighted_rows = d_combine(x)[0]
        ones = jnp.ones_like(weights)
        inner = jnp.stack([jnp.vdot(rows, y), jnp.vdot(out, x), jnp.vdot(y, weighted_rows)])
        return back(y)[0], combine(y, ones, handle), inner[None], weighted_rows, rows

    back, combined, inner, d_rows, rows = on_devices(num_ep, run)(x, weights, choices(num_ep * T))
    np.testing.assert_array_equal(back, combined)
    rows_y, out_x, y_drows = np.asarray(inner).sum(0)
    np.testing.assert_allclose(rows_y, np.vdot(combined, x), rtol=1e-5)
    np.testing.assert_allclose(out_x, y_drows, rtol=1e-5)
    assert d_rows.shape == rows.shape


@pytest.mark.parametrize(
    "method, num_ep, check_vma",
    [
        ("capacity", 2, True),
        ("capacity", 8, False),
        pytest.param("dropless", 1, True, marks=pytest.mark.slow),
        ("dropless", 4, True),
        pytest.param("dropless", 8, False, marks=pytest.mark.slow),
    ],
)
def test_gradients_are_the_same_however_many_devices(method, num_ep, check_vma):
    args, target = layer_case(E)
    topk = choices(len(target))
    for fill in (True, False):
        run = on_devices(num_ep, functools.partial(layer, make=plan_of(method), fill=fill), check_vma)
        close(with_gradients(run, target)(args, topk), plain_layer(E)(args, topk))


@pytest.mark.parametrize("fill", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_what_all_rows_share_has_its_gradient(method, fill):
    """Whoever sums over rows sums over those that hold nobody's, too: combine gives these none."""
    args, target = layer_case(E)
    scale = np.linspace(0.5, 2, D).astype(np.float32)
    # The last device fills all that it may send the first, so the last row that arrives there is somebody's.
    topk = np.full((len(target), K), E, np.int32)
    topk[-len(target) // 4 :] = np.arange(K)

    def run(x, scale, weights, topk):
        handle = plan_of(method)(topk)
        return combine(jnp.sin(dispatch(x, handle, fill=fill)) * scale[0] + scale[0], weights, handle)

    def loss(scale):
        scales = jnp.broadcast_to(scale, (4, 1, D))  # each device has its own
        return jnp.vdot(on_devices(4, run)(args[0], scales, args[3], topk), target)

    weights_T1 = np.where(topk < E, args[3], 0).sum(1, keepdims=True)
    want = np.sum((np.sin(args[0]) + 1) * weights_T1 * target, axis=0)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(scale), want, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_without_an_axis_nothing_is_communicated_and_nothing_scatter_added(method):
    args, target = layer_case(E)
    topk, run = choices(len(target)), functools.partial(layer, make=plan_of(method, axis_name=None))
    close(with_gradients(run, target)(args, topk), plain_layer(E)(args, topk))
    text = str(jax.make_jaxpr(jax.grad(lambda args: jnp.sum(run(*args, topk) * target)))(args))
    assert "scatter-add" not in text and "scatter_add" not in text
    assert "all_to_all" not in text


@pytest.mark.parametrize("method, exchanges", [("capacity", 2), ("dropless", 3)])
def test_all_to_all_is_the_only_collective(method, exchanges):
    args, target = layer_case(E)
    topk, run = choices(len(target)), on_devices(2, functools.partial(layer, make=plan_of(method)))
    forward = str(jax.make_jaxpr(run)(*args, topk))
    both = str(jax.make_jaxpr(jax.grad(lambda *args: jnp.sum(run(*args, topk))))(*args))
    assert forward.count("all_to_all[") == exchanges  # the dropless plan exchanges its counts
    assert both.count("all_to_all[") == exchanges + 2
    for name in ("ppermute", "psum", "all_gather", "scatter-add"):
        assert name not in both


@pytest.mark.parametrize("method, bound", [("capacity", 2), ("dropless", 0.5)])
def test_dropped_assignments_add_nothing_and_have_no_gradient(method, bound):
    topk, make = choices(TOKENS), plan_of(method, axis_name=None, bound=bound)
    handle = jax.jit(make)(topk)
    kept = np.asarray(handle.slot_TK) < handle.assignment_S.size
    assert int(handle.dropped) == np.sum(~kept) > 0
    check_dropped(functools.partial(layer, make=make), E, topk, kept)


@pytest.mark.parametrize("method", METHODS)
def test_bfloat16_rows_are_summed_in_float32(method):
    """And their gradients: exactly NumPy's sums, each rounded once. bfloat16 keeps 8 bits, weights here have 11."""
    rng, topk = np.random.default_rng(4), choices(T)
    x, d_out = rng.integers(-127, 128, (2, T, D))
    weights = 1 + rng.integers(0, 1024, (T, K)) / 1024
    low, d_low = (jnp.asarray(a, jnp.bfloat16) for a in (x, d_out))
    make = plan_of(method, axis_name=None)

    def rounded(exact):
        return np.asarray(exact, np.float32).astype(jnp.bfloat16)

    # In programs of their own: within one XLA may leave out the rounding between two parts.
    @jax.jit
    def there(x, topk):
        return dispatch(x, make(topk))

    @jax.jit
    def back(rows, weights, topk, d_out):
        out, pull = jax.vjp(lambda rows, weights: combine(rows, weights, make(topk)), rows, weights)
        return out, *pull(d_out)

    @jax.jit
    def back_to_tokens(d_rows, topk):
        return jax.vjp(lambda x: dispatch(x, make(topk)), low)[1](d_rows)[0]

    out, d_rows, d_weights = back(there(low, topk), np.float32(weights), topk, d_low)
    np.testing.assert_array_equal(out, rounded(x * weights.sum(1, keepdims=True)))
    np.testing.assert_array_equal(d_weights, np.repeat(np.sum(x * d_out, 1, keepdims=True), K, 1))
    of_rows = rounded(d_out[:, None] * weights[..., None])
    np.testing.assert_array_equal(back_to_tokens(d_rows, topk), rounded(np.sum(of_rows, 1, dtype=np.float64)))


def test_a_plan_is_the_same_where_jax_has_64_bits():
    topk, rows = choices(TOKENS), np.arange(TOKENS, dtype=np.float32)[:, None]

    def sent():
        return on_devices(2, lambda rows, topk: dispatch(rows, plan_of("dropless")(topk)))(rows, topk)

    want = sent()
    with jax.enable_x64(True):
        np.testing.assert_array_equal(sent(), want)


@pytest.mark.parametrize("method, bound", [("capacity", 2), ("dropless", 0.5)])
def test_no_plan_promotes_anything_where_jax_has_64_bits(method, bound):
    """A sum of int32 is int64 there."""

    def in_two_hops(topk):
        def inner(topk, experts):
            return expert_layers.plan_of(method, experts, bound=bound)(topk)

        return plan_two_hops(topk, E, expert_axes(2), inner, 5)

    makes = {
        1: plan_of(method, axis_name=None, bound=bound),
        2: plan_of(method, bound=bound),
        (2, 2): in_two_hops,
    }
    with jax.enable_x64(True):
        for ep, make in makes.items():
            numbers = on_devices(
                ep, lambda topk, make=make: [leaf[None] for leaf in jax.tree.leaves(make(topk))]
            )
            kinds = jax.eval_shape(numbers, choices(TOKENS))
            assert {kind.dtype for kind in kinds} == {jnp.dtype(jnp.int32)}, ep
        many = jax.ShapeDtypeStruct((1024, K), jnp.int32)  # more than are compared pair by pair
        kinds = jax.tree.leaves(jax.eval_shape(plan_of(method, axis_name=None), many))
        assert {kind.dtype for kind in kinds} == {jnp.dtype(jnp.int32)}


def test_count_is_exact_and_integer():
    topk = choices(1000)
    counts = count(topk, E)
    assert counts.dtype == jnp.int32
    np.testing.assert_array_equal(counts, np.bincount(topk.ravel(), minlength=E))


@pytest.mark.parametrize("factor, wanted", [(1.0, 32), (1.25, 40), (0.001, 1), (100.0, 128)])
def test_capacity_for(factor, wanted):
    assert capacity_for(128, 4, 16, factor) == wanted


def test_errors_say_what_does_not_fit():
    topk = choices(T)
    with pytest.raises(ValueError, match="16 tokens in topk_TK and capacity 0 must both be at least 1"):
        plan_capacity(topk, E, 0)
    with pytest.raises(ValueError, match=r"buffer_factor must be positive and finite, got -1\.0"):
        plan_dropless(topk, E, buffer_factor=-1.0)
    handle = jax.eval_shape(plan_of("capacity", axis_name=None), topk)
    with pytest.raises(ValueError, match=r"planned for 16 tokens, x_TD has shape \(4, 6\)"):
        dispatch(np.ones((4, D), np.float32), handle)
    with pytest.raises(ValueError, match=r"\(16, 3\) assignments, weights have shape \(16, 2\)"):
        combine(np.ones((E, T, D), np.float32), np.ones((T, 2), np.float32), handle)
    run = on_devices(8, lambda topk: plan_capacity(topk, 12, None, "ep").slot_TK)
    with pytest.raises(ValueError, match=r"12 experts do not divide over the 8 devices.*12 % 8 = 4"):
        run(topk)
