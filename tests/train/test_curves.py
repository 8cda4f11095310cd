"""All schedules train alike: the order of the work is no part of the mathematics."""

import jax
import numpy as np
import pytest

from train.config import SCHEDULES, TrainConfig
from train.data import draw_batch
from train.setup import prepare

NUM_STEPS = 20
OPTIONS = dict(
    pp=4, ep=2, microbatches=8, microbatch_size=2, sequence=16, model="tiny", steps=NUM_STEPS, warmup=5
)


def curve(schedule):
    config = TrainConfig(schedule=schedule, **OPTIONS)
    run = prepare(config)
    state, losses = run.state, []
    for step in range(NUM_STEPS):
        state, metrics = run.update(
            state, *draw_batch(run.corpus.train, config.seed, step, config.batch_shape)
        )
        losses.append(metrics["loss"])
    assert run.update._cache_size() == 1, "the step was compiled again"
    return run, np.array(jax.device_get(losses))


@pytest.mark.slow
def test_all_schedules_give_the_same_loss_curve():
    curves, stages = {}, {}
    for name in SCHEDULES:
        run, curves[name] = curve(name)
        stages[name] = run.schedule.placement.num_model_stages
    assert set(stages.values()) == {4, 8}, "the model should be cut in more than one way"
    reference = curves["gpipe"]
    assert reference[-1] < reference[0] - 0.5, "nothing was learnt, so nothing was compared"
    for name, losses in curves.items():
        np.testing.assert_allclose(losses, reference, rtol=0, atol=1e-5, err_msg=name)
