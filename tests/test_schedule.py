"""Tile ranges and schedules against the masks themselves, without a kernel."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash.mask import Mask, packed_mask
from pallas_kernels import schedule

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


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_a_schedule_has_each_tile_once(name, groups):
    mask, heads = MASKS[name], 3
    ranges, _ = schedule.find_ranges(mask, Q_LEN, KV_LEN, BLOCK_Q, groups, BLOCK_KV)
    num_q_tiles = ranges.lo.shape[1]
    words = np.asarray(schedule.make(ranges, 2, heads, num_blocks=5, head_group=2))
    assert (words[:, -1, 0] == -1).all()
    used = words[..., 0] >= 0
    tiles = words[used][:, 1] * num_q_tiles + words[used][:, 0]
    np.testing.assert_array_equal(np.sort(tiles), np.arange(2 * heads * num_q_tiles))


def test_blocks_share_unequal_documents_evenly():
    """64 documents, log-normal, in 64k tokens: no block gets more than 6 % above the mean."""
    lengths = np.random.default_rng(0).lognormal(0.0, 0.8, 64)
    ends = np.cumsum(lengths / lengths.sum() * 65536).astype(np.int32)
    cu_seqlens = jnp.asarray(np.concatenate([[0], ends]))
    mask = packed_mask(cu_seqlens, cu_seqlens, 65536, 65536, is_causal=True, window=None)
    ranges, _ = schedule.find_ranges(mask, 65536, 65536, 64, 2, 128)
    words = np.asarray(schedule.make(ranges, 1, 16, num_blocks=132, head_group=8))
    cost = (words[..., 2] >> 16) - (words[..., 2] & 0xFFFF) + 1
    load = np.where(words[..., 0] >= 0, cost, 0).sum(axis=1)
    assert load.max() <= 1.06 * load.mean()
