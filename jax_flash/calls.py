"""Validation: the arguments of the attention calls in one canonical form.

``dense_call`` and ``ragged_call`` check shapes, dtypes and values and return
``(AttentionSpec, Operands)``; so do those for caches in :mod:`jax_flash.cache_calls`. Every error
of a public attention call is raised there, here or in :mod:`jax_flash.checks`, at trace time.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash import checks
from jax_flash.mask import MAX_OFFSET, Mask, packed_mask
from jax_flash.spec import QUERY_DTYPES, AttentionSpec, Operands, make_spec

Array = jax.Array


def check_qkv(query: Array, key: Array, value: Array, names: tuple[str, str, str]) -> None:
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
    check_heads(query, key, value, names)


def check_heads(query: Array, key: Array, value: Array, names: tuple[str, str, str]) -> None:
    """Checks that there is a value for every key, and one head dim for queries and keys."""
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


def check_head_ratio(q_heads: int, kv_heads: int) -> None:
    """Checks that query heads share key heads evenly."""
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
    check_qkv(query, key, value, ("query", "key", "value"))
    batch, q_len, q_heads, _ = query.shape
    kv_len = key.shape[1]
    if key.shape[0] != batch:
        raise checks.value_error(
            "key.shape",
            given_key_shape or key.shape,
            f"the batch must be that of query, {batch}",
            "Give each batch element its keys",
        )
    check_head_ratio(q_heads, key.shape[2])
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
    check_qkv(query, key, value, ("query", "key", "value"))
    check_head_ratio(query.shape[1], key.shape[1])
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
