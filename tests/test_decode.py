"""Decoding on contiguous and paged caches, quantised ones too.

Whatever a sequence does not own is poisoned: unused slots and pages hold NaN, spare table entries
hold anything.
"""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash import (
    DecodePlan,
    chunked,
    decode_attention,
    decode_plan,
    paged_attention,
)
from tests import oracle64 as oracle
from tests.tolerance import (
    IMPLEMENTATIONS,
    ORACLE_NAMES,
    assert_close,
    bits,
    fast_jit,
    plain_errors,
    rand,
    runs,
)

NAN, INF = np.nan, np.inf
KV_SCALES = ("k_scale", "v_scale")
WILD = np.int32([-1, 10**6, 2**31 - 1, -(2**31)])


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(chunked, "_MAX_BLOCK", 32)


def cache(lens, heads=(4, 2), dims=(8, 8), q_len=1, dtype="float32"):
    """New queries and a contiguous cache whose slots past each length are 0."""
    lens, capacity = np.int32(lens), max(*lens, 1)
    query = rand(len(lens), q_len, heads[0], dims[0], dtype=dtype, seed=1)
    used = (np.arange(capacity) < lens[:, None])[..., None, None]
    key, value = (
        np.where(used, rand(len(lens), capacity, heads[1], dim, dtype=dtype, seed=seed), 0).astype(
            query.dtype
        )
        for dim, seed in zip(dims, (2, 3), strict=True)
    )
    return query, key, value, lens


def into_pages(arrays, lens, page_size, layout, seed=0, shared=0, spare_columns=2):
    """Scatters contiguous `[B, S, ...]` arrays over permuted pages.

    Args:
      arrays: `[B, S, Hk, ...]`, of which each sequence's first tokens are kept.
      lens: int [B].
      page_size: tokens in a page.
      layout: "HND" or "NHD".
      seed: of the permutation.
      shared: number of pages that sequence 1 has from sequence 0, whose tokens must be equal.
      spare_columns: columns of the table that no sequence needs.

    Returns:
      The pools, NaN where nothing was put (the most that int8 can hold), and the table.
    """
    rng = np.random.default_rng(seed)
    columns = -(-max(*lens, 1) // page_size) + spare_columns
    num_pages = len(lens) * columns + 1
    tables = rng.choice(WILD, (len(lens), columns))
    order = rng.permutation(num_pages)
    filling = [NAN if jnp.issubdtype(x.dtype, jnp.floating) else 127 for x in arrays]
    pools = [
        np.full((num_pages, page_size, *x.shape[2:]), f, x.dtype)
        for x, f in zip(arrays, filling, strict=True)
    ]
    for b, length in enumerate(np.asarray(lens).tolist()):
        for column in range(-(-length // page_size)):
            page = tables[0, column] if b == 1 and column < shared else order[b * columns + column]
            tables[b, column] = page
            tokens = slice(column * page_size, min((column + 1) * page_size, length))
            for pool, x in zip(pools, arrays, strict=True):
                pool[page, : tokens.stop - tokens.start] = x[b, tokens]
    return [np.swapaxes(x, 1, 2) if layout == "HND" else x for x in pools], tables


@functools.cache
def program(function, implementation, static):
    static = dict(static) | {"implementation": implementation, "return_residual": True}
    return fast_jit(partial(function, **static))


def run(function, implementation, arrays, static):
    """(out, lse) as NumPy arrays, or None where the implementation refuses."""
    if not runs(implementation, function, *arrays, **static, return_residual=True):
        return None
    arrays_too = (np.ndarray, DecodePlan)
    traced = {name: x for name, x in static.items() if isinstance(x, arrays_too)}
    static = {name: x for name, x in static.items() if name not in traced}
    results = program(function, implementation, tuple(static.items()))(*arrays, **traced)
    return [np.asarray(x) for x in results]


def dense_errors(query, key, value, lens, want, **terms):
    """The errors of the plain computation, from a cache whose unused slots are 0."""
    dense = {"query": query, "key": key, "value": value, "key_value_seq_lengths": lens}
    dense |= {"q_offset": lens - query.shape[1], "is_causal": True} | terms
    return plain_errors(dense, dict(zip(("out", "lse"), want, strict=True)))


def check(got, want, errors):
    for name, x, right in zip(("out", "lse"), got, want, strict=True):
        assert_close(x, right, errors[name], name)


@functools.cache
def page_case(page_size, layout, q_len, heads, dtype):
    lens = [3 * page_size, page_size + 1, 0, 1, max(page_size - 1, 1), page_size, 7]
    query, key, value, lens = cache(lens, heads, (64, 64), q_len, dtype)
    key[1, :page_size], value[1, :page_size] = key[0, :page_size], value[0, :page_size]
    pools, tables = into_pages([key, value], lens, page_size, layout, shared=1)
    arrays = query, *pools, tables, lens
    want = oracle.paged_attention(*arrays, page_layout=layout)
    return arrays, want, dense_errors(query, key, value, lens, want)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("page_size", "layout", "q_len", "heads", "dtype"),
    [
        (1, "HND", 1, (5, 1), "float32"),
        (2, "NHD", 2, (12, 2), "bfloat16"),
        (8, "HND", 3, (28, 4), "float32"),
        (16, "NHD", 4, (64, 4), "bfloat16"),
        (24, "HND", 5, (48, 2), "float16"),
        (32, "NHD", 6, (3, 3), "float32"),
        (64, "HND", 7, (71, 1), "bfloat16"),
    ],
)
def test_pages_of_any_size_equal_the_oracle(page_size, layout, q_len, heads, dtype, implementation):
    """Lengths around the page size, a shared page, unused slots of NaN, and wild table entries."""
    arrays, want, errors = page_case(page_size, layout, q_len, heads, dtype)
    got = run(paged_attention, implementation, arrays, {"page_layout": layout})
    if got is not None:
        check(got, want, errors)
        assert not got[0][2].any()
        assert (got[1][2] == -INF).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bits_depend_on_the_tokens_and_not_on_where_they_lie(implementation):
    """Not on the pages' numbers, the layout, the spare entries or what freed memory holds."""
    query, key, value, lens = cache([33, 17, 0, 5], (8, 2), (64, 64), 2, "bfloat16")
    results = []
    for seed, layout in ((0, "NHD"), (1, "NHD"), (2, "HND"), (3, "NHD")):
        pools, tables = into_pages([key, value], lens, 16, layout, seed)
        jnp.full(query.shape, NAN, query.dtype).block_until_ready().delete()
        arrays = query, *pools, tables, lens
        got = run(paged_attention, implementation, arrays, {"page_layout": layout})
        if got is None:
            return
        results.append(bits(got))
    assert results == results[:1] * 4
    # Pages of zeros where there was NaN, and a table without wild entries.
    pools = [np.nan_to_num(x) for x in pools]
    tables = np.where((tables < 0) | (tables >= len(pools[0])), 0, tables)
    arrays = query, *pools, tables, lens
    got = run(paged_attention, implementation, arrays, {"page_layout": "NHD"})
    assert bits(got) == results[0]


@pytest.mark.parametrize("is_paged", [True, False], ids=["paged", "contiguous"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_lengths_that_the_cache_does_not_have_are_clipped_when_traced(implementation, is_paged):
    query, key, value, lens = cache([80, 16, 0, 20], (8, 2), (64, 64), 2, "bfloat16")
    attend, arrays, static = decode_attention, (query, key, value), {}
    if is_paged:
        pools, tables = into_pages([key, value], lens, 16, "HND", spare_columns=0)
        attend, arrays, static = paged_attention, (query, *pools, tables), {"page_layout": "HND"}
    terms = {"local_window_size": (70, 0), "alibi_slopes": np.linspace(0.1, 0.8, 8, dtype="f4")}
    if run(attend, implementation, (*arrays, lens), static | terms) is None:
        return
    for term in ({}, terms):
        slopes = {name: x for name, x in term.items() if name == "alibi_slopes"}
        settings = static | {name: x for name, x in term.items() if name not in slopes}
        call = program(attend, implementation, tuple(settings.items()))
        results = [
            bits(call(*arrays, np.int32([first, 16, last, 20]), **slopes))
            for first, last in ((80, 0), (81, -1), (2**31 - 1, -(2**31)))
        ]
        assert results == results[:1] * 3


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_new_tokens_are_the_last_of_their_sequence(implementation):
    """Eight of them, group 8; in a sequence shorter than that the first ones see nothing."""
    q_len = 8
    query, key, value, lens = cache([40, 9, 2, 0], (16, 2), (16, 8), q_len)
    rule = {"is_causal": True, "q_offset": lens - q_len, "kv_lengths": lens}
    want = oracle.attention(query, key, value, **rule)
    errors = dense_errors(query, key, value, lens, want)
    unused = np.arange(key.shape[1]) >= lens[:, None]
    key[unused], value[unused] = NAN, INF
    got = run(decode_attention, implementation, (query, key, value, lens), {})
    if got is not None:
        check(got, want, errors)
        empty = np.arange(q_len) < q_len - lens[:, None]
        np.testing.assert_array_equal((got[1] == -INF).all(-1), empty)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_new_tokens_see_each_other_without_causal_mask(implementation):
    query, key, value, lens = cache([40, 9, 2, 0], (16, 2), (16, 8), 5)
    want = oracle.attention(query, key, value, kv_lengths=lens)
    got = run(decode_attention, implementation, (query, key, value, lens), {"is_causal": False})
    if got is not None:
        check(got, want, dense_errors(query, key, value, lens, want, is_causal=False))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_lengths_around_any_split_of_the_keys_equal_the_oracle(implementation):
    """Whatever number of parts the keys are split into; and twice, bit for bit."""
    lens = [1, 2, 31, 255, 257, 1024]
    arrays = cache(lens, (16, 8), (64, 64), 1, "bfloat16")
    got = run(decode_attention, implementation, arrays, {})
    if got is None:
        return
    query, key, value, lens = arrays
    rule = {"is_causal": True, "q_offset": lens - 1, "kv_lengths": lens}
    want = oracle.attention(query, key, value, **rule)
    check(got, want, dense_errors(*arrays, want))
    assert bits(got) == bits(run(decode_attention, implementation, arrays, {}))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_term_counts_from_the_end_of_the_sequence(implementation):
    query, key, value, lens = cache([40, 9, 2, 0], (4, 2), (16, 8), 3)
    terms = {
        "local_window_size": (4, 1),
        "logits_soft_cap": 2.0,
        "scale": 0.7,
        "sinks": rand(4, seed=4),
        "alibi_slopes": np.float32([0.1, -0.3, 0.0, 1.0]),
    }
    rule = {"is_causal": True, "q_offset": lens - 3, "kv_lengths": lens}
    renamed = {ORACLE_NAMES.get(name, name): x for name, x in terms.items()}
    want = oracle.attention(query, key, value, **rule, **renamed)
    errors = dense_errors(query, key, value, lens, want, **terms)
    pools, tables = into_pages([key, value], lens, 8, "HND")
    arrays = query, *pools, tables, lens
    for function, arrays in (
        (decode_attention, (query, key, value, lens)),
        (paged_attention, (query, *pools, tables, lens)),
    ):
        got = run(function, implementation, arrays, terms)
        if got is not None:
            check(got, want, errors)
            assert (got[1][3] == -INF).all(), "a sink makes no key"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_pool_of_keys_and_values_is_read_as_two_are(dtype, layout, implementation):
    query, key, value, lens = cache([40, 9, 0, 17], (4, 2), (64, 64), 2, "bfloat16")
    if dtype == "int8":
        key, value = ((20 * x.astype(np.float32)).astype(np.int8) for x in (key, value))
    scales = dict(zip(KV_SCALES, (np.float32([0.03, 0.04]), np.float32(0.02)), strict=True))
    for page_size in (16, 5):
        pools, tables = into_pages([key, value], lens, page_size, layout)
        static = {"page_layout": layout} | (scales if dtype == "int8" else {})
        want = run(paged_attention, implementation, (query, *pools, tables, lens), static)
        if want is None:
            return
        both = np.stack(pools, 1), None
        got = run(paged_attention, implementation, (query, *both, tables, lens), static)
        assert bits(got) == bits(want)


def test_the_gradient_and_the_map_of_a_pool_of_both_are_those_of_two():
    query, key, value, lens = cache([20, 9], (4, 2), (8, 8), 1)
    pools, tables = into_pages([key, value], lens, 4, "HND")
    pools = [np.nan_to_num(x, nan=0.0) for x in pools]

    def loss(query, key_pages, value_pages):
        return jnp.sum(jnp.sin(paged_attention(query, key_pages, value_pages, tables, lens)))

    want = jax.grad(loss, (0, 1, 2))(query, *pools)
    got = jax.grad(loss, (0, 1))(query, jnp.stack(pools, 1), None)
    assert bits([got[0], got[1][:, 0], got[1][:, 1]]) == bits(list(want))
    call = partial(paged_attention, block_tables=tables, kv_lens=lens)
    stacked = jnp.stack([jnp.stack(pools, 1), 2 * jnp.stack(pools, 1)])
    mapped = jax.vmap(lambda both: call(query, both, None))(stacked)
    alone = call(query, stacked[1], None)
    np.testing.assert_allclose(mapped[1], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [None, 0, (20, 3), 2**31 - 1])
@pytest.mark.parametrize("q_len", [1, 5])
def test_a_plan_counts_the_chunks_that_are_seen(q_len, window):
    lens = np.int32([0, 1, 16, 17, 300, 3, -4])
    plan = jax.jit(partial(decode_plan, num_new_tokens=q_len, local_window_size=window))(lens)
    left = lens.max() if window is None else (window if isinstance(window, int) else window[0])
    counts = []
    for length in lens:
        seen = {
            key // 16
            for query in range(length - q_len, length)
            for key in range(max(0, query - left), query + 1)
        }
        counts.append(len(seen))
    np.testing.assert_array_equal(plan.chunk_ends, np.cumsum(counts))
    assert plan.chunk_ends.dtype == np.int32


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bits_are_the_same_with_a_plan_even_of_other_lengths(implementation):
    query, key, value, lens = cache([40, 9, 0, 17, 1], (4, 2), (64, 64), 2)
    pools, tables = into_pages([key, value], lens, 16, "HND")
    static = {"local_window_size": (18, 0)}
    plan = partial(decode_plan, num_new_tokens=2)
    for function, caches in ((paged_attention, (*pools, tables)), (decode_attention, (key, value))):
        arrays = query, *caches, lens
        want = run(function, implementation, arrays, static)
        if want is None:
            return
        for given in (plan(lens, **static), plan(lens), plan(lens[::-1], **static)):
            got = run(function, implementation, arrays, static | {"plan": given})
            assert bits(got) == bits(want)


def scales_of(kind, shape, seed):
    """Scales for a cache `[B, S, Hk, ...]`, all below 1."""
    shapes = {"scalar": (), "per head": shape[2:3], "per token": shape[:3]}
    return np.float32(0.05) + np.float32(0.05) * rand(*shapes[kind], seed=seed) ** 2


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("dtype", "kind", "layout"),
    [
        ("float8_e4m3fn", "scalar", "HND"),
        ("float8_e5m2", "per head", "NHD"),
        ("int8", "per token", "HND"),
        ("float8_e4m3fn", "per token", None),
        ("int8", "per head", None),
    ],
)
def test_a_quantised_cache_is_read_times_its_scales(dtype, kind, layout, implementation):
    """In pages or, with layout None, contiguous; unused tokens have scales of NaN."""
    query, key, value, lens = cache([40, 9, 0, 17], (4, 2), (32, 32), 2)
    key, value = ((8 * x).round().astype(jnp.dtype(dtype)) for x in (key, value))
    scales = [np.asarray(scales_of(kind, key.shape, seed)) for seed in (4, 5)]
    wide = [
        x.astype(np.float32) * (scale if kind == "scalar" else scale[..., None])
        for x, scale in zip((key, value), scales, strict=True)
    ]
    rule = {"is_causal": True, "q_offset": lens - 2, "kv_lengths": lens}
    want = oracle.attention(query, *wide, **rule)
    errors = dense_errors(query, *wide, lens, want)
    if layout is None:
        function, static, tables = decode_attention, {}, ()
        unused = np.arange(key.shape[1]) >= lens[:, None]
        key[unused], value[unused] = (NAN, NAN) if dtype != "int8" else (127, -127)
        if kind == "per token":
            for scale in scales:
                scale[unused] = NAN
        pools = [key, value]
    else:
        function, static = paged_attention, {"page_layout": layout}
        pools, tables = into_pages([key, value], lens, 8, layout)
        if kind == "per token":
            scales, _ = into_pages(scales, lens, 8, layout)
        tables = (tables,)
    arrays = query, *pools, *tables, lens
    got = run(function, implementation, arrays, static | dict(zip(KV_SCALES, scales, strict=True)))
    if got is None:
        return
    check(got, want, errors)
    doubled = dict(zip(KV_SCALES, (scales[0], 2 * scales[1]), strict=True))
    out, lse = run(function, implementation, arrays, static | doubled)
    assert bits([out, lse]) == bits([2 * got[0], got[1]]), "out is linear in v_scale"


@pytest.mark.parametrize("scale", [None, 1.0])
def test_a_needed_entry_that_names_no_page_gives_nan_in_an_int8_cache_too(scale):
    pool = jnp.ones((3, 2, 4, 8), jnp.int8)
    tables, lens = jnp.array([[1, -1], [2, 3], [0, 1]], jnp.int32), jnp.array([8, 7, 5], jnp.int32)
    query = jnp.ones((3, 1, 2, 8))
    out = paged_attention(query, pool, pool, tables, lens, k_scale=scale, v_scale=scale)
    assert np.isnan(out[:2]).all()
    np.testing.assert_allclose(out[2], 1.0)


@pytest.mark.parametrize("implementation", ["xla", "chunked"])
def test_a_table_without_columns_leaves_every_query_empty(implementation):
    pool, query = jnp.ones((3, 2, 4, 8)), jnp.ones((2, 1, 2, 8))
    tables, lens = jnp.zeros((2, 0), jnp.int32), jnp.zeros((2,), jnp.int32)
    out, lse = paged_attention(
        query, pool, pool, tables, lens, implementation=implementation, return_residual=True
    )
    np.testing.assert_array_equal(out, np.zeros((2, 1, 2, 8)))
    np.testing.assert_array_equal(lse, np.full((2, 1, 2), -np.inf))


def test_a_whole_number_is_a_scale():
    query, cache = rand(2, 1, 2, 8), rand(2, 4, 2, 8)
    lens = jnp.array([4, 2], jnp.int32)
    call = partial(decode_attention, query, cache, cache, lens)
    np.testing.assert_array_equal(call(k_scale=2, v_scale=3), call(k_scale=2.0, v_scale=3.0))
