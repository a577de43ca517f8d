"""The primitives under interpret mode, and the algebra of tiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import tiles
from pallas_kernels.fragments import from_tile, shape, to_rows
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
    bounds = tiles.RowBounds(jnp.asarray(start + 100), jnp.asarray(end + 100), None)
    hidden = tiles.hide(OPS, s, bounds, jnp.int32(128), None)
    visible = (keys >= start[:, None] + 100) & (keys < end[:, None] + 100)
    np.testing.assert_array_equal(np.isneginf(hidden), ~visible)
    bounds = tiles.RowBounds(None, 200, jnp.arange(64, dtype=jnp.int32) % 3)
    hidden = tiles.hide(OPS, s, bounds, jnp.int32(128), jnp.asarray(keys % 3))
    visible = (keys < 200) & (keys % 3 == np.arange(64)[:, None] % 3)
    np.testing.assert_array_equal(np.isneginf(hidden), ~visible)


def test_fragments_are_in_the_order_of_registers():
    """As wgmma has them: PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk16"."""
    heads = rand(0, 3, 64, 2, 24)
    fragments = jnp.stack(
        [jnp.stack([from_tile(x[:, head]) for head in range(2)])[:, None] for x in heads]
    )
    assert fragments.shape == (3, 2, *shape(64, 24))
    warp, lane, eight, half, pair = np.ogrid[:4, :32, :3, :2, :2]
    x = heads[1, 16 * warp + lane // 4 + 8 * half, 0, 8 * eight + lane % 4 * 2 + pair]
    of_threads = np.asarray(fragments[1, 0, 0]).reshape(3, 4, 32, 2, 2)
    np.testing.assert_array_equal(of_threads.transpose(1, 2, 0, 3, 4), x)
    np.testing.assert_array_equal(to_rows(fragments), heads)


def test_shared_memory_is_counted_from_the_scratch_tree():
    tree = {
        "a": tiles.buffer((2, 64, 128), jnp.bfloat16),
        "b": plgpu.SMEM((64,), jnp.float32),
        "c": plgpu.Barrier(num_barriers=3),
        "d": plgpu.Barrier(),
    }
    assert tiles.smem_bytes(tree) == 2 * 64 * 128 * 2 + 1024 + 3 * 8 + 8
    assert [tiles.swizzle_bytes(n, jnp.bfloat16) for n in (64, 96, 48, 128)] == [128, 64, 32, 128]
