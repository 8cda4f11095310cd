"""What every split must satisfy, against ``jax.vjp``."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

from dualpipe_jax.split import split_backward
from dualpipe_jax.split.jaxprs import scan_arity
from tests.jaxprs import applied
from tests.quick import ALIKE

COLLECTIVES = (
    "psum",
    "psum_invariant",
    "all_to_all",
    "all_gather",
    "reduce_scatter",
    "ppermute",
    "pmax",
    "pmin",
)


def normal(seed, *shape, dtype=np.float32):
    """NumPy's: what JAX does at import is done again in every worker, and compiled."""
    return (0.3 * np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


def cotangent(seed, y):
    def one(leaf):
        return normal(seed, *leaf.shape).astype(leaf.dtype)

    return jax.tree.map(one, y)


def float0_zeros(y, dy):
    def one(y, dy):
        return dy if jnp.issubdtype(y.dtype, jnp.inexact) else np.zeros(y.shape, jax.dtypes.float0)

    return jax.tree.map(one, y, dy)


def assert_trees_match(want, got, exact, tolerance=1e-6):
    assert jax.tree.structure(want) == jax.tree.structure(got)
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if a.dtype == jax.dtypes.float0:
            continue
        a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
        if exact:
            np.testing.assert_array_equal(b, a)
        else:
            np.testing.assert_allclose(
                b, a, rtol=tolerance, atol=tolerance * max(1.0, np.abs(a).max(initial=0))
            )


def compiled(function, *arguments):
    """Runs a function compiled in haste: the tests' time is XLA's."""
    options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True} | ALIKE
    return jax.jit(function).lower(*arguments).compile(compiler_options=options)(*arguments)


def step_by_step(function, *arguments):
    """What a function gives, one operation after the other, with nothing fused.

    An operation is compiled once for all tests; programs of whole functions would take them ten times as long.
    """
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*arguments)
    outputs = _run(closed, closed.consts, jax.tree.leaves(arguments))
    return jax.tree.unflatten(jax.tree.structure(shape), outputs)


def _run(inside, consts, inputs):
    jaxpr = getattr(inside, "jaxpr", inside)
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))

    def read(atom):
        return atom.val if isinstance(atom, Literal) else known[atom]

    for eqn in jaxpr.eqns:
        known.update(zip(eqn.outvars, _apply(eqn, [read(atom) for atom in eqn.invars]), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _apply(eqn, inputs):
    name, params = eqn.primitive.name, eqn.params
    if name == "optimization_barrier":
        return inputs
    if name == "scan":
        return _scan(params, inputs)
    if name == "cond":
        return _call(params["branches"][int(inputs[0])], inputs[1:])
    if name == "while":
        first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        carry = inputs[second:]
        while _call(params["cond_jaxpr"], [*inputs[:first], *carry])[0]:
            carry = _call(params["body_jaxpr"], [*inputs[first:second], *carry])
        return carry
    if name in ("jit", "checkpoint", "remat2", "custom_jvp_call", "custom_vjp_call", "closed_call"):
        return _call(params.get("jaxpr") or params["call_jaxpr"], inputs)
    outputs = eqn.primitive.bind(*inputs, **params)
    return outputs if eqn.primitive.multiple_results else [outputs]


def _call(inside, inputs):
    return _run(inside, getattr(inside, "consts", ()), inputs)


def _scan(params, inputs):
    num_consts, num_carry = scan_arity(params)
    consts, carry, xs = inputs[:num_consts], inputs[num_consts:][:num_carry], inputs[num_consts + num_carry :]
    rows = []
    for place in range(params["length"]):
        place = params["length"] - 1 - place if params["reverse"] else place
        outputs = _call(params["jaxpr"], [*consts, *carry, *(x[place] for x in xs)])
        carry, ys = outputs[:num_carry], outputs[num_carry:]
        rows.append(ys)
    rows = rows[::-1] if params["reverse"] else rows
    return [*carry, *(jnp.stack(column) for column in zip(*rows, strict=True))]


def run_parts(plan, params, x, dy):
    """Forward, I and W, a barrier between them as if each were a program of its own."""
    y, aux, residuals_i, residuals_w = plan.forward(params, x)
    kept = lax.optimization_barrier((residuals_i, residuals_w))
    dx, stash = plan.backward_input(params, x if plan.keep_input in "IW" else None, *kept, dy)
    handed = lax.optimization_barrier(stash)
    dparams = plan.backward_weight(params, x if plan.keep_input == "W" else None, kept[1], handed)
    return (y, aux), (dparams, dx), (residuals_i, residuals_w, stash)


def vjp(f):
    """What the backward of a function gives, of (params, x, dy)."""
    return lambda params, x, dy: jax.vjp(f, params, x)[1](dy)


def check_split(f, params, x, *, has_aux=False, run=step_by_step, exact=True, tolerance=1e-6):
    """Compares every part of the split, and I and W at once, with ``jax.vjp``; gives the plan."""
    plan = split_backward(f, has_aux).trace(params, x)
    dy = cotangent(99, plan.y)

    def reference(params, x, dy):
        y, pull, *aux = jax.vjp(f, params, x, has_aux=has_aux)
        return (y, aux[0] if has_aux else None), pull(float0_zeros(y, dy))

    def ours(params, x, dy):
        outputs, halves, kept = run_parts(plan, params, x, dy)
        whole = plan.backward(params, x if plan.keep_input in "IW" else None, *kept[:2], dy)
        return outputs, halves, whole, kept

    outputs, gradients = run(reference, params, x, dy)
    got_outputs, halves, whole, kept = run(ours, params, x, dy)
    assert_trees_match(outputs, got_outputs, exact, tolerance)
    assert_trees_match(gradients, halves, exact, tolerance)
    assert_trees_match(gradients, whole, exact, tolerance)
    assert_types(plan, *kept)
    assert_no_parameter_kept(params, (*kept[0], *kept[1]))
    assert_parts(plan)
    return plan


def assert_types(plan, residuals_i, residuals_w, stash):
    def types(arrays):
        return [(a.shape, a.dtype) for a in arrays]

    assert types(plan.residuals_i) == types(residuals_i)
    assert types(plan.residuals_w) == types(residuals_w)
    assert types(plan.stash) == types(stash)


def assert_parts(plan):
    """W spends what I does not, and talks to nobody."""
    assert plan.flops.input + plan.flops.weight == plan.flops.backward
    assert not applied(plan, "weight").keys() & set(COLLECTIVES)


def assert_no_parameter_kept(params, arrays):
    """No array holds a parameter's numbers, in whatever order or precision."""
    for leaf in jax.tree.leaves(params):
        if leaf.size < 2 or not jnp.issubdtype(leaf.dtype, jnp.floating):
            continue
        for kept in arrays:
            if kept.size == leaf.size and jnp.issubdtype(kept.dtype, jnp.floating):
                precision = min(kept.dtype, leaf.dtype, key=lambda dtype: dtype.itemsize)
                ours, theirs = (
                    np.sort(np.asarray(a.astype(precision), np.float32), None) for a in (kept, leaf)
                )
                assert not np.array_equal(ours, theirs), f"a parameter {leaf.shape} is kept as {kept.shape}"


BATCH, WIDTH, HIDDEN = 8, 16, 32


def block_params(seed=0, num_layers=None):
    lead = () if num_layers is None else (num_layers,)
    return {
        "up": normal(seed, *lead, WIDTH, HIDDEN),
        "bias": normal(seed + 1, *lead, HIDDEN),
        "down": normal(seed + 2, *lead, HIDDEN, WIDTH),
        "scale": 1 + normal(seed + 3, *lead, WIDTH),
    }


def norm(scale, x):
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + x.dtype.type(1e-5)) * scale


def block(params, x):
    """A residual block: norm, up, silu, down."""
    h = jax.nn.silu(norm(params["scale"], x) @ params["up"] + params["bias"])
    return x + h @ params["down"]


def mlp(params, x):
    return jnp.tanh(x @ params["up"] + params["bias"]) @ params["down"]
