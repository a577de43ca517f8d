"""Sampling: the filters, their edges, and what they refuse."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.sampling import apply_temperature, apply_top_k, apply_top_p, greedy, sample

NEG_INF = -np.inf
TIED = np.array([2.0, 2.0, 1.0, NEG_INF], np.float32)
HALVES = np.log(np.array([0.5, 0.25, 0.25], np.float32))


def kept(logits):
    """Ids of the tokens that a filter left."""
    return np.flatnonzero(np.asarray(logits) > NEG_INF).tolist()


def draws(logits, count=400, **settings):
    keys = jax.random.split(jax.random.key(0), count)
    draw = jax.jit(jax.vmap(functools.partial(sample, logits=jnp.asarray(logits), **settings)))
    return np.asarray(draw(keys))


@pytest.mark.parametrize("p", [1, 1.0, None])
@pytest.mark.parametrize("k", [0, None, 4, 9, 2**40])
def test_k_of_none_zero_or_all_and_p_of_one_change_nothing(k, p):
    np.testing.assert_array_equal(apply_top_p(apply_top_k(TIED, k), p), TIED)


@pytest.mark.parametrize(
    "settings", [{"temperature": 0}, {"temperature": 0.0}, {"top_k": 1}, {"top_p": 0}]
)
def test_zero_temperature_k_of_one_and_p_of_zero_are_greedy_with_ties_to_the_lowest_id(settings):
    assert set(draws(TIED, **settings)) == {0}
    assert greedy(jnp.asarray(TIED)) == 0


@pytest.mark.parametrize("temperature", [1e-6, 1.2e-38])
def test_a_tiny_temperature_draws_only_among_the_most_likely(temperature):
    assert set(draws(TIED, temperature=temperature)) == {0, 1}


def test_a_temperature_below_the_smallest_normal_number_is_greedy():
    assert set(draws(TIED, temperature=1e-45)) == {0}


def test_the_highest_temperature_still_never_draws_what_is_impossible():
    assert set(draws(TIED, temperature=3e38)) == {0, 1, 2}


@pytest.mark.parametrize(("k", "ids"), [(1, [0]), (2, [0, 1]), (3, [0, 1, 2])])
def test_top_k_keeps_exactly_k_tokens_even_on_ties(k, ids):
    assert kept(apply_top_k(np.array([2, 2, 2, 2], np.float32), k)) == ids


def test_top_k_keeps_the_most_likely_wherever_they_are():
    assert kept(apply_top_k(np.array([0.0, 3.0, -1.0, 2.0], np.float32), 2)) == [1, 3]


@pytest.mark.parametrize(
    ("p", "ids"), [(0, [0]), (0.5, [0]), (0.51, [0, 1]), (0.75, [0, 1]), (0.76, [0, 1, 2])]
)
def test_top_p_keeps_the_fewest_tokens_that_hold_p(p, ids):
    assert kept(apply_top_p(HALVES, p)) == ids


def test_top_p_is_a_share_of_what_top_k_left():
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    assert kept(apply_top_p(logits, 0.55)) == [0, 1]
    assert kept(apply_top_p(apply_top_k(logits, 2), 0.55)) == [0]
    assert kept(apply_top_p(apply_top_k(logits, 2), 0.6)) == [0, 1]


def test_top_p_keeps_the_long_tail_at_one_where_rounding_would_lose_it():
    logits = jnp.zeros((50_000,), jnp.float32).at[0].set(12.0)
    assert len(kept(apply_top_p(logits, 1.0))) == 50_000


def test_an_impossible_token_is_never_drawn():
    assert set(draws(TIED)) == {0, 1, 2}
    assert set(draws(np.array([NEG_INF, 0.0, NEG_INF], np.float32), top_k=3, top_p=0.9)) == {1}


def test_samples_follow_the_distribution():
    counts = np.bincount(draws(HALVES, count=4000), minlength=3) / 4000
    np.testing.assert_allclose(counts, [0.5, 0.25, 0.25], atol=0.03)
    hot = np.bincount(draws(HALVES, count=4000, temperature=0.5), minlength=3) / 4000
    np.testing.assert_allclose(hot, [4 / 6, 1 / 6, 1 / 6], atol=0.03)


def test_the_same_key_draws_the_same_tokens():
    logits = jax.random.normal(jax.random.key(1), (8, 50), jnp.float32)
    first = sample(jax.random.key(3), logits, temperature=0.9, top_k=20, top_p=0.8)
    again = jax.jit(functools.partial(sample, temperature=0.9, top_k=20, top_p=0.8))(
        jax.random.key(3), logits
    )
    np.testing.assert_array_equal(first, again)
    assert (first != sample(jax.random.key(4), logits, temperature=0.9)).any()


def test_rows_may_have_settings_of_their_own_traced_too():
    logits = jnp.broadcast_to(jnp.asarray(TIED), (4, 4))
    settings = {
        "temperature": jnp.array([1.0, 0.0, 1.0, 1.0]),
        "top_k": jnp.array([0, 0, 1, 2]),
        "top_p": jnp.array([1.0, 1.0, 1.0, 0.0]),
    }
    keys = jax.random.split(jax.random.key(0), 300)
    draw = jax.jit(jax.vmap(lambda key, settings: sample(key, logits, **settings), (0, None)))
    tokens = np.asarray(draw(keys, settings))
    assert [set(column) for column in tokens.T] == [{0, 1, 2}, {0}, {0}, {0}]


@pytest.mark.parametrize("bad", [[np.nan, 0.0], [NEG_INF, NEG_INF], [np.inf, 0.0]])
def test_a_row_without_a_distribution_gives_minus_one_and_spares_its_neighbours(bad):
    logits = np.array([bad, [0.0, 9.0]], np.float32)
    for settings in ({}, {"temperature": 0}, {"top_k": 1}, {"top_p": 0.5}):
        assert sample(jax.random.key(0), logits, **settings)[0] == -1
    assert sample(jax.random.key(0), logits, temperature=0)[1] == 1


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_low_precision_logits_are_filtered_in_fp32(dtype):
    logits = jnp.asarray(TIED).astype(dtype)
    for out in (apply_temperature(logits, 0.5), apply_top_k(logits, 2), apply_top_p(logits, 0.5)):
        assert out.dtype == jnp.float32
    assert sample(jax.random.key(0), logits).dtype == jnp.int32


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"temperature": -0.1}, ValueError, r"temperature must be a number in \[0, "),
        ({"temperature": np.nan}, ValueError, "temperature must be .* got nan"),
        ({"temperature": np.inf}, ValueError, "temperature must be .* got inf"),
        ({"temperature": "hot"}, TypeError, "temperature must be .* got hot"),
        ({"top_k": -1}, ValueError, r"top_k must be an integer in \[0, inf\].* got -1"),
        ({"top_k": 2.0}, TypeError, "top_k must be an integer"),
        ({"top_k": True}, TypeError, "top_k must be an integer"),
        ({"top_p": -0.5}, ValueError, r"top_p must be a number in \[0, 1\].* got -0.5"),
        ({"top_p": 1.01}, ValueError, r"top_p must be a number in \[0, 1\]"),
        ({"top_p": np.nan}, ValueError, "top_p must be .* got nan"),
        ({"top_k": np.array([1, 2])}, ValueError, r"top_k must be .* got shape \(2,\)"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(settings, error, message):
    with pytest.raises(error, match=message):
        sample(jax.random.key(0), TIED, **settings)


@pytest.mark.parametrize(
    ("logits", "error"), [(np.array([1, 2]), TypeError), (np.float32(1.0), ValueError)]
)
def test_logits_that_are_not_rows_of_floats_are_refused(logits, error):
    with pytest.raises(error, match="logits must"):
        sample(jax.random.key(0), logits)
