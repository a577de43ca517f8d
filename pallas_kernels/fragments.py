"""dQ in the order in which a warpgroup holds it, for ``BackwardConfig.adds_registers``.

A tile of 64 queries is ``[D / 8, 512]``: of eight columns, four numbers of each thread. They are in
neighbouring registers, and added by one instruction, by which a warp adds 512 bytes in a row.
"""

from __future__ import annotations

import jax

COLUMNS = 8  # that a warpgroup adds at a time
_ROWS = 64
_PLACES = 4, 8, 4, 2, 2  # in these: warp, row of eight, two columns; of a thread: half, column

Array = jax.Array


def shape(rows: int, columns: int) -> tuple[int, ...]:
    """Of so many queries, whole tiles, and columns."""
    return rows // _ROWS, columns // COLUMNS, _ROWS * COLUMNS


def from_tile(x: Array) -> Array:
    """``[64, columns]`` in that order."""
    warps, rows, pairs, halves, pair = _PLACES
    x = x.reshape(warps, halves, rows, -1, pairs, pair)
    return x.transpose(3, 0, 2, 4, 1, 5).reshape(-1, _ROWS * COLUMNS)


def to_rows(x: Array) -> Array:
    """``[B, H, *shape(rows, columns)]`` as ``[B, rows, H, columns]``."""
    batch, heads, tiles, eights, _ = x.shape
    x = x.reshape(batch, heads, tiles, eights, *_PLACES)
    x = x.transpose(0, 2, 4, 7, 5, 1, 3, 6, 8)
    return x.reshape(batch, tiles * _ROWS, heads, eights * COLUMNS)
