"""What a tile of scores goes through in the forward kernel beside softmax: masks and terms.

Queries are rows and keys are columns. See :mod:`pallas_kernels.forward`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jax_flash.mask import dropout_threshold
from pallas_kernels import tiles
from pallas_kernels.config import Problem
from pallas_kernels.ops import Ops
from pallas_kernels.terms import Terms

Array = jax.Array
Ref = Any

_ROWS = tiles.WARPGROUP_ROWS


class KeyTiles(NamedTuple):
    """Key tiles ``[lo, hi)``, of which ``[full_lo, full_hi)`` need no mask; scalars.

    With ``visits``, int32 ``[num_kv_tiles]`` in global memory, they are places there instead: see
    :func:`pallas_kernels.schedule.find_visits`.
    """

    lo: Any
    hi: Any
    full_lo: Any
    full_hi: Any
    visits: Ref | None = None

    @property
    def count(self) -> Any:
        """How many."""
        return self.hi - self.lo

    def visit(self, i: Any) -> tuple[Any, Any]:
        """The one that is visited after ``i`` others, and whether it needs a mask."""
        if self.visits is not None:
            entry = self.visits[self.lo + i]
            return lax.shift_right_logical(entry, jnp.int32(1)), entry & 1 == 1
        tile = self.hi - 1 - i
        return tile, (tile < self.full_lo) | (tile >= self.full_hi)


class QueryTile(NamedTuple):
    """This warpgroup's rows of one query tile: scalars, and what all its key tiles need.

    Attributes:
        batch: batch element.
        head: query head.
        row: the first row.
        origin: a key position near those of the rows, for ALiBi; else None.
        terms: fp32 ``[rows]``, what the logits of each row have in common, where scores have it.
        drop_keys: int32 ``[rows]`` for dropout, or None.
    """

    batch: Any
    head: Any
    row: Any
    origin: Any = None
    terms: Array | None = None
    drop_keys: Array | None = None

    @property
    def place(self) -> tuple[Any, Any]:
        """Batch element and head."""
        return self.batch, self.head


class ScoreTiles:
    """Masks and terms of one launch; what a warpgroup does with a tile of its scores."""

    def __init__(self, problem: Problem, ops: Ops, refs: dict[str, Ref]):
        self.problem = problem
        self.ops = ops
        self.refs = refs
        self.terms = Terms(ops, problem, refs)

    def bounds(self, batch: Any, row: Any) -> tiles.RowBounds:
        """What this warpgroup's rows see."""
        mask = self.problem.mask
        rows = pl.ds(row, _ROWS)
        if "row_start" in self.refs:
            start = self.load_rows("row_start", batch, rows)
            end = self.load_rows("row_end", batch, rows)
        else:
            position = self.ops.iota((_ROWS,), 0) + (row + mask.q_offset)
            start, end = mask.static_interval(position, self.problem.kv_len)
            start = None if isinstance(start, int) else start
        segments = None
        if mask.q_segments is not None:
            segments = self.load_rows("q_segments", batch, rows)
        return tiles.RowBounds(start, end, segments)

    def load_rows(self, name: str, batch: Any, rows: Any) -> Array:
        """Of an array ``[B|1, Tq]`` some rows."""
        return self.ops.load_rows(self.of_batch(name, batch).at[rows])

    def key_segments(self, batch: Any, keys: Any) -> Array | None:
        """Segment ids of keys, if there are any."""
        if self.problem.mask.kv_segments is None:
            return None
        return self.ops.load_columns(self.of_batch("kv_segments", batch).at[keys])

    def of_batch(self, name: str, batch: Any) -> Ref:
        """Of an array ``[B|1, ...]`` the element's part."""
        ref = self.refs[name]
        return ref.at[batch if ref.shape[0] > 1 else 0]

    @property
    def kept_scale(self) -> float:
        """By what dropout scales the probabilities that it keeps."""
        return 1.0 / (1.0 - self.problem.dropout_rate)

    def query_tile(self, batch: Any, head: Any, row: Any) -> QueryTile:
        """What all key tiles of the rows from ``row`` on need."""
        origin = self.terms.origin(batch, row) if self.problem.has_alibi else None
        tile = QueryTile(batch, head, row, origin)
        if self.problem.soft_cap is not None:
            tile = tile._replace(terms=self.of_queries(tile))
        if self.problem.dropout_rate > 0.0:
            drop_keys = self.terms.of("row_keys", batch, head).at[pl.ds(row, _ROWS)]
            tile = tile._replace(drop_keys=self.ops.load_rows(drop_keys))
        return tile

    def of_queries(self, tile: QueryTile) -> Array | None:
        """What the logits of each row have in common."""
        return self.terms.of_queries(*tile.place, tile.row, _ROWS, tile.origin, as_rows=True)

    def row_shift(self, tile: QueryTile) -> Array | None:
        """What the logits of each row have beside their scores."""
        return self.of_queries(tile) if self.problem.soft_cap is None else None

    def of_keys(self, tile: QueryTile, column: Any, size: int) -> Array | None:
        """What the logits of each of ``size`` keys have in common."""
        if self.problem.has_plain_scores:
            return None
        return self.terms.of_keys(*tile.place, column, size, tile.origin, as_rows=False)

    def hide(self, tile: QueryTile, s: Array, column: Any) -> Array:
        """Scores with -inf where the keys from ``column`` on are hidden."""
        # The bounds are made or read anew at each edge: kept, they would cost registers.
        segments = self.key_segments(tile.batch, pl.ds(column, s.shape[1]))
        s = tiles.hide(self.ops, s, self.bounds(tile.batch, tile.row), column, segments)
        if "mask_bits" in self.refs:
            words = self.terms.of("mask_bits", *tile.place)
            s = self.ops.hide_by_bits(s, words, tile.row, column)
        return s

    def drop(self, tile: QueryTile, p: Array, column: Any) -> Array:
        """Probabilities, those that dropout drops replaced by 0."""
        if tile.drop_keys is None:
            return p
        seed = self.refs["seeds"][tile.batch]
        threshold = dropout_threshold(self.problem.dropout_rate)
        return self.ops.drop(p, tile.drop_keys, column, seed, threshold, keys_axis=1)
