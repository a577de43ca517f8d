"""Argument checks: every error names the argument, the value, the rule and the remedy."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array


def value_error(name: str, got: Any, rule: str, remedy: str) -> ValueError:
    """A ValueError with the four parts that every error of this package has."""
    return ValueError(f"{name}={got}: {rule}. {remedy}.")


def type_error(name: str, got: Any, rule: str, remedy: str) -> TypeError:
    """A TypeError with the four parts that every error of this package has."""
    return TypeError(f"{name}={got}: {rule}. {remedy}.")


def as_array(name: str, x: Any) -> Array:
    """Converts ``x`` to a JAX array; refuses what is not an array of numbers."""
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError) as error:
        raise type_error(
            name,
            type(x).__name__,
            "must be an array",
            "Pass a jax.Array or a NumPy array; only explain takes shapes",
        ) from error


def check_rank(name: str, x: Array, ranks: Sequence[int], layout: str) -> None:
    """Checks the number of axes; ``layout`` spells the axes out."""
    if x.ndim not in ranks:
        raise value_error(
            f"{name}.shape", x.shape, f"must have the layout {layout}", "Add or remove axes"
        )


def check_shape(name: str, x: Array, shape: Sequence[int], layout: str, remedy: str) -> None:
    """Checks a shape exactly."""
    if x.shape != tuple(shape):
        raise value_error(
            f"{name}.shape", x.shape, f"must be {layout} = {tuple(shape)} here", remedy
        )


def as_broadcastable(name: str, x: Array, shape: Sequence[int], layout: str) -> Array:
    """``x`` with leading axes of 1 added; each axis must be 1 or the full size."""
    full = (1,) * (len(shape) - x.ndim) + x.shape
    if len(full) != len(shape) or any(
        got not in (1, size) for got, size in zip(full, shape, strict=True)
    ):
        raise value_error(
            f"{name}.shape",
            x.shape,
            f"must be broadcastable to {layout} = {tuple(shape)}",
            "Make each axis 1 or the full size (for keys [B, Tk]: x[:, None, None, :])",
        )
    return x.reshape(full)


def as_float_array(name: str, x: Any, shape: Sequence[int], layout: str) -> Array:
    """A floating-point array of an exact shape."""
    array = as_array(name, x)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise type_error(
            f"{name}.dtype", array.dtype, "must be floating point", f"Cast {name} to float32"
        )
    check_shape(name, array, shape, layout, f"Give one value for each of {layout}")
    return array


def as_index_array(name: str, x: Any) -> Array:
    """An int32 array of lengths, offsets, ids or table entries.

    int64 is accepted where x64 mode allows it, and range-checked when its values are known.
    """
    rule = "must be int32 (or int64)"
    try:
        raw = x if hasattr(x, "dtype") else np.asarray(x)
    except ValueError as error:
        raise type_error(name, x, rule, "Pass an array of whole numbers") from error
    if raw.dtype == object:
        raise type_error(name, x, rule, "Pass an array of whole numbers")
    if not jnp.issubdtype(raw.dtype, jnp.integer):
        raise type_error(f"{name}.dtype", raw.dtype, rule, f"Use {name}.astype('int32')")
    values = known_values(raw)
    limits = np.iinfo(np.int32)
    if values is not None and values.size and raw.dtype.itemsize >= 4:
        outside = (values < limits.min) | (values > limits.max)
        if outside.any():
            raise value_error(
                name, values[outside][0], "must fit into int32", "Split the call into smaller ones"
            )
    array = jnp.asarray(x)
    if array.dtype.itemsize > 4 or array.dtype == jnp.uint32:
        # Not wrapped around: what no int32 can hold is out of every range all the same.
        low = jnp.asarray(max(limits.min, jnp.iinfo(array.dtype).min), array.dtype)
        array = jnp.clip(array, low, jnp.asarray(limits.max, array.dtype))
    return array.astype(jnp.int32)


def known_values(x: Any) -> np.ndarray | None:
    """The values of ``x`` if they can be read at trace time, else None."""
    if isinstance(x, jax.core.Tracer):
        return None
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return None
    return np.asarray(x)


def as_lengths(name: str, x: Any, batch: int, capacity: int) -> Array:
    """int32 ``[B]`` of lengths in [0, capacity]; checked when known."""
    lengths = as_index_array(name, x)
    check_shape(name, lengths, (batch,), "[B]", "Give one length for each batch element")
    values = known_values(x)
    if values is not None and values.size and (values.min() < 0 or values.max() > capacity):
        bad = values[(values < 0) | (values > capacity)][0]
        raise value_error(
            name, bad, f"lengths must lie in [0, {capacity}]", "Clip the lengths or grow the arrays"
        )
    return lengths


def as_cu_seqlens(name: str, x: Any, tokens: int) -> Array:
    """int32 ``[S + 1]`` of cumulative lengths; monotonic and in range when known."""
    cu_seqlens = as_index_array(name, x)
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 1:
        raise value_error(
            f"{name}.shape",
            cu_seqlens.shape,
            "must be [num_sequences + 1]",
            "Pass the running sum of the lengths, starting with 0",
        )
    values = known_values(x)
    if values is None:
        return cu_seqlens
    if (np.diff(values) < 0).any():
        raise value_error(
            name,
            values.tolist() if values.size <= 16 else f"array of {values.size}",
            "must not decrease",
            "Pass the running sum of the lengths, starting with 0",
        )
    if values[0] < 0 or values[-1] > tokens:
        raise value_error(
            name,
            f"[{values[0]}, ..., {values[-1]}]",
            f"must lie in [0, {tokens}], the number of tokens",
            "Check that the array belongs to this batch",
        )
    return cu_seqlens


def as_bool(name: str, x: Any) -> bool:
    """A static flag."""
    if not isinstance(x, bool | np.bool_):
        raise type_error(
            name,
            x,
            "must be a Python bool, known when the function is traced",
            "Pass True or False, or name it in static_argnames of jax.jit",
        )
    return bool(x)


def as_window(window: Any) -> tuple[int, int] | None:
    """``(left, right)`` from an int, a pair, or None."""
    name = "local_window_size"
    if window is None:
        return None
    pair = (window, window) if isinstance(window, numbers.Integral) else window
    if (
        isinstance(pair, str)
        or not isinstance(pair, Sequence)
        or len(pair) != 2
        or not all(isinstance(side, numbers.Integral) for side in pair)
        or any(isinstance(side, bool) for side in pair)
    ):
        raise type_error(
            name,
            window,
            "must be an int or a pair of ints (left, right), known when the function is traced",
            "Use a large number for a side without limit, None for no window",
        )
    left, right = (int(side) for side in pair)
    if left < 0 or right < 0:
        raise value_error(name, window, "both sides must be >= 0", "Use None for no window")
    return left, right


def as_real(name: str, x: Any) -> float:
    """A finite static number."""
    is_real = isinstance(x, numbers.Real | np.floating | np.integer)
    if isinstance(x, bool | np.bool_) or not is_real:
        raise type_error(
            name,
            repr(x),
            "must be a Python number, known when the function is traced",
            "Pass float(x), or name it in static_argnames of jax.jit",
        )
    value = float(x)
    if not np.isfinite(value):
        raise value_error(name, value, "must be finite", "Pass a finite number or None")
    return value


def as_soft_cap(soft_cap: Any) -> float | None:
    """The soft cap, or None."""
    if soft_cap is None:
        return None
    value = as_real("logits_soft_cap", soft_cap)
    if value <= 0.0:
        raise value_error("logits_soft_cap", value, "must be > 0", "Use None for no cap")
    return value


def as_rate(name: str, x: Any) -> float:
    """A probability."""
    value = as_real(name, x)
    if not 0.0 <= value <= 1.0:
        raise value_error(name, value, "must lie in [0, 1]", "Pass a probability")
    return value


def as_dropout(rate: Any, rng: Any) -> tuple[float, Array | None]:
    """The dropout rate and its key (None when nothing is dropped)."""
    value = as_rate("dropout_rate", rate)
    if value == 0.0:
        return value, None
    remedy = "Pass dropout_rng=jax.random.key(seed), or dropout_rate=0.0 for evaluation"
    if rng is None:
        rule = f"a key is needed when dropout_rate={value} is above 0"
        raise value_error("dropout_rng", None, rule, remedy)
    if not _is_one_key(rng):
        got = f"{rng.dtype}{list(rng.shape)}" if hasattr(rng, "shape") else type(rng).__name__
        raise type_error("dropout_rng", got, "must be one JAX key", remedy)
    return value, rng


def as_parts(outs: Any, lses: Any) -> tuple[Array, Array]:
    """Stacked outs ``[N, ..., Dv]`` and log-sum-exps ``[N, ...]``."""
    stacked = []
    for name, parts in (("outs", outs), ("lses", lses)):
        if isinstance(parts, Sequence):
            parts = [as_array(f"{name}[{i}]", part) for i, part in enumerate(parts)]
            shapes = {part.shape for part in parts}
            if len(shapes) != 1:
                raise value_error(
                    f"shapes of {name}",
                    sorted(shapes),
                    "there must be at least one part, and all of one shape",
                    "Merge parts that have the same queries and heads",
                )
            dtypes = {str(part.dtype) for part in parts}
            if len(dtypes) != 1:
                raise type_error(
                    f"dtypes of {name}", sorted(dtypes), "must all be equal", "Cast the parts"
                )
            parts = jnp.stack(parts)
        x = as_array(name, parts)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise type_error(f"{name}.dtype", x.dtype, "must be floating point", "Cast the parts")
        stacked.append(x)
    out, lse = stacked
    if out.ndim < 2:
        raise value_error(
            "outs.shape", out.shape, "must be [parts, ..., Dv]", "Stack the parts on a leading axis"
        )
    check_shape(
        "lses", lse, out.shape[:-1], "the shape of outs without Dv", "Pass the lse of each out"
    )
    return out, lse


def _is_one_key(x: Any) -> bool:
    """Whether ``x`` is a typed key, or the raw words of one."""
    if not isinstance(x, jax.Array | np.ndarray):
        return False
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x.shape == ()
    return x.dtype == jnp.uint32 and x.shape == jax.eval_shape(jax.random.PRNGKey, 0).shape
