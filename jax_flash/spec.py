"""What one attention call is: its static facts (:class:`AttentionSpec`) and its arrays.

The functions of :mod:`jax_flash.calls` check the arguments of the public functions and end in
:func:`make_spec`. After it no code sees a default, an optional axis, an unchecked shape or a second
way to say the same thing.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash import checks
from jax_flash.mask import Mask, dropout_seeds

Array = jax.Array

QUERY_DTYPES = tuple(jnp.dtype(x) for x in ("bfloat16", "float16", "float32", "float64"))
QUANTISED_DTYPES = tuple(jnp.dtype(x) for x in ("float8_e4m3fn", "float8_e5m2", "int8"))


def wide_dtype(dtype: Any) -> jnp.dtype:
    """What numbers of a floating-point dtype are summed in: float32, or float64 for float64."""
    return jnp.dtype("float64" if dtype == "float64" else "float32")


def finite_product(x: Array, scale: Array) -> Array:
    """``x * scale``, NaN where either is not finite, with derivatives that are finite everywhere.

    What is hidden later may hold anything: ``0 * NaN`` must not reach the gradient of the scale.
    """
    finite = jnp.isfinite(x) & jnp.isfinite(scale)
    clean = jnp.where(finite, x, jnp.zeros_like(x)) * jnp.where(finite, scale, jnp.ones_like(x))
    return jnp.where(finite, clean, jnp.nan)


@dataclasses.dataclass(frozen=True)
class Device:
    """The facts about a device that decide which implementation can run.

    Attributes:
        platform: ``"cpu"``, ``"gpu"`` or ``"tpu"``.
        compute_capability: e.g. ``"9.0"`` on an NVIDIA GPU, else None.
        name: the device's own name.
    """

    platform: str
    compute_capability: str | None = None
    name: str = ""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Operands:
    """The arrays of one call. Each has a leading axis of size B, or 1 where that says so.

    Attributes:
        query: ``[B, Tq, Hq, D]``.
        key: ``[B, Tk, Hk, D]``, or the pool ``[P, Hk, S, D]`` / ``[P, S, Hk, D]`` of a paged call.
        value: ``[B, Tk, Hk, Dv]``, or the pool of a paged call.
        mask: visibility; its lengths are those of the sequences also in a paged call. Of a cache
            they are as the caller gave them: what is not in [0, capacity] an implementation clips.
        bias: ``[B|1, Hq|1, Tq|1, Tk|1]``, added to the scaled logits.
        alibi_slopes: fp32 ``[B|1, Hq]``.
        sinks: fp32 ``[B|1, Hq]``, one more logit in the softmax's denominator.
        dropout_seeds: uint32 ``[B, 2]``.
        block_tables: int32 ``[B, max_pages]``.
        k_scale: fp32, broadcastable to the axes of ``key`` without its last; None means 1.
        v_scale: fp32, likewise for ``value``.
        kv_pages: the pool ``[P, 2, ...]`` of which ``key`` and ``value`` are slices, for kernels
            that read it in place (then nobody needs the slices, and XLA drops them); else None.
        chunk_ends: int32 ``[B]``, of a :class:`jax_flash.DecodePlan`; a hint that changes nothing.
    """

    query: Array
    key: Array
    value: Array
    mask: Mask
    bias: Array | None = None
    alibi_slopes: Array | None = None
    sinks: Array | None = None
    dropout_seeds: Array | None = None
    block_tables: Array | None = None
    k_scale: Array | None = None
    v_scale: Array | None = None
    kv_pages: Array | None = None
    chunk_ends: Array | None = None


class Residuals(NamedTuple):
    """What the backward pass gets.

    Attributes:
        operands: the arrays of the call.
        out: ``[B, Tq, Hq, Dv]``, tagged ``"flash_out"`` for remat policies.
        lse: ``[B, Tq, Hq]``, tagged ``"flash_lse"``.
    """

    operands: Operands
    out: Array
    lse: Array


class Gradients(NamedTuple):
    """Gradients of the floating-point operands, in their shapes and dtypes.

    None where the operand is absent or one of :attr:`AttentionSpec.constants`. One that a kernel
    leaves out although it is wanted becomes NaN, never a silent zero.
    """

    query: Array
    key: Array
    value: Array
    bias: Array | None = None
    alibi_slopes: Array | None = None
    sinks: Array | None = None
    k_scale: Array | None = None
    v_scale: Array | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Static facts of one call: hashable, so that it can key caches and custom derivatives.

    Attributes:
        kind: ``"dense"``, ``"ragged"``, ``"decode"`` or ``"paged"``: the public call it came from.
        scale: factor of the logits.
        soft_cap: ``c`` of ``c * tanh(x / c)``, or None.
        dropout_rate: probability of dropping, in [0, 1].
        deterministic: whether gradients must be bit-equal from run to run.
        return_lse: whether the caller wants the log-sum-exp, and may send a gradient through it.
        page_layout: ``"HND"`` or ``"NHD"`` for a paged call, else None.
        arrays: the operands as ShapeDtypeStructs.
        constants: names of floating-point operands whose gradients nobody asks for; known in the
            backward pass only.
    """

    kind: str
    scale: float
    soft_cap: float | None
    dropout_rate: float
    deterministic: bool
    return_lse: bool
    page_layout: str | None
    arrays: Operands
    constants: tuple[str, ...] = ()

    @property
    def mask(self) -> Mask:
        """The mask's static facts, with ShapeDtypeStructs for arrays."""
        return self.arrays.mask

    @property
    def dtype(self) -> jnp.dtype:
        """The query's dtype, which is also the output's."""
        return self.arrays.query.dtype

    @property
    def kv_dtype(self) -> jnp.dtype:
        """The dtype of keys and values; a quantised cache's differs from the query's."""
        return self.arrays.key.dtype

    @property
    def batch(self) -> int:
        """B."""
        return self.arrays.query.shape[0]

    @property
    def q_len(self) -> int:
        """Tq."""
        return self.arrays.query.shape[1]

    @property
    def num_q_heads(self) -> int:
        """Hq."""
        return self.arrays.query.shape[2]

    @property
    def head_dim(self) -> int:
        """D."""
        return self.arrays.query.shape[3]

    @property
    def value_dim(self) -> int:
        """Dv."""
        return self.arrays.value.shape[3]

    @property
    def num_kv_heads(self) -> int:
        """Hk."""
        return self.arrays.key.shape[
            2 if self.page_layout is None else page_axes(self.page_layout)[0]
        ]

    @property
    def page_size(self) -> int | None:
        """Tokens in a page, for a paged call."""
        if self.page_layout is None:
            return None
        return self.arrays.key.shape[page_axes(self.page_layout)[1]]

    @property
    def kv_len(self) -> int:
        """Tk; for a paged call the most that a row of the block table can hold."""
        if self.page_size is None:
            return self.arrays.key.shape[1]
        assert self.arrays.block_tables is not None
        return self.arrays.block_tables.shape[1] * self.page_size

    @property
    def accumulator_dtype(self) -> jnp.dtype:
        """float32, or float64 when the inputs are float64."""
        return wide_dtype(self.dtype)

    def with_operands(self, operands: Operands) -> AttentionSpec:
        """The same call on other arrays."""
        arrays = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), operands)
        return dataclasses.replace(self, arrays=arrays)

    def __str__(self) -> str:
        heads = f"H{self.num_q_heads}/{self.num_kv_heads}"
        dims = f"D{self.head_dim}" + (
            "" if self.value_dim == self.head_dim else f"/{self.value_dim}"
        )
        lengths = f"Tq{self.q_len} Tk{self.kv_len}"
        causal = " causal" if self.mask.is_causal else ""
        return f"{self.kind} B{self.batch} {lengths} {heads} {dims} {self.dtype}{causal}"


def make_spec(
    kind: str,
    operands: Operands,
    *,
    scale: Any,
    soft_cap: Any,
    dropout_rate: Any = 0.0,
    dropout_rng: Any = None,
    alibi_slopes: Any,
    sinks: Any,
    return_lse: Any,
    deterministic: Any,
    page_layout: str | None = None,
) -> tuple[AttentionSpec, Operands]:
    """Checks what all calls share and completes the canonical form."""
    query = operands.query
    batch, _, num_heads, head_dim = query.shape
    per_head: dict[str, Any] = {}
    for name, x in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if x is not None:
            x = checks.as_float_array(name, x, (num_heads,), "[Hq]")
            per_head[name] = x.astype(wide_dtype(query.dtype))[None]
    if scale is None:
        scale = 1.0 / math.sqrt(max(head_dim, 1))
    elif np.ndim(scale) != 0:
        raise checks.value_error(
            "scale.shape", np.shape(scale), "must be a scalar", "Multiply the query yourself"
        )
    elif isinstance(scale, jax.core.Tracer):
        # A traced scale is folded into the query, through which its gradient then flows.
        wide = wide_dtype(query.dtype)
        query = finite_product(query.astype(wide), scale.astype(wide)).astype(query.dtype)
        operands = dataclasses.replace(operands, query=query)
        scale = 1.0
    elif isinstance(scale, jax.Array | np.ndarray):
        scale = scale.item()
    rate, key = checks.as_dropout(dropout_rate, dropout_rng)
    operands = dataclasses.replace(
        operands,
        dropout_seeds=None if key is None else dropout_seeds(key, batch),
        **per_head,
    )
    spec = AttentionSpec(
        kind=kind,
        scale=checks.as_real("scale", scale),
        soft_cap=checks.as_soft_cap(soft_cap),
        dropout_rate=rate,
        deterministic=checks.as_bool("deterministic", deterministic),
        return_lse=checks.as_bool("return_residual", return_lse),
        page_layout=page_layout,
        arrays=operands,
    )
    return spec.with_operands(operands), operands


def page_axes(page_layout: Any) -> tuple[int, int]:
    """Axes of heads and of tokens in a pool ``[P, ., ., D]``."""
    if page_layout not in ("HND", "NHD"):
        raise checks.value_error(
            "page_layout",
            repr(page_layout),
            "must be 'HND' ([P, Hk, S, D]) or 'NHD' ([P, S, Hk, D])",
            "Name the layout of your pools",
        )
    return (1, 2) if page_layout == "HND" else (2, 1)
