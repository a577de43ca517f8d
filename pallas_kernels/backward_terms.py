"""The terms of a call around the backward kernel: what it reads of them.

In its transposed tiles keys are rows and queries are columns. What the logits of a query have in
common, a bias of one column, is part of the log-sum-exp that they are compared with, unless a soft
cap stands between. Rows that see a NaN or +inf in a bias have no gradient, and come with
lse = +inf, like those that see nothing. Under a soft cap a bias is free of both here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from jax_flash.mask import Mask
from pallas_kernels import terms
from pallas_kernels.backward_config import GROUPS, BackwardConfig, transposes_bias
from pallas_kernels.config import Problem
from pallas_kernels.ops import packed_rows
from pallas_kernels.terms import Arrays

Array = jax.Array


def inputs(
    problem: Problem,
    mask: Mask,
    arrays: Arrays,
    lse: Array,
    rows: int,
    keys: int,
    config: BackwardConfig,
) -> tuple[dict[str, Array], Array]:
    """What the kernel reads, by name, and the log-sum-exp that it compares with.

    Args:
        problem: static facts.
        mask: of the call.
        arrays: of the call.
        lse: fp32 ``[B, Hq, Tq]``, natural; +inf where a row has no gradient.
        rows: Tq rounded up to whole tiles.
        keys: Tk rounded up to whole tiles.
        config: compile-time options.

    Returns:
        What :func:`pallas_kernels.terms.inputs` makes, without sinks, where ``bias`` is transposed,
        ``[B|1, Hq|1, Tk', rows]``, unless :func:`~pallas_kernels.backward_config.transposes_bias`,
        and the mask as

        - ``visible_keys`` fp32 ``[B|1, Hq|1, keys]``, 1 where seen, if it is of one row;
        - ``visible_bits`` int32 ``[B|1, Hq|1, Tk|1, words]``, packed, transposed, if not;

        and lse without what all logits of a row have in common, of ALiBi only the distance to the
        first query of a part (:func:`folds_positions`).
    """
    bias = arrays.bias
    if bias is not None and not (problem.has_bias_tiles and problem.soft_cap is None):
        bias = jnp.where(jnp.isfinite(bias) | jnp.isneginf(bias), bias, jnp.zeros_like(bias))
    found = terms.inputs(problem, mask, arrays._replace(bias=bias, sinks=None), rows, keys)
    if "bias" in found and not transposes_bias(problem, config):
        assert bias is not None
        found["bias"] = terms.whole_tiles(jnp.swapaxes(bias, 2, 3), rows)
    if "bias_rows" in found and problem.soft_cap is None:
        common = found.pop("bias_rows")[..., : problem.q_len]
        lse = lse - jnp.where(jnp.isfinite(common), common, 0.0)
    if arrays.alibi_slopes is not None and folds_positions(problem):
        place = jnp.arange(problem.q_len, dtype=jnp.int32) % config.part_columns
        lse = lse + arrays.alibi_slopes[:, :, None] * place.astype(jnp.float32)
    if mask.array is not None:
        found |= _visible(mask.array, problem, keys)
    return found, lse


def folds_positions(problem: Problem) -> bool:
    """Whether ALiBi's distances between queries are part of lse, and need no work in the kernel."""
    return problem.soft_cap is None and problem.mask.q_offsets is None


def is_column(bias: Array | jax.ShapeDtypeStruct, kv_len: int) -> bool:
    """Whether a bias is the same for all keys, of which there are several."""
    return bias.shape[3] == 1 and kv_len > 1


class Wanted(NamedTuple):
    """Which gradients beside those of q, k and v are asked for."""

    bias: bool = False
    alibi_slopes: bool = False


def sums(problem: Problem, wanted: Wanted, rows: int, keys: int) -> dict[str, jax.ShapeDtypeStruct]:
    """What the kernel adds up for them, fp32, by name.

    Args:
        problem: static facts.
        wanted: gradients.
        rows: Tq rounded up to whole tiles.
        keys: Tk rounded up to whole tiles.

    Returns:
        Some of

        - ``dbias`` ``[B|1, Hq|1, rows, keys]``, the gradient of a bias that is neither of one row
          nor of one column;
        - ``dbias_keys`` ``[B, Hq, keys]``, summed over queries, of a bias of one row;
        - ``dbias_queries`` ``[GROUPS, B, Hq, rows]``, summed over a warpgroup's keys, of a bias of
          one column under a soft cap;
        - ``dslopes`` ``[B, Hq, keys]``, of the slopes, still to be summed over keys.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    bias, by_key = problem.bias, (problem.batch, problem.num_q_heads, keys)
    if wanted.bias and bias is not None:
        if problem.has_bias_tiles:
            shapes["dbias"] = (*bias.shape[:2], rows, keys)
        elif not is_column(bias, problem.kv_len):
            shapes["dbias_keys"] = by_key
        elif problem.soft_cap is not None:
            shapes["dbias_queries"] = (GROUPS, problem.batch, problem.num_q_heads, rows)
    if wanted.alibi_slopes:
        shapes["dslopes"] = by_key
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


def _visible(array: Array, problem: Problem, keys: int) -> dict[str, Array]:
    """A boolean mask ``[B|1, Hq|1, Tq|1, Tk|1]`` as the kernel reads it."""
    if array.shape[2] == 1:
        seen = jnp.broadcast_to(array[:, :, 0], (*array.shape[:2], problem.kv_len))
        surplus = ((0, 0), (0, 0), (0, keys - problem.kv_len))
        return {"visible_keys": jnp.pad(seen.astype(jnp.float32), surplus)}
    # Transposed by a kernel of its own. XLA would have what packs the mask write it transposed, and
    # read the mask in stripes; and it gets some kernels wrong that do more than transpose.
    words = with_layout_constraint(packed_rows(array), Layout(major_to_minor=(0, 1, 2, 3)))
    return {"visible_bits": jnp.swapaxes(lax.optimization_barrier(words), 2, 3)}


def sink_gradients(sinks: Array, lse: Array, delta: Array) -> Array:
    """Gradients of sinks ``[B|1, Hq]``: their probabilities times ``0 - delta``, over all rows.

    Args:
        sinks: fp32 ``[B|1, Hq]``.
        lse: fp32 ``[B, Hq, Tq]``, natural; +inf where a row has no gradient.
        delta: fp32 ``[B, Hq, Tq]``, finite there.
    """
    by_element = -(jnp.exp(sinks[:, :, None] - lse) * delta).sum(axis=2)
    return by_element if sinks.shape[0] > 1 else by_element.sum(axis=0, keepdims=True)


def bias_gradient(
    bias: Array | jax.ShapeDtypeStruct,
    sums: Mapping[str, Array],
    by_query: Array | None,
    q_len: int,
    kv_len: int,
) -> Array:
    """The gradient of a bias.

    Args:
        bias: ``[B|1, Hq|1, Tq|1, Tk|1]``.
        sums: of the kernel, as :func:`sums` declares them.
        by_query: fp32 ``[B, Hq, Tq]``, of all logits of a query, for a bias of one column whose
            gradient is known without the kernel; else None.
        q_len: Tq.
        kv_len: Tk.
    """
    if "dbias" in sums:
        return sums["dbias"][..., :q_len, :kv_len].astype(bias.dtype)
    if "dbias_keys" in sums:
        full = sums["dbias_keys"][:, :, None, :kv_len]
    else:
        if by_query is None:
            by_query = sums["dbias_queries"].sum(axis=0)
        full = by_query[:, :, :q_len, None]
    axes = [i for i, (n, m) in enumerate(zip(bias.shape, full.shape, strict=True)) if n < m]
    return full.sum(axis=axes, keepdims=True).astype(bias.dtype)


def query_gradients(sinks: Array | None, lse: Array, delta: Array, do: Array, out: Array) -> Array:
    """Gradients of what all logits of a query have in common, without a soft cap: ``[B, Hq, Tq]``.

    The gradients of the logits add up to ``do . out - delta * sum(p)``, where the probabilities add
    up to what the sink leaves.

    Args:
        sinks: fp32 ``[B|1, Hq]`` or None.
        lse: fp32 ``[B, Hq, Tq]``, natural; +inf where a row has no gradient.
        delta: fp32 ``[B, Hq, Tq]``, finite there.
        do: ``[B, Tq, Hq, Dv]``.
        out: ``[B, Tq, Hq, Dv]``.
    """
    dot = jnp.sum(do.astype(jnp.float32) * out.astype(jnp.float32), axis=3).transpose(0, 2, 1)
    total = 1.0 if sinks is None else 1.0 - jnp.exp(sinks[:, :, None] - lse)
    return jnp.where(lse < jnp.inf, dot - delta * total, 0.0)


def slope_gradients(slopes: Array, dslopes: Array) -> Array:
    """The gradient of ALiBi slopes ``[B|1, Hq]`` from the kernel's ``[B, Hq, keys]``."""
    by_element = dslopes.sum(axis=2)
    return by_element if slopes.shape[0] > 1 else by_element.sum(axis=0, keepdims=True)
