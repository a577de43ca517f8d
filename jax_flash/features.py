"""What each implementation computes, as a table of features: asked of them, never written down."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from jax_flash import api, backends, report
from jax_flash.spec import AttentionSpec, Device

YES, FORWARD_ONLY, NO, NOT_INSTALLED = "yes", "forward only", "no", "not installed"

_BATCH, _LEN, _HEADS, _DIM, _PAGE = 2, 256, 8, 128, 16
_PER_HEAD, _PER_BATCH = (_HEADS,), (_BATCH,)
_QUANTISED = "float8_e4m3fn"


def _array(*shape: int, dtype: str = "int32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Call:
    """A call of shapes that every implementation is at home with, but for what it asks about.

    Attributes:
        function: the public function.
        dtype: of queries, and of keys and values unless ``cache_dtype`` says otherwise.
        cache_dtype: of keys and values, or None.
        dims: D and Dv.
        num_kv_heads: Hk.
        terms: further keyword arguments.
        constants: operands whose gradients nobody asks for.
    """

    function: Callable[..., Any] = api.dot_product_attention
    dtype: str = "bfloat16"
    cache_dtype: str | None = None
    dims: tuple[int, int] = (_DIM, _DIM)
    num_kv_heads: int = _HEADS
    terms: dict[str, Any] = dataclasses.field(default_factory=dict)
    constants: tuple[str, ...] = ()

    def spec(self) -> AttentionSpec:
        """Its static facts."""
        is_new = self.function in (api.decode_attention, api.paged_attention)
        lead: tuple[int, ...] = (_BATCH, _LEN)
        if self.function is api.paged_attention:
            lead = (_BATCH * _LEN // _PAGE, _PAGE)
        arrays = [_array(_BATCH, 1 if is_new else _LEN, _HEADS, self.dims[0], dtype=self.dtype)]
        cache_dtype = self.cache_dtype or self.dtype
        arrays += [_array(*lead, self.num_kv_heads, dim, dtype=cache_dtype) for dim in self.dims]
        if self.function is api.ragged_attention:
            arrays = [_array(*x.shape[1:], dtype=x.dtype) for x in arrays] + [_array(_BATCH + 1)]
        elif self.function is api.paged_attention:
            arrays += [_array(_BATCH, _LEN // _PAGE), _array(_BATCH)]
        elif is_new:
            arrays += [_array(_BATCH)]
        # The last implementation takes every call, and is cheap to trace.
        call = report.explain(
            self.function, *arrays, implementation=backends.NAMES[-1], **self.terms
        )
        return dataclasses.replace(call.decisions[0].spec, constants=self.constants)


def _with(**terms: Any) -> _Call:
    return _Call(terms=terms)


def _bias(shape: tuple[int, ...], *constants: str, **terms: Any) -> _Call:
    bias = _array(*shape, dtype="bfloat16")
    return _Call(terms={"bias": bias, **terms}, constants=constants)


@functools.cache
def rows() -> dict[str, AttentionSpec]:
    """The features of the table, each with a call that has it."""
    return {label: call.spec() for label, call in _calls().items()}


def _calls() -> dict[str, _Call]:
    by_key, by_row = (_BATCH, 1, 1, _LEN), (_BATCH, _HEADS, _LEN, 1)
    shared, full = (1, _HEADS, _LEN, _LEN), (_BATCH, _HEADS, _LEN, _LEN)
    segments = _array(_BATCH, _LEN)
    slopes, sinks = (_array(*_PER_HEAD, dtype="float32") for _ in range(2))
    dropout = {"dropout_rate": 0.1, "dropout_rng": jax.random.key(0)}
    paged: dict[str, Any] = {"function": api.paged_attention, "terms": {"page_layout": "NHD"}}
    return {
        "full attention": _Call(),
        "causal": _with(is_causal=True),
        "window, causal": _with(is_causal=True, local_window_size=(64, 0)),
        "window on both sides": _with(local_window_size=(64, 64)),
        "`q_offset`, int": _with(is_causal=True, q_offset=_PAGE),
        "`q_offset`, `[B]`": _with(is_causal=True, q_offset=_array(*_PER_BATCH)),
        "`query_seq_lengths`": _with(query_seq_lengths=_array(*_PER_BATCH)),
        "`key_value_seq_lengths`": _with(key_value_seq_lengths=_array(*_PER_BATCH)),
        "segment ids": _with(query_segment_ids=segments),
        "`ragged_attention`": _Call(function=api.ragged_attention, terms={"is_causal": True}),
        "mask `[B, 1, 1, Tk]`": _with(mask=_array(*by_key, dtype="bool")),
        "mask `[1, 1, Tq, Tk]`": _with(mask=_array(1, 1, _LEN, _LEN, dtype="bool")),
        "mask `[B, Hq, Tq, Tk]`": _with(mask=_array(*full, dtype="bool")),
        "bias `[B, 1, 1, Tk]`": _bias(by_key, "bias"),
        "bias `[B, Hq, Tq, 1]`": _bias(by_row, "bias"),
        "bias `[1, Hq, Tq, Tk]`": _bias(shared, "bias"),
        "bias `[B, Hq, Tq, Tk]`": _bias(full, "bias"),
        "bias `[B, 1, 1, Tk]` and its gradient": _bias(by_key),
        "bias `[B, Hq, Tq, 1]` and its gradient": _bias(by_row),
        "bias `[1, Hq, Tq, Tk]` and its gradient": _bias(shared),
        "bias `[B, Hq, Tq, Tk]` and its gradient": _bias(full),
        "ALiBi, with the slopes' gradient": _with(alibi_slopes=slopes),
        "soft cap": _with(logits_soft_cap=30.0),
        "sinks, with their gradient": _with(sinks=sinks),
        "dropout": _with(**dropout),
        "log-sum-exp returned, with its gradient": _with(return_residual=True),
        "all of these terms in one call": _bias(
            shared,
            is_causal=True,
            mask=_array(*by_key, dtype="bool"),
            alibi_slopes=slopes,
            logits_soft_cap=30.0,
            sinks=sinks,
            return_residual=True,
            **dropout,
        ),
        "grouped heads": _Call(num_kv_heads=_HEADS // 4),
        "Dv ≠ D": _Call(dims=(_DIM, _DIM // 2)),
        "D not a multiple of 8": _Call(dims=(_DIM - 1, _DIM - 1)),
        "D = 256": _Call(dims=(256, 256)),
        "fp16": _Call(dtype="float16"),
        "fp32, D = 64": _Call(dtype="float32", dims=(64, 64)),
        "fp32, D = 128": _Call(dtype="float32"),
        "fp32, D = 128, dropout": _Call(dtype="float32", terms=dropout),
        "fp32, D = 128, ALiBi, with the slopes' gradient": _Call(
            dtype="float32", terms={"alibi_slopes": slopes}
        ),
        "`deterministic=True`": _with(deterministic=True),
        "the same, with the gradient of a bias `[1, Hq, Tq, Tk]`": _bias(
            shared, deterministic=True
        ),
        "`decode_attention`": _Call(function=api.decode_attention),
        "`paged_attention`": _Call(**paged),
        "`paged_attention`, fp8 cache": _Call(cache_dtype=_QUANTISED, **paged),
    }


def markdown(device: Device) -> str:
    """A Markdown table: a row for each feature, a column for each implementation.

    Cells say :data:`YES`; :data:`FORWARD_ONLY` where another implementation computes a gradient; or
    :data:`NO`. Kernels that are yet to be compiled are taken for compiled.

    Args:
        device: where the calls would run; it need not be there.
    """
    head = f"on {device.platform} {device.compute_capability or ''}".rstrip()
    lines = [
        [head, *(f'`"{name}"`' for name in backends.NAMES)],
        ["---"] * (1 + len(backends.NAMES)),
    ]
    for label, spec in rows().items():
        lines.append([label, *(_cell(name, spec, device) for name in backends.NAMES)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cell(name: str, spec: AttentionSpec, device: Device) -> str:
    backend = backends.load(name)
    if isinstance(backend, str):
        return NOT_INSTALLED
    if backends.reason_against(name, spec, device, is_compiled=True) is not None:
        return NO
    if backend.FUSED and backends.reason_against_gradient(name, spec) is not None:
        return FORWARD_ONLY
    return YES
