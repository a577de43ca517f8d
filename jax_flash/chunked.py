"""Attention in O(T) memory out of plain JAX (``"chunked"``).

A scan over blocks of queries holds two scans over blocks of keys: the first finds the largest
visible logit ``m`` of each row, the second sums ``exp(x - m)`` and ``exp(x - m) v``. ``m`` enters
the second as a constant, so both sums are linear and a derivative needs no history of them: with
the tiles recomputed (``jax.checkpoint``) forward and backward hold one tile of logits at a time.
Nothing here is a custom derivative: jvp, hessian and vmap work as on any JAX code.

Key blocks that :meth:`Mask.tile_ranges` shows to be hidden are skipped.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_flash import reference
from jax_flash.mask import visible_keys
from jax_flash.spec import AttentionSpec, Device, Operands

Array = jax.Array
Blocks = dict[str, Any]

FUSED = False

# Logits in one tile, over all batch elements and heads: 64 MiB in fp32.
_TILE_LOGITS = 2**24
_MAX_BLOCK = 1024
# Below this many logits the dense implementation is faster, and small enough.
_DENSE_LOGITS = 2**25

supports = reference.supports


def declines(spec: AttentionSpec, device: Device) -> str | None:
    """Stands back in an automatic choice when the logits fit into memory easily."""
    del device
    num_logits = spec.batch * spec.num_q_heads * spec.q_len * spec.kv_len
    if num_logits <= _DENSE_LOGITS:
        return f"not needed: the call has only {num_logits:,} logits"
    return None


def forward(spec: AttentionSpec, operands: Operands) -> tuple[Array, Array]:
    """Attention of one call; see :func:`jax_flash.reference.forward`."""
    q_len, kv_len = spec.q_len, spec.kv_len
    if 0 in (spec.batch, q_len, kv_len, spec.num_q_heads):
        return reference.forward(spec, operands)
    operands = reference.dense_operands(spec, operands)
    mask, bias = operands.mask, operands.bias
    block = _block_size(spec)
    block_q, block_kv = min(block, q_len), min(block, kv_len)
    if bias is not None and 1 in bias.shape[2:] and bias.dtype != "float64":
        # Tiles that share a bias add up its gradient: in fp32, rounded once.
        bias = bias.astype(spec.accumulator_dtype)
    query, key, value, bad_q, bad_kv = reference.finite_operands(spec, operands)
    start, end = (jnp.asarray(x) for x in mask.row_ranges(q_len, kv_len))
    ranges = mask.tile_ranges(q_len, kv_len, block_q, block_kv)

    q_blocks: Blocks = {
        "query": _split(query, 1, block_q),
        "start": _split(start, 1, block_q),
        "end": _split(end, 1, block_q),  # rows of padding get end = 0: they see nothing
        "positions": _split(jnp.asarray(mask.positions(q_len)), 1, block_q),
        "bad_q": _split(bad_q, 3, block_q),
        "first_row": jnp.arange(-(-q_len // block_q), dtype=jnp.int32) * block_q,
        "lo": jnp.min(jnp.asarray(ranges.lo), axis=0),
        "hi": jnp.max(jnp.asarray(ranges.hi), axis=0),
    }
    kv_blocks: Blocks = {
        "key": _split(key, 1, block_kv),
        "value": _split(value, 1, block_kv),
        "bad_kv": _split(bad_kv, 2, block_kv),
        "index": jnp.arange(-(-kv_len // block_kv), dtype=jnp.int32),
    }
    if mask.q_segments is not None and mask.kv_segments is not None:
        q_blocks["q_segments"] = _split(mask.q_segments, 1, block_q)
        kv_blocks["kv_segments"] = _split(mask.kv_segments, 1, block_kv)
    # A boolean array and a bias are cut along both axes, where they have them.
    shared: Blocks = {}
    for name, x in (("array", mask.array), ("bias", bias)):
        if x is not None and x.shape[2] > 1:
            q_blocks[name] = _split(x, 2, block_q)
        elif x is not None:
            shared[name] = x

    def attend_rows(rows: Blocks) -> tuple[Array, Array]:
        tables = shared | {name: rows[name] for name in ("array", "bias") if name in rows}
        inner, fixed = dict(kv_blocks), {}
        for name, x in tables.items():
            if x.shape[3] > 1:
                inner[name] = _split(x, 3, block_kv)
            else:
                fixed[name] = x
        return _attend_rows(spec, operands, rows, inner, fixed, block_q, block_kv)

    # The row maxima are kept for the backward pass; all else of a row block is recomputed.
    policy = jax.checkpoint_policies.save_only_these_names("flash_chunked_max")
    attend_rows = jax.checkpoint(attend_rows, prevent_cse=False, policy=policy)
    _, (out, lse) = jax.lax.scan(lambda _, rows: (None, attend_rows(rows)), None, q_blocks)
    return _join(out, q_len), _join(lse, q_len)


def _attend_rows(
    spec: AttentionSpec,
    operands: Operands,
    rows: Blocks,
    kv_blocks: Blocks,
    fixed: Blocks,
    block_q: int,
    block_kv: int,
) -> tuple[Array, Array]:
    """One block of queries against all blocks of keys."""
    # On a GPU "default" is TF32, whose products of bf16 and fp16 numbers are exact and which rounds
    # probabilities less than bf16 would. All else is multiplied in full.
    is_low = jnp.finfo(spec.dtype).bits < 32 and operands.key.dtype == spec.dtype
    is_low = is_low and operands.value.dtype == spec.dtype
    precision = "default" if is_low else "highest"
    row_index = rows["first_row"] + jnp.arange(block_q, dtype=jnp.int32)

    def columns_of(block: Blocks) -> Array:
        return block["index"] * block_kv + jnp.arange(block_kv, dtype=jnp.int32)

    def tile(block: Blocks, query: Array) -> tuple[Array, Array, Array]:
        columns = columns_of(block)
        block = {**fixed, **block}
        visible = visible_keys(
            columns,
            rows["start"],
            rows["end"],
            rows.get("q_segments"),
            block.get("kv_segments"),
            block.get("array"),
        )
        return reference.logits(
            spec,
            query,
            block["key"],
            block.get("bias"),
            operands.alibi_slopes,
            visible,
            rows["positions"],
            columns,
            precision=precision,
        )

    def if_live(step: Any, carry: Any, block: Blocks) -> Any:
        live = (rows["lo"] <= block["index"]) & (block["index"] < rows["hi"])
        return jax.lax.cond(live, step, lambda carry, _: carry, carry, block), None

    def max_step(m: Array, block: Blocks) -> Array:
        x, visible, _ = tile(block, rows["query"])
        return jnp.maximum(m, jnp.max(x, axis=-1, where=visible, initial=-jnp.inf))

    # Under shard_map a carry must vary over all the mesh axes that any operand varies over.
    zero = _zero_that_varies_like((operands, rows, kv_blocks), spec.accumulator_dtype)
    heads = (spec.num_kv_heads, spec.num_q_heads // spec.num_kv_heads)
    nothing = jnp.zeros((spec.batch, *heads, block_q), zero.dtype) + zero
    m, _ = jax.lax.scan(
        lambda m, block: if_live(max_step, m, block),
        nothing - jnp.inf,
        jax.lax.stop_gradient(kv_blocks),
    )
    m = jax.lax.stop_gradient(reference.finite_max(m, operands.sinks))
    m = checkpoint_name(m, "flash_chunked_max")

    @jax.checkpoint
    def contribution(block: Blocks, query: Array, m: Array) -> tuple[Array, ...]:
        x, visible, bad_bias = tile(block, query)
        p = reference.probabilities(x, m, visible)
        l = jnp.sum(p, axis=-1)
        p = reference.drop(spec, p, operands.dropout_seeds, row_index, columns_of(block))
        acc = jnp.einsum("bhgqk,bkhd->bhgqd", p, block["value"], precision=precision)
        seen_bad = visible & (block["bad_kv"][:, :, None, None, :] | bad_bias)
        return l, acc, jnp.any(visible, axis=-1), jnp.any(seen_bad, axis=-1)

    def sum_step(carry: tuple[Array, ...], block: Blocks) -> tuple[Array, ...]:
        l, acc, sees_a_key, seen_bad = contribution(block, rows["query"], m)
        return carry[0] + l, carry[1] + acc, carry[2] | sees_a_key, carry[3] | seen_bad

    acc = jnp.zeros((*nothing.shape, spec.value_dim), zero.dtype) + zero
    false = nothing > 1.0
    (l, acc, sees_a_key, seen_bad), _ = jax.lax.scan(
        lambda carry, block: if_live(sum_step, carry, block),
        (nothing, acc, false, rows["bad_q"] | false),
        kv_blocks,
    )
    return reference.finish(spec, acc, l, m, sees_a_key, seen_bad, operands.sinks)


def _zero_that_varies_like(tree: Any, dtype: Any) -> Array:
    """0, computed from nothing of each array: it varies over the mesh axes that any varies over."""
    parts = (jnp.sum(x.reshape(-1)[:0].astype(dtype)) for x in jax.tree.leaves(tree))
    return sum(parts, start=jnp.zeros((), dtype))


def _block_size(spec: AttentionSpec) -> int:
    """Rows and columns of a tile: a power of two that keeps its logits within the budget."""
    block = _MAX_BLOCK
    while block > 64 and spec.batch * spec.num_q_heads * block * block > _TILE_LOGITS:
        block //= 2
    return block


def _split(x: Array, axis: int, block: int) -> Array:
    """Cuts an axis into blocks (the last one padded with zeros) and moves them to the front."""
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, -x.shape[axis] % block)
    x = jnp.pad(x, pad)
    shape = (*x.shape[:axis], x.shape[axis] // block, block, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)


def _join(blocks: Array, length: int) -> Array:
    """``[n, B, block, ...]`` as ``[B, length, ...]``."""
    x = jnp.moveaxis(blocks, 0, 1)
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])[:, :length]
