"""Adapter to cuDNN's fused attention as ``jax.nn.dot_product_attention`` offers it (``"cudnn"``).

It answers yes only where cuDNN computes what the contract says. It refuses, and why:

- ragged, decode and paged calls: ``jax.nn`` has no argument for them;
- fp32 and fp64 inputs, head dims that are not multiples of 8 or above 256 (128 before Hopper), a
  value dim other than the key dim: not implemented there;
- odd lengths: its gradient is refused, and a call cannot know whether it will be differentiated;
- a boolean mask: it becomes a large negative bias, so a query that sees no key gets an average
  of the values instead of 0; a mask with a size-1 query or key axis is refused by ``jax.nn``;
- a bias: an entry of -inf can leave a query without keys (NaN there), broadcast query or key axes
  are refused, and its gradient is left out for most batch-broadcast shapes;
- sequence lengths: a length of 0 leaves queries without keys, and padded rows are not defined;
- a window without ``is_causal``: the right side is unsupported, and ``(left, 0)`` sees the future;
- a window that leaves a query without keys (``Tq > Tk + left``);
- ``q_offset`` and segment ids: no argument for them;
- soft cap, sinks, ALiBi slopes: no argument for them; dropout: its random bits are not ours;
- ``return_residual``: the log-sum-exp comes back rounded to the input dtype and has no gradient;
- ``deterministic``: its query gradient is summed by atomics;
- zero-size arrays: rejected at run time.

One limit cannot be seen at trace time: where a key is hidden by ``is_causal`` or a window, a NaN or
inf in it can still reach queries of the same tile.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_flash.spec import AttentionSpec, Device, Operands

Array = jax.Array

FUSED = False


def supports(spec: AttentionSpec, device: Device) -> str | None:
    """None where cuDNN computes this call under our contract, else the reason why not."""
    if device.platform != "gpu" or device.compute_capability is None:
        return f"needs an NVIDIA GPU; the device is {device.platform}"
    capability = float(device.compute_capability)
    max_head_dim = 256 if capability >= 9.0 else 128
    if capability < 8.0:
        return f"needs compute capability 8.0 or newer; found {device.compute_capability}"
    if spec.kind != "dense":
        return f"jax.nn has no {spec.kind} attention"
    if spec.dtype not in ("float16", "bfloat16"):
        return f"only float16 and bfloat16; got {spec.dtype}"
    if spec.head_dim % 8 or spec.head_dim > max_head_dim:
        return f"head dims are multiples of 8 up to {max_head_dim}; got {spec.head_dim}"
    if spec.value_dim != spec.head_dim:
        return f"the value dim must be the head dim; got {spec.value_dim} and {spec.head_dim}"
    if 0 in spec.arrays.query.shape or spec.kv_len == 0:
        return "zero-size arrays are rejected"
    if spec.q_len % 2 or spec.kv_len % 2:
        return f"lengths must be even for its gradient; got {spec.q_len} and {spec.kv_len}"
    return _mask_reason(spec) or _term_reason(spec)


def _mask_reason(spec: AttentionSpec) -> str | None:
    mask = spec.mask
    if mask.array is not None:
        return "a query with an all-False mask row would get an average, not 0"
    if mask.q_lengths is not None or mask.kv_ends is not None:
        return "a sequence length of 0 would not give 0"
    if mask.q_segments is not None:
        return "segment ids are not supported"
    if mask.q_offset or mask.q_offsets is not None:
        return "q_offset is not supported"
    if mask.window is not None and not mask.is_causal:
        return "a window without is_causal is unsupported or sees the future"
    if mask.window is not None and spec.q_len > spec.kv_len + mask.window[0]:
        return "the window leaves queries without keys"
    return None


def _term_reason(spec: AttentionSpec) -> str | None:
    arrays = spec.arrays
    if arrays.bias is not None:
        return "a bias of -inf would give NaN, and its gradient is not complete"
    if spec.soft_cap is not None:
        return "logits_soft_cap is not supported"
    if arrays.sinks is not None:
        return "sinks are not supported"
    if arrays.alibi_slopes is not None:
        return "alibi_slopes are not supported"
    if spec.dropout_rate > 0.0:
        return "its dropout mask is not the documented one"
    if spec.return_lse:
        return "its log-sum-exp is rounded to the input dtype and has no gradient"
    if spec.deterministic:
        return "its query gradient is not deterministic"
    return None


def forward(spec: AttentionSpec, operands: Operands) -> tuple[Array, Array]:
    """Attention of one call.

    Returns:
        out ``[B, Tq, Hq, D]``; and NaN for lse ``[B, Tq, Hq]``, which no supported call reads.
    """
    out = jax.nn.dot_product_attention(
        operands.query,
        operands.key,
        operands.value,
        scale=spec.scale,
        is_causal=spec.mask.is_causal,
        local_window_size=spec.mask.window,
        implementation="cudnn",
    )
    return out, jnp.full(out.shape[:-1], jnp.nan, jnp.float32)
