"""Tile ranges and schedules against the masks themselves, without a kernel."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash.mask import Mask, packed_mask
from pallas_kernels import forward, schedule
from pallas_kernels.ops import packed_bits, packed_rows

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


def blocks_of(batch, heads, q_len, kv_len):
    """A boolean mask with whole blocks of both values, and others."""
    rng = np.random.default_rng(7)
    array = rng.random((batch, heads, q_len, kv_len)) < 0.97
    for q, k in np.ndindex(-(-q_len // 64), -(-kv_len // 64)):
        value = rng.integers(0, 3, (batch, heads, 1, 1))
        block = array[:, :, q * 64 : (q + 1) * 64, k * 64 : (k + 1) * 64]
        block[...] = np.where(value == 2, block, value == 1)
    return jnp.asarray(array)


ARRAYS = {
    "of all": (1, 1, 300, 400),
    "of each head": (2, 3, 300, 400),
    "of whole words": (1, 1, 256, 384),
    "of keys": (2, 1, 1, 400),
    "of queries": (1, 3, 300, 1),
}


@pytest.mark.parametrize(
    ("name", "is_causal", "block_q", "block_kv"),
    [
        ("of all", True, 64, 128),
        ("of all", False, 192, 64),
        ("of each head", True, 128, 128),
        ("of whole words", False, 128, 128),
        ("of whole words", False, 64, 64),
        ("of keys", True, 128, 64),
        ("of queries", False, 64, 128),
    ],
)
def test_visits_are_what_a_boolean_mask_leaves(name, is_causal, block_q, block_kv):
    """Both passes visit all tiles with something to see, and call no others than whole ones full.

    But in the last words of queries the backward pass may take a whole tile for a masked one.
    """
    batch, heads, kv_heads = 2, 3, 1
    q_len, kv_len = (256, 384) if name == "of whole words" else (300, 400)
    mask = Mask(is_causal=is_causal, q_offset=100, array=blocks_of(*ARRAYS[name]))
    interval = dataclasses.replace(mask, array=np.ones((1, 1, 1, 1), bool))
    rows, columns = (range(0, n, size) for n, size in ((q_len, block_q), (kv_len, block_kv)))

    def by_tile(mask, reduction):
        visible = np.asarray(mask.to_array(q_len, kv_len))
        visible = np.broadcast_to(visible, (*visible.shape[:2], q_len, kv_len))
        tiles = [
            [
                reduction(visible[..., i : i + block_q, j : j + block_kv], axis=(2, 3))
                for j in columns
            ]
            for i in rows
        ]
        return np.moveaxis(tiles, (0, 1), (2, 3))

    some = by_tile(dataclasses.replace(mask, is_causal=False), np.any) & by_tile(interval, np.any)
    every = by_tile(mask, np.all)
    every[..., kv_len // block_kv :] = False

    def entries(place, flags, masked):
        return [2 * int(i) + bool(masked[*place, i]) for i in np.flatnonzero(flags[place])]

    visits, ranges, _ = schedule.find_visits(
        mask, batch, heads, q_len, kv_len, block_q, 1, block_kv
    )
    for row, tile in np.ndindex(visits.shape[:2]):
        b, h = divmod(row, heads) if some.shape[1] > 1 else (row, 0)
        place = min(b, some.shape[0] - 1), h, tile
        expected = entries(place, some, ~every)[::-1] or [1]
        np.testing.assert_array_equal(visits[row, tile, : ranges.hi[row, tile]], expected)
    if block_q > 128:
        return  # no block of the backward pass
    visits, ranges = schedule.find_query_visits(
        mask, batch, heads, kv_heads, q_len, kv_len, block_q, block_kv
    )
    some, every = (np.swapaxes(x, 2, 3) for x in (some, every))
    total = np.zeros(ranges.hi.shape, int)
    for row, tile in np.ndindex(visits.shape[:2]):
        b, h = divmod(row, heads) if some.shape[1] > 1 else (row, 0)
        place = min(b, some.shape[0] - 1), h, tile
        count = int(visits[row, tile, 0])
        found, expected = visits[row, tile, 1 : 1 + count], entries(place, some, ~every)
        np.testing.assert_array_equal(found >> 1, np.array(expected, int) >> 1)
        whole = np.asarray(found >> 1) < q_len // block_q
        np.testing.assert_array_equal(np.asarray(found)[whole], np.array(expected, int)[whole])
        assert (np.asarray(found) >= expected).all()
        total[min(b, total.shape[0] - 1) if total.shape[0] > 1 else 0, tile] += count
    factor = 1 if some.shape[1] > 1 else heads
    np.testing.assert_array_equal(ranges.hi, total * factor)


@pytest.mark.parametrize("shape", [(2, 1, 70, 130), (300, 256), (1, 5), (130, 1)])
def test_packed_rows_are_the_bits_of_the_transpose(shape):
    visible = np.random.default_rng(3).random(shape) < 0.5
    bits = np.asarray(packed_bits(jnp.asarray(visible)))
    word = np.arange(-(-shape[-1] // 128) * 128)
    place = word // 128 * 4 + word % 8 // 2, word % 128 // 8 * 2 + word % 2
    unpacked = (bits[..., place[0]] >> place[1] & 1)[..., : shape[-1]]
    np.testing.assert_array_equal(unpacked == 1, visible)
    rows = packed_rows(jnp.asarray(np.swapaxes(visible, -1, -2)))
    np.testing.assert_array_equal(np.swapaxes(rows, -1, -2), bits)
