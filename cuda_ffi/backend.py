"""The implementation ``"cuda"``: what the kernels can do, and the way from a call to a launch.

Whatever runs is one custom call that reads lengths and tables on the device. On a CPU the same
calls reach the kernels' twin (``csrc/cpu.cc``), which is there to test all but the kernels.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cuda_ffi import library, partition
from jax_flash.mask import MAX_OFFSET
from jax_flash.spec import QUANTISED_DTYPES, AttentionSpec, Device, Operands

Array = jax.Array

FUSED = True

MAX_NEW_TOKENS = 16
MAX_HEAD_DIM = 256
_CHUNK = 16  # tokens, csrc/kv_view.cuh
_LAYOUTS = {None: 0, "NHD": 1, "HND": 2}  # csrc/call.h; 2 more for pools of both
_POOL_AXES = {"NHD": "psg", "HND": "pgs"}  # see partition.py
_DIMS = ((64, 64), (128, 128), (192, 128), (MAX_HEAD_DIM, MAX_HEAD_DIM))  # csrc/instances.h
_MAX_RANGES = 640  # there are no more of small blocks, of 8 rows at most, see csrc/launch.cuh
_TABLES_BATCH = 2048  # sequences whose chunk counts fit into shared memory beside the ring
_STEADY_SPLITS = 8  # of each sequence and head, so that its bits do not depend on its neighbours

_fixed_splits = contextvars.ContextVar("fixed_splits", default=0)


@contextlib.contextmanager
def fixed_splits(count: int) -> Iterator[None]:
    """Calls traced inside share each sequence and head among so many blocks: to measure splits.

    Args:
        count: 1, 2, 4 or 8 (GPUs without clusters have 1 only), or 0 for the kernels' own choice.
    """
    token = _fixed_splits.set(count)
    try:
        yield
    finally:
        _fixed_splits.reset(token)


def supports(spec: AttentionSpec, device: Device) -> str | None:
    """None where the kernels compute this call, else the reason why not."""
    return limits(spec, device) or library.missing(device.platform)


def limits(spec: AttentionSpec, device: Device) -> str | None:
    """:func:`supports`, whether or not the kernels have been compiled."""
    if device.platform == "gpu" and float(device.compute_capability or 0) < 8.0:
        return f"needs compute capability 8.0 or newer; found {device.compute_capability}"
    if spec.kind not in ("decode", "paged"):
        return f"no {spec.kind} attention: its kernels read a key/value cache"
    if spec.dtype not in ("float16", "bfloat16"):
        return f"only float16 and bfloat16 queries; got {spec.dtype}"
    if spec.q_len > MAX_NEW_TOKENS:
        return f"at most {MAX_NEW_TOKENS} new tokens; got {spec.q_len}"
    step = 16 if spec.kv_dtype in QUANTISED_DTYPES else 8
    for dim in (spec.head_dim, spec.value_dim):
        if dim % step or not step <= dim <= MAX_HEAD_DIM:
            return (
                f"head dims of a {spec.kv_dtype} cache are multiples of {step} up to "
                f"{MAX_HEAD_DIM}; got {dim}"
            )
    return _size_reason(spec)


def _size_reason(spec: AttentionSpec) -> str | None:
    """Limits of 32-bit counts; elements are found with 64 bits."""
    if spec.batch > _TABLES_BATCH:
        return f"at most {_TABLES_BATCH} sequences; got {spec.batch}"
    if spec.kv_len == 0 or 0 in spec.arrays.query.shape or 0 in spec.arrays.key.shape:
        return "zero-size arrays have nothing to read"
    row_tiles = -(-spec.q_len * spec.num_q_heads // (8 * spec.num_kv_heads))
    chunks = spec.batch * spec.num_kv_heads * row_tiles * (spec.kv_len // _CHUNK + 2)
    if spec.kv_len > MAX_OFFSET or chunks >= 2**31:
        return f"the cache is too large for its counts: {chunks} chunks of {_CHUNK} tokens"
    return None


def forward(spec: AttentionSpec, operands: Operands) -> tuple[Array, Array]:
    """Attention of one call.

    Returns:
        out ``[B, Tq, Hq, Dv]`` in the query's dtype and lse fp32 ``[B, Tq, Hq]``.
    """
    mask = operands.mask
    assert mask.kv_ends is not None
    pools, layout = (operands.key, operands.value), _LAYOUTS[spec.page_layout]
    if operands.kv_pages is not None:
        pools, layout = (operands.kv_pages, operands.kv_pages), layout + 2
    kv_lens = jnp.broadcast_to(mask.kv_ends.reshape(-1), (spec.batch,))
    window = (-1, -1) if mask.window is None else mask.window
    arrays = (
        operands.query,
        *pools,
        _or_nothing(operands.block_tables, np.int32),
        kv_lens,
        _or_nothing(operands.sinks),
        _or_nothing(operands.alibi_slopes),
        _or_nothing(operands.k_scale),
        _or_nothing(operands.v_scale),
        _or_nothing(operands.chunk_ends, np.int32),
    )
    results = (
        jax.ShapeDtypeStruct((*operands.query.shape[:-1], spec.value_dim), spec.dtype),
        jax.ShapeDtypeStruct(operands.query.shape[:-1], jnp.float32),
        jax.ShapeDtypeStruct((_workspace_size(spec),), jnp.float32),
    )
    # The third result is room for the parts of cut items: memory that XLA manages.
    out, lse, _ = jax.ffi.ffi_call(library.DECODE, results)(
        *arrays,
        layout=np.int64(layout),
        scale=np.float32(spec.scale),
        soft_cap=np.float32(spec.soft_cap or 0.0),
        is_causal=np.bool_(mask.is_causal),
        window_left=np.int64(min(window[0], MAX_OFFSET)),
        window_right=np.int64(min(window[1], MAX_OFFSET)),
        num_splits=np.int64(_STEADY_SPLITS if spec.deterministic else _fixed_splits.get()),
    )
    return out, lse


def _or_nothing(x: Array | None, dtype: Any = np.float32) -> Array | np.ndarray:
    """An array of size 0 stands for one that is not there."""
    return np.zeros((0,), dtype) if x is None else x


def _workspace_size(spec: AttentionSpec) -> int:
    """Floats for the parts of items that are cut: two a range of chunks, rows of (acc, m, l)."""
    rows = min(spec.q_len * spec.num_q_heads // spec.num_kv_heads, 16)
    ranges = _MAX_RANGES if rows <= 8 else _MAX_RANGES // 2
    of_class = next(dv for d, dv in _DIMS if spec.head_dim <= d and spec.value_dim <= dv)
    return 2 * ranges * rows * (of_class + 4)


def append_reason(*arrays: Array, device: Device) -> str | None:
    """Why :func:`append` cannot run, or None; the arrays are those it takes."""
    if device.platform == "gpu" and float(device.compute_capability or 0) < 8.0:
        return f"needs compute capability 8.0 or newer; found {device.compute_capability}"
    pool = arrays[0]
    if any(x.dtype == "float64" for x in arrays):
        return "no float64 pools or tokens"
    if not all(isinstance(size, int) for size in pool.shape):
        return "needs sizes that are known when the call is traced; some are symbolic"
    if math.prod(pool.shape[:-1]) >= 2**31 or 0 in pool.shape:
        return f"at least one slot and less than 2**31; the pool is {pool.shape}"
    return library.missing(device.platform)


def append(
    key_pages: Array,
    value_pages: Array,
    new_key: Array,
    new_value: Array,
    slots: Array,
    *more: Array,
    page_layout: str,
) -> tuple[Array, Array]:
    """Scatters tokens ``[N, Hk, D]`` into their slots; see :func:`jax_flash.reference.append`.

    The pools are aliased to the results: where XLA may overwrite them nothing is copied.
    """
    is_fused = key_pages.ndim == 5
    layout = _LAYOUTS[page_layout] + 2 * is_fused
    is_copy = new_key.dtype == key_pages.dtype and not any(x.size for x in more)
    if not is_copy and new_key.dtype.itemsize == 1:
        new_key, new_value = (x.astype(jnp.float32) for x in (new_key, new_value))

    def call(*arrays: Array) -> tuple[Array, Array]:
        run: Callable = jax.ffi.ffi_call(
            library.APPEND,
            tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays[:2]),
            input_output_aliases={0: 0, 1: 1},
        )
        return tuple(run(*arrays, layout=np.int64(layout)))

    arrays = (key_pages, value_pages, new_key, new_value, slots, *more)
    if jax.device_count() > 1:
        call = partition.append(call, arrays, _POOL_AXES[page_layout])
    return call(*arrays)
