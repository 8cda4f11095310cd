"""Gradients are the product: every schedule and layout against the plain model, leaf by leaf."""

import functools

import jax
import numpy as np
import pytest

from dualpipe_jax import make_mesh, pipeline_value_and_grad, sequential_value_and_grad
from dualpipe_jax.schedule import (
    ALL_SCHEDULES,
    CostModel,
    chimera,
    dualpipe,
    dualpipe_v,
    gpipe,
    hanayo,
    interleaved_1f1b,
    interleaved_zero_bubble,
    one_f_one_b,
    validate,
    zb_h1,
)
from tests.engine import models

POLICIES = {
    "none": None,
    "all": "all",
    "dots": jax.checkpoint_policies.dots_saveable,
}


@functools.cache
def oracle(kind, num_stages, num_microbatches):
    params, _ = models.init(kind, num_stages)
    step = models.quick(sequential_value_and_grad(models.model(kind), has_aux=True))
    return jax.device_get(step(params, *models.data(num_microbatches)))


def assert_same(result, expected):
    """Loss, aux and every leaf of the gradients; integers exactly."""
    (loss, aux), grads = jax.device_get(result)
    (expected_loss, expected_aux), expected_grads = expected
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, aux, expected_aux)
    assert jax.tree.structure(grads) == jax.tree.structure(expected_grads)
    for (path, got), want in zip(
        jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(expected_grads), strict=True
    ):
        assert got.dtype == want.dtype and got.shape == want.shape
        if got.dtype != jax.dtypes.float0:
            scale = np.abs(want).max()
            assert scale > 0, jax.tree_util.keystr(path)
            np.testing.assert_allclose(
                got / scale, want / scale, atol=2e-6, err_msg=jax.tree_util.keystr(path)
            )


def check(make, num_ranks, num_ep, num_microbatches, kind, remat="none", check_vma=False, **options):
    schedule = make(num_ranks, num_microbatches)
    validate(schedule)
    num_stages = schedule.placement.num_model_stages
    params, specs = models.init(kind, num_stages)
    step = pipeline_value_and_grad(
        models.model(kind, POLICIES[remat]),
        schedule,
        make_mesh(num_ranks, num_ep),
        param_specs=specs,
        has_aux=True,
        check_vma=check_vma,
        **options,
    )
    result = models.quick(step)(params, *models.data(num_microbatches))
    assert_same(result, oracle(kind, num_stages, num_microbatches))


def legal(make, num_ranks):
    """A few legal microbatch counts: few, and well into the steady state."""
    if make in (dualpipe, chimera):
        return [max(2, 2 * num_ranks - 2), 2 * num_ranks + 4] if num_ranks % 2 == 0 else []
    if make is dualpipe_v:
        return [max(2, 2 * num_ranks - 1), 2 * num_ranks + 3]
    return [1, num_ranks + 3]


LAYOUTS = [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2), (8, 1)]
CORE = pytest.mark.parametrize(
    "make", (gpipe, one_f_one_b, zb_h1, dualpipe, dualpipe_v), ids=lambda make: make.__name__
)
"""One schedule for each thing the engine does: full backwards, split ones, pairs, two pipes, a V."""


@pytest.mark.thin(3)
@CORE
@pytest.mark.parametrize(("num_ranks", "num_ep"), LAYOUTS)
def test_schedules_and_layouts(make, num_ranks, num_ep):
    turn = (num_ranks // 2 + num_ep) % 2
    for num_microbatches in legal(make, num_ranks)[turn : turn + 1]:
        check(make, num_ranks, num_ep, num_microbatches, ("moe", "mlp")[(num_ranks + num_ep) % 2])


def also(*layouts):
    """Every other schedule: each layout once, and with it a count, a model, remat and vma, all in turn."""
    others = [make for make in ALL_SCHEDULES if make not in (gpipe, one_f_one_b, zb_h1, dualpipe, dualpipe_v)]
    for number, make in enumerate(others):
        for turn, (num_ranks, num_ep) in enumerate(layouts, start=number):
            if counts := legal(make, num_ranks):
                remat, check_vma = ("none", "all", "dots")[turn % 3], bool(turn // 2 % 2)
                case = make, num_ranks, num_ep, counts[turn % 5 > 0], ("moe", "mlp")[turn % 2]
                yield pytest.param(*case, remat, check_vma, id=f"{make.__name__}-pp{num_ranks}-ep{num_ep}")


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("make", "num_ranks", "num_ep", "num_microbatches", "kind", "remat", "check_vma"),
    list(also((2, 2), (4, 1))),
)
def test_every_other_schedule(make, num_ranks, num_ep, num_microbatches, kind, remat, check_vma):
    check(make, num_ranks, num_ep, num_microbatches, kind, remat, check_vma)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "num_ranks", "num_ep", "num_microbatches", "kind", "remat", "check_vma"),
    list(also((1, 1), (4, 2))),
)
def test_every_other_schedule_on_more_layouts(
    make, num_ranks, num_ep, num_microbatches, kind, remat, check_vma
):
    check(make, num_ranks, num_ep, num_microbatches, kind, remat, check_vma)


@pytest.mark.thin(5)
@pytest.mark.parametrize(
    ("make", "counts", "more"),
    [
        (interleaved_1f1b, (2, 6), {"num_stages_per_rank": 3}),
        (interleaved_zero_bubble, (4, 5), {"num_stages_per_rank": 4}),
        (hanayo, (3, 4), {"num_waves": 1}),
        (dualpipe, (4, 2), {}),
        (dualpipe_v, (4, 3), {}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_other_counts_of_stages_and_few_microbatches(make, counts, more):
    check(functools.partial(make, **more), counts[0], 1, counts[1], "mlp")


@pytest.mark.thin(5)
@pytest.mark.parametrize(("remat", "check_vma"), [("all", True), ("dots", False)])
@CORE
def test_remat_and_vma(make, remat, check_vma):
    check(make, 2, 2, 6, "moe", remat, check_vma)


@pytest.mark.thin(5)
@CORE
def test_vma_without_remat(make):
    check(make, 4, 2, 8, "mlp", check_vma=True)
    check(make, 2, 2, 4, "moe", check_vma=True)


@pytest.mark.thin(4)
@pytest.mark.parametrize("make", [dualpipe, dualpipe_v], ids=lambda make: make.__name__)
@pytest.mark.parametrize("kind", ["mlp", "moe"])
def test_fused_pairs(make, kind):
    """As accelerators run them: on CPU pairs are not fused unless asked for."""
    check(make, 4, 2, 10, kind, fuse_pairs=True)


def test_costs_change_the_ticks_and_not_the_result():
    check(dualpipe, 4, 1, 12, "mlp", costs=CostModel(F=1, I=1.64, W=0.97, FB=2.65, send=0.1))


@pytest.mark.slow
@CORE
@pytest.mark.parametrize(("num_ranks", "num_ep"), [(2, 2), (8, 1)])
def test_schedules_and_layouts_with_remat_and_vma(make, num_ranks, num_ep):
    turn = (num_ranks + num_ep) % 2
    for num_microbatches in legal(make, num_ranks)[turn : turn + 1]:
        check(make, num_ranks, num_ep, num_microbatches, ("mlp", "moe")[turn], "all", check_vma=True)
