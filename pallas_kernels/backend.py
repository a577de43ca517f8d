"""The implementation ``"mosaic"``: what the kernels can do, and the way from a call to a launch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_flash.spec import AttentionSpec, Device, Gradients, Operands, Residuals
from pallas_kernels import backward as backward_kernel
from pallas_kernels import backward_config, backward_terms, schedule, tune
from pallas_kernels import forward as kernel
from pallas_kernels.config import HEAD_DIMS, SPLIT_HEAD_DIMS
from pallas_kernels.terms import Arrays

Array = jax.Array

FUSED = True

# Calls that are alike are one function of a program, so that the layers of a model share a kernel:
# JAX numbers the kernels that it lowers, and those of different names are compiled one by one.
# What may change from one call to the next, such as a configuration from a table, is an argument.
_STATIC = ("problem", "config", "interpret")
_launch_forward = jax.jit(kernel.attention_forward, static_argnames=_STATIC)
_launch_backward = jax.jit(
    backward_kernel.attention_backward,
    static_argnames=(*_STATIC, "wanted", "deterministic"),
)

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
    if spec.dtype not in ("float16", "bfloat16", "float32"):
        return f"only float16, bfloat16 and float32; got {spec.dtype}"
    if spec.kv_dtype != spec.dtype:
        return f"keys must have the query's dtype {spec.dtype}; got {spec.kv_dtype}"
    widest = max(_dims(spec))
    if max(spec.head_dim, spec.value_dim) > widest:
        in_fp32 = " in float32" if spec.dtype == "float32" else ""
        return f"head dims up to {widest}{in_fp32}; got {spec.head_dim} and {spec.value_dim}"
    if spec.kv_len > _MAX_KV_LEN:
        return f"at most {_MAX_KV_LEN} keys; got {spec.kv_len}"
    return None


def how(spec: AttentionSpec) -> str | None:
    """What is special about the way in which the kernels compute a call."""
    if spec.dtype == "float32":
        return "fp32 as three bf16 parts, six products for one"
    return None


def declines_gradient(spec: AttentionSpec) -> str | None:
    """Why the backward kernel does not compute a gradient of a call that the forward computes."""
    if backward_config.fills_memory(spec.dtype, spec.head_dim, spec.value_dim):
        # Shared memory is full of the parts of tiles.
        names = ("bias", "alibi_slopes")
        wanted = [
            x for x in names if getattr(spec.arrays, x) is not None and x not in spec.constants
        ]
        no_room = ["dropout"] * (spec.dropout_rate > 0.0) + [f"the gradient of {x}" for x in wanted]
        if no_room:
            return (
                f"gradients in float32 of head dims above 64 leave no room for {no_room[0]}; "
                f"got {spec.head_dim} and {spec.value_dim}"
            )
    bias = spec.arrays.bias
    if bias is not None and "bias" not in spec.constants and spec.deterministic:
        if backward_terms.is_column(bias, spec.kv_len):
            in_order = spec.soft_cap is None
        else:
            in_order = bias.shape[2] == 1 or bias.shape[:2] == (spec.batch, spec.num_q_heads)
        if not in_order:
            return "deterministic=True: the gradient of this bias is added up in any order"
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
    if 0 in shape or spec.kv_len == 0:
        out = jnp.zeros((*shape, spec.value_dim), spec.dtype)
        return out, jnp.full(shape, -jnp.inf, jnp.float32)
    q, scale = operands.query, spec.scale
    if scale <= 0.0:
        # The row maximum of the scores must be that of the logits.
        q = q * jnp.asarray(np.sign(scale), q.dtype)
        scale = -scale or 1.0
    head_dim, value_dim = (_padded_dim(spec, dim) for dim in (spec.head_dim, spec.value_dim))
    if spec.arrays.bias is not None:
        # Out is staged in q's buffer, to make room for the bias.
        head_dim = max(head_dim, value_dim)
    problem = kernel.Problem(
        batch=spec.batch,
        q_len=spec.q_len,
        kv_len=spec.kv_len,
        num_q_heads=spec.num_q_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=spec.dtype,
        scale=scale,
        mask=operands.mask.abstract(),
        bias=spec.arrays.bias,
        has_alibi=operands.alibi_slopes is not None,
        has_sinks=operands.sinks is not None,
        soft_cap=spec.soft_cap,
        dropout_rate=0.0 if spec.dropout_rate == 1.0 else spec.dropout_rate,
        num_blocks=num_blocks or _multiprocessors(),
    )
    arrays = Arrays(
        operands.bias,
        operands.alibi_slopes,
        operands.sinks,
        operands.dropout_seeds if problem.dropout_rate > 0.0 else None,
    )
    out, lse = _launch_forward(
        problem,
        _padded(q, problem.head_dim),
        _padded(operands.key, problem.head_dim),
        _padded(operands.value, problem.value_dim),
        operands.mask,
        arrays,
        config=config or tune.tuned_config(problem),
        interpret=interpret,
    )
    out = out[:, : spec.q_len, :, : spec.value_dim]
    if spec.dropout_rate == 1.0:
        out = jnp.zeros_like(out)
    return out, lse[:, :, : spec.q_len].transpose(0, 2, 1)


def backward(spec: AttentionSpec, residuals: Residuals, do: Array, delta: Array) -> Gradients:
    """Gradients of one call.

    Args:
        spec: static facts.
        residuals: of the forward pass, of whatever implementation.
        do: ``[B, Tq, Hq, Dv]``, cotangent of out.
        delta: fp32 ``[B, Tq, Hq]``, ``rowsum(do * out) - dlse``.
    """
    return differentiate(spec, residuals, do, delta)


def differentiate(
    spec: AttentionSpec,
    residuals: Residuals,
    do: Array,
    delta: Array,
    *,
    config: backward_config.BackwardConfig | None = None,
    num_blocks: int | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Gradients:
    """:func:`backward` with a choice of configuration, grid size and interpret mode."""
    operands = residuals.operands
    q, k, v = operands.query, operands.key, operands.value
    if 0 in (spec.batch, spec.q_len, spec.num_q_heads, spec.kv_len):
        terms = operands.bias, operands.alibi_slopes, operands.sinks
        return Gradients(*(x if x is None else jnp.zeros_like(x) for x in (q, k, v, *terms)))
    # Without barriers XLA makes slow loops of the reduction, the transposition and comparisons.
    lse, delta = jax.lax.optimization_barrier((residuals.lse, delta))
    lse, delta = jax.lax.optimization_barrier((lse.transpose(0, 2, 1), delta.transpose(0, 2, 1)))
    # Rows that see no key have no gradient, nor have those that see a NaN, which makes lse one.
    # (But a NaN in a value meets their probabilities of 0, and makes NaN of their gradients.)
    has_gradient = jnp.isfinite(lse)
    lse = jnp.where(has_gradient, lse, jnp.inf)
    delta = jnp.where(has_gradient, delta, 0.0)
    sign = float(np.sign(spec.scale))
    if sign != 1.0:
        q = q * jnp.asarray(sign, q.dtype)
    rate = spec.dropout_rate
    if rate == 1.0:  # nothing reaches the output; what is left comes through the log-sum-exp
        rate, do = 0.0, jnp.zeros_like(do)
    head_dim, value_dim = backward_config.padded_dims(
        spec.head_dim, spec.value_dim, is_split=spec.dtype == "float32"
    )
    problem = kernel.Problem(
        batch=spec.batch,
        q_len=spec.q_len,
        kv_len=spec.kv_len,
        num_q_heads=spec.num_q_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=spec.dtype,
        scale=abs(spec.scale) or 1.0,
        mask=operands.mask.abstract(),
        bias=spec.arrays.bias,
        has_alibi=operands.alibi_slopes is not None,
        soft_cap=spec.soft_cap,
        dropout_rate=rate,
        num_blocks=num_blocks or _multiprocessors(),
        blocks_meet=interpret is not None or (num_blocks is None and _core_count() is not None),
    )
    config = config or backward_config.default_config(problem)
    wanted = backward_terms.Wanted(
        bias=operands.bias is not None and "bias" not in spec.constants,
        alibi_slopes=operands.alibi_slopes is not None and "alibi_slopes" not in spec.constants,
    )
    dq, dk, dv, sums = _launch_backward(
        problem,
        _padded(q, head_dim),
        _padded(k, head_dim),
        _padded(v, value_dim),
        _padded(do, value_dim),
        lse,
        delta,
        operands.mask,
        Arrays(
            operands.bias,
            operands.alibi_slopes,
            dropout_seeds=operands.dropout_seeds if rate > 0.0 else None,
        ),
        wanted=wanted,
        deterministic=spec.deterministic,
        config=config,
        interpret=interpret,
    )
    dq = dq[:, : spec.q_len, :, : spec.head_dim]
    factor = spec.scale / problem.scale if problem.parts > 1 else spec.scale
    if factor != 1.0:
        dq = dq * np.float32(factor)
    dk = dk[:, : spec.kv_len, :, : spec.head_dim]
    dv = dv[:, : spec.kv_len, :, : spec.value_dim]
    of_terms: dict[str, Array] = {}
    if operands.sinks is not None:
        of_terms["sinks"] = backward_terms.sink_gradients(operands.sinks, lse, delta)
    if operands.bias is not None and wanted.bias:
        by_query = None
        if backward_terms.is_column(operands.bias, spec.kv_len) and spec.soft_cap is None:
            by_query = backward_terms.query_gradients(operands.sinks, lse, delta, do, residuals.out)
        of_terms["bias"] = backward_terms.bias_gradient(
            operands.bias, sums, by_query, spec.q_len, spec.kv_len
        )
    if operands.alibi_slopes is not None and wanted.alibi_slopes:
        of_terms["alibi_slopes"] = backward_terms.slope_gradients(
            operands.alibi_slopes, sums["dslopes"]
        )
    return Gradients(dq.astype(q.dtype), dk, dv, **of_terms)


def _dims(spec: AttentionSpec) -> tuple[int, ...]:
    """Head dims that the kernel has tiles for."""
    return SPLIT_HEAD_DIMS if spec.dtype == "float32" else HEAD_DIMS


def _padded_dim(spec: AttentionSpec, dim: int) -> int:
    """The next head dim that the kernel has tiles for."""
    return next(size for size in _dims(spec) if dim <= size)


def _padded(x: Array, dim: int) -> Array:
    """``[B, T, H, D]`` with zeros up to a multiple of 8 rows and ``dim`` columns."""
    rows = -x.shape[1] % _ROW_MULTIPLE
    columns = dim - x.shape[3]
    return jnp.pad(x, ((0, 0), (0, rows), (0, 0), (0, columns))) if rows or columns else x


def _multiprocessors() -> int:
    """Of the default GPU; of an H100 or H200 where there is none."""
    return _core_count() or _H100_MULTIPROCESSORS


def _core_count() -> int | None:
    """Multiprocessors of the default GPU, if there is one."""
    return getattr(jax.devices()[0], "core_count", None)
