"""Schedules train alike: the order of the work is no part of the mathematics.

What is left is rounding, some 1e-6 of the loss here. The steps are the default run's own. Batches sixteen times
smaller at the same learning rate are not fit for this: their training is so ill-conditioned that 3e-7 in the
parameters became 5e-4 in the gradient and 1e-3 in the loss, where both schedules' gradients at equal parameters
agreed within 6e-8.
"""

import numpy as np
import pytest

from train import setup
from train.config import TrainConfig, configure
from train.setup import prepare

NUM_STEPS = 10
SCHEDULES = ("one_f_one_b", "dualpipe", "dualpipe_v")


def curve(schedule, num_steps=NUM_STEPS, **options):
    """Losses and experts' loads of the first steps, and the number of slices that the model is cut into."""
    config = configure(schedule=schedule, **options)
    run = prepare(config)
    state, losses, loads = run.init(), [], []
    for step in range(num_steps):
        batch = run.corpus.train_batch(config.seed, step, config.batch_shape)
        state, metrics = run.update(state, batch)
        losses.append([metrics[name].item() for name in ("loss", "objective")])
        loads.append(np.asarray(metrics["counts"]))
    assert run.update._cache_size() == 1, "the step was compiled again"
    return np.array(losses), np.array(loads), run.schedule.placement.num_model_stages


@pytest.fixture(autouse=True)
def compiled_in_half_the_time(monkeypatch):
    monkeypatch.setattr(setup, "compiler_options", lambda mesh: {"xla_backend_optimization_level": "0"})


@pytest.mark.slow
def test_schedules_give_the_same_loss_curve():
    """With multi-token prediction, whose loss is in the objective alone."""
    assert TrainConfig().model.precision == "float32"
    curves, loads, stages = zip(*(curve(name, mtp=1) for name in SCHEDULES), strict=True)
    assert set(stages) == {4, 8}, "the model should be cut in more than one way"
    assert curves[0][-1, 0] < curves[0][0, 0] - 0.5, "nothing was learnt, so nothing was compared"
    assert np.all(curves[0][:, 1] > curves[0][:, 0] + 0.1), "tokens further ahead are in no objective"
    for name, losses, chosen in zip(SCHEDULES, curves, loads, strict=True):
        # Two experts' scores may tie in seven digits. Then two orders of the same work choose differently, which is
        # seen at once in how often each is chosen, and train on as two models.
        same = [np.array_equal(ours, theirs) for ours, theirs in zip(chosen, loads[0], strict=True)]
        alike = [*same, False].index(False)
        assert alike >= 4, f"{name}: after {alike} steps experts were chosen differently"
        np.testing.assert_allclose(losses[:alike], curves[0][:alike], rtol=0, atol=1e-5, err_msg=name)
        np.testing.assert_allclose(losses, curves[0], rtol=0, atol=5e-3, err_msg=name)


@pytest.mark.slow
def test_stages_of_unequal_depth_train_the_same_model():
    """Six layers: 1, 2, 2, 1 on DualPipe's four ranks, three each on two."""
    (unequal, *_), (equal, *_) = (
        curve(schedule, num_steps=5, layers=6, pp=pp) for schedule, pp in (("dualpipe", 4), ("gpipe", 2))
    )
    assert unequal[-1, 0] < unequal[0, 0]
    np.testing.assert_allclose(unequal, equal, rtol=0, atol=1e-5)
