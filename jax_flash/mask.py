"""Which keys each query sees: one pytree for every kind of mask, and the small algebra on it.

Everything but a boolean array and segment ids is an *interval*: query row ``i`` of a batch element
sees the keys ``start <= j < end``. Causal masks, windows, offsets, per-batch lengths and packed
(ragged) sequences all reduce to it (:meth:`Mask.row_ranges`), and a kernel that can walk an
interval of key tiles per query tile (:meth:`Mask.tile_ranges`) therefore handles all of them.

The second half is the dropout mask: a documented counter-based generator, so that every
implementation, the forward and the backward pass draw the same bits from the same key.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array


# Offsets, window sides and lengths stay within this, so that sums of two or three fit into int32.
MAX_OFFSET = 2**29


class TileRanges(NamedTuple):
    """Key tiles to visit for each query tile, as int32 arrays ``[B|1, num_q_tiles]``.

    Tiles outside ``[lo, hi)`` are hidden from every row of the query tile. Tiles inside
    ``[full_lo, full_hi)`` are visible to every row: nothing needs checking there. A boolean array
    is not looked at.
    """

    lo: Array | np.ndarray
    full_lo: Array | np.ndarray
    full_hi: Array | np.ndarray
    hi: Array | np.ndarray


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Mask:
    """The visibility rule of one attention call. All parts are ANDed.

    A query row ``i`` stands at key position ``p = i + q_offset (+ q_offsets)``. Integer arrays are
    int32 and have a leading axis of size B, or 1 where all batch elements agree.

    Attributes:
        is_causal: key ``j`` is visible only if ``j <= p``.
        window: ``(left, right)``: key ``j`` is visible only if ``p - left <= j <= p + right``.
        q_offset: the static part of the offset.
        q_offsets: ``[B|1, Tq|1]``, the traced part of the offset.
        q_lengths: ``[B|1]``: rows at or past the length see nothing.
        kv_starts: ``[B|1, Tq|1]``: keys before it are hidden.
        kv_ends: ``[B|1, Tq|1]``: keys at or past it are hidden.
        q_segments: ``[B|1, Tq]``; a key is visible only if its segment id is equal.
        kv_segments: ``[B|1, Tk]``.
        array: bool ``[B|1, Hq|1, Tq|1, Tk|1]``; True is visible.
        q_starts: ``[B|1, Tk]``: queries before it do not see the key. This and the next two say by
            key what ``kv_starts``, ``kv_ends`` and ``q_offsets`` say by query, for
            :meth:`column_ranges`; they are there where those differ from query to query.
        q_ends: ``[B|1, Tk]``: queries at or past it do not see the key.
        kv_offsets: ``[B|1, Tk]``, the offset of the queries in between.
    """

    is_causal: bool = dataclasses.field(default=False, metadata={"static": True})
    window: tuple[int, int] | None = dataclasses.field(default=None, metadata={"static": True})
    q_offset: int = dataclasses.field(default=0, metadata={"static": True})
    q_offsets: Array | None = None
    q_lengths: Array | None = None
    kv_starts: Array | None = None
    kv_ends: Array | None = None
    q_segments: Array | None = None
    kv_segments: Array | None = None
    array: Array | None = None
    q_starts: Array | None = None
    q_ends: Array | None = None
    kv_offsets: Array | None = None

    @property
    def has_static_ranges(self) -> bool:
        """Whether :meth:`row_ranges` depends on nothing but the lengths of the call."""
        traced = (self.q_offsets, self.q_lengths, self.kv_starts, self.kv_ends)
        return all(x is None for x in traced)

    @property
    def is_interval(self) -> bool:
        """Whether :meth:`row_ranges` says everything: no segments and no boolean array."""
        return self.q_segments is None and self.array is None

    @property
    def is_trivial(self) -> bool:
        """Whether every query sees every key."""
        return (
            self.is_interval
            and self.has_static_ranges
            and not self.is_causal
            and self.window is None
        )

    def positions(self, q_len: int) -> Array | np.ndarray:
        """Key position of each query row, int32 ``[B|1, Tq]`` (NumPy when static)."""
        xp = np if isinstance(q_len, int) else jnp  # not an int: a symbolic size, in an export
        rows = xp.arange(q_len, dtype=xp.int32)[None] + np.int32(self.q_offset)
        return rows if self.q_offsets is None else jnp.asarray(rows) + self.q_offsets

    def static_interval(self, position: Any, kv_len: int) -> tuple[Any, Any]:
        """The part of :meth:`row_ranges` that causal masking, the window and ``kv_len`` make.

        Also for use inside kernels, where it is arithmetic on the rows' positions.

        Args:
            position: int32, key position of each row (NumPy or JAX).
            kv_len: Tk.

        Returns:
            ``(start, end)`` shaped like ``position``; a plain int where all rows agree.
        """
        xp = np if isinstance(position, np.ndarray) else jnp
        start: Any = 0
        end: Any = kv_len
        if self.is_causal:
            end = xp.minimum(position + np.int32(1), xp.int32(end))
        if self.window is not None:
            # A position is at least -2**29 and less than 2**30 (a cache's once its lengths are
            # clipped): with sides up to 2**30, farther than any key is, int32 cannot overflow.
            left, right = (np.int32(min(side, 2 * MAX_OFFSET)) for side in self.window)
            start = xp.maximum(position - left, np.int32(start))
            end = xp.minimum(position + (right + np.int32(1)), end)
        return start, end

    def row_ranges(self, q_len: int, kv_len: int) -> tuple[Array | np.ndarray, Array | np.ndarray]:
        """Intervals ``start <= j < end`` of visible keys, int32 ``[B|1, Tq]``, inside [0, Tk].

        A row that sees nothing has ``end <= start``. NumPy arrays when nothing is traced, so that
        a kernel can plan its tiles on the host.
        """
        position = self.positions(q_len)
        xp: Any = np if isinstance(position, np.ndarray) and self.has_static_ranges else jnp
        if not isinstance(kv_len, int):
            xp, kv_len = jnp, jnp.asarray(kv_len, jnp.int32)
        start, end = self.static_interval(position, kv_len)
        start, end = (xp.zeros_like(position) + x for x in (start, end))
        if self.kv_starts is not None:
            start = xp.maximum(start, self.kv_starts)
        if self.kv_ends is not None:
            end = xp.minimum(end, self.kv_ends)
        if self.q_lengths is not None:
            row = jnp.arange(q_len, dtype=jnp.int32)[None]
            end = xp.where(row < self.q_lengths[:, None], end, 0)
        return xp.minimum(start, kv_len), xp.maximum(end, 0)

    def column_ranges(
        self, q_len: int, kv_len: int
    ) -> tuple[Array | np.ndarray, Array | np.ndarray]:
        """Intervals ``start <= i < end`` of the queries that see a key, int32 ``[B|1, Tk]``.

        :meth:`row_ranges` by key: inside [0, Tq], ``end <= start`` where none sees it, NumPy when
        nothing is traced.
        """
        xp: Any = np if self.has_static_ranges else jnp
        key = xp.arange(kv_len, dtype=np.int32)[None]
        offsets = self.q_offsets if self.kv_offsets is None else self.kv_offsets
        own = key - np.int32(self.q_offset) - (np.int32(0) if offsets is None else offsets)
        start, end = xp.zeros_like(own), xp.full_like(own, q_len)
        if self.is_causal:
            start = xp.maximum(start, own)
        if self.window is not None:
            left, right = (np.int32(min(side, 2 * MAX_OFFSET)) for side in self.window)
            start = xp.maximum(start, own - right)
            end = xp.minimum(end, own + (left + np.int32(1)))
        if self.q_lengths is not None:
            end = xp.minimum(end, self.q_lengths[:, None])
        if self.q_starts is not None and self.q_ends is not None:
            start, end = xp.maximum(start, self.q_starts), xp.minimum(end, self.q_ends)
        else:
            for of_rows in (self.q_offsets, self.kv_starts, self.kv_ends):
                assert of_rows is None or of_rows.shape[1] == 1, "known by query, not by key"
            if self.kv_starts is not None:
                end = xp.where(key < self.kv_starts, 0, end)
            if self.kv_ends is not None:
                end = xp.where(key < self.kv_ends, end, 0)
        return xp.minimum(start, np.int32(q_len)), xp.maximum(end, np.int32(0))

    def tile_ranges(self, q_len: int, kv_len: int, block_q: int, block_kv: int) -> TileRanges:
        """Reduces the mask to tiles of ``block_q`` rows and ``block_kv`` keys.

        Rows past ``q_len`` in the last tile are ignored; a tile range with ``hi <= lo`` is empty.
        Tiles are told apart by their smallest and largest segment id: sorted ids, and any other
        that are alike within a tile, leave few tiles to visit. NumPy arrays when nothing is traced.
        """
        ranges = _tiles_of(self.row_ranges(q_len, kv_len), kv_len, block_q, block_kv)
        if self.q_segments is None or self.kv_segments is None:
            return ranges
        return _within_segments(
            ranges, _extremes(self.q_segments, block_q), _extremes(self.kv_segments, block_kv)
        )

    def column_tile_ranges(
        self, q_len: int, kv_len: int, block_q: int, block_kv: int
    ) -> TileRanges:
        """:meth:`tile_ranges` by key: query tiles to visit for each key tile, ``[B|1, tiles]``.

        Keys past ``kv_len`` and queries past ``q_len`` in the last tiles are ignored.
        """
        ranges = _tiles_of(self.column_ranges(q_len, kv_len), q_len, block_kv, block_q)
        if self.q_segments is None or self.kv_segments is None:
            return ranges
        return _within_segments(
            ranges, _extremes(self.kv_segments, block_kv), _extremes(self.q_segments, block_q)
        )

    def to_array(self, q_len: int, kv_len: int) -> Array | None:
        """The whole rule as bool ``[B|1, Hq|1, Tq|1, Tk|1]``; None when all keys are visible."""
        start = end = None
        if self.is_causal or self.window is not None or not self.has_static_ranges:
            start, end = self.row_ranges(q_len, kv_len)
        return visible_keys(
            jnp.arange(kv_len, dtype=jnp.int32),
            start,
            end,
            self.q_segments,
            self.kv_segments,
            self.array,
        )

    def abstract(self) -> Mask:
        """This mask with ShapeDtypeStructs for arrays: hashable, for specs and cache keys."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self)


def _tiles_of(
    intervals: tuple[Array | np.ndarray, Array | np.ndarray],
    limit: int,
    block: int,
    other_block: int,
) -> TileRanges:
    """Intervals of rows, reduced to tiles.

    Args:
        intervals: first and past-the-last place of each row, int32 ``[B|1, rows]``.
        limit: number of places.
        block: rows of a tile.
        other_block: places of a tile.
    """
    start, end = intervals
    xp: Any = np if isinstance(start, np.ndarray) else jnp
    empty = end <= start
    pad = ((0, 0), (0, -start.shape[1] % block))

    def reduce(rows: Any, neutral: int, reduction: Any) -> Any:
        tiles = xp.pad(rows, pad, constant_values=neutral)
        return reduction(tiles.reshape(rows.shape[0], -1, block), axis=-1)

    lo = reduce(xp.where(empty, limit, start), limit, xp.min) // other_block
    hi = -(-reduce(xp.where(empty, 0, end), 0, xp.max) // other_block)
    # A row that sees nothing makes no tile full: its interval is empty.
    full_lo = -(-reduce(xp.where(empty, limit, start), 0, xp.max) // other_block)
    last_seen = reduce(xp.where(empty, 0, end), limit, xp.min)
    # The last tile of places is full when every row sees all of them, although it is cut short.
    full_hi = xp.where(last_seen == limit, -(-limit // other_block), last_seen // other_block)
    return TileRanges(*(x.astype(xp.int32) for x in (lo, full_lo, full_hi, hi)))


def _extremes(segments: Array, block: int) -> tuple[Array, Array]:
    """Smallest and largest id in each tile of ``block``: int32 ``[B|1, num_tiles]``."""
    padded = jnp.pad(segments, ((0, 0), (0, -segments.shape[1] % block)), mode="edge")
    tiles = padded.reshape(segments.shape[0], -1, block)
    return tiles.min(axis=-1), tiles.max(axis=-1)


def _within_segments(
    ranges: TileRanges, q_ids: tuple[Array, Array], kv_ids: tuple[Array, Array]
) -> TileRanges:
    """Narrows tile ranges to the first and last key tile that can share an id, likewise full ones.

    Args:
        ranges: without regard to segments.
        q_ids: of :func:`_extremes`.
        kv_ids: of :func:`_extremes`.
    """
    q_low, q_high = (x[:, :, None] for x in q_ids)
    kv_low, kv_high = (x[:, None, :] for x in kv_ids)
    lo, full_lo, full_hi, hi = (jnp.asarray(x)[:, :, None] for x in ranges)
    num_tiles = kv_low.shape[2]
    tile = jnp.arange(num_tiles, dtype=jnp.int32)
    shared = (q_low <= kv_high) & (kv_low <= q_high) & (lo <= tile) & (tile < hi)
    alike = (q_low == q_high) & (kv_low == kv_high) & (q_low == kv_low)
    full = alike & (full_lo <= tile) & (tile < full_hi)

    def first(condition: Array) -> Array:
        return jnp.where(condition, tile, num_tiles).min(axis=2)

    first_full = first(full)
    return TileRanges(
        first(shared),
        first_full,
        first(~full & (tile > first_full[:, :, None])),  # the first run only, where there are gaps
        jnp.where(shared, tile + 1, 0).max(axis=2),
    )


def visible_keys(
    keys: Array,
    start: Array | np.ndarray | None,
    end: Array | np.ndarray | None,
    q_segments: Array | None,
    kv_segments: Array | None,
    array: Array | None,
) -> Array | None:
    """Combines a block of the rule: intervals AND equal segments AND boolean array.

    Args:
        keys: int32 ``[k]``, the indices of the block's keys.
        start: int32 ``[B|1, q]`` of the block's rows, or None together with ``end``.
        end: int32 ``[B|1, q]``.
        q_segments: ``[B|1, q]`` or None.
        kv_segments: ``[B|1, k]`` or None.
        array: bool ``[B|1, Hq|1, q|1, k|1]`` or None.

    Returns:
        bool ``[B|1, Hq|1, q|1, k|1]``, or None when all three parts are None.
    """
    result = array
    if start is not None and end is not None:
        j = keys[None, None, None, :]
        inside = (j >= start[:, None, :, None]) & (j < end[:, None, :, None])
        result = inside if result is None else result & inside
    if q_segments is not None and kv_segments is not None:
        same = q_segments[:, None, :, None] == kv_segments[:, None, None, :]
        result = same if result is None else result & same
    return result


def packed_mask(
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    q_len: int,
    kv_len: int,
    *,
    is_causal: bool,
    window: tuple[int, int] | None,
) -> Mask:
    """The mask of sequences packed one after another along one token axis (batch of 1).

    Sequence ``s`` holds the queries ``cu_seqlens_q[s] <= t < cu_seqlens_q[s + 1]`` and likewise the
    keys; its queries are the last ones of its keys. Tokens before ``cu_seqlens_q[0]`` or from
    ``cu_seqlens_q[-1]`` on belong to no sequence and see nothing.

    Args:
        cu_seqlens_q: int32 ``[S + 1]``, non-decreasing.
        cu_seqlens_k: int32 ``[S + 1]``, non-decreasing.
        q_len: number of packed query tokens.
        kv_len: number of packed key tokens.
        is_causal: bottom-right causal masking inside each sequence.
        window: window around each query's position inside its sequence.

    Returns:
        A :class:`Mask` whose intervals keep the sequences apart.
    """
    q_end, kv_start, kv_end = _sequences(cu_seqlens_q, cu_seqlens_k, q_len)
    by_key = q_end, kv_start, kv_end
    if cu_seqlens_q is not cu_seqlens_k or q_len != kv_len:
        by_key = _sequences(cu_seqlens_k, cu_seqlens_q, kv_len)
    kv_end = jnp.minimum(kv_end, kv_len)
    # The last query of a sequence stands at its last key.
    return Mask(
        is_causal=is_causal,
        window=window,
        q_offsets=kv_end - q_end,
        kv_starts=kv_start,
        kv_ends=kv_end,
        q_starts=by_key[1],
        q_ends=by_key[2],
        kv_offsets=jnp.minimum(by_key[0], kv_len) - by_key[2],
    )


def _sequences(cu_seqlens: Array, others: Array, length: int) -> tuple[Array, Array, Array]:
    """By token, int32 ``[1, length]``: the end of its sequence; its start and end among others.

    A token of no sequence has an empty one there.
    """
    token = jnp.arange(length, dtype=jnp.int32)
    # side="right" skips empty sequences: the last s with cu_seqlens[s] <= t.
    num_sequences = cu_seqlens.shape[0] - 1
    # One fused kernel while comparing with all boundaries is cheap, else a binary search.
    few = isinstance(length, int) and length * num_sequences <= 2**24
    sequence = jnp.searchsorted(
        cu_seqlens, token, side="right", method="compare_all" if few else "scan"
    )
    sequence = sequence.astype(jnp.int32) - 1
    owned = (sequence >= 0) & (sequence < num_sequences)
    sequence = jnp.clip(sequence, 0, max(num_sequences - 1, 0))
    following = jnp.minimum(sequence + 1, num_sequences)
    start, end = (jnp.where(owned, others[place], 0) for place in (sequence, following))
    return cu_seqlens[following][None], start[None], end[None]


# Dropout. Whether a probability is kept is a pure function of (seeds of the batch element, query
# head, row, key). Rows and keys that differ in bit 3 alone are a group; two rows by two keys share
# the hash z, and each multiplies it by a factor of its own:
#   row_key  = mix(mix(seed0 ^ head * GOLDEN) + group(row))
#   key_key  = spread(seed1 + group(key) * GOLDEN)                        spread(x) = x ^ x >> 16
#   z        = (row_key ^ key_key) * A;    z = z ^ z >> 15
#   bits     = z * FACTORS[bit 3 of row][bit 3 of key]
#   kept iff bits >= round(rate * 2**32)
# In the layout of a tile on tensor cores one thread has all four, queries by keys and keys by
# queries. `mix` is the 32-bit finaliser "lowbias32" of C. Wellons ("Hash Prospector", 2018, public
# domain). The bits of a probability are made like it, with A, but without its last step, which
# stirs lower bits only. There is no high product, so that it also runs inside a Mosaic kernel.
# The first factor is that of lowbias32, the others were searched for by the spectral test of
# generators: of every two, three and four of them the shortest dual vector is at least 0.78 of what
# is possible. Counted over all 2**32 values of z, at a rate of 0.1 the chance that two of the four
# are dropped is off by 1.3e-6 of itself, three by 8.1e-6, and all by 6.8e-5.
DROPOUT_GOLDEN = np.uint32(0x9E3779B9)
DROPOUT_MIX = ((16, np.uint32(0x21F0AAAD)), (15, np.uint32(0xD35A2D97)), (15, None))
DROPOUT_FACTORS = np.array([[0xD35A2D97, 0xC271C86B], [0xD1B2C7B3, 0xCF24DBC3]], np.uint32)


def _mix(x: Array) -> Array:
    for shift, factor in DROPOUT_MIX:
        x = x ^ (x >> np.uint32(shift))
        x = x if factor is None else x * factor
    return x


def _dropout_group(index: Array) -> tuple[Array, Array]:
    """Which group a row or key is in, uint32, and whether it is the second one there."""
    index = index.astype(jnp.uint32)
    group = (index >> np.uint32(4) << np.uint32(3)) | (index & np.uint32(7))
    return group, index & np.uint32(8) != 0


def dropout_threshold(rate: float) -> int:
    """What the 32 bits of a probability must reach for it to be kept, for a rate below 1."""
    return min(round(rate * 2.0**32), 2**32 - 1)


def dropout_row_keys(seeds: Array, heads: Array, rows: Array) -> Array:
    """uint32 ``[B, H, q]``, from which with the key the dropout mask of each query row is made."""
    head_key = _mix(seeds[:, :1] ^ heads.astype(jnp.uint32)[None] * DROPOUT_GOLDEN)
    group, _ = _dropout_group(rows)
    return _mix(head_key[:, :, None] + group)


def dropout_seeds(key: Array, batch: int) -> Array:
    """Seeds uint32 ``[B, 2]`` from a JAX key; one pair a batch element, so that folding is safe."""
    return jax.random.bits(key, (batch, 2), jnp.uint32)


def dropout_bits(row_key: Array, seed: Array, rows: Array, keys: Array) -> Array:
    """The 32 bits that decide about each probability, as uint32; the arguments broadcast.

    Args:
        row_key: uint32, of :func:`dropout_row_keys`.
        seed: uint32, the batch element's second seed.
        rows: int32, query row indices, or these less a multiple of 16.
        keys: int32, key indices.
    """
    (_, is_lower), (group, is_right) = _dropout_group(rows), _dropout_group(keys)
    key_key = seed + group * DROPOUT_GOLDEN
    (spread, factor), (shift, _), _ = DROPOUT_MIX
    z = (row_key ^ key_key ^ (key_key >> np.uint32(spread))) * factor
    z = z ^ (z >> np.uint32(shift))
    upper, lower = (jnp.where(is_right, right, left) for left, right in DROPOUT_FACTORS)
    return z * jnp.where(is_lower, lower, upper)


def dropout_keep(seeds: Array, heads: Array, rows: Array, columns: Array, rate: float) -> Array:
    """The dropout mask, True where a probability is kept.

    Args:
        seeds: uint32 ``[B, 2]`` from :func:`dropout_seeds`.
        heads: int32 ``[H]``, query head indices.
        rows: int32 ``[q]``, query row indices.
        columns: int32 ``[k]``, key indices.
        rate: probability of dropping, in [0, 1].

    Returns:
        bool ``[B, H, q, k]``.
    """
    if rate >= 1.0:
        return jnp.zeros((seeds.shape[0], heads.size, rows.size, columns.size), bool)
    row_key = dropout_row_keys(seeds, heads, rows)[:, :, :, None]
    bits = dropout_bits(row_key, seeds[:, 1, None, None, None], rows[:, None], columns)
    return bits >= np.uint32(dropout_threshold(rate))
