"""The CUDA kernels' way into JAX: the contract of decoding held by their twin on the CPU.

The same tests run the kernels themselves with JAX_FLASH_TEST_GPU=1. The contract's own tests run
once more, with the implementation "cuda" alone, as if a CPU had it.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cuda_ffi import backend, library
from jax_flash import backends, decode_attention, paged_attention
from tests import oracle64 as oracle
from tests import test_decode, tolerance
from tests.test_decode import (
    INF,
    NAN,
    cache,
    check,
    dense_errors,
    into_pages,
    page_case,
    run,
)
from tests.tolerance import bits, rand

ON_GPU = jax.default_backend() == "gpu"
REASON = library.missing(jax.default_backend())
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


@pytest.fixture(autouse=True)
def as_if_the_cpu_had_it(monkeypatch):
    monkeypatch.setattr(backends, "_NEEDS_GPU", ("mosaic", "cudnn"))
    monkeypatch.setattr(tolerance, "_answers", {})


def with_cuda_alone(test):
    """The same test without its other implementations."""

    @functools.wraps(test)
    def only(*args, **kwargs):
        return test(*args, **kwargs)

    only.__signature__ = inspect.signature(test)
    only.pytestmark = [
        pytest.mark.parametrize("implementation", ["cuda"]).mark
        if mark.name == "parametrize" and mark.args[0] == "implementation"
        else mark
        for mark in test.pytestmark
    ]
    return only


CONTRACT = [
    test
    for name, test in vars(test_decode).items()
    if name.startswith("test_") and "implementation" in inspect.signature(test).parameters
]
globals().update(
    {
        test.__name__: with_cuda_alone(test)
        for test in CONTRACT
        if test is not test_decode.test_a_table_without_columns_leaves_every_query_empty
    }
)
globals().update(
    {name: test for name, test in vars(test_decode).items() if name.startswith("test_append")}
)


TERMS = {
    "nothing": {},
    "window": {"local_window_size": (9, 0)},
    "window to both sides": {"local_window_size": (20, 2), "is_causal": False},
    "window that is always full": {"local_window_size": 2**31 - 1},
    "soft cap": {"logits_soft_cap": 1.5},
    "sinks": {"sinks": rand(8, seed=7)},
    "alibi": {"alibi_slopes": np.float32(0.1) * rand(8, seed=6)},
    "negative scale": {"scale": -0.3},
    "scale of zero": {"scale": 0.0},
    "everything": {
        "local_window_size": (33, 1),
        "logits_soft_cap": 3.0,
        "scale": 0.5,
        "sinks": rand(8, seed=7),
        "alibi_slopes": np.float32(0.1) * rand(8, seed=6),
    },
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
@pytest.mark.parametrize(("q_len", "page_size", "layout"), [(1, 16, "HND"), (5, 12, "NHD")])
def test_every_term_in_16_bits(terms, q_len, page_size, layout, dtype):
    query, key, value, lens = cache([140, 1, 0, 33, 64, 16, 3], (8, 2), (64, 64), q_len, dtype)
    rule = {"is_causal": True, "q_offset": lens - q_len, "kv_lengths": lens}
    rule |= {test_decode.ORACLE_NAMES.get(name, name): x for name, x in terms.items()}
    want = oracle.attention(query, key, value, **rule)
    errors = dense_errors(query, key, value, lens, want, **terms)
    pools, tables = into_pages([key, value], lens, page_size, layout)
    unused = np.arange(key.shape[1]) >= lens[:, None]
    key[unused], value[unused] = NAN, INF
    got = run(decode_attention, "cuda", (query, key, value, lens), terms)
    check(got, want, errors)
    got = run(
        paged_attention, "cuda", (query, *pools, tables, lens), terms | {"page_layout": layout}
    )
    check(got, want, errors)


@pytest.mark.parametrize("kind", ["scalar", "per head", "per token"])
@pytest.mark.parametrize("cache_dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.parametrize(
    ("dtype", "dims", "page_size", "longest"),
    [
        ("bfloat16", (128, 128), 16, 140),
        ("float16", (64, 64), 8, 140),
        ("bfloat16", (96, 48), 5, 140),
        pytest.param("bfloat16", (128, 128), 16, 5000, marks=pytest.mark.gpu),  # rings go round
        pytest.param("float16", (64, 64), 8, 5000, marks=pytest.mark.gpu),
    ],
)
def test_8_bit_caches(dtype, dims, page_size, longest, cache_dtype, kind):
    """Also with a query whose numbers exceed fp16, in which the products are."""
    query, key, value, lens = cache([longest, 9, 0, 17], (12, 2), dims, 3, dtype)
    size = 1e6 if dtype == "bfloat16" else 1.0
    query = (query.astype(np.float32) * np.float32(size)).astype(query.dtype)
    key, value = ((8 * x.astype(np.float32)).round() for x in (key, value))
    key, value = (np.clip(x, -120, 120).astype(jnp.dtype(cache_dtype)) for x in (key, value))
    scales = [np.asarray(test_decode.scales_of(kind, key.shape, seed)) for seed in (4, 5)]
    wide = [
        x.astype(np.float32) * (scale if kind == "scalar" else scale[..., None])
        for x, scale in zip((key, value), scales, strict=True)
    ]
    terms = {"scale": 0.1 / size}
    rule = {"is_causal": True, "q_offset": lens - 3, "kv_lengths": lens}
    want = oracle.attention(query, *wide, **rule, **terms)
    # The plain computation has the cache in the query's dtype.
    low = [x.astype(query.dtype) for x in wide]
    errors = dense_errors(query, *low, lens, want, **terms)
    pools, tables = into_pages([key, value], lens, page_size, "HND")
    if kind == "per token":
        scales, _ = into_pages(scales, lens, page_size, "HND")
    named = dict(zip(test_decode.KV_SCALES, scales, strict=True))
    got = run(paged_attention, "cuda", (query, *pools, tables, lens), terms | named)
    check(got, want, errors)


def random_call(seed):
    """Shapes, lengths and terms drawn at random; the keys may be split in any way."""
    rng = np.random.default_rng(seed)
    heads = [(1, 1), (5, 1), (7, 7), (14, 2), (32, 8), (71, 1), (12, 3)][rng.integers(7)]
    dims = [(64, 64), (128, 128), (80, 80), (192, 128), (256, 256), (40, 24)][rng.integers(6)]
    q_len = int(rng.choice([1, 1, 2, 4, 7, 16]))
    batch = int(rng.choice([1, 2, 3, 9, 40 if ON_GPU else 6]))
    longest = int(rng.choice([1, 20, 300, 700] if not ON_GPU else [1, 20, 700, 5000]))
    lens = rng.integers(0, longest + 1, batch)
    lens[rng.integers(batch)] = longest
    page_size = int(rng.choice([1, 3, 8, 16, 32, 64, 128, 256]))
    layout = str(rng.choice(["HND", "NHD"]))
    terms = {}
    if rng.integers(3) == 0:
        terms["local_window_size"] = (int(rng.integers(0, longest + 1)), int(rng.integers(0, 5)))
    if rng.integers(4) == 0:
        terms["is_causal"] = False
    if rng.integers(4) == 0:
        terms["sinks"] = rand(heads[0], seed=seed)
    if rng.integers(4) == 0:
        terms["deterministic"] = True
    return heads, dims, q_len, lens.tolist(), page_size, layout, terms


@pytest.mark.parametrize("seed", range(40 if ON_GPU else 12))
def test_calls_drawn_at_random(seed):
    heads, dims, q_len, lens, page_size, layout, terms = random_call(seed)
    dtype = ["bfloat16", "float16"][seed % 2]
    query, key, value, lens = cache(lens, heads, dims, q_len, dtype)
    dense = {name: x for name, x in terms.items() if name != "deterministic"}
    rule = {"is_causal": True, "q_offset": lens - q_len, "kv_lengths": lens}
    rule |= {test_decode.ORACLE_NAMES.get(name, name): x for name, x in dense.items()}
    want = oracle.attention(query, key, value, **rule)
    errors = dense_errors(query, key, value, lens, want, **dense)
    pools, tables = into_pages([key, value], lens, page_size, layout, seed)
    unused = np.arange(key.shape[1]) >= lens[:, None]
    key[unused], value[unused] = INF, NAN
    check(run(decode_attention, "cuda", (query, key, value, lens), terms), want, errors)
    arrays = query, *pools, tables, lens
    got = run(paged_attention, "cuda", arrays, terms | {"page_layout": layout})
    check(got, want, errors)
    again = run(paged_attention, "cuda", arrays, terms | {"page_layout": layout})
    assert bits(got) == bits(again)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("lens", "heads", "page_size"),
    [([40_000], (8, 2), 16), ([40_000], (8, 2), 4), ([2000] * 20, (8, 8), 16)],
    ids=["a cluster", "a cluster, small pages", "one block each"],
)
def test_more_pages_than_a_warp_looks_up_at_a_time(lens, heads, page_size):
    query, key, value, lens = cache(lens, heads, (64, 64), 1, "bfloat16")
    want = oracle.attention(query, key, value, is_causal=True, q_offset=lens - 1, kv_lengths=lens)
    errors = dense_errors(query, key, value, lens, want)
    pools, tables = into_pages([key, value], lens, page_size, "HND")
    check(run(paged_attention, "cuda", (query, *pools, tables, lens), {}), want, errors)


@pytest.mark.parametrize("page_size", [1, 16])
def test_what_one_new_token_must_not_see_may_be_nan(page_size):
    """The keys and values of the tokens after it, which are in the same product."""
    q_len = 4
    query, key, value, lens = cache([40, 17, 5], (8, 2), (64, 64), q_len, "bfloat16")
    pools, tables = into_pages([key, value], lens, page_size, "HND")
    clean = run(paged_attention, "cuda", (query, *pools, tables, lens), {})
    for b, length in enumerate(lens):
        key[b, length - 1], value[b, length - 2] = NAN, INF
    pools, tables = into_pages([key, value], lens, page_size, "HND")
    got = run(paged_attention, "cuda", (query, *pools, tables, lens), {})
    for x, right in zip(got, clean, strict=True):
        assert bits(x[:, : q_len - 2]) == bits(right[:, : q_len - 2])
        assert np.isnan(x[:, q_len - 2 :]).all()


@pytest.mark.parametrize("page_size", [4, 16])
def test_a_needed_entry_that_names_no_page_taints_the_rows_that_see_it(page_size):
    query, key, value, lens = cache([4 * page_size] * 3, (8, 2), (64, 64), 2, "bfloat16")
    pools, tables = into_pages([key, value], lens, page_size, "HND")
    clean = run(paged_attention, "cuda", (query, *pools, tables, lens), {})
    tables[1, 3], tables[2, 0] = -1, len(pools[0])
    out, lse = run(paged_attention, "cuda", (query, *pools, tables, lens), {})
    assert bits([out[0], lse[0]]) == bits([clean[0][0], clean[1][0]])
    assert np.isnan(out[1:]).all()
    assert np.isnan(lse[1:]).all()
    # Out of the window, the entry is not needed.
    terms = {"local_window_size": (page_size - 2, 0)}
    out, _ = run(paged_attention, "cuda", (query, *pools, tables, lens), terms)
    assert np.isfinite(out[2]).all()


@pytest.mark.parametrize("seed", range(3))
def test_deterministic_bits_do_not_depend_on_the_neighbours(seed):
    lens = [[70, 400, 3, 129, 1000][(seed + i) % 5] for i in range(5)]
    query, key, value, lens = cache(lens, (8, 2), (128, 128), 1, "bfloat16")
    pools, tables = into_pages([key, value], lens, 16, "HND", seed)
    static = {"deterministic": True}
    out, lse = run(paged_attention, "cuda", (query, *pools, tables, lens), static)
    for b in range(5):
        arrays = query[b : b + 1], *pools, tables[b : b + 1], lens[b : b + 1]
        alone = run(paged_attention, "cuda", arrays, static)
        assert bits(alone) == bits([out[b : b + 1], lse[b : b + 1]])


def refusal(*, device=None, function=decode_attention, **changes):
    given = {"heads": (4, 2), "dims": (64, 64), "q_len": 1, "dtype": "bfloat16"} | changes
    arrays = cache([9, 4], *given.values())
    (decision,) = jax_flash_explain(function, *arrays)
    return backend.supports(decision.spec, device or decision.device)


def jax_flash_explain(function, *arrays):
    from jax_flash import explain

    return explain(function, *arrays).decisions


def test_it_says_what_it_cannot_do():
    assert refusal() is None
    assert "at most 16 new tokens; got 17" in refusal(q_len=17)
    assert "multiples of 8 up to 256; got 60" in refusal(dims=(60, 64))
    assert "got 264" in refusal(dims=(264, 64))
    assert "only float16 and bfloat16" in refusal(dtype="float32")
    old = backends.Device("gpu", "7.5", "T4")
    assert "needs compute capability 8.0 or newer; found 7.5" in refusal(device=old)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("batch", "longest", "heads", "q_len"),
    [
        (backend._TABLES_BATCH, 40, (8, 2), 4),
        (backend._TABLES_BATCH, 40, (8, 2), 1),
        (80, 700, (16, 8), 1),
    ],
)
def test_many_sequences(batch, longest, heads, q_len):
    """Lengths are counted in shared memory, of which 16 rows of queries leave the least.

    With fewer rows ranges are of small blocks, where four items fall on each multiprocessor.
    """
    assert 4 * jax.devices()[0].core_count <= batch * heads[1]
    lens = np.random.default_rng(0).integers(0, longest, batch)
    query, key, value, lens = cache(lens.tolist(), heads, (128, 128), q_len, "bfloat16")
    pools, tables = into_pages([key, value], lens, 16, "NHD")
    want = run(paged_attention, "xla", (query, *pools, tables, lens), {"page_layout": "NHD"})
    wide = np.pad(tables, ((0, 0), (0, 300)), constant_values=-1)  # for long ones, equal ranges
    for table in (tables, wide):
        got = run(paged_attention, "cuda", (query, *pools, table, lens), {"page_layout": "NHD"})
        for x, right, atol in zip(got, want, (0.03, 1e-3), strict=True):
            np.testing.assert_allclose(np.float32(x), np.float32(right), atol=atol)


@pytest.mark.gpu
@pytest.mark.parametrize("lens", [[900], [4096, 3, 700, 64], [9000] + [50] * 40], ids=len)
def test_two_gpus_give_the_same_bits(lens):
    gpus = jax.devices()[:2]
    if len(gpus) < 2:
        pytest.skip("needs two GPUs")
    query, key, value, lens = cache(lens, (32, 8), (128, 128), 1, "bfloat16")
    pools, tables = into_pages([key, value], lens, 16, "HND")
    arrays = query, *pools, tables, lens
    attend = functools.partial(paged_attention, implementation="cuda", return_residual=True)
    one, other = (jax.jit(attend)(*jax.device_put(arrays, gpu)) for gpu in gpus)
    assert [x.devices() for x in (one[0], other[0])] == [{gpu} for gpu in gpus]
    assert bits(one) == bits(other)
    heads = jax.sharding.NamedSharding(
        jax.sharding.Mesh(np.array(gpus), ("x",)), jax.sharding.PartitionSpec(None, None, "x")
    )
    both = jax.jit(attend)(jax.device_put(query, heads), *arrays[1:])
    want = oracle.attention(query, key, value, is_causal=True, q_offset=lens - 1, kv_lengths=lens)
    check([np.asarray(x) for x in both], want, dense_errors(query, key, value, lens, want))


@pytest.mark.parametrize("q_len", [1, 8])
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_all_splits_agree(count, q_len):
    arrays, want, errors = page_case(16, "HND", q_len, (8, 2), "bfloat16")

    def attend(*arrays):
        with backend.fixed_splits(count):
            return paged_attention(*arrays, implementation="cuda", return_residual=True)

    check([np.asarray(x) for x in jax.jit(attend)(*arrays)], want, errors)


@pytest.mark.parametrize(
    ("batch", "heads", "q_len"), [(9, 8, 1), (24, 8, 1), (80, 8, 1), (24, 4, 8)]
)
def test_batches_of_every_size_are_right(batch, heads, q_len):
    """One large block an item, small ones, several waves of large ones, two tiles of rows."""
    lens = np.random.default_rng(batch).integers(0, 90, batch)
    query, key, value, lens = cache(lens.tolist(), (4 * heads, heads), (64, 64), q_len, "bfloat16")
    pools, tables = into_pages([key, value], lens, 16, "HND")
    tables = np.pad(tables, ((0, 0), (0, 70)), constant_values=-1)  # more than the short ones
    want = oracle.paged_attention(query, *pools, tables, lens)
    errors = dense_errors(query, key, value, lens, want)
    check(run(paged_attention, "cuda", (query, *pools, tables, lens), {}), want, errors)


def test_a_split_that_no_kernel_has_is_refused():
    arrays, _, _ = page_case(16, "HND", 1, (8, 2), "bfloat16")
    with backend.fixed_splits(3), pytest.raises(jax.errors.JaxRuntimeError, match="1, 2, 4 or 8"):
        jax.block_until_ready(paged_attention(*arrays, implementation="cuda"))


@pytest.mark.gpu
def test_what_cannot_be_launched_raises_with_kernel_shape_and_cause():
    query, cache_ = jnp.zeros((1, 1, 2, 512), jnp.bfloat16), jnp.zeros((1, 4, 2, 512), jnp.bfloat16)
    nothing = np.zeros((0,), np.float32)
    results = [jax.ShapeDtypeStruct(query.shape, query.dtype)]
    results += [jax.ShapeDtypeStruct((n,), jnp.float32) for n in (2, 16)]
    call = jax.ffi.ffi_call(library.DECODE, results)
    attributes = {"scale": np.float32(1), "soft_cap": np.float32(0), "is_causal": np.bool_(True)}
    attributes |= {n: np.int64(-1) for n in ("window_left", "window_right")}
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"decode on query \[1,1,2,512\].*256"):
        jax.block_until_ready(
            call(
                query,
                cache_,
                cache_,
                np.zeros((0,), np.int32),
                np.int32([4]),
                *[nothing] * 4,
                np.zeros((0,), np.int32),
                layout=np.int64(0),
                num_splits=np.int64(0),
                **attributes,
            )
        )


def test_a_library_that_is_not_there_is_a_reason(monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_FLASH_LIBRARY_DIR", str(tmp_path))
    fresh = library.missing.__wrapped__
    assert "not built: there is no" in fresh("cpu")
    (tmp_path / "libjax_flash_cpu.so").write_text("not a library")
    assert "cannot be loaded" in fresh("cpu")
    assert fresh("tpu") == "there are no kernels for tpu"
