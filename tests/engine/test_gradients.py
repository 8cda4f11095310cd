"""Gradients are the product: every schedule and layout against the plain model, leaf by leaf."""

import functools

import jax
import pytest

from dualpipe_jax import make_mesh, pipeline_value_and_grad
from dualpipe_jax.schedule import (
    ALL_SCHEDULES,
    CostModel,
    chimera,
    dualpipe,
    dualpipe_v,
    gpipe,
    hanayo,
    interleaved_1f1b,
    interleaved_1f1b_overlap,
    interleaved_zero_bubble,
    looped_bfs,
    one_f_one_b,
    v_half,
    v_min,
    validate,
    zb_h1,
    zb_h2,
    zb_v,
)
from tests.engine import models

POLICIES = {"none": None, "all": "all", "dots": jax.checkpoint_policies.dots_saveable}
COSTS = CostModel(F=1, I=1.64, W=0.97, FB=2.65, send=0.1)
TYPED = {"check_vma": True}
FUSED = {"fuse_pairs": True}  # as accelerators run pairs; on CPU only if asked for
SWITCH = {"divergence": "switch"}

# Schedule, ranks, devices of ep, microbatches (few, or well into the steady state), model, remat, the engine's
# options and the schedule's. Every schedule meets both models; either model meets each remat, with types and without,
# on each number of ranks but three. The corners are here: one rank, eight, one microbatch, fewer of them than ranks.
QUICK = [
    (gpipe, 1, 1, 1, "mlp", "dots", TYPED),
    (one_f_one_b, 8, 1, 11, "mlp", "none", TYPED),
    (interleaved_1f1b, 2, 2, 4, "mlp", "all", {}),
    (zb_h1, 4, 2, 1, "moe", "dots", {"costs": COSTS}),
    (zb_v, 2, 1, 4, "mlp", "none", {}),
    (hanayo, 2, 1, 5, "mlp", "none", {}),
    (chimera, 2, 2, 4, "mlp", "dots", {}),
    (dualpipe, 2, 1, 2, "mlp", "dots", {}),
    (dualpipe, 2, 2, 4, "moe", "all", TYPED | FUSED),
    (dualpipe_v, 2, 1, 4, "mlp", "none", {}),
    (zb_h1, 2, 1, 4, "mlp", "none", SWITCH),
]
SLOW = [
    (gpipe, 2, 2, 5, "moe", "all", TYPED),
    (gpipe, 8, 1, 11, "mlp", "none", {}),
    (one_f_one_b, 1, 2, 4, "moe", "dots", {}),
    (one_f_one_b, 2, 2, 1, "mlp", "all", TYPED),
    (one_f_one_b, 4, 1, 1, "moe", "none", {}),
    (interleaved_1f1b, 4, 1, 7, "moe", "dots", TYPED),
    (interleaved_1f1b, 2, 1, 6, "mlp", "none", {}, {"num_stages_per_rank": 3}),
    (interleaved_1f1b_overlap, 2, 2, 5, "moe", "none", {}),
    (interleaved_1f1b_overlap, 4, 1, 1, "mlp", "all", TYPED),
    (looped_bfs, 2, 2, 5, "mlp", "dots", TYPED),
    (looped_bfs, 4, 2, 1, "moe", "none", {}),
    (zb_h1, 1, 1, 4, "mlp", "all", TYPED),
    (zb_h1, 8, 1, 11, "moe", "dots", {}),
    (dualpipe, 4, 1, 8, "moe", "none", SWITCH | FUSED),
    (dualpipe_v, 2, 2, 4, "moe", "none", SWITCH | TYPED),
    (zb_h2, 2, 2, 5, "moe", "all", {}),
    (zb_h2, 4, 1, 1, "mlp", "dots", TYPED),
    (interleaved_zero_bubble, 2, 2, 5, "moe", "dots", TYPED),
    (interleaved_zero_bubble, 4, 1, 5, "mlp", "none", {}, {"num_stages_per_rank": 4}),
    (zb_v, 4, 1, 7, "mlp", "all", TYPED),
    (zb_v, 2, 2, 4, "moe", "none", {}),
    (v_half, 2, 1, 5, "mlp", "none", {}),
    (v_half, 4, 2, 1, "moe", "dots", TYPED),
    (v_min, 2, 2, 5, "moe", "all", {}),
    (v_min, 4, 1, 1, "mlp", "none", TYPED),
    (hanayo, 3, 1, 4, "mlp", "dots", {}, {"num_waves": 1}),
    (hanayo, 4, 2, 1, "moe", "all", TYPED),
    (chimera, 4, 1, 6, "moe", "none", TYPED),
    (dualpipe, 8, 1, 14, "mlp", "none", {}),
    (dualpipe, 4, 1, 2, "mlp", "none", {}),
    (dualpipe, 4, 2, 10, "moe", "none", FUSED),
    (dualpipe, 4, 2, 12, "mlp", "all", TYPED | {"costs": COSTS}),
    (dualpipe_v, 2, 2, 7, "mlp", "dots", TYPED),
    (dualpipe_v, 1, 2, 5, "moe", "none", {}),
    (dualpipe_v, 4, 1, 3, "mlp", "none", {}),
    (dualpipe_v, 4, 2, 10, "moe", "dots", FUSED),
    (dualpipe_v, 8, 1, 15, "moe", "all", TYPED),
]


def cases():
    for marks, rows in ((), QUICK), (pytest.mark.slow, SLOW):
        for make, ranks, ep, count, kind, remat, options, *more in rows:
            if more:
                make = functools.wraps(make)(functools.partial(make, **more[0]))
            name = "-".join([make.__name__, f"pp{ranks}", f"ep{ep}", f"mb{count}", kind, remat, *options])
            yield pytest.param(make, (ranks, ep), count, kind, remat, options, id=name, marks=marks)


@pytest.mark.parametrize(("make", "layout", "num_microbatches", "kind", "remat", "options"), [*cases()])
def test_as_the_plain_model(make, layout, num_microbatches, kind, remat, options):
    schedule = make(layout[0], num_microbatches)
    validate(schedule)
    num_stages = schedule.placement.num_model_stages
    params, specs = models.init(kind, num_stages)
    step = pipeline_value_and_grad(
        models.model(kind, POLICIES[remat]),
        schedule,
        make_mesh(*layout),
        param_specs=specs,
        has_aux=True,
        **options,
    )
    result = models.quick(step)(params, *models.data(num_microbatches))
    models.assert_same(result, models.oracle(kind, num_stages, num_microbatches))


def test_no_schedule_is_left_out():
    """And each has experts in one case, none in another."""
    found = {(make, kind) for make, _, _, _, kind, *_ in QUICK + SLOW}
    assert found == {(make, kind) for make in ALL_SCHEDULES for kind in ("mlp", "moe")}
