"""Appending tokens to pools: rounding, rotation, aliasing, and what attention then reads."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash import append_kv, paged_attention
from tests import oracle64 as oracle
from tests.test_decode import KV_SCALES, NAN, cache, check, dense_errors, into_pages, run
from tests.tolerance import bits, rand


def quantised(x, scale, dtype):
    """What a cache of `dtype` stores for x / scale: rounded to even, and saturated."""
    x = x.astype(np.float32) / np.float32(scale)
    if dtype == "int8":
        return np.clip(np.round(x), -128, 127).astype(np.int8)
    largest = float(jnp.finfo(dtype).max)
    return np.clip(x, -largest, largest).astype(jnp.dtype(dtype))


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"])
def test_append_writes_each_token_to_its_slot_and_nothing_else(dtype, layout):
    """Slots of -1 and slots past the pool are skipped; values are scaled, rounded, saturated."""
    pages, page_size, heads, dims = 3, 4, 2, (8, 4)
    slots = np.int32([5, -1, 0, 11, 12, 2**31 - 1, 7, -(2**31), 4])
    pools = [rand(pages, page_size, heads, d, seed=d).astype(jnp.dtype(dtype)) for d in dims]
    tokens = [8 * rand(len(slots), heads, d, seed=d + 1) for d in dims]
    tokens[0][0], tokens[1][0] = 1e4, -1e4
    scales = np.float32(0.25), np.float32([0.5, 2.0])
    if dtype == "bfloat16":
        scales = np.float32(1.0), np.float32([1.0, 1.0])
    want = [x.copy() for x in pools]
    for n, slot in enumerate(slots):
        if 0 <= slot < pages * page_size:
            for x, new, scale in zip(want, tokens, scales, strict=True):
                row = quantised(new[n], np.reshape(scale, (-1, 1)), dtype)
                x[slot // page_size, slot % page_size] = row
    if layout == "HND":
        pools, want = ([np.swapaxes(x, 1, 2) for x in xs] for xs in (pools, want))
    given = dict(zip(KV_SCALES, scales, strict=True)) if dtype != "bfloat16" else {}
    got = jax.jit(partial(append_kv, page_layout=layout))(*pools, *tokens, slots, **given)
    assert [x.dtype for x in got] == [jnp.dtype(dtype)] * 2
    assert bits(list(got)) == bits([np.ascontiguousarray(x) for x in want])


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8"])
@pytest.mark.parametrize("pairs", [1, 3, 4])
def test_append_rotates_keys_before_it_scales_them(pairs, dtype, layout):
    slots, scales = np.int32([5, -1, 0]), (np.float32([0.02, 0.03]), np.float32(0.05))
    keys, values = rand(3, 2, 8, seed=1), rand(3, 2, 8, seed=2)
    angles = rand(3, pairs, seed=3)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    low, high = keys[..., :pairs], keys[..., pairs : 2 * pairs]
    want = keys.copy()
    want[..., : 2 * pairs] = np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)
    pool = jnp.zeros((2, 2, 4, 8) if layout == "HND" else (2, 4, 2, 8), dtype)
    got = jax.jit(partial(append_kv, page_layout=layout))(
        pool, pool, keys, values, slots, k_scale=scales[0], v_scale=scales[1],
        rotary=(cos[:, 0], sin[:, 0]),
    )  # fmt: skip
    got = [np.float32(x if layout == "NHD" else jnp.swapaxes(x, 1, 2)) for x in got]
    plain = np.float32(quantised(values[0], 0.05, dtype))  # XLA may divide by multiplying
    np.testing.assert_allclose(got[1][1, 1], plain, rtol=3e-7 if dtype == "float32" else 0)
    spacing = {"float32": 1e-6, "bfloat16": 2**-7, "float8_e4m3fn": 2**-3, "int8": 1e-2}[dtype]
    want = want / np.float32([[0.02], [0.03]])
    for n, slot in ((0, 5), (2, 0)):
        stored = got[0][slot // 4, slot % 4]
        largest = np.abs(want).max()
        np.testing.assert_allclose(stored, want[n], rtol=spacing, atol=spacing * largest)
        assert np.abs(stored - want[n]).max() > 0 or dtype == "float32"
    assert np.count_nonzero(got[0].any((2, 3))) == 2


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_append_to_a_pool_of_keys_and_values_is_that_to_two(dtype, layout):
    shape = (3, 2, 4, 8) if layout == "HND" else (3, 4, 2, 8)
    pools = [(8 * rand(*shape, seed=seed)).round().astype(jnp.dtype(dtype)) for seed in (1, 2)]
    arrays = 9 * rand(4, 2, 8, seed=3), 9 * rand(4, 2, 8, seed=4), np.int32([7, -1, 11, 0])
    append = jax.jit(partial(append_kv, page_layout=layout, v_scale=np.float32([0.5, 2.0])))
    want = append(*pools, *arrays)
    got, nothing = append(np.stack(pools, 1), None, *arrays)
    assert nothing is None
    assert bits([got[:, 0], got[:, 1]]) == bits(list(want))
    assert bits(list(want)) != bits(pools)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_appended_tokens_are_what_attention_then_reads(layout):
    """A prompt of unequal lengths at once, then token after token into unowned NaN."""
    query, key, value, lens = cache([9, 6, 12], (4, 2), (8, 16), 1)
    _, tables = into_pages([key, value], lens, 4, layout, spare_columns=0)
    pools = [
        np.full((10, 2, 4, d) if layout == "HND" else (10, 4, 2, d), NAN, np.float32)
        for d in (8, 16)
    ]
    append = jax.jit(partial(append_kv, page_layout=layout))
    for first, last in ((0, 5), (5, 6), (6, 7), (7, 12)):
        tokens = [(b, t) for b in range(3) for t in range(first, last)]
        slots = [tables[b, t // 4] * 4 + t % 4 if t < lens[b] else -1 for b, t in tokens]
        rows = tuple(np.transpose(tokens))
        pools = append(*pools, key[rows], value[rows], np.int32(slots))
    got = run(paged_attention, "xla", (query, *pools, tables, lens), {"page_layout": layout})
    want = oracle.attention(query, key, value, kv_lengths=lens)
    check(got, want, dense_errors(query, key, value, lens, want))


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
def test_append_to_donated_pools_writes_in_place(dtype, layout):
    """Not so in float8, which XLA on the CPU widens to scatter into, the whole pool of it."""
    pools = [jnp.zeros((64, 16, 16, 8), dtype) for _ in range(2)]
    arrays = rand(5, 16, 8), rand(5, 16, 8), np.int32([3, -1, 900, 16, 4])
    append = jax.jit(partial(append_kv, page_layout=layout), donate_argnums=(0, 1))
    memory = append.lower(*pools, *arrays).compile().memory_analysis()
    assert memory.alias_size_in_bytes == 2 * pools[0].nbytes
    assert memory.temp_size_in_bytes < pools[0].nbytes // 8, "a pool is copied on the way"
    places = [x.unsafe_buffer_pointer() for x in pools]
    got = append(*pools, *arrays)
    assert [x.unsafe_buffer_pointer() for x in got] == places
    assert all(x.is_deleted() for x in pools)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_append_leaves_pools_that_are_not_donated_as_they_were(layout):
    pools = [jnp.zeros((4, 2, 2, 8)) for _ in range(2)]
    before = bits(pools)
    got = jax.jit(partial(append_kv, page_layout=layout))(
        *pools, rand(2, 2, 8), rand(2, 2, 8, seed=1), np.int32([3, 4])
    )
    assert bits(pools) == before
    assert all(np.any(x) for x in got)
