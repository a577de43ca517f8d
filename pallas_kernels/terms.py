"""What a logit has beside its product, tile by tile: bias, ALiBi, soft cap; and dropout.

    x_ij = scale <q_i, k_j> + bias_ij + slope (j - p_i)         p_i: the query's key position
    x_ij = cap tanh(x_ij / cap)                                 with a soft cap

The terms come in three forms. What depends on the query alone (a bias of one column, ``-slope p``)
moves all logits of a row alike: without a soft cap it is added to the log-sum-exp only. What
depends on the key alone (a bias of one row, ``slope j``) is a vector a tile. The rest is a tile.
Positions are relative to one nearby (``origin``), so that large ones cost no accuracy.

A bias of -inf hides its key, one of +inf makes a row NaN, and a finite one stays finite: beside the
lowest number a product would have to be 1e31 to matter.

Scores keep whatever unit costs least: :attr:`Problem.scale_log2` says what makes them logits in
log2 units.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jax_flash import mask as masks
from jax_flash.mask import Mask
from pallas_kernels import ops as primitives
from pallas_kernels.config import Problem
from pallas_kernels.ops import Ops

Array = jax.Array
Ref = Any


class Arrays(NamedTuple):
    """Arrays of a call's terms; see :class:`jax_flash.spec.Operands`."""

    bias: Array | None = None
    alibi_slopes: Array | None = None
    sinks: Array | None = None
    dropout_seeds: Array | None = None


def inputs(problem: Problem, mask: Mask, arrays: Arrays, rows: int, keys: int) -> dict[str, Array]:
    """What the kernels read, by name.

    Args:
        problem: static facts.
        mask: of the call.
        arrays: of the call.
        rows: Tq rounded up to whole tiles.
        keys: Tk rounded up to whole tiles.

    Returns:
        Some of

        - ``bias`` ``[B|1, Hq|1, Tq', keys]``, where it is neither of one row nor of one column;
          Tq' is a multiple of 8;
        - ``bias_rows`` fp32 ``[B|1, Hq|1, rows]``, ``bias_keys`` fp32 ``[B|1, Hq|1, keys]``;
        - ``slopes`` fp32 ``[B|1, Hq]``, ``sinks`` likewise;
        - ``positions`` int32 ``[B|1, rows]``, where the offset is not static;
        - ``row_keys`` int32 ``[B, Hq, rows]`` and ``seeds`` int32 ``[B]``, for dropout.
    """
    found: dict[str, Array] = {}
    if arrays.bias is not None:
        bias = arrays.bias
        if problem.has_bias_tiles:
            found["bias"] = whole_tiles(bias, keys)
        elif bias.shape[2] == 1:
            found["bias_keys"] = _vector(bias[:, :, 0], problem.kv_len, keys)
        else:
            found["bias_rows"] = _vector(bias[..., 0], problem.q_len, rows)
    if arrays.alibi_slopes is not None:
        found["slopes"] = arrays.alibi_slopes
        if mask.q_offsets is not None:
            positions = jnp.asarray(mask.positions(problem.q_len))
            surplus = rows - problem.q_len
            found["positions"] = jnp.pad(positions, ((0, 0), (0, surplus)), mode="edge")
    if arrays.sinks is not None:
        found["sinks"] = arrays.sinks
    if arrays.dropout_seeds is not None:
        heads = jnp.arange(problem.num_q_heads, dtype=jnp.int32)
        keys_of_rows = masks.dropout_row_keys(
            arrays.dropout_seeds, heads, jnp.arange(rows, dtype=jnp.int32)
        )
        found["row_keys"] = lax.bitcast_convert_type(keys_of_rows, jnp.int32)
        found["seeds"] = lax.bitcast_convert_type(arrays.dropout_seeds[:, 1], jnp.int32)
    return found


def whole_tiles(bias: Array, columns: int) -> Array:
    """A bias ``[..., rows, <= columns]`` as a tiled TMA copy wants it: ``[..., 8 n, columns]``."""
    surplus = (-bias.shape[2] % 8, columns - bias.shape[3])
    return jnp.pad(bias, ((0, 0), (0, 0), *((0, n) for n in surplus))) if any(surplus) else bias


def _vector(bias: Array, size: int, padded: int) -> Array:
    """A bias ``[B|1, Hq|1, n|1]`` of one row or column as fp32 ``[B|1, Hq|1, padded]``."""
    bias = jnp.where(jnp.isposinf(bias), jnp.nan, bias.astype(jnp.float32))
    bias = jnp.broadcast_to(bias, (*bias.shape[:2], size))
    return jnp.pad(bias, ((0, 0), (0, 0), (0, padded - size)))


@dataclasses.dataclass(frozen=True)
class Terms:
    """The terms in a kernel.

    Attributes:
        ops: primitives.
        problem: static facts.
        refs: :func:`inputs`, in global memory.
    """

    ops: Ops
    problem: Problem
    refs: dict[str, Ref]

    def of(self, name: str, batch: Any, head: Any) -> Ref:
        """Of an array ``[B|1, Hq|1, ...]`` the element's and head's part."""
        ref = self.refs[name]
        return ref.at[batch if ref.shape[0] > 1 else 0, head if ref.shape[1] > 1 else 0]

    def scalar(self, name: str, batch: Any, head: Any) -> Array:
        """Of an array ``[B|1, Hq]`` one number."""
        ref = self.refs[name]
        return ref[batch if ref.shape[0] > 1 else 0, head]

    def origin(self, batch: Any, row: Any) -> Any:
        """A key near the position of the query ``row``; the nearest one."""
        if "positions" in self.refs:
            position = self._positions(batch)[row]
        else:
            position = row + self.problem.mask.q_offset
        return jnp.clip(position, 0, self.problem.kv_len)

    def _positions(self, batch: Any) -> Ref:
        ref = self.refs["positions"]
        return ref.at[batch if ref.shape[0] > 1 else 0]

    def of_queries(
        self, batch: Any, head: Any, row: Any, count: int, origin: Any, *, as_rows: bool
    ) -> Array | None:
        """fp32 ``[count]``: what the logits of each query have in common; None if nothing."""
        load, _ = self._vectors(as_rows)
        total = None
        if "bias_rows" in self.refs:
            total = load(self.of("bias_rows", batch, head).at[pl.ds(row, count)])
        if self.problem.has_alibi:
            distance = self.query_positions(batch, row, count, origin, as_rows=as_rows)
            term = distance * -self.scalar("slopes", batch, head)
            total = term if total is None else total + term
        return total

    def query_positions(
        self, batch: Any, row: Any, count: int, origin: Any, *, as_rows: bool
    ) -> Array:
        """fp32 ``[count]``: key positions of queries, relative to one."""
        load, layout = self._vectors(as_rows)
        if "positions" in self.refs:
            position = load(self._positions(batch).at[pl.ds(row, count)])
            return (position - origin).astype(jnp.float32)
        first = row + self.problem.mask.q_offset - origin
        return self.ops.float_iota(count, layout) + first.astype(jnp.float32)

    def of_keys(
        self, batch: Any, head: Any, key: Any, count: int, origin: Any, *, as_rows: bool
    ) -> Array | None:
        """fp32 ``[count]``: what the logits of each key have in common; None if nothing."""
        load, layout = self._vectors(as_rows)
        total = None
        if "bias_keys" in self.refs:
            total = load(self.of("bias_keys", batch, head).at[pl.ds(key, count)])
        if self.problem.has_alibi:
            first = (key - origin).astype(jnp.float32)
            distance = self.ops.float_iota(count, layout) + first
            term = distance * self.scalar("slopes", batch, head)
            total = term if total is None else total + term
        return total

    def _vectors(self, as_rows: bool) -> tuple[Any, Any]:
        if as_rows:
            return self.ops.load_rows, primitives.ROWS
        return self.ops.load_columns, primitives.COLUMNS

    def scores(
        self,
        s: Array,
        rows: Array | None,
        columns: Array | None,
        bias: Array | None,
        *,
        hides: bool = True,
    ) -> Array:
        """Scores of products.

        Args:
            s: fp32 ``[m, n]``, products of queries and keys.
            rows: fp32 ``[m]``, to be added to the logits of each row.
            columns: fp32 ``[n]``, likewise of each column.
            bias: ``[m, n]``, likewise.
            hides: give keys whose terms are -inf scores of -inf, whatever their products are.
                Without, and without a soft cap, scores are mere sums: there, they may be NaN.
        """
        problem = self.problem
        if problem.has_plain_scores:
            return s
        unit = 1.0 if problem.soft_cap is None else 1.0 / problem.soft_cap
        x = s * (problem.scale * unit)
        hides = hides or problem.soft_cap is not None
        hidden = None
        for vector, axis in ((rows, 0), (columns, 1)):
            if vector is not None:
                vector = lax.broadcast_in_dim(vector, x.shape, [axis])
                x = x + vector * unit
                if hides and problem.bias is not None:
                    gone = vector == -jnp.inf
                    hidden = gone if hidden is None else hidden | gone
        if bias is not None:
            wide = self.ops.widen(bias)
            if hides:
                gone = bias == jnp.asarray(-jnp.inf, bias.dtype)
                hidden = gone if hidden is None else hidden | gone
            if problem.soft_cap is not None:
                wide = jnp.where(wide == jnp.inf, jnp.nan, wide)
            x = x + wide * unit
        if problem.soft_cap is not None:
            x = self.ops.tanh(x)
        return x if hidden is None else jnp.where(hidden, -jnp.inf, x)
