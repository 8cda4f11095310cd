"""Sampling, against NumPy written the obvious way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.decode import Sampling, sample
from models.decode.sampling import draw, likeliest, uniforms

VOCAB = 17


def drawn_by_numpy(logits, temperature, top_p, uniform):
    """Walk down the likeliest tokens; also how near the walk came to another answer."""
    weights = np.exp((logits - logits.max()).astype(np.float64) / temperature)
    probs = weights / weights.sum()
    order = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    kept, mass = [], 0.0
    for token in order:
        if kept and mass >= top_p:
            break
        kept.append(token)
        mass += probs[token]
    reached = 0.0
    for token in kept:
        reached += probs[token] / mass
        if uniform < reached:
            return token, abs(uniform - reached)
    raise AssertionError("the distribution function ends at 1")


def test_the_likeliest_is_the_first_of_the_largest_and_what_is_no_number_is_seen_wherever_it_is():
    rng = np.random.default_rng(1)
    logits = np.round(3 * rng.normal(size=(9, 3, 5000))).astype(np.float32)
    logits[0], logits[1, :, 7:] = -3e38, -np.inf
    finite = np.ones((9, 3), bool)
    finite[1] = False
    for row, (place, what) in enumerate(
        [(0, np.nan), (4999, np.nan), (1234, np.inf), (3000, -np.inf)], start=2
    ):
        logits[row, 1, place], finite[row, 1] = what, False
    tokens, all_finite = jax.jit(likeliest)(logits)
    assert tokens.dtype == jnp.int32 and tokens.min() >= 0 and tokens.max() < 5000
    np.testing.assert_array_equal(all_finite, finite)
    np.testing.assert_array_equal(np.asarray(tokens)[finite], logits.argmax(-1)[finite])


@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5, 1e-6])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
def test_draw_is_the_inverse_of_the_distribution_function(temperature, top_p):
    rng = np.random.default_rng(0)
    logits = (2 * rng.normal(size=(300, VOCAB))).astype(np.float32)
    logits[:50] = np.round(logits[:50])  # equal ones
    uniform = rng.random(300).astype(np.float32)
    full = jnp.full(300, temperature, jnp.float32), jnp.full(300, top_p, jnp.float32)
    got = np.asarray(draw(jnp.asarray(logits), *full, jnp.asarray(uniform)))
    wanted = [drawn_by_numpy(row, temperature, top_p, u) for row, u in zip(logits, uniform, strict=True)]
    clear = np.array([margin > 1e-5 for _, margin in wanted])
    assert clear.mean() > 0.98
    np.testing.assert_array_equal(got[clear], np.array([token for token, _ in wanted])[clear])
    assert len(set(got)) > (1 if top_p < 0.1 else 5)


def test_the_last_number_below_one_is_a_token_that_is_kept():
    logits = jnp.log(jnp.asarray([[0.5, 0.3, 0.2, 1e-30]]))
    edge = jnp.asarray([np.nextafter(np.float32(1), np.float32(0))])
    for top_p, token in ((1.0, 2), (0.6, 1), (0.4, 0)):
        assert int(draw(logits, jnp.ones(1), jnp.full(1, top_p, jnp.float32), edge)[0]) == token


def test_uniforms_are_even_and_follow_from_seed_and_position_alone():
    seeds, positions = np.arange(40, dtype=np.uint32), np.arange(100, dtype=np.int32)
    all_of_them = np.asarray(uniforms(jnp.asarray(seeds), jnp.tile(positions, (40, 1))))
    assert len(np.unique(all_of_them)) > 3990 and (all_of_them >= 0).all() and (all_of_them < 1).all()
    # Within 4 standard deviations.
    np.testing.assert_allclose(np.histogram(all_of_them, 10, (0, 1))[0], 400, atol=80)
    np.testing.assert_allclose(np.corrcoef(all_of_them)[~np.eye(40, dtype=bool)], 0, atol=0.45)
    alone = uniforms(jnp.asarray([7], jnp.uint32), jnp.asarray([[99]], jnp.int32))
    assert alone[0, 0] == all_of_them[7, 99]


def test_each_row_is_chosen_its_own_way():
    rng = np.random.default_rng(1)
    logits = jnp.asarray(rng.normal(size=(3, 2, VOCAB)), jnp.float32)
    positions = jnp.asarray([[4, 5], [6, 7], [0, 1]], jnp.int32)
    how = Sampling(
        np.asarray([0, 1.5, 0], np.float32),
        np.asarray([1, 0.9, 1], np.float32),
        np.asarray([1, 2, 3], np.uint32),
    )
    got = np.asarray(jax.jit(sample)(logits, how, positions))
    likeliest = np.argmax(np.asarray(logits), -1)
    np.testing.assert_array_equal(got[[0, 2]], likeliest[[0, 2]])
    for s in range(2):
        uniform = float(uniforms(jnp.asarray([2], jnp.uint32), positions[1:2])[0, s])
        assert got[1, s] == drawn_by_numpy(np.asarray(logits[1, s]), 1.5, 0.9, uniform)[0]
    greedy = sample(logits, how._replace(temperature=np.zeros(3, np.float32)), positions)
    np.testing.assert_array_equal(greedy, likeliest)
    np.testing.assert_array_equal(sample(logits, None, positions), likeliest)
