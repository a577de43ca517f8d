"""The dense oracle (``"xla"``): the contract written down as plainly as JAX allows.

    x   = scale * q k^T + bias + alibi_slope * (j - p)        p: the query's key position
    x   = soft_cap * tanh(x / soft_cap)
    lse = log(sum over visible j of exp(x_j) + exp(sink))
    out = sum over visible j of dropout(exp(x_j - lse)) v_j

in fp32 (fp64 for fp64 inputs) with the logits held as one array ``[B, Hk, G, Tq, Tk]``. It is plain
JAX: every transform works on it. A query that sees no key gives out 0, lse -inf and zero gradients.

Non-finite inputs never leak. Arithmetic runs on copies in which non-finite entries of q, k and v
are zero, and the rows that *see* one of them (their own q, or a visible key's k or v) are set to
NaN at the end; likewise for a visible NaN or +inf in the bias. So ``0 * NaN`` behind a mask cannot
happen, in the output or in a gradient, and no gradient passes through a row of NaN.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jax_flash.mask import dropout_keep
from jax_flash.spec import (
    QUANTISED_DTYPES,
    AttentionSpec,
    Device,
    Operands,
    finite_product,
    page_axes,
    wide_dtype,
)

Array = jax.Array

FUSED = False


def supports(spec: AttentionSpec, device: Device) -> str | None:
    """Every valid call, on every device."""
    del spec, device
    return None


def forward(spec: AttentionSpec, operands: Operands) -> tuple[Array, Array]:
    """Attention of one call.

    Args:
        spec: the call's static facts.
        operands: its arrays.

    Returns:
        out ``[B, Tq, Hq, Dv]`` in the query's dtype, and lse ``[B, Tq, Hq]`` in fp32 (fp64 for fp64
        inputs).
    """
    operands = dense_operands(spec, operands)
    q_len, kv_len = spec.q_len, spec.kv_len
    query, key, value, bad_q, bad_kv = finite_operands(spec, operands)
    rows, columns = jnp.arange(q_len, dtype=jnp.int32), jnp.arange(kv_len, dtype=jnp.int32)
    x, visible, bad_bias = logits(
        spec,
        query,
        key,
        operands.bias,
        operands.alibi_slopes,
        operands.mask.to_array(q_len, kv_len),
        jnp.asarray(operands.mask.positions(q_len)),
        columns,
        precision="highest",
    )
    m = jnp.max(x, axis=-1, where=visible, initial=-jnp.inf)
    m = jax.lax.stop_gradient(finite_max(m, operands.sinks))
    p = probabilities(x, m, visible)
    l = jnp.sum(p, axis=-1)
    p = drop(spec, p, operands.dropout_seeds, rows, columns)
    acc = jnp.einsum("bhgqk,bkhd->bhgqd", p, value, precision="highest")
    bad = bad_kv[:, :, None, None, :] | bad_bias
    seen_bad = jnp.any(visible & bad, axis=-1) | bad_q
    return finish(spec, acc, l, m, jnp.any(visible, axis=-1), seen_bad, operands.sinks)


def dense_operands(spec: AttentionSpec, operands: Operands) -> Operands:
    """The same call on a contiguous, unquantised cache.

    Pages are gathered in the order of the block table. Entries that no sequence length needs are
    never followed: they may hold anything. A needed entry that names no page reads as NaN. Lengths
    that the cache does not have are clipped.
    """
    if spec.page_layout is None:
        key = dequantise(operands.key, operands.k_scale)
        value = dequantise(operands.value, operands.v_scale)
    else:
        key = gather_pages(spec, operands, operands.key, operands.k_scale)
        value = gather_pages(spec, operands, operands.value, operands.v_scale)
    mask = operands.mask
    if spec.kind in ("decode", "paged"):
        lengths = jnp.clip(mask.kv_ends, 0, key.shape[1])
        mask = dataclasses.replace(mask, q_offsets=lengths, kv_ends=lengths)
    return dataclasses.replace(
        operands, key=key, value=value, mask=mask, block_tables=None, k_scale=None, v_scale=None
    )


def dequantise(x: Array, scale: Array | None) -> Array:
    """``x * scale`` in fp32; ``scale`` lacks the last axis of ``x``."""
    return x if scale is None else finite_product(x.astype(jnp.float32), scale[..., None])


def gather_pages(
    spec: AttentionSpec, operands: Operands, pool: Array, scale: Array | None
) -> Array:
    """The pages of each sequence, one after another: ``[B, max_pages * S, Hk, D]``."""
    tables, lengths, page_size = operands.block_tables, operands.mask.kv_ends, spec.page_size
    assert tables is not None
    assert lengths is not None
    assert page_size is not None
    if pool.shape[0] == 0:  # a gather needs one page to exist
        pool = jnp.full((1, *pool.shape[1:]), 0, pool.dtype)
        tables = jnp.full_like(tables, 1)
    num_pages, (batch, max_pages) = pool.shape[0], tables.shape
    first_token = jnp.arange(max_pages, dtype=jnp.int32) * page_size
    tables = jnp.where(tables < 0, num_pages, tables)  # -1 names no page, not the last one
    tables = jnp.where(first_token < lengths, tables, 0)

    def gather(x: Array) -> Array:
        pages = x.at[tables].get(mode="fill")
        pages = jnp.swapaxes(pages, 2, 3) if spec.page_layout == "HND" else pages
        return pages.reshape(batch, max_pages * page_size, *pages.shape[3:])

    if scale is not None:
        scale = gather(jnp.broadcast_to(scale, pool.shape[:3]))
    elif pool.dtype == jnp.int8:  # which has no NaN for what is not there
        names_a_page = jnp.repeat(tables < num_pages, page_size, axis=1)[..., None]
        scale = jnp.where(names_a_page, 1.0, jnp.nan)
    return dequantise(gather(pool), scale)


def finite_operands(
    spec: AttentionSpec, operands: Operands
) -> tuple[Array, Array, Array, Array, Array]:
    """q, k, v in the accumulator dtype with non-finite entries zeroed, and where those were.

    Returns:
        query ``[B, Tq, Hk, G, D]``, key ``[B, Tk, Hk, D]``, value ``[B, Tk, Hk, Dv]``, the bad
        query rows bool ``[B, Hk, G, Tq]`` and the bad keys bool ``[B, Hk, Tk]``.
    """
    heads = (spec.num_kv_heads, spec.num_q_heads // max(spec.num_kv_heads, 1))
    query = operands.query.reshape(spec.batch, spec.q_len, *heads, spec.head_dim)
    arrays, bad = [], []
    for x in (query, operands.key, operands.value):
        x = x.astype(spec.accumulator_dtype)
        finite = jnp.isfinite(x)
        arrays.append(jnp.where(finite, x, jnp.zeros_like(x)))
        bad.append(~jnp.all(finite, axis=-1))
    bad_q = jnp.transpose(bad[0], (0, 2, 3, 1))
    bad_kv = jnp.transpose(bad[1] | bad[2], (0, 2, 1))
    return arrays[0], arrays[1], arrays[2], bad_q, bad_kv


def group_heads(x: Array, num_kv_heads: int) -> Array:
    """``[B, Hq|1, ...]`` as ``[B, Hk|1, G|1, ...]``."""
    heads = (1, 1) if x.shape[1] == 1 else (num_kv_heads, x.shape[1] // max(num_kv_heads, 1))
    return x.reshape(x.shape[0], *heads, *x.shape[2:])


def logits(
    spec: AttentionSpec,
    query: Array,
    key: Array,
    bias: Array | None,
    alibi_slopes: Array | None,
    visible: Array | None,
    positions: Array,
    columns: Array,
    *,
    precision: str,
) -> tuple[Array, Array, Array]:
    """Logits of a block of queries and keys, and which of them count.

    Args:
        spec: the call's static facts.
        query: ``[B, q, Hk, G, D]`` in the accumulator dtype.
        key: ``[B, k, Hk, D]`` in the accumulator dtype.
        bias: ``[B|1, Hq|1, q|1, k|1]``; -inf hides a key as a mask does, also under a soft cap.
        alibi_slopes: ``[B|1, Hq]``.
        visible: bool ``[B|1, Hq|1, q|1, k|1]`` or None for all.
        positions: int32 ``[B|1, q]``, key positions of the queries.
        columns: int32 ``[k]``, indices of the keys.
        precision: of the matrix product.

    Returns:
        The logits ``[B, Hk, G, q, k]``, their visibility of the same shape, and where the bias is
        NaN or +inf, broadcastable to it (the logits are computed as if it were 0 there).
    """
    x = jnp.einsum("bqhgd,bkhd->bhgqk", query, key, precision=precision) * spec.scale
    mask = None if visible is None else group_heads(visible, spec.num_kv_heads)
    bad_bias = jnp.zeros((), bool)
    if bias is not None:
        bias = group_heads(bias, spec.num_kv_heads)
        finite, shown = jnp.isfinite(bias), ~jnp.isneginf(bias)
        bad_bias = shown & ~finite
        mask = shown if mask is None else mask & shown
        x = x + jnp.where(finite, bias, jnp.zeros_like(bias)).astype(x.dtype)
        # A finite bias stays finite, also where adding to it or casting it overflows.
        x = jnp.where(jnp.isneginf(x), jnp.finfo(x.dtype).min, x)
    if alibi_slopes is not None:
        distance = (columns[None, None, :] - positions[:, :, None]).astype(x.dtype)
        slopes = group_heads(alibi_slopes, spec.num_kv_heads).astype(x.dtype)
        x = x + slopes[..., None, None] * distance[:, None, None]
    mask = jnp.ones(x.shape, bool) if mask is None else jnp.broadcast_to(mask, x.shape)
    if spec.soft_cap is not None:
        # Hidden logits are cleared first: their derivative must be a number.
        x = jnp.where(mask, x, jnp.zeros_like(x))
        x = spec.soft_cap * jnp.tanh(x / spec.soft_cap)
    return x, mask, bad_bias


def finite_max(m: Array, sinks: Array | None) -> Array:
    """Completes a maximum of visible logits ``[B, Hk, G, q]`` by the sinks, and makes it finite."""
    if sinks is not None:
        m = jnp.maximum(m, group_heads(sinks, m.shape[1])[..., None].astype(m.dtype))
    return jnp.where(jnp.isneginf(m), jnp.zeros_like(m), m)


def probabilities(x: Array, m: Array, visible: Array) -> Array:
    """``exp(x - m)`` where visible, else 0, with derivatives that are numbers everywhere."""
    z = jnp.where(visible, x - m[..., None], jnp.zeros_like(x))
    return jnp.where(visible, jnp.exp(z), jnp.zeros_like(x))


def drop(spec: AttentionSpec, p: Array, seeds: Array | None, rows: Array, columns: Array) -> Array:
    """Inverted dropout of the probabilities ``[B, Hk, G, q, k]`` of given rows and columns."""
    if seeds is None:
        return p
    heads = jnp.arange(spec.num_q_heads, dtype=jnp.int32)
    keep = dropout_keep(seeds, heads, rows, columns, spec.dropout_rate)
    kept = p / (1.0 - spec.dropout_rate) if spec.dropout_rate < 1.0 else p
    return jnp.where(group_heads(keep, spec.num_kv_heads), kept, jnp.zeros_like(p))


def finish(
    spec: AttentionSpec,
    acc: Array,
    l: Array,
    m: Array,
    sees_a_key: Array,
    seen_bad: Array,
    sinks: Array | None,
) -> tuple[Array, Array]:
    """Normalises and lays out the results.

    Args:
        spec: the call's static facts.
        acc: sums of ``p v``, ``[B, Hk, G, Tq, Dv]``.
        l: sums of ``p``, ``[B, Hk, G, Tq]``.
        m: what was subtracted from the logits, ``[B, Hk, G, Tq]``.
        sees_a_key: bool ``[B, Hk, G, Tq]``; the other rows are empty.
        seen_bad: bool ``[B, Hk, G, Tq]``; these rows saw a non-finite input.
        sinks: ``[B|1, Hq]`` or None.

    Returns:
        out ``[B, Tq, Hq, Dv]`` and lse ``[B, Tq, Hq]``.
    """
    if sinks is not None:
        l = l + jnp.exp(group_heads(sinks, m.shape[1])[..., None].astype(m.dtype) - m)
    l = jnp.where(sees_a_key, l, jnp.ones_like(l))
    seen_bad = seen_bad & sees_a_key
    out = jnp.where(seen_bad[..., None], jnp.nan, acc / l[..., None])
    lse = jnp.where(sees_a_key, m + jnp.log(l), -jnp.inf)
    lse = jnp.where(seen_bad, jnp.nan, lse)
    shape = (spec.batch, acc.shape[3], spec.num_q_heads)
    out = jnp.transpose(out, (0, 3, 1, 2, 4)).reshape(*shape, spec.value_dim)
    lse = jnp.transpose(lse, (0, 3, 1, 2)).reshape(shape)
    return out.astype(spec.dtype), lse


def append(
    key_pages: Array,
    value_pages: Array,
    new_key: Array,
    new_value: Array,
    slots: Array,
    k_scale: Array,
    v_scale: Array,
    cos: Array,
    sin: Array,
    page_layout: str,
) -> tuple[Array, Array]:
    """Scatters tokens into their slots; see :func:`jax_flash.append_kv`.

    Args:
        key_pages: a pool; of keys and values ``[P, 2, ., ., D]`` if ``value_pages`` is empty.
        value_pages: a pool, or an empty array.
        new_key: ``[N, Hk, D]``.
        new_value: ``[N, Hk, Dv]``.
        slots: int32 ``[N]``.
        k_scale: fp32 ``[Hk]`` or ``[1]``; empty for none.
        v_scale: likewise.
        cos: fp32 ``[N, R/2]``, of the angles by which keys are rotated; empty for none.
        sin: likewise.
        page_layout: ``"HND"`` or ``"NHD"``.

    Returns:
        The pools.
    """
    is_fused = key_pages.ndim == 5
    heads_axis, tokens_axis = (axis + is_fused for axis in page_axes(page_layout))
    page_size = max(key_pages.shape[tokens_axis], 1)
    # Out of range on purpose for the tokens to skip: mode="drop" writes nothing there.
    page = jnp.where(slots < 0, key_pages.shape[0], slots // page_size)
    slot = slots % page_size
    head = jnp.arange(key_pages.shape[heads_axis], dtype=jnp.int32)
    heads_first = heads_axis < tokens_axis
    within = (head[None], slot[:, None]) if heads_first else (slot[:, None], head[None])

    def scatter(pool: Array, new: Array, half: int) -> Array:
        where = (page[:, None], *((half,) * is_fused), *within)
        if pool.dtype.itemsize > 1 or pool.dtype == jnp.int8:
            return pool.at[where].set(new, mode="drop")
        # As bytes: XLA would widen a whole pool of 8-bit floats to scatter into it.
        pool_bytes, new_bytes = (jax.lax.bitcast_convert_type(x, jnp.uint8) for x in (pool, new))
        pool_bytes = pool_bytes.at[where].set(new_bytes, mode="drop")
        return jax.lax.bitcast_convert_type(pool_bytes, pool.dtype)

    key = _stored(_rotated(new_key, cos, sin), k_scale, key_pages.dtype)
    value = _stored(new_value, v_scale, key_pages.dtype)
    if is_fused:
        return scatter(scatter(key_pages, key, 0), value, 1), value_pages
    return scatter(key_pages, key, 0), scatter(value_pages, value, 0)


def _rotated(x: Array, cos: Array, sin: Array) -> Array:
    """``[N, H, D]`` with its first channels rotated in pairs, in fp32 or wider."""
    pairs = cos.shape[-1]
    if pairs == 0:
        return x
    wide = wide_dtype(x.dtype)
    cos, sin = (angle.astype(wide)[:, None] for angle in (cos, sin))
    low, high, rest = jnp.split(x.astype(wide), (pairs, 2 * pairs), axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin, rest], axis=-1)


def _stored(x: Array, scale: Array, dtype: jnp.dtype) -> Array:
    """``x / scale`` rounded and saturated to ``dtype``; ``x`` is ``[N, H, D]``."""
    if scale.size:
        x = x.astype(jnp.float32) / scale.reshape(-1, 1)
    if dtype in QUANTISED_DTYPES:
        is_int = jnp.issubdtype(dtype, jnp.integer)
        x = jnp.round(x) if is_int else x
        limits = jnp.iinfo(dtype) if is_int else jnp.finfo(dtype)
        x = jnp.clip(x, float(limits.min), float(limits.max))
    return x.astype(dtype)


def merge(outs: Array, lses: Array) -> tuple[Array, Array]:
    """Merges stacked parts ``[N, ..., Dv]`` by their log-sum-exps ``[N, ...]``.

    See :func:`jax_flash.merge_attention`.
    """
    lse = lses.astype(wide_dtype(max(lses.dtype, outs.dtype, key=lambda dtype: dtype.itemsize)))
    is_empty = jnp.isneginf(lse)
    m = jnp.max(lse, axis=0, initial=-jnp.inf)
    m = jax.lax.stop_gradient(finite_max(m, None))
    weight = probabilities(jnp.moveaxis(lse, 0, -1), m, jnp.moveaxis(~is_empty, 0, -1))
    weight = jnp.moveaxis(weight, -1, 0)
    l = jnp.sum(weight, axis=0)
    all_empty = jnp.all(is_empty, axis=0)
    l = jnp.where(all_empty, jnp.ones_like(l), l)
    # An empty part's out is not read, whatever it holds.
    parts = jnp.where(is_empty[..., None], jnp.zeros_like(outs), outs).astype(lse.dtype)
    merged = jnp.sum(weight[..., None] * parts, axis=0) / l[..., None]
    return merged.astype(outs.dtype), jnp.where(all_empty, -jnp.inf, m + jnp.log(l))
