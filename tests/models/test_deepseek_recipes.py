"""The papers' numbers where the papers give them."""

import jax
import numpy as np
import pytest

import models
from models import recipes
from models.recipes import Phase


def step_at(recipe, tokens):
    """The first step that has so many tokens behind it."""
    done, step = 0, 0
    while done < tokens:
        ramped = recipe.batch_size(step)
        if ramped == recipe.batch:
            return step + int(np.ceil((tokens - done) / (ramped * recipe.sequence)))
        done, step = done + ramped * recipe.sequence, step + 1
    return step


@pytest.mark.parametrize(
    "tokens, rate, bias_rate, mtp_weight",
    [
        (1e12, 2.2e-4, 1e-3, 0.3),
        (9.999e12, 2.2e-4, 1e-3, 0.3),
        (10.001e12, 2.2e-4, 1e-3, 0.1),
        (12.15e12, (2.2e-4 + 2.2e-5) / 2, 1e-3, 0.1),
        (14.299e12, 2.2e-5, 1e-3, 0.1),
        (14.31e12, 2.2e-5, 0, 0.1),
        (14.7e12, 7.3e-6, 0, 0.1),
    ],
)
def test_v3_after_so_many_tokens(tokens, rate, bias_rate, mtp_weight):
    recipe = recipes.v3()
    step = step_at(recipe, tokens)
    np.testing.assert_allclose(recipe.tokens_before(step), tokens, rtol=2e-4)
    np.testing.assert_allclose(recipe.learning_rate(step), rate, rtol=2e-3)
    np.testing.assert_allclose(recipe.bias_rate(step), bias_rate)
    np.testing.assert_allclose(recipe.mtp_weight(step), mtp_weight)


def test_v3_warms_up_in_2000_steps_and_its_batches_grow():
    recipe = recipes.v3(batch_multiple=64)
    rates = jax.vmap(recipe.learning_rate)(np.arange(3000))
    np.testing.assert_allclose(rates[:2000], 2.2e-4 * np.arange(1, 2001) / 2000, rtol=1e-5)
    np.testing.assert_allclose(rates[2000:], 2.2e-4, rtol=1e-5)
    assert recipe.batch_size(0) == 3072
    half = step_at(recipe, 234.5e9)
    assert abs(recipe.batch_size(half) - (3072 + 15360) / 2) <= 128
    assert recipe.batch_size(step_at(recipe, 469e9)) == recipe.batch_size(10**6) == 15360
    assert all(recipe.batch_size(step) % 64 == 0 for step in range(0, 20000, 97))
    assert recipe.batch_size(recipe.num_steps - 1) == 15360
    before, after = (recipe.tokens_before(recipe.num_steps - back) for back in (1, 0))
    assert before < 14.8e12 <= after * (1 + 1e-6)


@pytest.mark.parametrize(
    "recipe, peak, falls, batches, tokens, alpha",
    [
        (recipes.v2(), 2.4e-4, (0.6, 0.9), (2304, 9216), 8.1e12, 0.003),
        (recipes.v2_lite(), 4.2e-4, (0.8, 0.9), (4608, 4608), 5.7e12, 0.001),
    ],
)
def test_v2_falls_in_steps(recipe, peak, falls, batches, tokens, alpha):
    assert recipe.tokens == tokens and recipe.balance_factor == alpha
    assert (recipe.batch_size(0), recipe.batch_size(recipe.num_steps)) == batches
    for share in (0.3, *(fall + side for fall in falls for side in (-1e-3, 1e-3)), 1):
        wanted = peak * 0.316 ** sum(share > fall for fall in falls)
        np.testing.assert_allclose(recipe.learning_rate(step_at(recipe, share * tokens)), wanted, rtol=1e-5)
    assert recipe.bias_rate(0) == 0 and recipe.config.num_mtp_layers == 0


def test_another_model_follows_v3_in_proportion():
    config = models.small(num_mtp_layers=1)
    run = dict(sequence=256, first_batch=8, batch=40, batch_multiple=8, warmup=100)
    small, v3 = recipes.in_proportion(recipes.v3(), 50e6, 1e-3, config, **run), recipes.v3()
    for share in (0.2, 0.7, 0.8, 0.97, 0.98, 0.99):
        ours, theirs = (step_at(recipe, share * recipe.tokens) for recipe in (small, v3))
        np.testing.assert_allclose(
            small.learning_rate(ours) / 1e-3, v3.learning_rate(theirs) / 2.2e-4, rtol=0.02, err_msg=share
        )
        np.testing.assert_allclose(small.mtp_weight(ours), v3.mtp_weight(theirs))
        np.testing.assert_allclose(small.bias_rate(ours), v3.bias_rate(theirs))
    assert (small.batch_size(0), small.batch_size(small.num_steps)) == (8, 40)
    steps = range(0, small.num_steps, 37)
    done = np.cumsum([0, *(small.batch_size(step) * 256 for step in range(small.num_steps))])
    assert [small.count_tokens(step) for step in steps] == [done[step] for step in steps]


@pytest.mark.parametrize(
    "name, changes, rate, source",
    [
        ("v3", {}, 2.2e-4, "DeepSeek-V3, arXiv:2412.19437, section 4.2"),
        ("v2", {}, 2.4e-4, "DeepSeek-V2, arXiv:2405.04434, section 3.1"),
        ("v2-lite", {}, 4.2e-4, "DeepSeek-V2-Lite, arXiv:2405.04434, section B.1"),
        ("v3", {"dim": 512}, 4e-3 * 8**-0.6, "the rate by our rule for width 512"),
        ("67b-a2b", {}, 4e-3 * 32**-0.6, "the rate by our rule for width 2048"),
        ("byte", {}, 4e-3, "our own"),
        ("small", {}, 4e-3 * 4**-0.6, "our own"),
    ],
)
def test_a_model_has_its_own_recipe_or_the_rate_of_its_width(name, changes, rate, source):
    recipe = recipes.of(name, models.MODELS[name](**changes))
    assert max(phase.start for phase in recipe.rates) == pytest.approx(rate)
    assert source in recipe.source
    assert recipe.config.dim == changes.get("dim", models.MODELS[name]().dim)


def test_recipes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"rates must end with tokens, 1.48e\+13, and rise until then"):
        recipes.v3(rates=(Phase(1e12, 1e-4),))
    with pytest.raises(ValueError, match="batch_multiple is 8192, more than the smallest batch"):
        recipes.v3(batch_multiple=8192)
