"""What real models need, against the plain model leaf by leaf: which layout meets which feature is read from CASES.

Every case has kinds of stages, x a tree of floats, integers and a key, side inputs, losses and metrics in all stages,
token-weighted means over uneven microbatches, tied and shared parameters, integers and keys in params (see real.py).
"""

import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from dualpipe_jax import Pipeline, make_mesh, reference_value_and_grad
from dualpipe_jax.schedule import chimera, dualpipe, dualpipe_v, interleaved_1f1b, one_f_one_b, zb_h1, zb_v
from tests.engine import real
from tests.engine.models import quick
from tests.jaxprs import equations

FROZEN = {
    "stages": {"layers": [None, True], "scale": None, "number": None, "key": None},
    "shared": {"dense": True},
}
FROZEN["shared"] |= {name: None for name in ("embed", "bias", "join", "unused")}
STORED_LAYER = {"up": P("dp", "ep"), "a": P("dp"), "b": None, "bias": None, "router": None}
STORED_LAYER |= {"down": P(None, ("ep", "dp")), "experts": P("ep", "dp")}
STORED = {
    "stages": {"layers": [STORED_LAYER] * real.SLOTS, "scale": P("ep"), "number": None, "key": None},
    "shared": {
        "embed": P(None, ("ep", "dp")),
        "dense": P("pp", "dp"),
        "join": P(("dp", "ep"), "pp"),
        "bias": None,
        "unused": None,
    },
}


class Case(NamedTuple):
    """A schedule on (dp, pp, ep) with so many microbatches, and what is asked of it."""

    make: object
    layout: tuple[int, int, int]
    num_microbatches: int
    dropout: bool = True
    remat: bool = True
    options: Mapping = {}


CASES = {
    "one stage": Case(one_f_one_b, (1, 1, 2), 2),
    "no pair, whole backwards": Case(one_f_one_b, (2, 2, 1), 3, dropout=False, remat=False),
    "no pair, halves": Case(zb_h1, (1, 2, 2), 4, options={"frozen": FROZEN}),
    "two pipes, halves of pairs": Case(dualpipe, (1, 4, 2), 8),
    "two pipes, fused pairs": Case(dualpipe, (2, 2, 2), 4, options={"fuse_pairs": True, "idle_sends": True}),
    "two pipes, stored sharded": Case(dualpipe, (2, 2, 2), 4, options={"storage_specs": STORED}),
    "a V, fused pairs, one conditional": Case(
        dualpipe_v,
        (1, 2, 2),
        5,
        options={"fuse_pairs": True, "idle_sends": True, "divergence": "switch", "frozen": FROZEN},
    ),
    "a V, checked, lockstep": Case(zb_v, (1, 2, 2), 4, options={"check_vma": True, "divergence": "none"}),
    "rounds, one conditional": Case(interleaved_1f1b, (1, 2, 1), 4, options={"divergence": "switch"}),
    "two pipes, no pair, gradients of inputs": Case(
        chimera, (2, 2, 1), 4, remat=False, options={"input_grads": True}
    ),
    "two pipes, checked, all at once": Case(
        dualpipe,
        (2, 2, 2),
        4,
        options={
            "check_vma": True,
            "fuse_pairs": True,
            "divergence": "switch",
            "storage_specs": STORED,
            "frozen": FROZEN,
            "input_grads": True,
        },
    ),
}
KEY = jax.random.key(3)


@functools.cache
def oracle(num_stages, num_microbatches, num_parts, dropout, extra):
    step = quick(reference_value_and_grad(real.model(num_stages), num_parts=num_parts, input_grads=extra))
    batch = real.data(num_microbatches, extra=extra)
    return jax.device_get(step(real.init(num_stages), batch, KEY if dropout else None))


def check(case):
    dp, pp, ep = case.layout
    schedule = case.make(pp, case.num_microbatches)
    stages, extra = schedule.placement.num_model_stages, case.options.get("input_grads", False)
    batch, key = real.data(case.num_microbatches, extra=extra), KEY if case.dropout else None
    mesh = make_mesh(pp, ep, dp=dp)
    pipeline = Pipeline(
        real.model(stages, case.remat), schedule, mesh, param_specs=real.SPECS, **case.options
    )
    result = jax.device_get(quick(pipeline.value_and_grad)(real.init(stages), batch, key))
    compare(result, oracle(stages, case.num_microbatches, dp * ep, case.dropout, extra), case.options)


def compare(result, expected, options=None):
    (loss, report), grads = result
    (expected_loss, expected_report), expected_grads = expected
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    assert report.losses.keys() == expected_report.losses.keys()
    for name, value in expected_report.losses.items():
        np.testing.assert_allclose(report.losses[name], value, rtol=1e-6, err_msg=name)
    assert report.metrics.keys() == expected_report.metrics.keys()
    for name, value in expected_report.metrics.items():
        rtol = 1e-5 if value.dtype == np.float32 else 0
        np.testing.assert_allclose(report.metrics[name], value, rtol=rtol, err_msg=name)
    found = jax.tree_util.tree_leaves_with_path(grads, is_leaf=lambda g: g is None)
    frozen = 0
    for (path, got), want in zip(found, jax.tree.leaves(expected_grads), strict=True):
        name = jax.tree_util.keystr(path)
        if got is None:
            frozen += 1
            assert "[1]" in name or "dense" in name
            continue
        assert (got.dtype, got.shape) == (want.dtype, want.shape), name
        if got.dtype != jax.dtypes.float0:
            scale = np.abs(want).max()
            assert scale > 0 or "unused" in name or "[1]" in name, name  # the ends have no second layer
            np.testing.assert_allclose(got, want, atol=2e-6 * scale, rtol=0, err_msg=name)
    assert frozen == (8 if (options or {}).get("frozen") else 0)


QUICK = "no pair, halves"


@pytest.mark.parametrize(
    "name", [n if n == QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_case(name):
    check(CASES[name])


def test_what_is_of_parameters_alone_is_made_once():
    """No tick does the product of ``a`` and ``b`` or of the table and ``dense``, nor the matmuls of their gradients."""
    pipeline = Pipeline(real.model(2), dualpipe(2, 4), make_mesh(2, 2), param_specs=real.SPECS)
    jaxpr = jax.make_jaxpr(pipeline.value_and_grad)(real.init(2), real.data(4), KEY).jaxpr
    in_tick, once = [], []
    for around, eqn in equations(jaxpr):
        if eqn.primitive.name == "dot_general":
            (in_tick if "scan" in around else once).append(
                [v.aval.shape for v in (*eqn.invars, *eqn.outvars)]
            )
    table = {(real.VOCAB, real.WIDTH), (real.WIDTH, real.WIDTH)}
    assert in_tick and not [s for s in in_tick if real.RANK in sum(s, ()) or table == set(s)]
    assert [s for s in once if real.RANK in sum(s, ())] and [s for s in once if table == set(s)]


def test_the_comparison_can_fail():
    """A gradient that is off by a hundred-thousandth, a count by one, a leaf that is missing: each is seen."""
    expected = oracle(2, 4, 2, True, False)
    (loss, report), grads = jax.tree.map(np.copy, expected)
    compare(((loss, report), grads), expected)
    wrong = jax.tree.map(np.copy, grads)
    wrong["shared"]["embed"][0] *= 1 + 1e-4
    wrong["shared"]["embed"][3, 2] += 1e-5 * np.abs(wrong["shared"]["embed"]).max()
    with pytest.raises(AssertionError, match="embed"):
        compare(((loss, report), wrong), expected)
    counts = report._replace(metrics=report.metrics | {"counts": report.metrics["counts"] + 1})
    with pytest.raises(AssertionError, match="counts"):
        compare(((loss, counts), grads), expected)
