"""Tile ranges and schedules against the masks themselves, without a kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash.mask import Mask, packed_mask
from pallas_kernels import forward, schedule

Q_LEN, KV_LEN, BLOCK_Q, BLOCK_KV = 200, 230, 64, 32


def i32(*values):
    return np.array(values, np.int32)


def sorted_ids(length, ids, seed):
    return np.sort(np.random.default_rng(seed).integers(0, ids, (2, length)), axis=1).astype(
        "int32"
    )


ANY_IDS = np.random.default_rng(5).integers(-3, 3, (2, KV_LEN)).astype("int32")
MASKS = {
    "full": Mask(),
    "causal": Mask(is_causal=True, q_offset=30),
    "window": Mask(window=(40, 3)),
    "causal window": Mask(is_causal=True, window=(70, 9), q_offset=-90),
    "offsets": Mask(is_causal=True, q_offsets=i32(-40, 60)[:, None]),
    "early": Mask(is_causal=True, q_offset=-90),
    "lengths": Mask(q_lengths=i32(200, 70), kv_ends=i32(100, 230)[:, None]),
    "packed": packed_mask(
        i32(0, 50, 50, 177, 190),
        i32(0, 33, 90, 200, 230),
        Q_LEN,
        KV_LEN,
        is_causal=True,
        window=None,
    ),
    "sorted segments": Mask(
        q_segments=sorted_ids(Q_LEN, 4, 0), kv_segments=sorted_ids(KV_LEN, 4, 1), is_causal=True
    ),
    "one segment": Mask(
        q_segments=np.zeros((1, Q_LEN), "i4"), kv_segments=np.zeros((1, KV_LEN), "i4")
    ),
    "any segments": Mask(q_segments=ANY_IDS[:, :Q_LEN], kv_segments=ANY_IDS),
}


def visible_tiles(mask):
    """bool ``[B, q tile, row, kv tile, column]``; rows past the end repeat the last one."""
    visible = mask.to_array(Q_LEN, KV_LEN)
    visible = np.ones((1, 1, 1, 1), bool) if visible is None else np.asarray(visible)
    visible = np.broadcast_to(visible, (visible.shape[0], 1, Q_LEN, KV_LEN))[:, 0]
    pad = ((0, 0), (0, -Q_LEN % BLOCK_Q), (0, -KV_LEN % BLOCK_KV))
    visible = np.pad(visible, pad, mode="edge")
    return visible.reshape(visible.shape[0], -(-Q_LEN // BLOCK_Q), BLOCK_Q, -1, BLOCK_KV)


@pytest.mark.parametrize("name", MASKS)
def test_tile_ranges_hide_nothing_visible_and_unmask_nothing_hidden(name):
    mask = MASKS[name]
    tiles = visible_tiles(mask)
    some, every = tiles.any(axis=(2, 4)), tiles.all(axis=(2, 4))
    ranges = mask.tile_ranges(Q_LEN, KV_LEN, BLOCK_Q, BLOCK_KV)
    lo, full_lo, full_hi, hi = (np.asarray(x)[:, :, None] for x in ranges)
    tile = np.arange(tiles.shape[3])
    assert not (some & ~((lo <= tile) & (tile < hi))).any()
    unmasked = (full_lo <= tile) & (tile < full_hi) & (lo <= tile) & (tile < hi)
    assert not (unmasked & ~every).any()
    if name != "any segments":  # of the others the ranges are exact
        assert (some | ((tile < lo) | (tile >= hi))).all()
        assert (every == unmasked).all()


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("name", MASKS)
def test_ranges_hold_what_rows_see(name, groups):
    """What a range leaves out is hidden, what it calls full is visible, and counts are right."""
    mask, q_len, kv_len, rows, block_kv = MASKS[name], Q_LEN, KV_LEN, 32, 64
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


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_a_schedule_has_each_tile_once_with_its_ranges(name, groups):
    mask, heads = MASKS[name], 3
    ranges, _ = schedule.find_ranges(mask, Q_LEN, KV_LEN, BLOCK_Q, groups, BLOCK_KV)
    num_q_tiles = ranges.lo.shape[1]
    words = np.asarray(schedule.make(ranges, 2, heads, num_blocks=5, head_group=2))
    assert words.shape[2] == 3 + 2 * groups
    assert (words[:, -1, 0] == -1).all()
    words = words[words[..., 0] >= 0]
    tile, head = words[:, 0], words[:, 1]
    np.testing.assert_array_equal(
        np.sort(head * num_q_tiles + tile), np.arange(2 * heads * num_q_tiles)
    )
    row = np.minimum(head // heads, ranges.lo.shape[0] - 1)
    lo, hi, own_lo, full_lo, full_hi, own_hi = (np.asarray(x)[row, tile] for x in ranges)
    np.testing.assert_array_equal(words[:, 2], lo | hi << 16)
    np.testing.assert_array_equal(words[:, 3::2], own_lo | own_hi << 16)
    np.testing.assert_array_equal(words[:, 4::2], full_lo | full_hi << 16)


def test_so_many_static_tiles_that_jax_deals_them_out(monkeypatch):
    monkeypatch.setattr(schedule, "_MAX_HOST_TILES", 0)
    ranges, _ = schedule.find_ranges(Mask(is_causal=True), 1000, 1000, 64, 2, 128)
    by_keys, _ = schedule.find_query_ranges(Mask(is_causal=True), 1000, 1000, 64, 128)
    for make, static in ((schedule.make, ranges), (schedule.make_for_keys, by_keys)):
        words = np.asarray(jax.jit(lambda: make(static, 2, 3, 5, 2))())  # noqa: B023
        words = words[words[..., 0] >= 0]
        tiles = words[:, 1] * static.lo.shape[1] + words[:, 0]
        np.testing.assert_array_equal(np.sort(tiles), np.arange(6 * static.lo.shape[1]))


def test_the_longest_tiles_go_first():
    ranges, _ = schedule.find_ranges(Mask(is_causal=True), 1000, 1000, 64, 2, 128)
    words = np.asarray(schedule.make(ranges, 2, 3, num_blocks=4, head_group=2))
    load = np.where(words[..., 0] >= 0, (words[..., 2] >> 16) - (words[..., 2] & 0xFFFF), 0)
    assert load.sum(axis=1).max() <= load.sum(axis=1).mean() * 1.15


def test_blocks_share_unequal_documents_evenly():
    """64 documents, log-normal, in 64k tokens: no block gets more than 4 % above the mean."""
    lengths = np.random.default_rng(0).lognormal(0.0, 0.8, 64)
    ends = np.cumsum(lengths / lengths.sum() * 65536).astype(np.int32)
    cu_seqlens = jnp.asarray(np.concatenate([[0], ends]))
    mask = packed_mask(cu_seqlens, cu_seqlens, 65536, 65536, is_causal=True, window=None)
    ranges, _ = schedule.find_ranges(mask, 65536, 65536, 64, 2, 128)
    words = np.asarray(schedule.make(ranges, 1, 16, num_blocks=132, head_group=8))
    cost = (words[..., 2] >> 16) - (words[..., 2] & 0xFFFF) + 1
    load = np.where(words[..., 0] >= 0, cost, 0).sum(axis=1)
    assert load.max() <= 1.04 * load.mean()


def test_schedule_packs_large_numbers():
    ranges = schedule.Ranges(
        *(np.array([[x]]) for x in (40000, 65535)),
        *(np.array([[[x]]]) for x in (40000, 40001, 65534, 65535)),
    )
    words = schedule.make(ranges, 1, 1, 1, 1)
    lo, hi = forward._unpack(jnp.asarray(words)[0, 0, 2])
    assert (lo, hi) == (40000, 65535)
