"""The primitives under interpret mode, the algebra of tiles, and the schedule."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_flash.mask import Mask
from pallas_kernels import forward, schedule, tiles
from pallas_kernels.ops import Ops

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
OPS = Ops(INTERPRET)


def rand(seed, *shape, dtype="float32"):
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(jnp.dtype(dtype))


def test_products_accumulate_and_rescale():
    a, b = rand(0, 64, 64, dtype="bfloat16"), rand(1, 64, 64, dtype="bfloat16")
    factor = rand(2, 64)

    def body(a_ref, b_ref, factor_ref, out_ref, a_s, b_s, full, acc):
        for source, target in ((a_ref, a_s), (b_ref, b_s)):
            plgpu.copy_gmem_to_smem(source, target, full)
        plgpu.barrier_wait(full)

        def products(acc):
            OPS.matmul(acc, a_s, b_s, transpose_b=True)
            OPS.wait_matmuls(0)
            OPS.rescale(acc, OPS.load_rows(factor_ref), skip_ones=True)
            OPS.matmul_registers(acc, OPS.load_tile(a_s), b_s)
            return OPS.load_accumulator(acc, wait=0)

        out_ref[...] = OPS.with_accumulator(products, (64, 64), acc.at[0])

    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32),
        scratch_types=[
            tiles.buffer((64, 64), jnp.bfloat16),
            tiles.buffer((64, 64), jnp.bfloat16),
            plgpu.Barrier(num_arrivals=2),
            OPS.accumulator_scratch(1, (64, 64)),
        ],
        grid=(1,),
        grid_names=("x",),
        num_threads=1,
        thread_name="t",
        interpret=INTERPRET,
    )(a, b, factor)
    a, b = a.astype(np.float32), b.astype(np.float32)
    np.testing.assert_allclose(out, factor[:, None] * (a @ b.T) + a @ b, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("lazy_growth", [0.0, 8.0])
@pytest.mark.parametrize("partial_sums", [False, True])
def test_softmax_steps_equal_one_softmax(lazy_growth, partial_sums):
    scores = rand(0, 64, 96) * 20
    scores[3] = -np.inf
    scores[4, :40] = -np.inf
    values, scale = rand(1, 96, 8), 0.7
    stats = tiles.first_stats(OPS, 64, partial_sums=partial_sums)
    acc = jnp.zeros((64, 8))
    for start in range(0, 96, 32):
        p, stats, alpha = tiles.softmax_step(
            jnp.asarray(scores[:, start : start + 32]),
            stats,
            scale * tiles.LOG2_E,
            lazy_growth=lazy_growth,
        )
        assert p.max() <= 2**lazy_growth
        acc = acc * alpha[:, None] + p @ values[start : start + 32]
    inverse, lse = tiles.finish(stats)
    with np.errstate(divide="ignore"):
        expected_lse = np.log(np.exp(scores.astype(np.float64) * scale).sum(axis=1))
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5)
    weights = np.exp(scores * scale - np.where(np.isfinite(expected_lse), expected_lse, 0)[:, None])
    np.testing.assert_allclose(acc * inverse[:, None], weights @ values, rtol=1e-4, atol=1e-5)


def test_hide_compares_columns_with_bounds():
    s = jnp.zeros((64, 128))
    start, end = np.arange(64, dtype=np.int32), np.arange(64, dtype=np.int32) * 3
    keys = np.arange(128, 256)
    hidden = tiles.hide(OPS, s, jnp.asarray(start + 100), jnp.asarray(end + 100), jnp.int32(128))
    visible = (keys >= start[:, None] + 100) & (keys < end[:, None] + 100)
    np.testing.assert_array_equal(np.isneginf(hidden), ~visible)
    hidden = tiles.hide(OPS, s, 0, 200, jnp.int32(128))
    np.testing.assert_array_equal(np.isneginf(hidden[0]), keys >= 200)


def test_shared_memory_is_counted_from_the_scratch_tree():
    tree = {
        "a": tiles.buffer((2, 64, 128), jnp.bfloat16),
        "b": plgpu.SMEM((64,), jnp.float32),
        "c": plgpu.Barrier(num_barriers=3),
        "d": plgpu.Barrier(),
    }
    assert tiles.smem_bytes(tree) == 2 * 64 * 128 * 2 + 64 * 4 + 3 * 8 + 8
    assert [tiles.swizzle_bytes(n, jnp.bfloat16) for n in (64, 96, 48, 128)] == [128, 64, 32, 128]


MASKS = {
    "full": Mask(),
    "causal": Mask(is_causal=True),
    "offset": Mask(is_causal=True, q_offset=37),
    "early": Mask(is_causal=True, q_offset=-90),
    "window": Mask(window=(50, 20)),
    "causal window": Mask(is_causal=True, window=(100, 0), q_offset=60),
    "lengths": Mask(kv_ends=jnp.array([[0], [150]], jnp.int32)),
    "q lengths": Mask(is_causal=True, q_lengths=jnp.array([70, 1], jnp.int32)),
}


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("name", MASKS)
def test_ranges_hold_what_rows_see(name, groups):
    """What a range leaves out is hidden, what it calls full is visible, and counts are right."""
    mask, q_len, kv_len, rows, block_kv = MASKS[name], 200, 230, 32, 64
    ranges, edges = schedule.find_ranges(mask, q_len, kv_len, rows, groups, block_kv)
    lo, hi, own_lo, full_lo, full_hi, own_hi = map(np.asarray, ranges)
    array = mask.to_array(q_len, kv_len)
    visible = np.ones((1, 1, q_len, kv_len), bool) if array is None else np.asarray(array)
    visible = np.broadcast_to(visible[:, 0], (lo.shape[0], q_len, kv_len))
    assert ((lo[..., None] <= own_lo) & (own_lo <= full_lo) & (full_lo <= full_hi)).all()
    assert ((full_hi <= own_hi) & (own_hi <= hi[..., None])).all()
    assert (lo < hi).all()
    for b, tile, group in np.ndindex(own_lo.shape):
        at = (b, tile, group)
        start = (tile * groups + group) * rows
        block = visible[b, start : start + rows]
        assert (own_lo[at] < own_hi[at]) == (start < q_len)
        seen = np.flatnonzero(block.any(axis=0)) // block_kv
        assert ((own_lo[at] <= seen) & (seen < own_hi[at])).all()
        assert full_hi[at] <= kv_len // block_kv
        assert block[:, full_lo[at] * block_kv : full_hi[at] * block_kv].all()
        assert own_hi[at] - full_hi[at] <= edges.leading
        assert full_lo[at] - own_lo[at] <= edges.trailing
        if start < q_len:
            assert edges.skips_first or own_hi[at] == hi[b, tile]
            assert edges.skips_last or own_lo[at] == lo[b, tile]
        else:
            assert edges.idles


@pytest.mark.parametrize("static", [True, False])
def test_schedule_has_every_tile_once(static):
    mask = Mask(is_causal=True)
    if not static:
        mask = Mask(is_causal=True, q_offsets=jnp.zeros((1, 1), jnp.int32))
    batch, heads, blocks = 2, 3, 4
    ranges, _ = schedule.find_ranges(mask, 1000, 1000, 64, 2, 128)
    words = np.asarray(schedule.make(ranges, batch, heads, blocks, 2))
    assert words.shape[0] == blocks
    assert words.shape[2] == 3 + 2 * 2
    assert (words[:, -1, 0] == -1).all()
    seen = collections.Counter()
    for word in words.reshape(-1, words.shape[2]):
        if word[0] >= 0:
            seen[word[0], word[1]] += 1
            assert word[2] & 0xFFFF == np.asarray(ranges.lo)[0, word[0]]
            assert word[2] >> 16 == np.asarray(ranges.hi)[0, word[0]]
            assert word[5] >> 16 == np.asarray(ranges.own_hi)[0, word[0], 1]
    assert seen == {(tile, head): 1 for tile in range(8) for head in range(batch * heads)}
    loads = np.where(words[..., 0] >= 0, (words[..., 2] >> 16) - (words[..., 2] & 0xFFFF), 0)
    loads = loads.sum(axis=1)
    if static:
        assert loads.max() <= loads.mean() * 1.15


def test_schedule_packs_large_numbers():
    ranges = schedule.Ranges(
        *(np.array([[x]]) for x in (40000, 65535)),
        *(np.array([[[x]]]) for x in (40000, 40001, 65534, 65535)),
    )
    words = schedule.make(ranges, 1, 1, 1, 1)
    lo, hi = forward._unpack(jnp.asarray(words)[0, 0, 2])
    assert (lo, hi) == (40000, 65535)
