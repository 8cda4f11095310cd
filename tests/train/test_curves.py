"""Schedules train alike: the order of the work is no part of the mathematics.

What is left is rounding, some 1e-6 of the loss here. The rate of learning is still warming up: at its peak, on batches
as small as these, training is so ill-conditioned that 3e-7 in the parameters becomes 1e-3 in the loss.
"""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import models
from dualpipe_jax.engine import reference_value_and_grad
from dualpipe_jax.parallel import make_mesh
from train.config import configure
from train.model import model_config
from train.setup import prepare
from train.state.layout import init_state
from train.step import make_optimizer, make_update

NUM_STEPS = 4
TINY = configure(
    schedule="dualpipe_v", pp=2, ep=2, stage_layers=(1, 0, 1, 0), model="tiny", layers=1, mtp=1, microbatches=4,
    microbatch_size=2, sequence=32, eval_sequences=1, warmup=10,
)  # fmt: skip
"""On a V, which cuts the model into four; ``test_run`` has DualPipe's curve and another's that goes on with it."""


def curve(run, state, update):
    """Losses and experts' loads of the first steps."""
    losses, loads = [], []
    for step in range(NUM_STEPS):
        batch = run.corpus.train_batch(run.config.seed, step, run.config.batch_shape)
        state, metrics = update(state, batch)
        losses.append([metrics[name].item() for name in ("loss", "objective")])
        loads.append(np.asarray(metrics["counts"]))
    assert update.step._cache_size() == 1, "the step was compiled again"
    return np.array(losses), np.array(loads)


def plain_curve(run):
    """Of the model in one piece, without a pipeline."""
    asked, one = run.config, NamedSharding(make_mesh(1), PartitionSpec())
    model = models.deepseek(
        model_config(asked), 1, mtp_weight=asked.model.mtp_weight, balance_factor=asked.model.balance_factor
    )
    optimizer = make_optimizer(
        run.recipe.learning_rate, clip=asked.optimizer.clip, weight_decay=asked.optimizer.weight_decay
    )
    state = init_state(jax.jit(model.init, out_shardings=one)(jax.random.key(asked.seed)), optimizer)
    gradients = reference_value_and_grad(model.staged)
    return curve(run, state, make_update(gradients, optimizer, asked.optimizer.bias_rate, state))


@pytest.mark.slow
def test_a_schedule_gives_the_plain_models_loss_curve():
    """With multi-token prediction, whose loss is in the objective alone, on four stages of unequal depth."""
    run = prepare(TINY)
    losses, loads = curve(run, run.init(), run.update)
    expected, plain_loads = plain_curve(run)
    assert run.config.step.precision == "float32"
    assert expected[-1, 0] < expected[0, 0] - 0.1, "nothing was learnt, so nothing was compared"
    assert np.all(expected[:, 1] > expected[:, 0] + 0.1), "tokens further ahead are in no objective"
    # Two experts' scores may tie in seven digits. Then two orders of the same work choose differently, which is seen
    # at once in how often each is chosen, and train on as two models.
    np.testing.assert_array_equal(loads, plain_loads)
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-5)
