"""The public attention calls: defaults and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jax_flash import backends, cache_calls, calls, checks, reference, vjp
from jax_flash.cache_calls import DecodePlan
from jax_flash.sharding import keep_query_sharding
from jax_flash.spec import AttentionSpec, Operands

Array = jax.Array
Implementation = str | Sequence[str] | None


def dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Array | None = None,
    key_value_seq_lengths: Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Implementation = None,
    return_residual: bool = False,
    q_offset: int | Array = 0,
    query_segment_ids: Array | None = None,
    key_value_segment_ids: Array | None = None,
    logits_soft_cap: float | None = None,
    sinks: Array | None = None,
    alibi_slopes: Array | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    deterministic: bool = False,
) -> Any:
    r"""Scaled dot-product attention; a drop-in for :func:`jax.nn.dot_product_attention`.

    For query ``i`` at key position ``p = i + q_offset`` and key ``j``::

        x_ij   = scale * <q_i, k_j> + bias_ij + alibi_slope * (j - p)
        x_ij   = c * tanh(x_ij / c)                            if logits_soft_cap = c
        lse_i  = log(sum over visible j of exp(x_ij) + exp(sink))
        out_i  = sum over visible j of exp(x_ij - lse_i) * v_j

    A key is visible if *every* mask given says so. A query that sees no key gets out 0, lse -inf
    and zero gradients. Softmax and sums are in fp32 whatever the input; gradients have the dtype
    and shape of the array they belong to.

    Letters: B batch, Tq/Tk lengths, Hq/Hk heads (``Hq % Hk == 0``; fewer key heads than query heads
    is grouped-query attention), D head dim, Dv value dim.

    Args:
        query: ``[B, Tq, Hq, D]`` or ``[Tq, Hq, D]``; bfloat16, float16, float32 or float64.
        key: ``[B, Tk, Hk, D]`` or ``[Tk, Hk, D]``, of the query's dtype.
        value: ``[B, Tk, Hk, Dv]`` or ``[Tk, Hk, Dv]``, of the query's dtype.
        bias: floating point, broadcastable to ``[B, Hq, Tq, Tk]``. Any finite number is only added,
            however negative; -inf hides the key as a mask does.
        mask: bool, broadcastable to ``[B, Hq, Tq, Tk]``; True is visible.
        scale: factor of the logits; None is ``1 / sqrt(D)``. A traced scalar is multiplied into the
            query (one more rounding of it) and gets a gradient.
        is_causal: key ``j`` is visible only if ``j <= i + q_offset``.
        query_seq_lengths: int32 ``[B]``; queries at or past the length see nothing.
        key_value_seq_lengths: int32 ``[B]``; keys at or past the length are hidden.
        local_window_size: ``(left, right)``: only keys ``p - left <= j <= p + right``; an int w
            means ``(w, w)``.
        implementation: None for the fastest that computes exactly this, or one name or a sequence
            of names tried in order, of ``"mosaic"``, ``"cuda"``, ``"cudnn"``, ``"chunked"`` and
            ``"xla"``.
        return_residual: also return the log-sum-exp, differentiable.
        q_offset: int, or int32 ``[B]``; key position of the first query.
        query_segment_ids: int32 ``[B, Tq]``; a key is visible only if its segment id is equal.
        key_value_segment_ids: int32 ``[B, Tk]``; the query's ids if omitted and ``Tq == Tk``.
        logits_soft_cap: ``c > 0`` above.
        sinks: floating point ``[Hq]``; a logit that takes part in the softmax and has no value.
        alibi_slopes: floating point ``[Hq]``.
        dropout_rate: probability of dropping a softmax probability; the others are divided by
            ``1 - dropout_rate``.
        dropout_rng: JAX key; needed if ``dropout_rate > 0``. The mask is a documented function of
            it (:func:`jax_flash.mask.dropout_keep`), equal on every implementation.
        deterministic: whether gradients must be bit-equal from run to run.

    Returns:
        out ``[B, Tq, Hq, Dv]`` (or ``[Tq, Hq, Dv]``) in the query's dtype; with ``return_residual``
        the pair ``(out, lse)``, lse ``[B, Tq, Hq]`` (or ``[Tq, Hq]``) in fp32 (fp64 for fp64
        inputs), natural log.

    Raises:
        ValueError: a wrong shape, a value out of range, or an unknown implementation.
        TypeError: a wrong dtype or type.
        UnsupportedError: the implementations named in ``implementation`` cannot compute this call.

    Source:
        Vaswani et al. 2017, equation 1; Dao 2023 (FlashAttention-2) for lse; Press et al. 2022
        (ALiBi); Xiao et al. 2024 (sinks).
    """
    spec, operands = calls.dense_call(
        query,
        key,
        value,
        bias,
        mask,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        q_offset=q_offset,
        query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids,
        scale=scale,
        soft_cap=logits_soft_cap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        dropout_rate=dropout_rate,
        dropout_rng=dropout_rng,
        return_lse=return_residual,
        deterministic=deterministic,
    )
    return _attend(spec, operands, implementation, drop_batch=np.ndim(query) == 3)


def ragged_attention(
    query: Array,
    key: Array,
    value: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array | None = None,
    *,
    is_causal: bool,
    scale: float | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    sinks: Array | None = None,
    alibi_slopes: Array | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    implementation: Implementation = None,
    return_residual: bool = False,
    deterministic: bool = False,
) -> Any:
    """Attention over sequences packed one after another, each seeing only itself.

    Sequence ``s`` holds the query tokens ``cu_seqlens_q[s] <= t < cu_seqlens_q[s + 1]`` and the key
    tokens ``cu_seqlens_k[s] <= t < cu_seqlens_k[s + 1]``; either may be empty. Its queries are the
    *last* ones of its keys: causal masks, windows and ALiBi use
    ``q_offset = key length - query length``. Tokens outside every sequence get out 0 and lse -inf.

    Args:
        query: ``[tokens_q, Hq, D]``.
        key: ``[tokens_k, Hk, D]``.
        value: ``[tokens_k, Hk, Dv]``.
        cu_seqlens_q: int32 ``[num_sequences + 1]``, non-decreasing.
        cu_seqlens_k: likewise for the keys; ``cu_seqlens_q`` if omitted.
        is_causal: whether each query sees only keys up to its own position.
        scale: see :func:`dot_product_attention`, as for all that follow.
        local_window_size: as there, inside each sequence.
        logits_soft_cap: as there.
        sinks: as there.
        alibi_slopes: as there.
        dropout_rate: as there.
        dropout_rng: as there.
        implementation: as there.
        return_residual: as there.
        deterministic: as there.

    Returns:
        out ``[tokens_q, Hq, Dv]``; with ``return_residual`` also lse ``[tokens_q, Hq]``.

    Raises:
        ValueError: a wrong shape or value; ``cu_seqlens`` that decrease or leave the array, where
            their values are known when the call is traced.
        TypeError: a wrong dtype or type.
        UnsupportedError: the implementations named cannot compute this call.
    """
    spec, operands = calls.ragged_call(
        query,
        key,
        value,
        cu_seqlens_q,
        cu_seqlens_k,
        is_causal=is_causal,
        local_window_size=local_window_size,
        scale=scale,
        soft_cap=logits_soft_cap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        dropout_rate=dropout_rate,
        dropout_rng=dropout_rng,
        return_lse=return_residual,
        deterministic=deterministic,
    )
    return _attend(spec, operands, implementation, drop_batch=True)


def decode_attention(
    query: Array,
    key_cache: Array,
    value_cache: Array,
    kv_lens: Array,
    *,
    is_causal: bool = True,
    scale: float | None = None,
    k_scale: float | Array | None = None,
    v_scale: float | Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    sinks: Array | None = None,
    alibi_slopes: Array | None = None,
    plan: DecodePlan | None = None,
    implementation: Implementation = None,
    return_residual: bool = False,
    deterministic: bool = False,
) -> Any:
    """Attention of a few new tokens to a contiguous key/value cache that already holds them.

    The new tokens are the last of each sequence: new token ``t`` stands at position
    ``kv_lens - Tq + t``. Slots at or past ``kv_lens`` may hold anything.

    Args:
        query: ``[B, Tq, Hq, D]``, Tq new tokens (1 to 16 on the fused implementations).
        key_cache: ``[B, S, Hk, D]`` in the query's dtype, or quantised: float8_e4m3fn, float8_e5m2
            or int8.
        value_cache: ``[B, S, Hk, Dv]`` in the dtype of ``key_cache``.
        kv_lens: int32 ``[B]``, tokens in the cache, the new ones included. Clipped to ``[0, S]``
            where their values are not known when the call is traced.
        is_causal: whether new tokens see only those up to their own position.
        scale: see :func:`dot_product_attention`.
        k_scale: what ``key_cache`` is multiplied by: a scalar, ``[Hk]`` or ``[B, S, Hk]``.
        v_scale: likewise for ``value_cache``.
        local_window_size: see :func:`dot_product_attention`, as for all that follow.
        logits_soft_cap: as there.
        sinks: as there.
        alibi_slopes: as there.
        plan: what :func:`decode_plan` gave for these lengths. It saves time and changes nothing;
            kernels check it, and ignore one of other lengths.
        implementation: as there.
        return_residual: as there.
        deterministic: also asks that a sequence's bits do not depend on its neighbours.

    Returns:
        out ``[B, Tq, Hq, Dv]``; with ``return_residual`` also lse ``[B, Tq, Hq]``.

    Raises:
        ValueError: a wrong shape, or known lengths outside ``[0, S]``.
        TypeError: a wrong dtype or type.
        UnsupportedError: the implementations named cannot compute this call.
    """
    spec, operands = cache_calls.decode_call(
        query,
        key_cache,
        value_cache,
        kv_lens,
        is_causal=is_causal,
        local_window_size=local_window_size,
        k_scale=k_scale,
        v_scale=v_scale,
        plan=plan,
        scale=scale,
        soft_cap=logits_soft_cap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        return_lse=return_residual,
        deterministic=deterministic,
    )
    return _attend(spec, operands, implementation)


def paged_attention(
    query: Array,
    key_pages: Array,
    value_pages: Array | None,
    block_tables: Array,
    kv_lens: Array,
    *,
    page_layout: str = "HND",
    is_causal: bool = True,
    scale: float | None = None,
    k_scale: float | Array | None = None,
    v_scale: float | Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    sinks: Array | None = None,
    alibi_slopes: Array | None = None,
    plan: DecodePlan | None = None,
    implementation: Implementation = None,
    return_residual: bool = False,
    deterministic: bool = False,
) -> Any:
    """Attention of a few new tokens to a paged key/value cache that already holds them.

    Token ``t`` of sequence ``b`` lies in page ``block_tables[b, t // S]``, slot ``t % S``. Table
    entries from ``ceil(kv_lens / S)`` on are never read and may hold anything, as may slots past
    the length. Pages may be shared.

    Args:
        query: ``[B, Tq, Hq, D]``, Tq new tokens, the last of each sequence.
        key_pages: the pool ``[P, Hk, S, D]`` (``"HND"``) or ``[P, S, Hk, D]`` (``"NHD"``) of
            P pages of S tokens, in the query's dtype or quantised: float8_e4m3fn, float8_e5m2 or
            int8.
        value_pages: likewise, with Dv for D; None if ``key_pages`` is a pool of both,
            ``[P, 2, Hk, S, D]`` or ``[P, 2, S, Hk, D]``, which under ``jax.jit`` is read in place.
        block_tables: int32 ``[B, max_pages]``, page numbers.
        kv_lens: int32 ``[B]``, tokens in the cache, the new ones included. Clipped to
            ``[0, max_pages * S]`` where their values are not known when the call is traced.
        page_layout: ``"HND"`` or ``"NHD"``.
        is_causal: whether new tokens see only those up to their own position.
        scale: see :func:`dot_product_attention`.
        k_scale: what ``key_pages`` is multiplied by: a scalar, ``[Hk]``, or one number a token,
            shaped like the pool without its last axis.
        v_scale: likewise for ``value_pages``.
        local_window_size: see :func:`dot_product_attention`, as for all that follow.
        logits_soft_cap: as there.
        sinks: as there.
        alibi_slopes: as there.
        plan: what :func:`decode_plan` gave for these lengths. It saves time and changes nothing;
            kernels check it, and ignore one of other lengths.
        implementation: as there.
        return_residual: as there.
        deterministic: also asks that a sequence's bits do not depend on its neighbours.

    Returns:
        out ``[B, Tq, Hq, Dv]``; with ``return_residual`` also lse ``[B, Tq, Hq]``.

    Raises:
        ValueError: a wrong shape, or known lengths beyond what the table can hold.
        TypeError: a wrong dtype or type.
        UnsupportedError: the implementations named cannot compute this call.

    Source:
        Kwon et al. 2023 (PagedAttention).
    """
    spec, operands = cache_calls.paged_call(
        query,
        key_pages,
        value_pages,
        block_tables,
        kv_lens,
        page_layout=page_layout,
        is_causal=is_causal,
        local_window_size=local_window_size,
        k_scale=k_scale,
        v_scale=v_scale,
        plan=plan,
        scale=scale,
        soft_cap=logits_soft_cap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        return_lse=return_residual,
        deterministic=deterministic,
    )
    return _attend(spec, operands, implementation)


def decode_plan(
    kv_lens: Array,
    *,
    num_new_tokens: int = 1,
    local_window_size: int | tuple[int, int] | None = None,
) -> DecodePlan:
    """Plans the work of a decode step once, for the attention of all its layers.

    The kernels give every multiprocessor an equal part of all sequences' tokens, for which each of
    them adds up the lengths by itself, in every layer. With a plan that is done already. It is
    made on the device, from lengths that the host need not know.

    Args:
        kv_lens: int32 ``[B]``, those of :func:`paged_attention` or :func:`decode_attention`.
        num_new_tokens: Tq, the new tokens of each sequence.
        local_window_size: the window of these calls.

    Returns:
        A pytree to pass as ``plan=``.

    Raises:
        ValueError: a wrong shape or value.
        TypeError: a wrong dtype or type.
    """
    return cache_calls.plan_call(kv_lens, num_new_tokens, local_window_size)


def append_kv(
    key_pages: Array,
    value_pages: Array | None,
    new_key: Array,
    new_value: Array,
    slot_mapping: Array,
    *,
    page_layout: str = "HND",
    k_scale: float | Array | None = None,
    v_scale: float | Array | None = None,
    rotary: tuple[Array, Array] | None = None,
) -> tuple[Array, Array | None]:
    """Writes new keys and values into their slots of a paged cache.

    Token ``n`` goes to page ``slot_mapping[n] // S``, slot ``slot_mapping[n] % S``; a negative
    slot, or one past the pool, is skipped. Two tokens must not name one slot. Donate the pools
    under ``jax.jit`` and they are updated in place.

    Args:
        key_pages: the pool ``[P, Hk, S, D]`` (``"HND"``) or ``[P, S, Hk, D]`` (``"NHD"``).
        value_pages: likewise, with Dv for D; None if ``key_pages`` is a pool of both,
            ``[P, 2, Hk, S, D]`` or ``[P, 2, S, Hk, D]``.
        new_key: floating point ``[tokens, Hk, D]``.
        new_value: floating point ``[tokens, Hk, Dv]``.
        slot_mapping: int32 ``[tokens]``.
        page_layout: ``"HND"`` or ``"NHD"``.
        k_scale: scalar or ``[Hk]``; the stored key is ``new_key / k_scale``, rounded to the pool's
            dtype. An 8-bit pool saturates; int8 has no NaN and stores 0 for it.
        v_scale: likewise for the values.
        rotary: cos and sin of the angles by which keys are rotated before they are scaled, fp32
            ``[tokens, R/2]`` each: channels ``c < R/2`` and ``c + R/2`` of a head are a pair (the
            half-split form), the others stay as they are.

    Returns:
        The pools with the tokens in them, the second one None if it was.

    Raises:
        ValueError: a wrong shape.
        TypeError: a wrong dtype or type.
    """
    arrays = cache_calls.append_call(
        key_pages,
        value_pages,
        new_key,
        new_value,
        slot_mapping,
        page_layout,
        k_scale,
        v_scale,
        rotary,
    )
    pools = backends.append(*arrays, page_layout=page_layout)
    return pools[0], None if value_pages is None else pools[1]


def merge_attention(
    outs: Array | Sequence[Array], lses: Array | Sequence[Array]
) -> tuple[Array, Array]:
    """Merges attention over disjoint sets of keys into attention over their union.

    Args:
        outs: parts of shape ``[..., Dv]``, stacked on a leading axis or in a sequence.
        lses: their natural-log log-sum-exps ``[...]``, likewise. A part that saw no key has -inf.

    Returns:
        out ``[..., Dv]`` in the dtype of the parts and lse ``[...]`` in fp32 (fp64 for fp64
        parts); differentiable in both arguments. Where all parts are -inf: out 0, lse -inf, zero
        gradients. A sink is best left out of the parts and merged as one of its own, with out 0 and
        the sink as its lse: a part that sees no key has lse -inf, with or without a sink.

    Raises:
        ValueError: numbers of parts or shapes that do not agree.
        TypeError: parts that are not floating point.

    Source:
        Dao 2023 (FlashAttention-2), section 3.1.
    """
    return reference.merge(*checks.as_parts(outs, lses))


def _attend(
    spec: AttentionSpec,
    operands: Operands,
    implementation: Implementation,
    drop_batch: bool = False,
) -> Any:
    name = backends.choose(spec, implementation, operands.query)
    out, lse = keep_query_sharding(lambda operands: vjp.attend(spec, operands, name), operands)
    if drop_batch:
        out, lse = out[0], lse[0]
    return (out, lse) if spec.return_lse else out
