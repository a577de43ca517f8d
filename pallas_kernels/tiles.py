"""Layouts, shared memory, and the algebra of one tile of scores: mask and online softmax."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import split
from pallas_kernels.ops import Ops

Array = jax.Array

WARPGROUP_ROWS = 64  # rows of one wgmma: what a warpgroup owns
MAX_SMEM_BYTES = 232448  # of one thread block, on compute capability 9.0
BARRIER_BYTES = 8
_BUFFER_ALIGNMENT = 1024
LOG2_E = math.log2(math.e)
# The running maximum starts at a finite number, so that exp2(-inf - m) is 0, never NaN.
LOWEST = float(np.finfo(np.float32).min) / 2


class RowStats(NamedTuple):
    """Running softmax statistics of the rows of one warpgroup.

    Attributes:
        m: fp32 ``[rows]``, an upper reference of the scaled scores, in log2 units.
        l: sum of ``exp2(score - m)``: fp32 ``[rows]``, or ``[rows, 8]`` partial sums.
    """

    m: Array
    l: Array


def swizzle_bytes(columns: int, dtype: Any) -> int:
    """The widest swizzle whose rows divide a row of ``columns`` elements."""
    row_bytes = columns * jnp.dtype(dtype).itemsize
    return next(width for width in (128, 64, 32) if row_bytes % width == 0)


def buffer(shape: tuple[int, ...], dtype: Any, widest: int = 128) -> Any:
    """A shared-memory buffer that TMA fills and wgmma reads: tiled by 8 rows, swizzled."""
    swizzle = min(widest, swizzle_bytes(shape[-1], dtype))
    tile = (8, swizzle // jnp.dtype(dtype).itemsize)
    transforms = (plgpu.TilingTransform(tile), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def operand_buffer(shape: tuple[int, ...], dtype: Any, widest: int = 128) -> Any:
    """Operands ``[..., m, n]`` of matrix products, of fp32 their parts ``[..., 3, m, n]``."""
    if jnp.dtype(dtype) == jnp.float32:
        return buffer((*shape[:-2], split.PARTS, *shape[-2:]), split.DTYPE, widest)
    return buffer(shape, dtype, widest)


def smem_bytes(scratch: Mapping[str, Any]) -> int:
    """Shared memory that a scratch tree takes, barriers and Mosaic's alignment included."""
    buffers = barriers = 0
    for item in scratch.values():
        if isinstance(item, plgpu.Barrier):
            barriers += BARRIER_BYTES * int(np.prod(item.num_barriers))
        elif item is not None:
            size = math.prod(item.shape) * jnp.dtype(item.dtype).itemsize
            buffers += -(-size // _BUFFER_ALIGNMENT) * _BUFFER_ALIGNMENT
    return buffers + barriers


class RowBounds(NamedTuple):
    """What the rows of one warpgroup see: keys ``start <= j < end`` that share their segment.

    Attributes:
        start: int32 ``[rows]``; None if every row starts at key 0.
        end: int32 ``[rows]`` or a scalar.
        segments: int32 ``[rows]``; None without segments.
    """

    start: Array | None
    end: Any
    segments: Array | None

    def sees(self, keys: Any, segments: Any, spread: Callable[[Array], Array]) -> Array:
        """Which keys the rows see.

        Args:
            keys: int32 indices of keys.
            segments: int32 ids of those keys; unused without segments.
            spread: makes an array ``[rows]`` comparable with ``keys``.
        """
        visible = keys < (spread(self.end) if jnp.ndim(self.end) else self.end)
        if self.start is not None:
            visible = visible & (keys >= spread(self.start))
        if self.segments is not None:
            visible = visible & (spread(self.segments) == segments)
        return visible


def hide(ops: Ops, s: Array, bounds: RowBounds, column: Any, segments: Array | None) -> Array:
    """Scores with -inf where a row does not see a key.

    Args:
        ops: primitives.
        s: fp32 ``[rows, block_kv]``.
        bounds: what the rows see.
        column: scalar, the key index of column 0.
        segments: int32 ``[block_kv]``, of the keys; None without segments.
    """

    def spread(x: Array) -> Array:
        return lax.broadcast_in_dim(x, s.shape, [0])

    # The bounds move to the tile, not the columns to the keys: one subtraction a row.
    start = None if bounds.start is None else bounds.start - column
    local = RowBounds(start, bounds.end - column, bounds.segments)
    if segments is not None:
        segments = lax.broadcast_in_dim(segments, s.shape, [1])
    return jnp.where(local.sees(ops.iota(s.shape, 1), segments, spread), s, -jnp.inf)


def first_stats(ops: Ops, rows: int, *, partial_sums: bool, wide: bool = False) -> RowStats:
    """Statistics of rows that have seen nothing; see :func:`softmax_step`."""
    l = ops.full_tile((rows, 8), 0.0) if partial_sums else ops.full_rows(rows, 0.0)
    return RowStats(ops.full_rows(rows, LOWEST * 2 if wide else LOWEST), l)


def exponent(s: Array, m: Array, scale_log2: float, *, wide: bool, axis: int = 0) -> Array:
    """``log2(exp(logit - m))`` of scores; ``m`` has an entry for each place along ``axis``.

    In log2 units, which saves an instruction; or with ``wide`` in those of the scores, where logits
    may be as large as numbers can be.
    """
    m = lax.broadcast_in_dim(m, s.shape, [axis])
    return (s - m) * scale_log2 if wide else s * scale_log2 - m


def softmax_step(
    s: Array,
    stats: RowStats,
    scale_log2: float,
    *,
    lazy_growth: float,
    wide: bool = False,
    exp2: Callable[[Array], Array] = jnp.exp2,
) -> tuple[Array, RowStats, Array]:
    """One step of the online softmax.

    Args:
        s: fp32 ``[rows, block_kv]``, scores; -inf is hidden.
        stats: of the tiles before.
        scale_log2: factor from scores to log2 units.
        lazy_growth: m moves only when a row's maximum exceeds it by more than this, in log2 units.
            Terms then reach ``2 ** lazy_growth``, which fp32 sums and bf16 or fp16 terms hold.
        wide: whether m is in the units of the scores, not log2 units (:func:`exponent`).
        exp2: of a tile.

    Returns:
        ``p = exp2(s * scale_log2 - m)``, the new statistics, and ``alpha = exp2(m_old - m)`` by
        which whatever was accumulated before must be scaled.
    """
    m, l = stats
    partial_sums = l.ndim == 2
    unit = scale_log2 if wide else 1.0
    highest = s.max(axis=1)
    new_m = jnp.maximum(m, highest if wide else highest * scale_log2)
    if lazy_growth > 0.0:
        new_m = jnp.where(new_m - m > lazy_growth / unit, new_m, m)
    alpha = jnp.exp2((m - new_m) * unit if wide else m - new_m)
    p = exp2(exponent(s, new_m, scale_log2, wide=wide))
    if partial_sums:
        l = l * lax.broadcast_in_dim(alpha, l.shape, [0])
        for column in range(0, s.shape[1], l.shape[1]):
            l = l + p[:, column : column + l.shape[1]]
    else:
        l = l * alpha + p.sum(axis=1)
    return p, RowStats(new_m, l), alpha


def finish(
    stats: RowStats,
    shift: Array | None = None,
    sink: Array | None = None,
    *,
    wide: bool = False,
) -> tuple[Array, Array]:
    """What sums of ``exp(logit - m) v`` are to be multiplied by, and the natural log-sum-exp.

    0 and -inf for rows that saw nothing.

    Args:
        stats: of all tiles.
        shift: fp32 ``[rows]``, what the logits of each row have beside their scores; -inf hides
            all keys.
        sink: fp32 scalar, one more logit.
        wide: whether m is a logit, not in log2 units.
    """
    m, l = stats
    unit = 1.0 if wide else LOG2_E
    if l.ndim == 2:
        l = l.sum(axis=1)
    if shift is not None:
        # A shift that is NaN or +inf makes a NaN of its row.
        l = jnp.where(shift == -jnp.inf, 0.0, l + shift * 0.0)
        m = m + jnp.where(shift == -jnp.inf, 0.0, shift) * unit
    # A NaN in l is not 0 and stays one.
    is_empty = l == 0.0
    factor: Any = 1.0
    if sink is not None:
        other = jnp.where(is_empty, m, sink * unit)
        new_m = jnp.maximum(m, other)
        factor, other = (jnp.exp2((x - new_m) * (LOG2_E / unit)) for x in (m, other))
        l = l * factor + jnp.where(is_empty, 0.0, other)
        m = new_m
    inverse = jnp.where(is_empty, 0.0, factor / l)
    return inverse, m * (1.0 / unit) + jnp.log2(l) * (1.0 / LOG2_E)


def visible_columns(
    ops: Ops, shape: tuple[int, int], bounds: RowBounds, key: Any, segments: Array | None
) -> Array:
    """Which keys the queries see, of a transposed tile: keys are its rows, queries its columns.

    Args:
        ops: primitives.
        shape: ``(keys, queries)``.
        bounds: what the queries see; its arrays have one entry a column.
        key: scalar, the key index of row 0.
        segments: int32 ``[keys]``, of the keys; None without segments.

    Returns:
        bool ``shape``.
    """

    def spread(x: Array) -> Array:
        return lax.broadcast_in_dim(x, shape, [1])

    start = None if bounds.start is None else bounds.start - key
    local = RowBounds(start, bounds.end - key, bounds.segments)
    if segments is not None:
        segments = lax.broadcast_in_dim(segments, shape, [0])
    return local.sees(ops.iota(shape, 0), segments, spread)
