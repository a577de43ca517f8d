"""Validation of the calls that read or write a key/value cache; see :mod:`jax_flash.calls`."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jax_flash import checks
from jax_flash.calls import check_head_ratio, check_heads, check_qkv
from jax_flash.mask import MAX_OFFSET, Mask
from jax_flash.spec import (
    QUANTISED_DTYPES,
    QUERY_DTYPES,
    AttentionSpec,
    Operands,
    make_spec,
    page_axes,
    wide_dtype,
)

Array = jax.Array

_FUSED = "[P, 2, Hk, S, D] or [P, 2, S, Hk, D] without value_pages"
_CHUNK = 16  # tokens that the kernels work on at a time


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """How a step's attention is cut up, for all of its layers; made by :func:`decode_plan`.

    Attributes:
        chunk_ends: int32 ``[B]``, the running sum of the chunks of 16 tokens that each sequence's
            new tokens see.
    """

    chunk_ends: Array


def plan_call(kv_lens: Any, num_new_tokens: Any, local_window_size: Any) -> DecodePlan:
    """Checks the arguments of :func:`jax_flash.decode_plan` and computes it."""
    lens = checks.as_index_array("kv_lens", kv_lens)
    checks.check_rank("kv_lens", lens, (1,), "[B]")
    is_count = isinstance(num_new_tokens, int) and not isinstance(num_new_tokens, bool)
    if not is_count or num_new_tokens < 1:
        raise checks.value_error(
            "num_new_tokens", num_new_tokens, "must be an int >= 1", "Pass the query's axis Tq"
        )
    lens = jnp.clip(lens, 0, MAX_OFFSET)
    window = checks.as_window(local_window_size)
    begins = jnp.zeros_like(lens)
    if window is not None:
        first_seen = lens - num_new_tokens - min(window[0], MAX_OFFSET)
        begins = jnp.maximum(first_seen, 0) // _CHUNK * _CHUNK
    chunks = (jnp.maximum(lens - begins, 0) + _CHUNK - 1) // _CHUNK
    return DecodePlan(jnp.cumsum(chunks, dtype=jnp.int32))


def _chunk_ends(plan: Any, batch: int) -> dict[str, Array]:
    if plan is None:
        return {}
    if not isinstance(plan, DecodePlan):
        raise checks.type_error(
            "plan", type(plan).__name__, "must be a DecodePlan", "Make one with decode_plan"
        )
    remedy = "Make the plan of the lengths that the call has"
    checks.check_shape("plan.chunk_ends", plan.chunk_ends, (batch,), "[B]", remedy)
    return {"chunk_ends": plan.chunk_ends}


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
    plan: Any,
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
    check_head_ratio(query.shape[2], kv_heads)
    scales = _as_scales(k_scale, v_scale, key, (1, 1, kv_heads), "[B, S, Hk]")
    kv_lens = checks.as_lengths("kv_lens", kv_lens, batch, kv_len)
    visibility = _cache_mask(kv_lens, query.shape[1], is_causal, local_window_size)
    scales |= _chunk_ends(plan, batch)
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
    plan: Any,
    **terms: Any,
) -> tuple[AttentionSpec, Operands]:
    """The canonical form of :func:`jax_flash.paged_attention`."""
    kv_pages = None
    if value_pages is None:
        kv_pages = checks.as_array("key_pages", key_pages)
        checks.check_rank("key_pages", kv_pages, (5,), _FUSED)
        _check_fused(kv_pages)
        key_pages, value_pages = kv_pages[:, 0], kv_pages[:, 1]
    query, key, value = _as_cache(
        ("key_pages", "value_pages"),
        "[P, Hk, S, D] or [P, S, Hk, D]",
        query,
        key_pages,
        value_pages,
    )
    heads_axis, tokens_axis = page_axes(page_layout)
    kv_heads, page_size = key.shape[heads_axis], key.shape[tokens_axis]
    check_head_ratio(query.shape[2], kv_heads)
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
    visibility = _cache_mask(kv_lens, query.shape[1], is_causal, local_window_size)
    scales |= _chunk_ends(plan, batch)
    operands = Operands(
        query=query,
        key=key,
        value=value,
        mask=visibility,
        block_tables=tables,
        kv_pages=kv_pages,
        **scales,
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
    check_qkv(query, query, query, names)
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
    check_heads(query, key, value, names)
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


def _cache_mask(kv_lens: Array, q_len: int, is_causal: Any, window: Any) -> Mask:
    """The queries are the last tokens of each sequence.

    Implementations clip the lengths to the capacity: here it would be a kernel before each call.
    """
    lens = kv_lens[:, None]
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
    rotary: Any,
) -> tuple[Array, ...]:
    """Checks the arguments of :func:`jax_flash.append_kv`.

    Returns:
        What :func:`jax_flash.reference.append` takes, but for the layout. What is absent has
        size 0.
    """
    heads_axis, _ = page_axes(page_layout)
    pools = []
    names = ("key_pages",) if value_pages is None else ("key_pages", "value_pages")
    rank, layout = 4, "[P, Hk, S, D] or [P, S, Hk, D]"
    if value_pages is None:
        rank, layout = 5, _FUSED
    for name, x in zip(names, (key_pages, value_pages), strict=False):
        pool = checks.as_array(name, x)
        checks.check_rank(name, pool, (rank,), layout)
        if pool.dtype not in QUERY_DTYPES + QUANTISED_DTYPES:
            raise checks.type_error(
                f"{name}.dtype",
                pool.dtype,
                "must be floating point, float8_e4m3fn, float8_e5m2 or int8",
                "Allocate the pool in one of these",
            )
        pools.append(pool)
    if value_pages is None:
        _check_fused(pools[0])
        pools.append(jnp.zeros((0,), pools[0].dtype))
    elif pools[0].shape[:3] != pools[1].shape[:3] or pools[0].dtype != pools[1].dtype:
        raise checks.value_error(
            "value_pages.shape",
            pools[1].shape,
            f"all axes but the last must equal those of key_pages, {pools[0].shape}, and so must "
            "the dtype",
            "Allocate both pools alike",
        )
    slots = checks.as_index_array("slot_mapping", slot_mapping)
    checks.check_rank("slot_mapping", slots, (1,), "[tokens]")
    heads = pools[0].shape[heads_axis + rank - 4]
    tokens, scales = [], []
    dims = (pools[0].shape[-1], pools[0].shape[-1] if value_pages is None else pools[1].shape[-1])
    new = (("new_key", new_key, "k_scale", k_scale), ("new_value", new_value, "v_scale", v_scale))
    for dim, (name, x, scale_name, scale) in zip(dims, new, strict=True):
        x = checks.as_array(name, x)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise checks.type_error(
                f"{name}.dtype", x.dtype, "must be floating point", f"Cast {name} to float32"
            )
        layout = "[tokens, Hk, D] with one token for each entry of slot_mapping"
        remedy = "Match the tokens, and the pool's heads and dim"
        checks.check_shape(name, x, (slots.shape[0], heads, dim), layout, remedy)
        tokens.append(x)
        scales.append(_append_scale(scale_name, scale, heads))
    if tokens[0].dtype != tokens[1].dtype:
        wide = wide_dtype(max((x.dtype for x in tokens), key=lambda dtype: dtype.itemsize))
        tokens = [x.astype(wide) for x in tokens]
    return (*pools, *tokens, slots, *scales, *_rotary(rotary, slots.shape[0], dims[0]))


def _check_fused(pool: Array) -> None:
    if pool.shape[1] != 2:
        raise checks.value_error(
            "key_pages.shape",
            pool.shape,
            "without value_pages its axis 1 must be 2, keys and values",
            "Pass value_pages, or a pool [P, 2, Hk, S, D] or [P, 2, S, Hk, D]",
        )


def _append_scale(name: str, scale: Any, heads: int) -> Array:
    if scale is None:
        return jnp.zeros((0,), jnp.float32)
    array = checks.as_array(name, scale)
    if array.shape not in ((), (heads,)):
        raise checks.value_error(
            f"{name}.shape",
            array.shape,
            f"must be a scalar or [Hk] = [{heads}]",
            "Give one scale for all, or one for each key/value head",
        )
    return array.astype(jnp.float32).reshape(-1)


def _rotary(rotary: Any, tokens: int, head_dim: int) -> tuple[Array, Array]:
    """Cos and sin, fp32 ``[tokens, pairs]``."""
    if rotary is None:
        return jnp.zeros((0, 0), jnp.float32), jnp.zeros((0, 0), jnp.float32)
    if not isinstance(rotary, tuple | list) or len(rotary) != 2:
        raise checks.type_error(
            "rotary", type(rotary).__name__, "must be a pair (cos, sin)", "Pass two arrays"
        )
    cos, sin = (
        checks.as_array(f"rotary[{i}]", x).astype(jnp.float32) for i, x in enumerate(rotary)
    )
    if cos.ndim != 2 or cos.shape[0] != tokens or not 0 < 2 * cos.shape[1] <= head_dim:
        raise checks.value_error(
            "rotary[0].shape",
            cos.shape,
            f"must be [tokens, R / 2] with {tokens} tokens and 0 < R <= {head_dim}",
            "Give the angles of each token's own position",
        )
    checks.check_shape("rotary[1]", sin, cos.shape, "that of rotary[0]", "Give cos and sin")
    return cos, sin
