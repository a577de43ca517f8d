r"""How far an implementation is from fp32, measured on part of the call that was timed.

The part is :attr:`bench.cases.Case.probes` (the last sequence of a batch) and of it the first and
the last key head with their query heads. The error of an array is relative,
``||x - x_fp32|| / ||x_fp32||`` in the Euclidean norm; that of a call is the largest of its arrays.
No array may be more than twice as wrong as the same one of plain attention: products in the inputs'
dtype, softmax in fp32. Rows are taken in chunks, so that 16k tokens fit.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.cases import Case

Array = jax.Array

# Compiler options: XLA would try a hundred kernels for each matrix product.
RUN_ONCE = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}

_CHUNK_ROWS = 1024
_HIGHEST = jax.lax.Precision.HIGHEST


class Reference:
    """The right results of one case on its probes.

    Args:
        case: the call.
        inputs: query, key and value, shaped as ``case.shapes`` says.
        do: the gradient that comes in, shaped like the output; None for the forward pass alone.

    Attributes:
        plain_errors: of plain attention, by the names "out", "dq", "dk" and "dv".
    """

    def __init__(self, case: Case, inputs: Sequence[Array], do: Array | None = None) -> None:
        self._case = case
        names = ("out",) if do is None else ("out", "dq", "dk", "dv")
        given = dict(zip(("q", "k", "v"), inputs[:3], strict=True))
        if do is not None:
            given["do"] = do
        self._right: list[dict[str, np.ndarray]] = []
        plain = []
        for part in self._parts(given):
            first, last = case.visible_range(part["q"].shape[0])
            right = _results(**part, first=first, last=last, dtype="float32")
            low = _results(**part, first=first, last=last, dtype=case.dtype)
            self._right.append(dict(zip(names, map(_float64, right), strict=True)))
            plain.append(dict(zip(names, map(_float64, low), strict=True)))
        self.plain_errors = _errors(plain, self._right)

    def judge(self, arrays: dict[str, Array]) -> tuple[float, bool]:
        """The error of arrays named "out", "dq", "dk" and "dv", or some of these; if it will do.

        Raises:
            FloatingPointError: a number that is not finite.
        """
        parts = [{name: _float64(x) for name, x in part.items()} for part in self._parts(arrays)]
        if not all(np.isfinite(x).all() for part in parts for x in part.values()):
            raise FloatingPointError("results that are not finite")
        errors = _errors(parts, self._right)
        is_good = all(error <= 2.0 * self.plain_errors[name] for name, error in errors.items())
        return max(errors.values()), is_good

    def _parts(self, arrays: dict[str, Array]) -> list[dict[str, Array]]:
        """Cuts each array to probe and head: ``[T, G, D]`` for queries, ``[T, D]`` for keys."""
        case = self._case
        group = case.num_q_heads // case.num_kv_heads
        parts = []
        for index, tokens in case.probes:
            for head in sorted({0, case.num_kv_heads - 1}):
                part = {}
                for name, x in arrays.items():
                    x = (x if index is None else x[index])[tokens]
                    is_key = name in ("k", "v", "dk", "dv")
                    part[name] = x[:, head] if is_key else x[:, head * group : (head + 1) * group]
                parts.append(part)
        return parts


def _float64(x: Array) -> np.ndarray:
    return np.asarray(x.astype(jnp.float32)).astype(np.float64)


def _errors(parts: list[dict[str, Any]], right: list[dict[str, Any]]) -> dict[str, float]:
    """Of each array, over all parts of it."""

    def error(name: str) -> float:
        pairs = [(x[name], y[name]) for x, y in zip(parts, right, strict=True)]
        wrong = sum(np.sum((x - y) ** 2) for x, y in pairs)
        return float(np.sqrt(wrong / sum(np.sum(y**2) for _, y in pairs)))

    return {name: error(name) for name in parts[0]}


@functools.partial(jax.jit, static_argnames=("dtype",), compiler_options=RUN_ONCE)
def _results(
    q: Array,
    k: Array,
    v: Array,
    do: Array | None = None,
    *,
    first: Array,
    last: Array,
    dtype: str,
) -> tuple[Array, ...]:
    """out, and with ``do`` also dq, dk and dv; computed in ``dtype``."""
    attend = functools.partial(_attend, first=first, last=last, dtype=dtype)
    wide = [x.astype(jnp.float32) for x in (q, k, v)]  # so that chunks add up in fp32
    if do is None:
        return (attend(*wide),)
    out, pullback = jax.vjp(attend, *wide)
    return out, *(grad.astype(dtype) for grad in pullback(do.astype(out.dtype)))


def _attend(q: Array, k: Array, v: Array, *, first: Array, last: Array, dtype: str) -> Array:
    """One key head: q ``[T, G, D]``, k and v ``[T, D]``, all fp32; out ``[T, G, D]``.

    Row i sees the keys ``first[i]`` to ``last[i]``, int32 ``[T]``.
    """
    length, group, head_dim = q.shape
    chunk = min(length, _CHUNK_ROWS)
    padding = -length % chunk
    column = jnp.arange(length)

    @jax.checkpoint
    def rows_of(rows: tuple[Array, Array, Array]) -> Array:
        q_rows, first, last = rows
        scaled = q_rows.astype(dtype) * jnp.asarray(head_dim**-0.5, dtype)
        x = jnp.einsum("tgd,sd->tgs", scaled, k.astype(dtype), precision=_HIGHEST)
        visible = (first[:, None] <= column) & (column <= last[:, None])
        x = jnp.where(visible[:, None], x.astype(jnp.float32), -jnp.inf)
        p = jnp.exp(x - jax.lax.stop_gradient(x.max(-1, keepdims=True)))
        l = p.sum(-1, keepdims=True)
        out = jnp.einsum("tgs,sd->tgd", p.astype(dtype), v.astype(dtype), precision=_HIGHEST)
        return (out.astype(jnp.float32) / l).astype(dtype)

    def in_chunks(x: Array) -> Array:
        # Rows added at the end repeat the last one, so that they see keys too.
        padded = jnp.pad(x, ((0, padding), *((0, 0),) * (x.ndim - 1)), mode="edge")
        return padded.reshape(-1, chunk, *x.shape[1:])

    out = jax.lax.map(rows_of, (in_chunks(q), in_chunks(first), in_chunks(last)))
    return out.reshape(-1, group, head_dim)[:length]
