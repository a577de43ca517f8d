"""Which thread block computes which tile, and which key tiles each visits: int32 words in an array.

A kernel launches about one thread block per multiprocessor. Block ``c`` walks row ``c`` of the
schedule, ``[num_blocks, max_tiles + 1, 3 + 2 * groups]``, whose words are

    0          query tile, or -1 past the end of the row (the last entry always is)
    1          batch * num_heads + head
    2          lo | hi << 16            key tiles to load
    3 + 2 g    lo | hi << 16            key tiles that the rows of warpgroup g visit
    4 + 2 g    full_lo | full_hi << 16  those of them that need no mask

with ``lo <= full_lo <= full_hi <= hi``. A warpgroup without rows has ``lo == hi``; one whose rows
see nothing visits one tile, masked.

Where the ranges are static the schedule is made here, once, longest tiles first (Graham's LPT rule:
each tile goes to the block that is free first), within groups of heads whose keys and values fit in
the L2 cache together. Where lengths are known only at run time, JAX operations deal out the tiles
round by round (:func:`_dealt`).
"""

from __future__ import annotations

import functools
import heapq
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash.mask import Mask
from pallas_kernels.ops import packed_bits, packed_rows

Array = jax.Array

MAX_KV_TILES = 2**16 - 1
_MAX_HOST_TILES = 2**15  # beyond it a Python loop over tiles costs more than it saves
_GOLDEN = (5**0.5 - 1) / 2
_MATCHES = 2  # halvings of the number of rounds that are dealt out, where there are enough
_HALF = 2**16 - 1  # all bits of half a word
_TILE_COST = 1.5  # start and end of a query tile, in key tiles


class Ranges(NamedTuple):
    """Key tiles by query tile: int32, NumPy where static. R is 1, B or B * Hq.

    Attributes:
        lo: ``[R, num_q_tiles]``, with ``hi`` what the query tile loads.
        hi: likewise.
        own_lo: ``[R, num_q_tiles, groups]``, with ``own_hi`` what each warpgroup visits.
        own_full_lo: likewise, with ``own_full_hi`` what of it needs no mask.
        own_full_hi: likewise.
        own_hi: likewise.
    """

    lo: Any
    hi: Any
    own_lo: Any
    own_full_lo: Any
    own_full_hi: Any
    own_hi: Any


class Edges(NamedTuple):
    """What is known at trace time about all warpgroups' tiles; the largest numbers if unknown.

    Key tiles are visited from last to first: some that only other warpgroups visit, ``leading``
    masked ones, full ones, ``trailing`` masked ones, and again some that only others visit.

    Attributes:
        leading: the most leading masked tiles of any warpgroup.
        trailing: likewise for trailing ones.
        skips_first: whether a warpgroup ever sits out the first tiles that are loaded.
        skips_last: likewise for the last ones.
        idles: whether a warpgroup ever has no rows.
    """

    leading: int = MAX_KV_TILES
    trailing: int = MAX_KV_TILES
    skips_first: bool = True
    skips_last: bool = True
    idles: bool = True

    @property
    def masked(self) -> bool:
        """Whether any tile needs a mask."""
        return self.leading > 0 or self.trailing > 0


def find_ranges(
    mask: Mask, q_len: int, kv_len: int, rows: int, groups: int, block_kv: int
) -> tuple[Ranges, Edges]:
    """Ranges of query tiles of ``groups * rows`` rows, from :meth:`Mask.tile_ranges`.

    A last key tile that is cut short by ``kv_len`` counts as masked, because its missing columns
    are read as zeros.
    """
    own = mask.tile_ranges(q_len, kv_len, rows, block_kv)
    xp: Any = np if isinstance(own.lo, np.ndarray) else jnp
    num_kv_tiles = -(-kv_len // block_kv)
    num_units = own.lo.shape[1]
    surplus = -num_units % groups
    exists = np.arange(num_units + surplus).reshape(-1, groups) < num_units

    def by_tile(x: Any) -> Any:
        return xp.pad(x, ((0, 0), (0, surplus))).reshape(x.shape[0], -1, groups)

    own_lo, full_lo, full_hi, own_hi = map(by_tile, own)
    sees = own_lo < own_hi
    lo = xp.where(sees, own_lo, num_kv_tiles - 1).min(axis=2)
    hi = xp.maximum(xp.where(sees, own_hi, 0).max(axis=2), lo + 1)
    own_lo = xp.where(sees, own_lo, lo[..., None])
    own_hi = xp.where(sees, own_hi, lo[..., None] + exists.astype(np.int32))
    full_hi = xp.clip(xp.minimum(full_hi, kv_len // block_kv), own_lo, own_hi)
    full_lo = xp.clip(full_lo, own_lo, own_hi)
    # Where nothing is full, all count as leading.
    some_full = sees & (full_lo < full_hi)
    full_lo = xp.where(some_full, full_lo, own_lo)
    full_hi = xp.where(some_full, full_hi, own_lo)
    ranges = Ranges(*(x.astype(xp.int32) for x in (lo, hi, own_lo, full_lo, full_hi, own_hi)))
    if xp is jnp or lo.size == 0:
        return ranges, Edges(idles=surplus > 0)
    active = np.broadcast_to(exists[None], own_lo.shape)
    edges = Edges(
        leading=int((own_hi - full_hi).max()),
        trailing=int((full_lo - own_lo).max()),
        skips_first=bool((active & (own_hi < hi[..., None])).any()),
        skips_last=bool((active & (own_lo > lo[..., None])).any()),
        idles=surplus > 0,
    )
    return ranges, edges


def find_visits(
    mask: Mask,
    batch: int,
    num_heads: int,
    q_len: int,
    kv_len: int,
    rows: int,
    groups: int,
    block_kv: int,
) -> tuple[Array, Ranges, Edges]:
    """Key tiles of query tiles where a boolean array decides, and there may be gaps between them.

    Returns:
        visits: int32 ``[R, num_q_tiles, num_kv_tiles]``, with ``2 * key tile + (needs a mask)``
            from the last tile on in the first ``hi`` places;
        ranges: places in it instead of key tiles;
        edges: of a schedule about which nothing is known.
    """
    assert mask.array is not None
    block_q = groups * rows
    visible, full = _visible_tiles(mask, q_len, kv_len, block_q, block_kv)
    tile = jnp.arange(visible.shape[3], dtype=jnp.int32)
    entries = jnp.where(visible, 2 * tile + jnp.where(full, 0, 1), -1)
    visits = -jnp.sort(-entries, axis=-1, stable=False)
    count = visible.sum(axis=-1, dtype=jnp.int32)
    # A tile that sees nothing visits one, masked.
    visits = jnp.where(count[..., None] == 0, 1, visits)
    count = jnp.maximum(count, 1)
    if count.shape[1] > 1:
        visits, count = (jnp.broadcast_to(x, (batch, *x.shape[1:])) for x in (visits, count))
    visits, count = (x.reshape(-1, *x.shape[2:]) for x in (visits, count))
    first_row = np.arange(count.shape[1] * groups, dtype=np.int32).reshape(-1, groups) * rows
    own_hi = jnp.where(first_row < q_len, count[..., None], 0)
    zero = jnp.zeros_like(own_hi)
    ranges = Ranges(jnp.zeros_like(count), count, zero, zero, zero, own_hi)
    idles = -(-q_len // rows) % groups > 0
    return visits, ranges, Edges(skips_first=False, skips_last=False, idles=idles)


def _visible_tiles(
    mask: Mask, q_len: int, kv_len: int, block_q: int, block_kv: int, *, by_keys: bool = False
) -> tuple[Array, Array]:
    """Which tiles must be visited, and which of them need no mask, by a boolean array and the rest.

    Both bool ``[B|1, Hq|1, num_q_tiles, num_kv_tiles]``. What is read are the packed words that the
    kernel reads, too, in the backward pass ``by_keys``: XLA makes them once.
    """
    assert mask.array is not None
    if by_keys and mask.array.shape[2] > 1:
        words, axis = packed_rows(mask.array), 2
    else:
        of_columns = jnp.broadcast_to(mask.array, (*mask.array.shape[:3], kv_len))
        words, axis = packed_bits(of_columns), 3
    some, every = _tiles_of_words(words, axis, (q_len, kv_len), (block_q, block_kv))
    own = mask.tile_ranges(q_len, kv_len, block_q, block_kv)
    lo, full_lo, full_hi, hi = (jnp.asarray(x)[:, None, :, None] for x in own)
    tile = jnp.arange(-(-kv_len // block_kv), dtype=jnp.int32)
    full = every & (full_lo <= tile) & (tile < jnp.minimum(full_hi, kv_len // block_kv))
    return some & (lo <= tile) & (tile < hi), full


def _tiles_of_words(
    words: Array, axis: int, lengths: tuple[int, int], blocks: tuple[int, int]
) -> tuple[Array, Array]:
    """Of a packed mask: tiles with some, and with nothing but, visible keys.

    Both bool ``[B|1, Hq|1, num_q_tiles, num_kv_tiles]``. Rows past the end of whole words do not
    count, what is past the end in a word does.

    Args:
        words: int32 ``[B|1, Hq|1, Tq|1, words]``, or ``[B|1, Hq|1, words, Tk|1]``.
        axis: along which bits are packed: 3 or 2.
        lengths: Tq and Tk.
        blocks: queries and keys of a tile; along ``axis`` a multiple of 64.
    """
    assert blocks[axis - 2] % 64 == 0, "a tile must have whole halves of words"
    other = 5 - axis
    quads = words.reshape(*words.shape[:axis], -1, 4, *words.shape[axis + 1 :])
    at = functools.partial(jax.lax.index_in_dim, keepdims=False)
    quads = [at(quads, t, axis + 1) for t in range(4)]

    def by_tile(join: Any, reduction: Any, neutral: int) -> Array:
        result = _grouped(functools.reduce(join, quads), other, blocks[other - 2], neutral)
        if result.shape[other + 1] > 1:
            result = reduction(result, axes=(other + 1,))
        else:
            result = jnp.repeat(result.squeeze(other + 1), num_tiles[other - 2], other)
        # The lower halves of four words have 64 bits in a row, the upper halves the next.
        shift = np.array([0, 16], np.int32).reshape(2, *[1] * (result.ndim - axis - 1))
        halves = jnp.expand_dims(result, axis + 1) >> shift & _HALF
        halves = halves.reshape(*result.shape[:axis], -1, *result.shape[axis + 1 :])
        halves = _grouped(halves, axis, blocks[axis - 2] // 64, neutral & _HALF)
        result = functools.reduce(
            join, (at(halves, i, axis + 1) for i in range(halves.shape[axis + 1]))
        )
        return jax.lax.slice_in_dim(result, 0, num_tiles[axis - 2], axis=axis)

    num_tiles = [-(-length // block) for length, block in zip(lengths, blocks, strict=True)]
    some = by_tile(jnp.bitwise_or, jax.lax.reduce_or, 0) != 0
    every = by_tile(jnp.bitwise_and, jax.lax.reduce_and, -1) == _HALF
    return some, every


def _grouped(x: Array, axis: int, size: int, padding: Any) -> Array:
    """An axis as two, of groups and of ``size`` in each; one of 1 stays that."""
    if x.shape[axis] == 1:
        return jnp.expand_dims(x, axis + 1)
    surplus = [(0, 0)] * x.ndim
    surplus[axis] = (0, -x.shape[axis] % size)
    x = jnp.pad(x, surplus, constant_values=padding)
    return x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])


def row_of(head: Any, num_rows: int, num_heads: int) -> Any:
    """Of an array with 1, B or B * Hq rows: that of ``head = b * Hq + h``; ``num_heads`` is B Hq.

    For NumPy, JAX and kernels.
    """
    if num_rows == 1:
        return head * 0
    heads_a_row = num_heads // num_rows
    if isinstance(head, np.ndarray) or heads_a_row == 1:
        return head // heads_a_row
    return jax.lax.div(head, jnp.int32(heads_a_row))


def make(
    ranges: Ranges,
    batch: int,
    num_heads: int,
    num_blocks: int,
    head_group: int,
    *,
    batch_first: bool = False,
) -> Any:
    """The schedule.

    Args:
        ranges: of the query tiles.
        batch: B.
        num_heads: Hq.
        num_blocks: thread blocks of the launch.
        head_group: how many heads are worked on at a time.
        batch_first: work on one head of all batch elements before the next, where all have the
            same ranges.
    """
    num_q_tiles = ranges.lo.shape[1]
    num_tiles = batch * num_heads * num_q_tiles
    if isinstance(ranges.lo, np.ndarray) and num_tiles <= _MAX_HOST_TILES:
        # Tensor-core work and the length of the key loop count alike.
        own = (ranges.own_hi - ranges.own_lo).mean(axis=2)
        cost = (own + (ranges.hi - ranges.lo)) / 2
        tiles = _longest_first(
            tuple(map(tuple, cost.tolist())), batch, num_heads, num_blocks, head_group
        )
        xp: Any = np
    else:
        tiles, xp = _dealt(ranges, batch, num_heads, num_blocks), jnp
    if batch_first and ranges.lo.shape[0] == 1:
        tiles = _batch_first(tiles, batch, num_heads, num_q_tiles, xp)
    return _words(ranges, tiles, batch * num_heads, xp)


def _batch_first(tiles: Any, batch: int, num_heads: int, tiles_a_head: int, xp: Any) -> Any:
    """Tile numbers renamed, so that those of one head of all batch elements are neighbours."""
    place, tile = tiles // tiles_a_head, tiles % tiles_a_head
    head, element = place // batch, place % batch
    return xp.where(tiles >= 0, (element * num_heads + head) * tiles_a_head + tile, -1)


def _dealt(ranges: Any, batch: int, num_heads: int, num_blocks: int) -> Array:
    """Tile numbers ``[num_blocks, rounds + 1]``, -1 past the end, made by JAX operations.

    In a round each block gets one of the next ``num_blocks`` tiles: neighbours, whose keys and
    values are in the L2 cache together. Rounds are matched in pairs, and pairs in fours, the
    longest of one with the shortest of the other. Which block gets the longest match moves from one
    four to the next: back and forth, and every two on by the golden ratio, so that over many all
    blocks draw evenly from the sorted costs.
    """
    tiles_a_head = ranges.lo.shape[1]
    num_tiles = batch * num_heads * tiles_a_head
    num_rounds = -(-num_tiles // num_blocks)
    levels = _MATCHES if num_rounds >= 2 ** (_MATCHES + 1) else 0
    num_matches = -(-num_rounds // 2**levels)
    tile = jnp.arange(num_matches * 2**levels * num_blocks, dtype=jnp.int32)
    tile = tile.reshape(-1, num_blocks)
    head = jnp.minimum(tile // tiles_a_head, batch * num_heads - 1)
    row = row_of(head, ranges.lo.shape[0], batch * num_heads)
    cost = jnp.asarray(ranges.hi - ranges.lo)[row, tile % tiles_a_head]
    cost = jnp.where(tile < num_tiles, cost, -1)
    match = tile[:, :, None]
    block = np.arange(num_blocks, dtype=np.int32)
    for level in range(levels + 1):
        if level:
            cost = cost[::2] + cost[1::2, ::-1]
            match = jnp.concatenate([match[::2], match[1::2, ::-1]], axis=2)
        # The longest first. One number is sorted for cost and place: half the work, fewer kernels.
        keys = jnp.sort(block - cost * num_blocks, axis=1, stable=False)
        place = keys % num_blocks
        cost = (place - keys) // num_blocks
        match = jnp.take_along_axis(match, place[:, :, None], axis=1)
    turn = np.arange(num_matches)[:, None]
    shift = np.round(turn // 2 * num_blocks * _GOLDEN).astype(np.int32)
    rank = (block + shift) % num_blocks
    rank = np.where(turn % 2 == 0, rank, num_blocks - 1 - rank)
    match = jnp.take_along_axis(jnp.where(match < num_tiles, match, -1), rank[:, :, None], axis=1)
    dealt = jnp.swapaxes(match, 0, 1).reshape(num_blocks, -1)[:, :num_rounds]
    return jnp.pad(dealt, ((0, 0), (0, 1)), constant_values=-1)


def _words(ranges: Ranges, tiles: Any, num_heads: int, xp: Any) -> Any:
    """Expands tile numbers ``(b * Hq + h) * num_q_tiles + q_tile``; ``num_heads`` is B * Hq."""
    num_q_tiles = ranges.lo.shape[1]
    used = tiles >= 0
    tile = xp.where(used, tiles, 0)
    head, q_tile = tile // num_q_tiles, tile % num_q_tiles
    row = row_of(head, ranges.lo.shape[0], num_heads)
    lo, hi, own_lo, full_lo, full_hi, own_hi = (xp.asarray(x)[row, q_tile] for x in ranges)
    words = [xp.where(used, q_tile, -1), head, lo | hi << 16]
    for group in range(own_lo.shape[-1]):
        words.append(own_lo[..., group] | own_hi[..., group] << 16)
        words.append(full_lo[..., group] | full_hi[..., group] << 16)
    return xp.stack(words, axis=-1).astype(xp.int32)


@functools.lru_cache(maxsize=64)
def _longest_first(
    cost: tuple[tuple[float, ...], ...],
    batch: int,
    num_heads: int,
    num_blocks: int,
    head_group: int,
) -> np.ndarray:
    """Tile numbers ``[num_blocks, max_tiles + 1]``, -1 where a row has ended."""
    num_q_tiles = len(cost[0])
    heads = batch * num_heads
    queue = [(0.0, block) for block in range(num_blocks)]
    rows: list[list[int]] = [[] for _ in range(num_blocks)]
    orders = [np.lexsort((-np.arange(num_q_tiles), -np.asarray(row))).tolist() for row in cost]
    for first in range(0, heads, head_group):
        group = range(first, min(heads, first + head_group))
        tiles = [
            (-cost[_row(head, num_heads, cost)][q_tile], rank, head, q_tile)
            for head in group
            for rank, q_tile in enumerate(orders[_row(head, num_heads, cost)])
        ]
        for negative_cost, _, head, q_tile in sorted(tiles):
            load, block = heapq.heappop(queue)
            rows[block].append(head * num_q_tiles + q_tile)
            heapq.heappush(queue, (load - negative_cost + _TILE_COST, block))
    width = max(map(len, rows)) + 1
    return np.array([row + [-1] * (width - len(row)) for row in rows], np.int32)


def _row(head: int, num_heads: int, cost: tuple[tuple[float, ...], ...]) -> int:
    return min(head // num_heads, len(cost) - 1)


class QueryRanges(NamedTuple):
    """Query tiles by key tile, for the backward pass: int32 ``[R, num_kv_tiles]``.

    R is 1 or B; also B * Hk where a boolean array decides (:func:`find_query_visits`).

    Attributes:
        lo: with ``hi`` the query tiles to visit; those left out see nothing of the key tile.
        full_lo: with ``full_hi`` the part of them that needs no mask.
        full_hi: likewise.
        hi: likewise.
    """

    lo: Any
    full_lo: Any
    full_hi: Any
    hi: Any


class QueryEdges(NamedTuple):
    """What is known at trace time about all key tiles; True if unknown.

    Attributes:
        leading: whether masked query tiles ever come before the full ones.
        trailing: whether they ever come after them.
    """

    leading: bool = True
    trailing: bool = True

    @property
    def masked(self) -> bool:
        """Whether any tile needs a mask."""
        return self.leading or self.trailing


def find_query_ranges(
    mask: Mask, q_len: int, kv_len: int, block_q: int, block_kv: int
) -> tuple[QueryRanges, QueryEdges]:
    """Query tiles of key tiles, from :meth:`Mask.column_tile_ranges`.

    Every query of a full tile sees all keys, so none is empty: a NaN in a value meets no
    probabilities of rows that see nothing.
    """
    lo, full_lo, full_hi, hi = mask.column_tile_ranges(q_len, kv_len, block_q, block_kv)
    xp: Any = np if isinstance(lo, np.ndarray) else jnp
    hi = xp.maximum(hi, lo)
    full_lo = xp.clip(full_lo, lo, hi)
    full_hi = xp.clip(full_hi, full_lo, hi)
    # Keys past the end are read as zeros, which are no scores.
    is_whole = np.arange(lo.shape[1]) < kv_len // block_kv
    # Where nothing is full, all count as leading.
    some_full = (full_lo < full_hi) & is_whole
    full_lo, full_hi = (xp.where(some_full, x, hi) for x in (full_lo, full_hi))
    ranges = QueryRanges(*(x.astype(xp.int32) for x in (lo, full_lo, full_hi, hi)))
    if xp is jnp or lo.size == 0:
        return ranges, QueryEdges()
    return ranges, QueryEdges(bool((full_lo > lo).any()), bool((full_hi < hi).any()))


def find_query_visits(
    mask: Mask,
    batch: int,
    num_q_heads: int,
    num_kv_heads: int,
    q_len: int,
    kv_len: int,
    block_q: int,
    block_kv: int,
) -> tuple[Array, QueryRanges]:
    """Query tiles of key tiles where a boolean array decides, and there may be gaps between them.

    Returns:
        visits: int32 ``[R, num_kv_tiles, 2 + num_q_tiles]``, R being 1, B or B * Hq: how many query
            tiles see the key tile, and ``2 * query tile + (needs a mask)`` of each;
        ranges: from 0 to how many those are of all query heads of a key head together.
    """
    assert mask.array is not None
    visible, full = _visible_tiles(mask, q_len, kv_len, block_q, block_kv, by_keys=True)
    num_q_tiles = visible.shape[2]
    q_tile = jnp.arange(num_q_tiles, dtype=jnp.int32)[:, None]
    entries = jnp.where(visible, 2 * q_tile + jnp.where(full, 0, 1), 2 * num_q_tiles)
    visits = jnp.swapaxes(jnp.sort(entries, axis=2, stable=False), 2, 3)
    count = visible.sum(axis=2, dtype=jnp.int32)
    visits = jnp.concatenate([count[..., None], visits, jnp.zeros_like(count)[..., None]], axis=3)
    group = num_q_heads // num_kv_heads
    if count.shape[1] > 1:
        visits, count = (jnp.broadcast_to(x, (batch, *x.shape[1:])) for x in (visits, count))
        count = count.reshape(batch, num_kv_heads, group, -1).sum(axis=2)
    else:
        count = count * group
    visits, count = (x.reshape(-1, *x.shape[2:]) for x in (visits, count))
    return visits, QueryRanges(jnp.zeros_like(count), count, count, count)


def find_query_bounds(mask: Mask, q_len: int, kv_len: int, num_keys: int) -> tuple[Array, Array]:
    """:meth:`Mask.column_ranges`, int32 ``[B|1, num_keys]``; empty where there is no key."""
    surplus = ((0, 0), (0, num_keys - kv_len))
    start, end = (jnp.asarray(x) for x in mask.column_ranges(q_len, kv_len))
    return jnp.pad(start, surplus), jnp.pad(end, surplus)


def make_for_keys(
    ranges: QueryRanges,
    batch: int,
    num_kv_heads: int,
    num_blocks: int,
    head_group: int,
    *,
    batch_first: bool = False,
) -> Any:
    """The backward pass's schedule, ``[num_blocks, max_tiles + 1, 6]``.

    Its words are the key tile, or -1 past the end, ``batch * num_kv_heads + head`` and the four
    ranges of the key tile's query tiles. For ``batch_first`` see :func:`make`.
    """
    num_kv_tiles = ranges.lo.shape[1]
    num_tiles = batch * num_kv_heads * num_kv_tiles
    if isinstance(ranges.lo, np.ndarray) and num_tiles <= _MAX_HOST_TILES:
        cost = (ranges.hi - ranges.lo).astype(np.float64)
        tiles = _longest_first(
            tuple(map(tuple, cost.tolist())), batch, num_kv_heads, num_blocks, head_group
        )
        xp: Any = np
    else:
        tiles, xp = _dealt(ranges, batch, num_kv_heads, num_blocks), jnp
    if batch_first and ranges.lo.shape[0] == 1:
        tiles = _batch_first(tiles, batch, num_kv_heads, num_kv_tiles, xp)
    return _key_words(ranges, tiles, batch * num_kv_heads, xp)


def can_await_first(table: np.ndarray, num_kv_heads: int) -> bool:
    """Whether blocks may wait for the first batch element of each tile.

    That is so if they come to an end when each does: if no two wait for each other.

    Args:
        table: of :func:`make_for_keys`, of blocks that all run at the same time.
        num_kv_heads: key heads.
    """
    kv_tile, (element, head) = table[..., 0], np.divmod(table[..., 1], num_kv_heads)
    is_done = np.zeros((num_kv_heads, kv_tile.max(initial=0) + 1), bool)
    block, place = np.arange(len(table)), np.zeros(len(table), np.int32)
    while True:
        now = block, place
        is_left = kv_tile[now] >= 0
        is_first = element[now] == 0
        goes_on = is_left & (is_first | is_done[head[now], kv_tile[now]])
        if not goes_on.any():
            return not is_left.any()
        done = block[goes_on & is_first], place[goes_on & is_first]
        is_done[head[done], kv_tile[done]] = True
        place += goes_on


def make_in_rounds(
    ranges: QueryRanges,
    batch: int,
    num_kv_heads: int,
    num_blocks: int,
    slabs: int,
) -> Any:
    """The schedules of a deterministic backward pass, ``[rounds, num_blocks, max_tiles + 1, 6]``.

    Round ``r`` has the key tiles ``r * slabs <= j < (r + 1) * slabs`` of every head, which add to
    different slabs of dq.
    """
    num_kv_tiles = ranges.lo.shape[1]
    num_places = batch * num_kv_heads * slabs
    max_tiles = -(-num_places // num_blocks)
    rounds = np.arange(-(-num_kv_tiles // slabs), dtype=np.int32)[:, None, None]
    block = np.arange(num_blocks, dtype=np.int32)[:, None]
    place = np.arange(max_tiles + 1, dtype=np.int32) * num_blocks + block
    kv_tile, head = rounds * slabs + place % slabs, place // slabs
    used = (place < num_places) & (kv_tile < num_kv_tiles)
    xp = np if isinstance(ranges.lo, np.ndarray) else jnp
    tiles = np.where(used, head * num_kv_tiles + kv_tile, -1)
    return _key_words(ranges, tiles, batch * num_kv_heads, xp)


def _key_words(ranges: QueryRanges, tiles: Any, num_heads: int, xp: Any) -> Any:
    """Expands tile numbers ``(b * Hk + h) * num_kv_tiles + kv_tile``; ``num_heads`` is B * Hk."""
    num_kv_tiles = ranges.lo.shape[1]
    used = tiles >= 0
    tile = xp.where(used, tiles, 0)
    head, kv_tile = tile // num_kv_tiles, tile % num_kv_tiles
    row = row_of(head, ranges.lo.shape[0], num_heads)
    words = [xp.where(used, kv_tile, -1), head]
    words += [xp.asarray(x)[row, kv_tile] for x in ranges]
    return xp.stack(words, axis=-1).astype(xp.int32)
