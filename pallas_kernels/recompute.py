"""Rows of out once more, key by key, where a product has left a NaN or inf in them.

A matrix product multiplies hidden values by probabilities of 0, and 0 times NaN is NaN: a bad value
reaches rows that do not see it, if it shares a tile with keys that they see. Here hidden values are
left out by selection. It is slow (no tensor cores, operands from global memory) and rare, and it
relies on the log-sum-exp, which no value has touched:

    out = sum over visible keys j of exp2(s_j - lse) v_j        in log2 units
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import tiles
from pallas_kernels.ops import Ops

Array = jax.Array
Ref = Any

KEYS = 16  # of a tile: the fewest for which dropout is drawn


class Operands(NamedTuple):
    """What one (batch element, head) reads, in global memory.

    Attributes:
        q: ``[Tq', D]``.
        k: ``[Tk', D]``.
        v: ``[Tk', Dv]``.
    """

    q: Ref
    k: Ref
    v: Ref


def recompute(
    ops: Ops,
    operands: Operands,
    row: Any,
    keys: tuple[Any, Any],
    weights: Callable[[Array, Any], tuple[Array, Array]],
) -> Array:
    """Out of one warpgroup's rows.

    Args:
        ops: primitives.
        operands: of the rows' batch element and head.
        row: the first of the rows.
        keys: the first key and the one past the last that any of the rows may see.
        weights: from products fp32 ``[rows, KEYS]`` with the keys from a given one on, a multiple
            of KEYS: probabilities, and which keys are seen.

    Returns:
        fp32 ``[rows, Dv]``; 0 for rows that see nothing.
    """
    q, k, v = operands
    num_rows = tiles.WARPGROUP_ROWS
    head_dim, value_dim = k.shape[1], v.shape[1]
    shape = (num_rows, value_dim)
    width = math.gcd(head_dim, 64)
    tile_shape = (num_rows, KEYS)

    def add(key: Any, out: Array) -> Array:
        s = ops.full_rows(num_rows, 0.0)
        for first in range(0, head_dim, width):
            columns = pl.ds(first, width)
            rows = ops.gather_rows(q.at[:, columns], row, num_rows).astype(jnp.float32)
            column = ops.load_columns(k.at[key, columns]).astype(jnp.float32)
            s = s + (rows * lax.broadcast_in_dim(column, rows.shape, [1])).sum(axis=1)
        # A whole tile for one of its columns: so the terms are those of the tensor cores' tiles.
        own = lax.rem(key, jnp.int32(KEYS))
        p, is_seen = weights(lax.broadcast_in_dim(s, tile_shape, [0]), key - own)
        is_own = ops.iota(tile_shape, 1) == own
        p = jnp.where(is_own, p, 0.0).sum(axis=1)
        visible = jnp.where(is_own & is_seen, 1.0, 0.0).sum(axis=1) > 0.0
        value = ops.load_columns(v.at[key]).astype(jnp.float32)
        product = lax.broadcast_in_dim(p, shape, [0]) * lax.broadcast_in_dim(value, shape, [1])
        return jnp.where(lax.broadcast_in_dim(visible, shape, [0]), out + product, out)

    return lax.fori_loop(*keys, add, ops.full_tile(shape, 0.0))
