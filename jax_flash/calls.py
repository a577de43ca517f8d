"""Validation: the arguments of the four attention calls in one canonical form.

``dense_call``, ``ragged_call``, ``decode_call`` and ``paged_call`` check shapes, dtypes and values
and return ``(AttentionSpec, Operands)``. Every error of a public attention call is raised here or
in :mod:`jax_flash.checks`, at trace time.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash import checks
from jax_flash.mask import MAX_OFFSET, Mask, packed_mask
from jax_flash.spec import (
    QUANTISED_DTYPES,
    QUERY_DTYPES,
    AttentionSpec,
    Operands,
    make_spec,
    page_axes,
)

Array = jax.Array


def _check_qkv(query: Array, key: Array, value: Array, names: tuple[str, str, str]) -> None:
    """Checks dtypes, head counts and head dims of ``[..., tokens, heads, dim]`` arrays."""
    query_name, key_name, value_name = names
    if query.dtype not in QUERY_DTYPES:
        raise checks.type_error(
            f"{query_name}.dtype",
            query.dtype,
            "must be bfloat16, float16, float32 or float64",
            "Cast the inputs",
        )
    for name, x in ((key_name, key), (value_name, value)):
        if x.dtype != query.dtype:
            raise checks.type_error(
                f"{name}.dtype",
                x.dtype,
                f"must equal {query_name}.dtype ({query.dtype})",
                "Cast the inputs to one dtype",
            )
    _check_heads(query, key, value, names)


def _check_heads(query: Array, key: Array, value: Array, names: tuple[str, str, str]) -> None:
    query_name, key_name, value_name = names
    if key.shape[:-1] != value.shape[:-1]:
        raise checks.value_error(
            f"{value_name}.shape",
            value.shape,
            f"all axes but the last must equal those of {key_name}, {key.shape}",
            "Every key needs one value",
        )
    if query.shape[-1] != key.shape[-1]:
        raise checks.value_error(
            f"{key_name}.shape",
            key.shape,
            f"the head dim must equal that of {query_name}, {query.shape[-1]}",
            "Project both to one head dim (only values may have another)",
        )


def _check_head_ratio(q_heads: int, kv_heads: int) -> None:
    if q_heads and (kv_heads == 0 or q_heads % kv_heads):
        raise checks.value_error(
            "heads of query",
            q_heads,
            f"must be a multiple of the heads of key and value, {kv_heads}",
            "Choose Hq and Hk with Hq % Hk == 0, and check the order of the axes",
        )


def _with_batch(name: str, x: Any) -> Array:
    """``[T, H, D]`` or ``[B, T, H, D]`` as the latter."""
    array = checks.as_array(name, x)
    checks.check_rank(name, array, (3, 4), "[B, T, H, D] or [T, H, D]")
    return array[None] if array.ndim == 3 else array


def dense_call(
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    mask: Any,
    *,
    is_causal: Any,
    query_seq_lengths: Any,
    key_value_seq_lengths: Any,
    local_window_size: Any,
    q_offset: Any,
    query_segment_ids: Any,
    key_value_segment_ids: Any,
    **terms: Any,
) -> tuple[AttentionSpec, Operands]:
    """The canonical form of :func:`jax_flash.dot_product_attention`."""
    given_key_shape = getattr(key, "shape", None)
    query, key, value = (
        _with_batch(name, x) for name, x in (("query", query), ("key", key), ("value", value))
    )
    _check_qkv(query, key, value, ("query", "key", "value"))
    batch, q_len, q_heads, _ = query.shape
    kv_len = key.shape[1]
    if key.shape[0] != batch:
        raise checks.value_error(
            "key.shape",
            given_key_shape or key.shape,
            f"the batch must be that of query, {batch}",
            "Give each batch element its keys",
        )
    _check_head_ratio(q_heads, key.shape[2])
    full, layout = (batch, q_heads, q_len, kv_len), "[B, Hq, Tq, Tk]"
    if bias is not None:
        bias = checks.as_array("bias", bias)
        if not jnp.issubdtype(bias.dtype, jnp.floating):
            raise checks.type_error(
                "bias.dtype",
                bias.dtype,
                "must be floating point",
                "Cast it to float32, or pass a boolean array as mask=",
            )
        bias = checks.as_broadcastable("bias", bias, full, layout)
    if mask is not None:
        mask = checks.as_array("mask", mask)
        if mask.dtype != jnp.bool_:
            raise checks.type_error(
                "mask.dtype",
                mask.dtype,
                "must be bool, where True means visible",
                "Use mask.astype(bool), or bias= for numbers to add",
            )
        mask = checks.as_broadcastable("mask", mask, full, layout)
    if (query_segment_ids is None) != (key_value_segment_ids is None):
        if query_segment_ids is None or q_len != kv_len:
            raise checks.value_error(
                "key_value_segment_ids" if key_value_segment_ids is None else "query_segment_ids",
                None,
                "both sides need segment ids",
                "Pass query_segment_ids and key_value_segment_ids",
            )
        key_value_segment_ids = query_segment_ids
    segments = {}
    for field, name, ids, length in (
        ("q_segments", "query_segment_ids", query_segment_ids, q_len),
        ("kv_segments", "key_value_segment_ids", key_value_segment_ids, kv_len),
    ):
        if ids is not None:
            ids = checks.as_index_array(name, ids)
            ids = ids[None] if ids.ndim == 1 else ids
            if ids.ndim != 2 or ids.shape[0] not in (1, batch) or ids.shape[1] != length:
                raise checks.value_error(
                    f"{name}.shape",
                    ids.shape,
                    f"must be [B, T] = {(batch, length)}",
                    "Give one id for each token",
                )
            segments[field] = ids
    static_offset, offsets = _split_offset(q_offset, batch)
    kv_ends = None
    if key_value_seq_lengths is not None:
        kv_ends = checks.as_lengths("key_value_seq_lengths", key_value_seq_lengths, batch, kv_len)
    if query_seq_lengths is not None:
        query_seq_lengths = checks.as_lengths("query_seq_lengths", query_seq_lengths, batch, q_len)
    visibility = Mask(
        is_causal=checks.as_bool("is_causal", is_causal),
        window=checks.as_window(local_window_size),
        q_offset=static_offset,
        q_offsets=offsets,
        q_lengths=query_seq_lengths,
        kv_ends=None if kv_ends is None else kv_ends[:, None],
        array=mask,
        **segments,
    )
    operands = Operands(query=query, key=key, value=value, mask=visibility, bias=bias)
    return make_spec("dense", operands, **terms)


def _split_offset(q_offset: Any, batch: int) -> tuple[int, Array | None]:
    """An offset as its static part and its traced part ``[B|1, 1]``."""
    if isinstance(q_offset, int | np.integer) and not isinstance(q_offset, bool):
        if abs(int(q_offset)) > MAX_OFFSET:
            raise checks.value_error(
                "q_offset", q_offset, "must lie within +-2**29", "Shift the positions"
            )
        return int(q_offset), None
    if not hasattr(q_offset, "dtype"):
        raise checks.type_error(
            "q_offset", q_offset, "must be an int or an int32 array [B]", "Use an int, or jnp.array"
        )
    offsets = checks.as_index_array("q_offset", q_offset)
    values = checks.known_values(q_offset)
    if values is not None and values.size:
        for bound in (values.min(), values.max()):
            if not -MAX_OFFSET <= bound <= MAX_OFFSET:
                raise checks.value_error(
                    "q_offset", bound, "must lie within +-2**29", "Shift the positions"
                )
    offsets = jnp.clip(offsets, -MAX_OFFSET, MAX_OFFSET)
    if offsets.ndim == 0:
        return 0, offsets.reshape(1, 1)
    checks.check_shape("q_offset", offsets, (batch,), "[B]", "Give one offset a batch element")
    return 0, offsets[:, None]


def ragged_call(
    query: Any,
    key: Any,
    value: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    is_causal: Any,
    local_window_size: Any,
    **terms: Any,
) -> tuple[AttentionSpec, Operands]:
    """The canonical form of :func:`jax_flash.ragged_attention`: a dense batch of one."""
    arrays = []
    for name, x in (("query", query), ("key", key), ("value", value)):
        x = checks.as_array(name, x)
        checks.check_rank(name, x, (3,), "[tokens, H, D]")
        arrays.append(x)
    query, key, value = arrays
    _check_qkv(query, key, value, ("query", "key", "value"))
    _check_head_ratio(query.shape[1], key.shape[1])
    if cu_seqlens_k is None:
        if key.shape[0] != query.shape[0]:
            raise checks.value_error(
                "cu_seqlens_k",
                None,
                f"is needed when there are {key.shape[0]} keys for {query.shape[0]} queries",
                "Pass the running sum of the key lengths",
            )
        cu_seqlens_k = cu_seqlens_q
    cu_seqlens_q = checks.as_cu_seqlens("cu_seqlens_q", cu_seqlens_q, query.shape[0])
    cu_seqlens_k = checks.as_cu_seqlens("cu_seqlens_k", cu_seqlens_k, key.shape[0])
    checks.check_shape(
        "cu_seqlens_k",
        cu_seqlens_k,
        cu_seqlens_q.shape,
        "[num_sequences + 1]",
        "Every sequence needs queries and keys (its length may be 0)",
    )
    visibility = packed_mask(
        cu_seqlens_q,
        cu_seqlens_k,
        query.shape[0],
        key.shape[0],
        is_causal=checks.as_bool("is_causal", is_causal),
        window=checks.as_window(local_window_size),
    )
    operands = Operands(query=query[None], key=key[None], value=value[None], mask=visibility)
    return make_spec("ragged", operands, **terms)


def decode_call(
    query: Any,
    key_cache: Any,
    value_cache: Any,
    kv_lens: Any,
    *,
    is_causal: Any,
    local_window_size: Any,
    k_scale: Any,
    v_scale: Any,
    **terms: Any,
) -> tuple[AttentionSpec, Operands]:
    """The canonical form of :func:`jax_flash.decode_attention`."""
    query, key, value = _as_cache(
        ("key_cache", "value_cache"), "[B, S, Hk, D]", query, key_cache, value_cache
    )
    batch, kv_len, kv_heads = key.shape[:3]
    if batch != query.shape[0]:
        raise checks.value_error(
            "key_cache.shape",
            key.shape,
            f"the batch must be that of query, {query.shape[0]}",
            "Give each sequence its own row of the cache",
        )
    _check_head_ratio(query.shape[2], kv_heads)
    scales = _as_scales(k_scale, v_scale, key, (1, 1, kv_heads), "[B, S, Hk]")
    kv_lens = checks.as_lengths("kv_lens", kv_lens, batch, kv_len)
    visibility = _cache_mask(kv_lens, kv_len, query.shape[1], is_causal, local_window_size)
    operands = Operands(query=query, key=key, value=value, mask=visibility, **scales)
    return make_spec("decode", operands, **terms)


def paged_call(
    query: Any,
    key_pages: Any,
    value_pages: Any,
    block_tables: Any,
    kv_lens: Any,
    *,
    page_layout: Any,
    is_causal: Any,
    local_window_size: Any,
    k_scale: Any,
    v_scale: Any,
    **terms: Any,
) -> tuple[AttentionSpec, Operands]:
    """The canonical form of :func:`jax_flash.paged_attention`."""
    query, key, value = _as_cache(
        ("key_pages", "value_pages"),
        "[P, Hk, S, D] or [P, S, Hk, D]",
        query,
        key_pages,
        value_pages,
    )
    heads_axis, tokens_axis = page_axes(page_layout)
    kv_heads, page_size = key.shape[heads_axis], key.shape[tokens_axis]
    _check_head_ratio(query.shape[2], kv_heads)
    if page_size == 0:
        raise checks.value_error(
            "key_pages.shape", key.shape, "a page must hold a token", "Choose a page size >= 1"
        )
    batch = query.shape[0]
    tables = checks.as_index_array("block_tables", block_tables)
    if tables.ndim != 2 or tables.shape[0] != batch:
        raise checks.value_error(
            "block_tables.shape",
            tables.shape,
            f"must be [B, max_pages] with B = {batch}",
            "Give each sequence one row of page numbers",
        )
    per_head = [1, 1, 1]
    per_head[heads_axis] = kv_heads
    axes = "[P, Hk, S]" if page_layout == "HND" else "[P, S, Hk]"
    scales = _as_scales(k_scale, v_scale, key, tuple(per_head), axes)
    capacity = tables.shape[1] * page_size
    kv_lens = checks.as_lengths("kv_lens", kv_lens, batch, capacity)
    visibility = _cache_mask(kv_lens, capacity, query.shape[1], is_causal, local_window_size)
    operands = Operands(
        query=query, key=key, value=value, mask=visibility, block_tables=tables, **scales
    )
    return make_spec("paged", operands, page_layout=page_layout, **terms)


def _as_cache(
    cache_names: tuple[str, str], cache_layout: str, query: Any, key: Any, value: Any
) -> tuple[Array, Array, Array]:
    """Query, key and value with four axes each, and a cache dtype that the query can use."""
    key_name, value_name = cache_names
    arrays = []
    for name, x in (("query", query), (key_name, key), (value_name, value)):
        x = checks.as_array(name, x)
        layout = "[B, new_tokens, Hq, D]" if name == "query" else cache_layout
        checks.check_rank(name, x, (4,), layout)
        arrays.append(x)
    query, key, value = arrays
    names = ("query", key_name, value_name)
    _check_qkv(query, query, query, names)
    if key.dtype != query.dtype and key.dtype not in QUANTISED_DTYPES:
        raise checks.type_error(
            f"{key_name}.dtype",
            key.dtype,
            f"must be query.dtype ({query.dtype}), float8_e4m3fn, float8_e5m2 or int8",
            "Cast the query, or store the cache in one of these",
        )
    if value.dtype != key.dtype:
        raise checks.type_error(
            f"{value_name}.dtype",
            value.dtype,
            f"must equal {key_name}.dtype ({key.dtype})",
            "Cast them to one dtype",
        )
    _check_heads(query, key, value, names)
    return query, key, value


def _as_scales(
    k_scale: Any, v_scale: Any, key: Array, per_head: tuple[int, ...], layout: str
) -> dict[str, Array]:
    """Scales as fp32 arrays with the pool's axes but the last, each 1 or the full size."""
    scales = {}
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is None:
            continue
        array = checks.as_array(name, scale)
        heads = max(per_head)
        shapes = {(): (1, 1, 1), (heads,): per_head, key.shape[:3]: key.shape[:3]}
        if array.shape not in shapes:
            raise checks.value_error(
                f"{name}.shape",
                array.shape,
                f"must be a scalar, [Hk] = [{heads}], or one a token, {layout} = {key.shape[:3]}",
                "Broadcast the scale to one of these",
            )
        scales[name] = array.astype(jnp.float32).reshape(shapes[array.shape])
    return scales


def _cache_mask(kv_lens: Array, capacity: int, q_len: int, is_causal: Any, window: Any) -> Mask:
    """The queries are the last tokens of each sequence; lengths are clipped to the capacity."""
    lens = jnp.clip(kv_lens, 0, capacity)[:, None]
    return Mask(
        is_causal=checks.as_bool("is_causal", is_causal),
        window=checks.as_window(window),
        q_offset=-q_len,
        q_offsets=lens,
        kv_ends=lens,
    )


def append_call(
    key_pages: Any,
    value_pages: Any,
    new_key: Any,
    new_value: Any,
    slot_mapping: Any,
    page_layout: Any,
    k_scale: Any,
    v_scale: Any,
) -> tuple[Array, Array, Array, Array, Array]:
    """Checks the arguments of :func:`jax_flash.append_kv` and casts the tokens to the pools' dtype.

    Returns:
        The pools, the tokens to store (scaled, in the pools' dtypes) and the slots, int32.
    """
    heads_axis, _ = page_axes(page_layout)
    pools, tokens = [], []
    for name, x in (("key_pages", key_pages), ("value_pages", value_pages)):
        pool = checks.as_array(name, x)
        checks.check_rank(name, pool, (4,), "[P, Hk, S, D] or [P, S, Hk, D]")
        if pool.dtype not in QUERY_DTYPES + QUANTISED_DTYPES:
            raise checks.type_error(
                f"{name}.dtype",
                pool.dtype,
                "must be floating point, float8_e4m3fn, float8_e5m2 or int8",
                "Allocate the pool in one of these",
            )
        pools.append(pool)
    if pools[0].shape[:3] != pools[1].shape[:3]:
        raise checks.value_error(
            "value_pages.shape",
            pools[1].shape,
            f"all axes but the last must equal those of key_pages, {pools[0].shape}",
            "Allocate both pools alike",
        )
    slots = checks.as_index_array("slot_mapping", slot_mapping)
    checks.check_rank("slot_mapping", slots, (1,), "[tokens]")
    heads = pools[0].shape[heads_axis]
    new = (
        ("new_key", new_key, "k_scale", k_scale, pools[0]),
        ("new_value", new_value, "v_scale", v_scale, pools[1]),
    )
    for name, x, scale_name, scale, pool in new:
        shape = (slots.shape[0], heads, pool.shape[3])
        x = checks.as_array(name, x)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise checks.type_error(
                f"{name}.dtype", x.dtype, "must be floating point", f"Cast {name} to float32"
            )
        layout = "[tokens, Hk, D] with one token for each entry of slot_mapping"
        checks.check_shape(name, x, shape, layout, "Match the tokens, and the pool's heads and dim")
        tokens.append(_quantise(x, scale_name, scale, pool.dtype))
    return pools[0], pools[1], tokens[0], tokens[1], slots


def _quantise(x: Array, name: str, scale: Any, dtype: jnp.dtype) -> Array:
    """``x / scale`` rounded and saturated to ``dtype``; ``x`` is ``[tokens, Hk, D]``."""
    if scale is not None:
        heads = x.shape[1]
        scale = checks.as_array(name, scale)
        if scale.shape not in ((), (heads,)):
            raise checks.value_error(
                f"{name}.shape",
                scale.shape,
                f"must be a scalar or [Hk] = [{heads}]",
                "Give one scale for all, or one for each key/value head",
            )
        x = x.astype(jnp.float32) / scale.astype(jnp.float32).reshape(-1, 1)
    if dtype in QUANTISED_DTYPES:
        is_int = jnp.issubdtype(dtype, jnp.integer)
        x = jnp.round(x) if is_int else x
        limits = jnp.iinfo(dtype) if is_int else jnp.finfo(dtype)
        x = jnp.clip(x, float(limits.min), float(limits.max))
    return x.astype(dtype)
