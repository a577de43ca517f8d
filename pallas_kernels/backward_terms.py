"""The terms of a call around the backward kernel: what it reads of them.

In its transposed tiles keys are rows and queries are columns. What the logits of a query have in
common, a bias of one column, is part of the log-sum-exp that they are compared with, unless a soft
cap stands between. A bias is free of NaN and +inf here: rows that see one have no gradient, and
come with lse = +inf, like those that see nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_flash.mask import Mask
from pallas_kernels import terms
from pallas_kernels.config import Problem
from pallas_kernels.ops import packed_bits
from pallas_kernels.terms import Arrays

Array = jax.Array


def inputs(
    problem: Problem, mask: Mask, arrays: Arrays, lse: Array, rows: int, keys: int
) -> tuple[dict[str, Array], Array]:
    """What the kernel reads, by name, and the log-sum-exp that it compares with.

    Args:
        problem: static facts.
        mask: of the call.
        arrays: of the call.
        lse: fp32 ``[B, Hq, Tq]``, natural; +inf where a row has no gradient.
        rows: Tq rounded up to whole tiles.
        keys: Tk rounded up to whole tiles.

    Returns:
        What :func:`pallas_kernels.terms.inputs` makes, without sinks, where ``bias`` is transposed,
        ``[B|1, Hq|1, Tk, rows]``, and the mask as

        - ``visible_keys`` fp32 ``[B|1, Hq|1, keys]``, 1 where seen, if it is of one row;
        - ``visible_bits`` int32 ``[B|1, Hq|1, Tk|1, words]``, packed, transposed, if not;

        and lse without what all logits of a row have in common.
    """
    bias = arrays.bias
    if bias is not None:
        bias = jnp.where(jnp.isfinite(bias) | jnp.isneginf(bias), bias, jnp.zeros_like(bias))
    found = terms.inputs(problem, mask, arrays._replace(bias=bias, sinks=None), rows, keys)
    if "bias" in found:
        assert bias is not None
        surplus = ((0, 0),) * 3 + ((0, rows - problem.q_len),)
        found["bias"] = jnp.pad(jnp.swapaxes(bias, 2, 3), surplus)
    if "bias_rows" in found and problem.soft_cap is None:
        common = found.pop("bias_rows")[..., : problem.q_len]
        lse = lse - jnp.where(jnp.isfinite(common), common, 0.0)
    if mask.array is not None:
        found |= _visible(mask.array, problem, keys)
    return found, lse


def _visible(array: Array, problem: Problem, keys: int) -> dict[str, Array]:
    """A boolean mask ``[B|1, Hq|1, Tq|1, Tk|1]`` as the kernel reads it."""
    if array.shape[2] == 1:
        seen = jnp.broadcast_to(array[:, :, 0], (*array.shape[:2], problem.kv_len))
        surplus = ((0, 0), (0, 0), (0, keys - problem.kv_len))
        return {"visible_keys": jnp.pad(seen.astype(jnp.float32), surplus)}
    return {"visible_bits": packed_bits(jnp.swapaxes(array, 2, 3))}


def sink_gradients(sinks: Array, lse: Array, delta: Array) -> Array:
    """Gradients of sinks ``[B|1, Hq]``: their probabilities times ``0 - delta``, over all rows.

    Args:
        sinks: fp32 ``[B|1, Hq]``.
        lse: fp32 ``[B, Hq, Tq]``, natural; +inf where a row has no gradient.
        delta: fp32 ``[B, Hq, Tq]``, finite there.
    """
    by_element = -(jnp.exp(sinks[:, :, None] - lse) * delta).sum(axis=2)
    return by_element if sinks.shape[0] > 1 else by_element.sum(axis=0, keepdims=True)
