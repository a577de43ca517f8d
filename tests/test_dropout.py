"""The generator of dropout masks: that it is the documented one, its rate, its independence."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash.mask import dropout_keep, dropout_seeds

BATCH, HEADS, SIZE = 4, 4, 256
RATES = [0.1, 0.5, 0.9]


def i32(*values):
    return jnp.arange(*values, dtype=jnp.int32)


@functools.cache
def kept(rate, seed=0):
    """bool [BATCH, HEADS, SIZE, SIZE]."""
    seeds = dropout_seeds(jax.random.key(seed), BATCH)
    draw = jax.jit(functools.partial(dropout_keep, rate=rate))
    return np.asarray(draw(seeds, i32(HEADS), i32(SIZE), i32(SIZE)))


def standardised(rate):
    """The same with a mean of 0 and a variance of 1, if the mask is right."""
    return ((kept(rate) - (1 - rate)) / np.sqrt(rate * (1 - rate))).astype(np.float64)


def z_score(products):
    """How many standard deviations the mean of independent numbers of variance 1 is from 0."""
    return abs(products.mean()) * np.sqrt(products.size)


def documented(seeds, head, row, key, rate):
    """One element, from the text of `jax_flash.mask` alone, in integers of Python."""
    ones = 2**32 - 1
    golden, first, second = 0x9E3779B9, 0x21F0AAAD, 0xD35A2D97
    factors = [[0xD35A2D97, 0xC271C86B], [0xD1B2C7B3, 0xCF24DBC3]]

    def mix(x):
        x = (x ^ x >> 16) * first & ones
        x = (x ^ x >> 15) * second & ones
        return x ^ x >> 15

    def group(index):
        return index // 16 * 8 + index % 8

    row_key = mix(mix(seeds[0] ^ head * golden & ones) + group(row) & ones)
    key_key = seeds[1] + group(key) * golden & ones
    z = (row_key ^ key_key ^ key_key >> 16) * first & ones
    z ^= z >> 15
    return z * factors[row >> 3 & 1][key >> 3 & 1] & ones >= round(rate * 2**32)


@pytest.mark.parametrize("rate", RATES)
def test_the_mask_is_the_documented_one(rate):
    seeds = np.asarray(dropout_seeds(jax.random.key(0), BATCH)).tolist()
    rng = np.random.default_rng(1)
    places = rng.integers(0, (BATCH, HEADS, SIZE, SIZE), (500, 4)).tolist()
    for batch, head, row, key in places:
        want = documented(seeds[batch], head, row, key, rate)
        assert kept(rate)[batch, head, row, key] == want, (batch, head, row, key)


def test_a_part_of_the_mask_needs_only_its_own_rows_and_keys():
    seeds = dropout_seeds(jax.random.key(0), BATCH)
    part = dropout_keep(seeds[1:], i32(2, 4), i32(5, 47), i32(9, 90), 0.5)
    np.testing.assert_array_equal(part, kept(0.5)[1:, 2:4, 5:47, 9:90])


@pytest.mark.parametrize("rate", RATES)
def test_the_rate_is_that_of_independent_draws(rate):
    noise = standardised(rate)
    assert z_score(noise) < 5
    for axis in (2, 3):  # of the keys of a row, and of the rows of a key
        sums = noise.sum(axis=axis) / np.sqrt(SIZE)
        assert z_score((sums**2 - 1) / np.sqrt(2)) < 5


STEPS = [(0, 1), (1, 0), (0, 8), (8, 0), (8, 8), (7, 9), (0, 16), (16, 0), (16, 16), (64, 128)]


@pytest.mark.parametrize("rate", RATES[:2])
@pytest.mark.parametrize("step", STEPS)
def test_rows_and_keys_are_independent(step, rate):
    (rows, keys), noise = step, standardised(rate)
    assert z_score(noise[:, :, rows:, keys:] * noise[:, :, : SIZE - rows, : SIZE - keys]) < 5
    assert z_score(noise[:, :, rows:, : SIZE - keys] * noise[:, :, : SIZE - rows, keys:]) < 5


@pytest.mark.parametrize("rate", RATES[:2])
def test_heads_elements_and_keys_of_jax_are_independent(rate):
    noise = standardised(rate)
    assert z_score(noise[1:] * noise[:-1]) < 5
    assert z_score(noise[:, 1:] * noise[:, :-1]) < 5
    agreement = np.mean(kept(rate) == kept(rate, seed=1))
    assert abs(agreement - (1 - 2 * rate * (1 - rate))) < 5 * 0.5 / np.sqrt(noise.size)


@pytest.mark.parametrize("rate", RATES)
def test_the_four_that_share_a_hash_are_independent(rate):
    """All 16 outcomes are as frequent as they should be (chi-square, 15 degrees of freedom)."""
    groups = kept(rate).reshape(BATCH, HEADS, SIZE // 16, 2, 8, SIZE // 16, 2, 8)
    four = np.moveaxis(groups, (3, 6), (0, 1)).reshape(4, -1)
    outcomes = np.bincount(np.array([1, 2, 4, 8]) @ four, minlength=16)
    num_kept = np.array([outcome.bit_count() for outcome in range(16)])
    expected = four.shape[1] * (1 - rate) ** num_kept * rate ** (4 - num_kept)
    assert ((outcomes - expected) ** 2 / expected).sum() < 50  # of right ones, 1e-5 exceed it
