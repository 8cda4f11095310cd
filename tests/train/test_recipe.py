"""What a run goes by: the recipe of its model in proportion, options over it, batches that grow."""

import collections
import types

import jax
import numpy as np
import optax
import pytest

from dualpipe_jax.parallel import make_mesh
from train.checks import check
from train.config import FLAGS, ConfigError, TrainConfig, configure, option
from train.data import Corpus
from train.data.corpus import text_source
from train.data.vocabulary import BYTES
from train.model import model_config
from train.prepare.__main__ import USUAL_SEQUENCE
from train.recipe import FROM_RECIPE, describe, follow, run_recipe
from train.setup import Run


def recipe_of(**options):
    config = follow(configure(**options))
    return config, run_recipe(config, model_config(config))


def rates(recipe, *steps):
    return [float(recipe.learning_rate(step)) for step in steps]


def cosine(peak, final, way):
    return final + (peak - final) * (1 + np.cos(np.pi * way)) / 2


def test_the_default_run_is_a_warmed_up_cosine_to_a_tenth():
    config, recipe = recipe_of()
    curve = optax.warmup_cosine_decay_schedule(0.0, 4e-3, 20, 250, 4e-4)
    found = jax.vmap(recipe.learning_rate)(np.arange(250))
    np.testing.assert_allclose(found, [curve(step + 1) for step in range(250)], rtol=2e-6)
    named = {flag: option(config, flag) for flag in FROM_RECIPE}
    assert named == {
        "--learning-rate": 4e-3,
        "--warmup": 20,
        "--b1": 0.9,
        "--b2": 0.95,
        "--weight-decay": 0.1,
        "--clip": 1.0,
        "--bias-rate": 0.01,
        "--mtp-weight": 0.3,
        "--balance-factor": 1e-4,
        "--sequence": USUAL_SEQUENCE,
    }


def test_v3_is_trained_as_deepseek_did_in_proportion():
    """Of 14.8T tokens: constant to 10T, a cosine to 14.3T, two constants to 14.633T and the end."""
    steps = 14_800
    config, recipe = recipe_of(model="v3", steps=steps, mtp=1)
    assert config.step.sequence == 4096 and config.model.balance_factor == 1e-4 and recipe.warmup == 1480
    wanted = {
        1479: 2.2e-4,
        9_990: 2.2e-4,
        12_149: cosine(2.2e-4, 2.2e-5, 0.5),
        14_310: 2.2e-5,
        14_620: 2.2e-5,
        14_640: 7.3e-6,
        steps - 1: 7.3e-6,
    }
    np.testing.assert_allclose(rates(recipe, *wanted), [*wanted.values()], rtol=2e-3)
    np.testing.assert_allclose([recipe.bias_rate(step) for step in (0, 14_290, 14_310)], [1e-3, 1e-3, 0])
    np.testing.assert_allclose([recipe.mtp_weight(step) for step in (0, 9_990, 10_010)], [0.3, 0.3, 0.1])
    told = describe(config, recipe)
    assert told.startswith("DeepSeek-V3, arXiv:2412.19437, section 4.2\n")
    assert "rates are not scaled with the batch" in told and "64 sequences a step for 15360" in told
    assert "not followed: its batch grows from 3072" in told and "overrule" not in told


def test_v2_lite_has_its_balance_loss_and_falls_in_steps():
    config, recipe = recipe_of(model="v2-lite", steps=1000)
    assert (config.model.balance_factor, config.optimizer.bias_rate) == (1e-3, 0.0)
    wanted = [4.2e-4, 4.2e-4 * 0.316, 4.2e-4 * 0.316**2]
    np.testing.assert_allclose(rates(recipe, 790, 890, 999), wanted, rtol=1e-4)


def test_options_overrule_the_recipe_and_are_named():
    config, recipe = recipe_of(
        steps=100, learning_rate=1e-3, constant_until=0.6, final_rate=0.2, b1=0.8, bias_rate=0.02, warmup=0
    )
    np.testing.assert_allclose(
        rates(recipe, 0, 59, 79, 99), [1e-3, 1e-3, cosine(1e-3, 2e-4, 0.5), 2e-4], rtol=1e-5
    )
    assert (recipe.b1, recipe.b2, float(recipe.bias_rate(50))) == (0.8, 0.95, np.float32(0.02))
    told = describe(config, recipe)
    assert "--learning-rate 0.001 (0.004), --warmup 0 (10), --b1 0.8 (0.9), --bias-rate 0.02 (0.01), " in told
    assert "--constant-until 0.6, --final-rate 0.2" in told and "--b2" not in told


def test_the_weight_of_further_tokens_changes_where_the_rate_begins_to_fall():
    _, recipe = recipe_of(steps=10, mtp=1, mtp_weight=0.4, final_mtp_weight=0.2, constant_until=0.5)
    np.testing.assert_allclose([recipe.mtp_weight(step) for step in (0, 4, 5, 9)], [0.4, 0.4, 0.2, 0.2])
    _, constant = recipe_of(model="v3", steps=10, mtp_weight=0.2)
    np.testing.assert_allclose([constant.mtp_weight(step) for step in (0, 9)], [0.2, 0.2])
    # A run's own config.json says 0.3, too, so that a weight that is the recipe's is followed by the recipe's.
    _, published = recipe_of(model="v3", steps=10, mtp_weight=0.3)
    np.testing.assert_allclose([published.mtp_weight(step) for step in (0, 9)], [0.3, 0.1])


def test_batches_grow_by_the_first_one_until_the_ramp_is_done():
    """3 to 12 microbatches of 2 sequences of 10 tokens: linear in tokens, cut down to a multiple of 3."""
    config, recipe = recipe_of(
        schedule="gpipe", pp=1, ep=1, microbatches=12, microbatch_size=2, sequence=10, steps=20,
        first_microbatches=3, ramp_tokens=600,
    )  # fmt: skip
    done, sizes = 0, []
    for _ in range(20):
        exact = 3 + 9 * min(done / 600, 1)
        sizes.append(3 * int(exact // 3) * 2)
        done += sizes[-1] * 10
    assert [recipe.batch_size(step) for step in range(20)] == sizes and len({*sizes}) == 4
    assert recipe.tokens == recipe.count_tokens(20) == done
    assert config.batch_counts == (3, 6, 9, 12)


def test_a_ramp_of_any_length_is_made_at_once():
    """It has a row for each size of batches, of which no run needs to reach the last."""
    config, recipe = recipe_of(
        microbatches=8, microbatch_size=2, steps=20, first_microbatches=4, ramp_tokens=10**15
    )
    assert len({recipe.batch_size(step) for step in range(20)}) == 1
    assert recipe.tokens == 20 * 4 * 2 * config.sequence
    half = 10**15 // 2 // (8 * config.sequence)
    sizes = [recipe.batch_size(half + beyond) for beyond in (0, 10**3, 10**12)]
    assert sizes == [8, 8, 16]
    assert recipe.count_tokens(10**15) > 10**15


def test_growing_batches_read_what_batches_of_one_size_would_in_its_order():
    config, recipe = recipe_of(
        schedule="gpipe", pp=1, ep=1, microbatches=2, microbatch_size=2, sequence=16, steps=7,
        first_microbatches=1, ramp_tokens=128,
    )  # fmt: skip
    text = np.random.default_rng(0).integers(0, 128, 4096).astype(np.uint8).tobytes()
    corpus = Corpus((text_source("text", [text], [text], 1, BYTES),))
    layout = types.SimpleNamespace(mesh=make_mesh(1, 1))
    run = types.SimpleNamespace(config=config, corpus=corpus, recipe=recipe, layout=layout)
    grown = [np.asarray(Run.batch(run, step)["inputs"]) for step in range(7)]
    assert [len(batch) for batch in grown] == [1, 1, 1, 1, 2, 2, 2]
    assert [Run.compiles(run, step) for step in range(7)] == [True, *3 * [False], True, False, False]
    plain = [corpus.train_batch(0, number, (1, 2, 16))["inputs"] for number in range(10)]
    np.testing.assert_array_equal(np.concatenate(grown), np.concatenate(plain))


def test_what_is_filled_in_stays():
    """A run that goes on reads its own options, whatever the recipes say by then."""
    config = follow(configure(model="v3", steps=50))
    assert follow(config) == config
    assert follow(configure(config, steps=100)).optimizer.warmup == config.optimizer.warmup
    left_out = {flag for flag in FLAGS if option(TrainConfig(), flag) is None}
    assert left_out >= {*FROM_RECIPE}


WRONG = {
    "one of two": (dict(first_microbatches=4), "--first-microbatches and --ramp-tokens: one says from what"),
    "no divisor": (
        dict(first_microbatches=6, ramp_tokens=1),
        "--first-microbatches 6: steps grow by as many, which must divide the 16 of --microbatches",
    ),
    "no text so long": (
        dict(first_microbatches=8, ramp_tokens=2**62),
        f"--ramp-tokens {2**62}: must be below 2^62",
    ),
    "odd for two pipes": (
        dict(first_microbatches=1, ramp_tokens=1),
        "--pp 4 --first-microbatches: a step with 1: ",
    ),
    "with a profile": (
        dict(first_microbatches=8, ramp_tokens=1, profile=1),
        "--profile: with --first-microbatches",
    ),
    "b1": (dict(b1=1.0), "--b1 1.0: must be below 1"),
    "share": (dict(constant_until=1.5), "--constant-until 1.5: must be below 1"),
    "final": (dict(final_rate=-1.0), "--final-rate -1.0: must not be negative"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused(case):
    options, message = WRONG[case]
    with pytest.raises(ConfigError) as told:
        check(configure(**options))
    assert str(told.value).startswith(message), collections.ChainMap({"told": str(told.value)})
