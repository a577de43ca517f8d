"""PagedKVCache: the layer says the same with pages as without, and writes nowhere else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cuda_ffi import backend as cuda
from cuda_ffi import library
from jax_flash import PagedKVCache, backends
from jax_flash.layers import FlashCausalSelfAttention
from jax_flash.spec import Device
from pallas_kernels import backend as mosaic

# On a GPU these fp32 models run on plain XLA, which says so.
pytestmark = pytest.mark.filterwarnings("ignore:jax_flash. attention:UserWarning")

HEADS, KV_HEADS, DIM, WIDTH, S, P = 4, 2, 8, 32, 4, 12
TABLES = np.array([[3, 7, 1, 0], [5, 2, 0, 0]], np.int32)  # room for 12 and 8 tokens


def make_layer(**options):
    options = {"num_kv_heads": KV_HEADS, "rope_theta": 1e4, "rngs": nnx.Rngs(0), **options}
    return FlashCausalSelfAttention(HEADS, WIDTH, **options)


def inputs(length, seed=1):
    return jax.random.normal(jax.random.key(seed), (2, length, WIDTH), jnp.float32)


def paged(dtype=jnp.float32, lengths=(0, 0), poison=True):
    """Pools of NaN, which must never be read, and room for two sequences."""
    cache = PagedKVCache.create(P, S, KV_HEADS, DIM, dtype)
    if poison:
        nan = jnp.full_like(cache.key_pages, jnp.nan)
        cache = PagedKVCache(nan, nan + 0, cache.block_tables, cache.lengths)
    return cache.with_sequences(TABLES, jnp.array(lengths, jnp.int32))


def extend(layer, x, cache, new_lengths=None):
    graph, state = nnx.split(layer)

    @jax.jit
    def run(state, x, cache, new_lengths):
        return nnx.merge(graph, state)(x, cache=cache, new_lengths=new_lengths)

    return run(state, x, cache, new_lengths)


@pytest.mark.parametrize("chunks", [(8,), (3, 5), (1,) * 8, (5, 1, 2)])
def test_the_layer_gives_what_the_full_pass_gives(chunks):
    layer, x = make_layer(), inputs(8)
    expected, cache = layer(x), paged()
    outs, start = [], 0
    for size in chunks:
        out, cache = extend(layer, x[:, start : start + size], cache)
        outs.append(out)
        start += size
    np.testing.assert_allclose(jnp.concatenate(outs, axis=1), expected, rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(cache.lengths, [8, 8])


@pytest.mark.parametrize("num_new", [1, 2, 20])
def test_rows_of_unequal_new_lengths_agree_with_a_contiguous_cache(num_new):
    layer = make_layer()
    first, more = inputs(5), inputs(num_new, seed=2)
    new = jnp.array([min(num_new, 6), 0], jnp.int32)
    outs = []
    for cache in (layer.init_cache(2, 12), paged()):
        _, cache = extend(layer, first, cache, jnp.array([5, 3], jnp.int32))
        out, cache = extend(layer, more, cache, new)
        np.testing.assert_array_equal(cache.lengths, [5 + int(new[0]), 3])
        outs.append(out)
    np.testing.assert_allclose(outs[1], outs[0], rtol=2e-5, atol=2e-5)


def test_only_the_pages_of_the_tables_are_written():
    layer = make_layer()
    before = paged(lengths=(3, 6), poison=False)
    _, after = extend(layer, inputs(3), before, jnp.array([3, 1], jnp.int32))
    changed = np.asarray((after.key_pages != before.key_pages).any(axis=(1, 3)))
    expected = np.zeros((P, S), bool)
    expected[3, 3] = expected[7, 0] = expected[7, 1] = True  # positions 3, 4, 5 of row 0
    expected[2, 2] = True  # position 6 of row 1
    np.testing.assert_array_equal(changed, expected)


@pytest.mark.parametrize("bad_page", [0, -1, P, 2**31 - 1])
def test_a_token_without_a_page_is_not_stored_and_its_output_is_nan(bad_page):
    layer, x = make_layer(), inputs(3)
    tables = TABLES.copy()
    tables[1, 1] = bad_page
    cache = paged(lengths=(0, 3), poison=False).with_sequences(tables, jnp.array([0, 3]))
    out, after = extend(layer, x, cache)
    assert np.isfinite(out[0]).all()
    assert np.isfinite(out[1, 0]).all()
    assert np.isnan(out[1, 1:]).all()
    changed = np.flatnonzero(np.asarray((after.key_pages != cache.key_pages).any(axis=(1, 2, 3))))
    assert changed.tolist() == [3, 5]


def test_tokens_past_the_table_are_dropped():
    cache = paged(lengths=(15, 16))
    slots, dropped = cache.slots(2)
    assert slots.tolist() == [[-1, -1], [-1, -1]]
    assert dropped.all()
    _, after = extend(make_layer(), inputs(2), cache)
    np.testing.assert_array_equal(after.lengths, [16, 16])


def test_donated_pools_are_updated_in_place_and_undonated_ones_stay():
    graph, state = nnx.split(make_layer())

    def step(state, x, cache):
        return nnx.merge(graph, state)(x, cache=cache)

    cache, x = paged(), inputs(3)
    first, _ = jax.jit(step)(state, x, cache)
    assert not cache.key_pages.is_deleted()
    donating = jax.jit(step, donate_argnums=2)
    out, after = donating(state, x, cache)
    assert cache.key_pages.is_deleted()
    np.testing.assert_array_equal(out, first)
    assert not pool_copies(donating, state, x, after)
    assert pool_copies(jax.jit(step), state, x, after)  # so they can be seen


def pool_copies(function, *arguments):
    """The copies of a whole pool in a compiled program."""
    text = function.lower(*arguments).compile().as_text()
    pool = f"f32[{P},{KV_HEADS},{S},{DIM}]{{3,2,1,0}} copy("
    return [line for line in text.splitlines() if pool in line]


@pytest.mark.parametrize(
    ("num_new", "counted", "kernels"),
    [(1, True, cuda), (1, False, cuda), (8, False, cuda), (32, True, mosaic), (256, False, mosaic)],
)
def test_on_a_gpu_there_is_a_kernel_for_every_kind_of_step(monkeypatch, num_new, counted, kernels):
    monkeypatch.setattr(library, "missing", lambda platform: None)  # as if it were compiled
    specs, choose = [], backends.choose
    monkeypatch.setattr(
        backends, "choose", lambda spec, *rest: specs.append(spec) or choose(spec, *rest)
    )
    cache = PagedKVCache.create(9, 16, 4, 64).with_sequences(
        jnp.zeros((2, 20), jnp.int32), jnp.zeros((2,), jnp.int32)
    )
    query = jax.ShapeDtypeStruct((2, num_new, 8, 64), jnp.bfloat16)
    counts = jnp.ones((2,), jnp.int32) if counted else None
    jax.eval_shape(lambda query, cache: cache.attend(query, cache.lengths, counts), query, cache)
    (spec,) = specs
    assert kernels.supports(spec, Device("gpu", "9.0")) is None


def test_layers_may_be_scanned_over_stacked_pools():
    x, steps = inputs(3), 3
    layers = [make_layer(rngs=nnx.Rngs(seed)) for seed in range(steps)]
    graph, _ = nnx.split(layers[0])
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(nnx.state(one) for one in layers))
    cache = paged()
    pools = [jnp.stack([pool] * steps) for pool in (cache.key_pages, cache.value_pages)]

    @jax.jit
    def run(stacked, pools, x):
        def body(x, layer):
            state, pools = layer
            one = PagedKVCache(*pools, cache.block_tables, cache.lengths)
            out, one = nnx.merge(graph, state)(x, cache=one)
            return x + out, (one.key_pages, one.value_pages)

        return jax.lax.scan(body, x, (stacked, pools))

    out, (key_pages, _) = run(stacked, pools, x)
    expected = x
    for layer in layers:
        expected = expected + layer(expected)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)
    assert np.isfinite(key_pages[:, 3, :, :3]).all()


def test_copied_pages_are_equal_and_the_others_untouched():
    cache = paged(poison=False)
    filled = jnp.arange(cache.key_pages.size, dtype=jnp.float32).reshape(cache.key_pages.shape)
    cache = PagedKVCache(filled, -filled, cache.block_tables, cache.lengths)
    copy = jax.jit(PagedKVCache.copy_pages)
    after = copy(cache, jnp.array([3, 0, 0], jnp.int32), jnp.array([9, 0, 0], jnp.int32))
    expected = np.asarray(filled).copy()
    expected[9] = expected[3]
    np.testing.assert_array_equal(after.key_pages, expected)
    np.testing.assert_array_equal(after.value_pages, -expected)


def test_a_pool_of_another_dtype_keeps_it():
    layer, x = make_layer(), inputs(4)
    out, cache = extend(layer, x, paged(jnp.bfloat16))
    assert (out.dtype, cache.key_pages.dtype) == (jnp.float32, jnp.bfloat16)
    np.testing.assert_allclose(out, layer(x), rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_pages": 1}, ValueError, "num_pages=1: must be >= 2: page 0 is reserved"),
        ({"page_size": 0}, ValueError, "page_size=0: must be >= 1"),
        ({"head_dim": -1}, ValueError, "head_dim=-1: must be >= 1"),
        ({"dtype": jnp.int32}, TypeError, "dtype=int32: must be floating point"),
    ],
)
def test_impossible_pools_are_refused(options, error, message):
    sizes = {"num_pages": P, "page_size": S, "num_kv_heads": KV_HEADS, "head_dim": DIM}
    with pytest.raises(error, match=message):
        PagedKVCache.create(**{**sizes, **options})


def test_a_cache_for_another_layer_or_batch_is_refused():
    cache, x = paged(), inputs(3)
    with pytest.raises(ValueError, match=r"cache.key_pages.shape=.*must be \[P, Hk, S, D\]"):
        make_layer(num_kv_heads=1)(x, cache=cache)
    with pytest.raises(ValueError, match=r"cache.lengths.shape=\(2,\).*with_sequences"):
        make_layer()(x[:1], cache=cache)
    with pytest.raises(ValueError, match=r"lengths.shape=\(1,\)"):
        cache.with_sequences(TABLES, jnp.zeros((1,), jnp.int32))
    with pytest.raises(TypeError, match=r"block_tables\.dtype=float32"):
        cache.with_sequences(TABLES.astype(np.float32), cache.lengths)
