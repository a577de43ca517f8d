"""The implementation ``"mosaic"``: what the kernels can do, and the way from a call to a launch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_flash.mask import Mask
from jax_flash.spec import AttentionSpec, Device, Operands
from pallas_kernels import forward as kernel
from pallas_kernels import schedule

Array = jax.Array

FUSED = True

_ROW_MULTIPLE = 8  # a tiled TMA copy wants lengths that are multiples of 8
_H100_MULTIPROCESSORS = 132  # also the H200's
_MAX_KV_LEN = schedule.MAX_KV_TILES * 64


def supports(spec: AttentionSpec, device: Device) -> str | None:
    """None where the kernels compute this call, else the reason why not."""
    if device.platform != "gpu" or device.compute_capability is None:
        return f"needs an NVIDIA Hopper GPU; the device is {device.platform}"
    if device.compute_capability != "9.0":
        return f"needs compute capability 9.0 (Hopper); found {device.compute_capability}"
    if spec.kind not in ("dense", "ragged"):
        return f"no {spec.kind} attention: its queries are too few to fill a tile"
    if spec.dtype not in ("float16", "bfloat16"):
        return f"only float16 and bfloat16; got {spec.dtype}"
    if spec.kv_dtype != spec.dtype:
        return f"keys must have the query's dtype {spec.dtype}; got {spec.kv_dtype}"
    widest = max(kernel.HEAD_DIMS)
    if max(spec.head_dim, spec.value_dim) > widest:
        return f"head dims up to {widest}; got {spec.head_dim} and {spec.value_dim}"
    if spec.kv_len > _MAX_KV_LEN:
        return f"at most {_MAX_KV_LEN} keys; got {spec.kv_len}"
    if spec.mask.array is not None:
        return "a boolean mask array is not supported; lengths, windows and offsets are"
    if spec.mask.q_segments is not None:
        return "segment ids are not supported; packed sequences are (ragged_attention)"
    return _term_reason(spec) or untested(spec)


def untested(spec: AttentionSpec) -> str | None:
    """What the kernel does in interpret mode and has not been seen to do right on a GPU."""
    has_lengths = spec.mask.q_lengths is not None or spec.mask.kv_ends is not None
    if spec.kind == "dense" and has_lengths:
        return "sequence lengths have not passed their tests on a GPU yet"
    return None


def _term_reason(spec: AttentionSpec) -> str | None:
    if spec.arrays.bias is not None:
        return "a bias is not supported"
    if spec.arrays.alibi_slopes is not None:
        return "alibi_slopes are not supported"
    if spec.soft_cap is not None:
        return "logits_soft_cap is not supported"
    if spec.arrays.sinks is not None:
        return "sinks are not supported"
    if spec.dropout_rate > 0.0:
        return "dropout is not supported"
    return None


def forward(spec: AttentionSpec, operands: Operands) -> tuple[Array, Array]:
    """Attention of one call.

    Returns:
        out ``[B, Tq, Hq, Dv]`` in the query's dtype and lse fp32 ``[B, Tq, Hq]``.
    """
    return attend(spec, operands)


def attend(
    spec: AttentionSpec,
    operands: Operands,
    *,
    config: kernel.ForwardConfig | None = None,
    num_blocks: int | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[Array, Array]:
    """:func:`forward` with a choice of configuration, grid size and interpret mode."""
    shape = (spec.batch, spec.q_len, spec.num_q_heads)
    if 0 in shape or 0 in (spec.kv_len, spec.value_dim):
        # Without keys all rows are empty; without values there may still be a log-sum-exp.
        lse = jnp.full(shape, -jnp.inf, jnp.float32)
        out = jnp.zeros((*shape, spec.value_dim), spec.dtype)
        if 0 in shape or spec.kv_len == 0:
            return out, lse
    q, scale = operands.query, spec.scale
    if scale <= 0.0:
        # The row maximum of the scores must be that of the logits.
        q = q * jnp.asarray(np.sign(scale), q.dtype)
        scale = -scale or 1.0
    v = _without_hidden_rows(spec, operands)
    problem = kernel.Problem(
        batch=spec.batch,
        q_len=spec.q_len,
        kv_len=spec.kv_len,
        num_q_heads=spec.num_q_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=_padded_dim(spec.head_dim),
        value_dim=_padded_dim(spec.value_dim),
        dtype=spec.dtype,
        scale=scale,
        mask=operands.mask.abstract(),
        num_blocks=num_blocks or _multiprocessors(),
    )
    out, lse = kernel.attention_forward(
        problem,
        _padded(q, problem.head_dim),
        _padded(operands.key, problem.head_dim),
        _padded(v, problem.value_dim),
        operands.mask,
        config=config,
        interpret=interpret,
    )
    out = out[:, : spec.q_len, :, : spec.value_dim]
    return out, lse[:, :, : spec.q_len].transpose(0, 2, 1)


def _padded_dim(dim: int) -> int:
    """The next head dim that the kernel has tiles for."""
    return next(size for size in kernel.HEAD_DIMS if dim <= size)


def _padded(x: Array, dim: int) -> Array:
    """``[B, T, H, D]`` with zeros up to a multiple of 8 rows and ``dim`` columns."""
    rows = -x.shape[1] % _ROW_MULTIPLE
    columns = dim - x.shape[3]
    return jnp.pad(x, ((0, 0), (0, rows), (0, 0), (0, columns))) if rows or columns else x


def _multiprocessors() -> int:
    """Of the default GPU; of an H100 or H200 where there is none."""
    device = jax.devices()[0]
    return getattr(device, "core_count", None) or _H100_MULTIPROCESSORS


def _without_hidden_rows(spec: AttentionSpec, operands: Operands) -> Array:
    """The values, zeroed where no query of the call sees them.

    In the kernel such a row can share a tile with visible ones and meet probabilities of 0, where a
    NaN or inf would survive. Costs a pass over the values, where some can be hidden.
    """
    v = operands.value
    seen = seen_keys(operands.mask, spec.q_len, spec.kv_len)
    if isinstance(seen, np.ndarray) and seen.all():
        return v
    return jnp.where(seen[:, :, None, None], v, jnp.zeros((), v.dtype))


def seen_keys(mask: Mask, q_len: int, kv_len: int) -> Any:
    """Keys that at least one query sees, bool ``[B|1, Tk]`` (NumPy where static)."""
    start: Any
    end: Any
    start, end = mask.row_ranges(q_len, kv_len)
    if isinstance(start, np.ndarray):
        return _seen_static(start, end, kv_len)
    used = start < end
    traced = (mask.q_offsets, mask.kv_starts, mask.kv_ends)
    if all(x is None or x.shape[1] == 1 for x in traced):
        # Neighbouring rows have overlapping or touching intervals: their union has no gap.
        lowest = jnp.min(jnp.where(used, start, kv_len), axis=1, keepdims=True)
        highest = jnp.max(jnp.where(used, end, 0), axis=1, keepdims=True)
        key = jnp.arange(kv_len, dtype=jnp.int32)[None]
        return (lowest <= key) & (key < highest)
    start, end = jnp.broadcast_arrays(start, jnp.maximum(start, end))
    batch = jnp.arange(start.shape[0], dtype=jnp.int32)[:, None]
    count = used.astype(jnp.int32)
    steps = jnp.zeros((start.shape[0], kv_len + 1), jnp.int32)
    steps = steps.at[batch, start].add(count).at[batch, end].add(-count)
    return jnp.cumsum(steps, axis=1)[:, :-1] > 0


def _seen_static(start: np.ndarray, end: np.ndarray, kv_len: int) -> np.ndarray:
    """Counts at each key the intervals that have begun and not ended."""
    steps = np.zeros((start.shape[0], kv_len + 1), np.int32)
    batch = np.arange(start.shape[0])[:, None]
    used = (start < end).astype(np.int32)
    np.add.at(steps, (batch, start), used)
    np.subtract.at(steps, (batch, np.maximum(start, end)), used)
    return np.cumsum(steps, axis=1)[:, :-1] > 0
