"""The backward kernel's schedules against the masks themselves, and its options; no kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash.mask import Mask, packed_mask
from pallas_kernels import backward, schedule
from pallas_kernels import backward_config as kernel_config
from pallas_kernels.config import Problem

MASKS = {
    "full": Mask(),
    "causal": Mask(is_causal=True),
    "offset": Mask(is_causal=True, q_offset=37),
    "early": Mask(is_causal=True, q_offset=-90),
    "window": Mask(window=(50, 20)),
    "causal window": Mask(is_causal=True, window=(100, 0), q_offset=60),
    "lengths": Mask(kv_ends=jnp.array([[0], [150]], jnp.int32)),
    "q lengths": Mask(is_causal=True, q_lengths=jnp.array([70, 1], jnp.int32)),
    "segments": Mask(
        q_segments=jnp.array([[0] * 100 + [1] * 100]),
        kv_segments=jnp.array([[0] * 130 + [1] * 100]),
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_ranges_hold_what_keys_are_seen_by(name):
    """What a range leaves out does not see the key tile; what it calls full sees all of it."""
    mask, q_len, kv_len, block_q, block_kv = MASKS[name], 200, 230, 32, 64
    ranges, edges = schedule.find_query_ranges(mask, q_len, kv_len, block_q, block_kv)
    lo, full_lo, full_hi, hi = map(np.asarray, ranges)
    array = mask.to_array(q_len, kv_len)
    visible = np.ones((1, 1, q_len, kv_len), bool) if array is None else np.asarray(array)
    visible = np.broadcast_to(visible[:, 0], (lo.shape[0], q_len, kv_len))
    assert ((lo <= full_lo) & (full_lo <= full_hi) & (full_hi <= hi)).all()
    assert edges.leading or (lo == full_lo).all()
    assert edges.trailing or (full_hi == hi).all()
    for b, tile in np.ndindex(lo.shape):
        keys = slice(tile * block_kv, (tile + 1) * block_kv)
        seeing = np.flatnonzero(visible[b, :, keys].any(axis=1)) // block_q
        assert ((lo[b, tile] <= seeing) & (seeing < hi[b, tile])).all()
        rows = slice(full_lo[b, tile] * block_q, full_hi[b, tile] * block_q)
        assert visible[b, rows, keys].all()
        if rows.start < rows.stop:
            assert keys.stop <= kv_len
    if name == "causal":
        np.testing.assert_array_equal(lo[0], [0, 2, 4, 6])
        np.testing.assert_array_equal(full_lo[0], [2, 4, 6, 7])
    if name == "early":  # tiles 0, 1 and a part of 2 see nothing
        np.testing.assert_array_equal(lo[0, :2], [2, 4])
        np.testing.assert_array_equal(hi[0] - lo[0], [5, 3, 0, 0])
        np.testing.assert_array_equal(full_lo[0, :2], [5, 7])
    if name == "segments":
        np.testing.assert_array_equal(hi[0], [4, 4, 7, 7])
        np.testing.assert_array_equal(full_hi[0] - full_lo[0], [3, 3, 0, 0])


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("slabs", [0, 1, 3])
def test_schedule_has_every_key_tile_once(static, slabs):
    mask = Mask(is_causal=True)
    if not static:
        mask = Mask(is_causal=True, q_offsets=jnp.zeros((1, 1), jnp.int32))
    batch, heads, blocks, num_tiles = 2, 3, 4, 8
    ranges, _ = schedule.find_query_ranges(mask, 1000, 1000, 64, 128)
    if slabs:
        words = np.asarray(schedule.make_in_rounds(ranges, batch, heads, blocks, slabs))
        for round_words in words:
            used = round_words[..., :2].reshape(-1, 2)
            used = [(tile % slabs, head) for tile, head in used.tolist() if tile >= 0]
            assert len(used) == len(set(used)), "two tiles of a round add to the same place"
    else:
        words = np.asarray(schedule.make_for_keys(ranges, batch, heads, blocks, 2))[None]
    assert (words[:, :, -1, 0] == -1).all()
    seen = words.reshape(-1, 6)
    seen = seen[seen[:, 0] >= 0]
    assert len(seen) == num_tiles * batch * heads
    assert len(np.unique(seen[:, :2], axis=0)) == len(seen)
    for tile, _, *found in seen.tolist():
        assert found == [int(np.asarray(x)[0, tile]) for x in ranges]
    if static and not slabs:
        loads = np.where(words[..., 0] >= 0, words[..., 5] - words[..., 2], 0).sum(axis=2)
        assert loads.max() <= loads.mean() * 1.15


def packed(cu_seqlens_q, cu_seqlens_k, is_causal, window):
    cu_seqlens = (jnp.asarray(x, jnp.int32) for x in (cu_seqlens_q, cu_seqlens_k))
    return packed_mask(*cu_seqlens, 200, 230, is_causal=is_causal, window=window)


IN_ORDER = {name: MASKS[name] for name in ("lengths", "q lengths", "early", "causal window")} | {
    "packed": packed([0, 50, 50, 51, 190], [0, 60, 70, 75, 230], True, None),
    "packed window": packed([10, 60, 100, 200], [5, 10, 110, 190], False, (20, 3)),
    "more queries than keys": packed([0, 90, 150, 199], [0, 20, 60, 60], True, (30, 0)),
}


@pytest.mark.parametrize("name", IN_ORDER)
def test_bounds_are_the_queries_that_see_a_key(name):
    """Exactly those."""
    q_len, kv_len, num_keys = 200, 230, 256
    start, end = map(
        np.asarray, schedule.find_query_bounds(IN_ORDER[name], q_len, kv_len, num_keys)
    )
    query = np.arange(q_len)[:, None]
    inside = (start[:, None] <= query) & (query < end[:, None])
    visible = np.asarray(IN_ORDER[name].to_array(q_len, kv_len))[:, 0]
    np.testing.assert_array_equal(inside[..., :kv_len], visible)
    assert not inside[..., kv_len:].any()


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("is_causal", [False, True])
def test_lists_hold_the_query_tiles_that_see_a_key_tile(heads, is_causal):
    """All of them and no others; those said to need no mask are whole and see all of it."""
    blocks = np.random.default_rng(0).random((1, heads, 3, 5)) < 0.6
    array = np.kron(blocks, np.ones((1, 1, 64, 64), bool))[:, :, :140, :300]
    array = jnp.asarray(array ^ (np.arange(300) == 70))
    mask = Mask(is_causal=is_causal, q_offset=160, array=array)
    visits, ranges = schedule.find_query_visits(mask, 2, 4, 2, 140, 300, 64, 128)
    visits, steps = np.asarray(visits), np.asarray(ranges.hi)
    visible = np.asarray(mask.to_array(140, 300))
    for row, by_key_tile in enumerate(visits):
        seen = visible[0, row % heads]
        for kv_tile, (count, *entries) in enumerate(by_key_tile):
            blocks = [seen[i : i + 64, kv_tile * 128 :][:, :128] for i in range(0, 140, 64)]
            assert [entry // 2 for entry in entries[:count]] == [
                i for i, block in enumerate(blocks) if block.any()
            ]
            for entry in entries[:count]:
                block = blocks[entry // 2]
                assert entry % 2 == (not block.all() or block.shape != (64, 128))
    counts = visits[:, :, 0].reshape(-1, min(heads, 2), 3).sum(axis=1)
    np.testing.assert_array_equal(steps, counts if heads > 1 else 2 * counts)


@pytest.mark.parametrize("known", [True, False])
def test_thread_blocks_wait_only_where_all_of_them_run_at_once(known):
    """A program that is made where there is no GPU may run on one with fewer multiprocessors."""
    bias = jax.ShapeDtypeStruct((1, 16, 4096, 4096), jnp.bfloat16)
    problem = Problem(
        batch=4,
        q_len=4096,
        kv_len=4096,
        num_q_heads=16,
        num_kv_heads=16,
        head_dim=128,
        value_dim=128,
        dtype=jnp.bfloat16,
        scale=1.0,
        mask=Mask(),
        bias=bias,
        blocks_meet=known,
    )
    config = kernel_config.default_config(problem)
    ranges, _ = schedule.find_query_ranges(Mask(), 4096, 4096, config.block_q, config.block_kv)
    table = schedule.make_for_keys(ranges, 4, 16, 132, 1, batch_first=True)
    assert backward._writes_bias(problem, config, ranges, table) == known


@pytest.mark.parametrize("num_blocks", [1, 3, 7, 132])
@pytest.mark.parametrize("is_causal", [False, True])
def test_thread_blocks_can_wait_for_the_first_batch_element(num_blocks, is_causal):
    ranges, _ = schedule.find_query_ranges(Mask(is_causal=is_causal), 640, 640, 64, 128)
    for head_group in (1, 3, 8):
        table = schedule.make_for_keys(ranges, 4, 3, num_blocks, head_group, batch_first=True)
        assert schedule.can_await_first(table, 3)


def test_thread_blocks_cannot_wait_for_what_comes_after_them():
    """Two rows of two tiles, each of which begins with what needs the end of the other."""
    table = np.zeros((2, 3, 7), np.int32)
    table[:, 2, 0] = -1
    table[0, :2, :2] = (0, 1), (1, 0)  # key tile, batch element
    table[1, :2, :2] = (1, 1), (0, 0)
    assert not schedule.can_await_first(table, 1)
    assert schedule.can_await_first(table[:, [1, 0, 2]], 1)


@pytest.mark.parametrize("num_blocks", [3, 200])
def test_batch_elements_that_share_a_bias_are_neighbours(num_blocks):
    """In the order of a schedule, which has every key tile of every head once."""
    ranges, _ = schedule.find_query_ranges(Mask(), 128, 256, 64, 128)
    table = schedule.make_for_keys(ranges, 4, 2, num_blocks, 1, batch_first=True)
    words = [tuple(word[:2]) for row in table.swapaxes(0, 1) for word in row if word[0] >= 0]
    assert sorted(words) == [(tile, head) for tile in range(2) for head in range(8)]
    if num_blocks == 200:
        assert {head % 2 for _, head in words[:8]} == {0}


def test_configs_ask_for_no_more_than_there_is():
    with pytest.raises(ValueError, match="consumer_registers=248"):
        kernel_config.BackwardConfig(consumer_registers=248)
    with pytest.raises(ValueError, match="block_q=128"):
        kernel_config.BackwardConfig(own_gradients=True, block_q=128)
    with pytest.raises(ValueError, match="ds_buffers=1"):
        kernel_config.BackwardConfig(ds_buffers=1)
    with pytest.raises(ValueError, match="parts=4"):
        kernel_config.BackwardConfig(block_q=128, parts=4)
    with pytest.raises(ValueError, match="kv_stages=2: 1 with own gradients"):
        kernel_config.BackwardConfig(own_gradients=True, kv_stages=2)
    for own_gradients in (False, True):
        with pytest.raises(ValueError, match="hands_over_in_ds"):
            kernel_config.BackwardConfig(own_gradients=own_gradients, hands_over_in_ds=True)
        with pytest.raises(ValueError, match="dq_warpgroup"):
            kernel_config.BackwardConfig(own_gradients=own_gradients, dq_warpgroup=True)
    with pytest.raises(ValueError, match="dq_first: with own gradients"):
        kernel_config.BackwardConfig(dq_first=True)
    options = {"own_gradients": True, "keys_in_registers": True, "dq_warpgroup": True}
    with pytest.raises(ValueError, match="more than the 512 there are"):
        kernel_config.BackwardConfig(**options)
    assert kernel_config.BackwardConfig(**options, consumer_registers=208).consumers == 3
