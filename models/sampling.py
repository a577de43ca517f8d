"""Choosing the next token: temperature, top-k and top-p as pure functions on logits.

Each filter takes logits `[..., V]` and returns fp32 logits of the same shape in which the tokens it
rules out are -inf. They compose; `sample` applies them in the usual order:

    temperature -> top-k -> renormalise -> top-p -> draw

The edges are fixed: `temperature=0`, `top_k=1` and `top_p=0` are greedy, with ties going to the
lowest id; `top_k` of 0, None or at least V and `top_p` of 1 or None change nothing; at least one
token always survives; a token at -inf is never drawn; the same key draws the same tokens.

Settings are Python numbers or arrays, one per row (shape `[...]`), so that one jitted call can
serve requests with different settings. A setting that is traced cannot be checked for its range.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Setting = float | int | jax.Array | np.ndarray

# Below the smallest normal fp32 number a division by the temperature means nothing: greedy.
_COLDEST = float(np.finfo(np.float32).tiny)
_HOTTEST = float(np.finfo(np.float32).max)
# Rounding in a running sum of probabilities must not let a token in whose predecessors hold p.
_ROUNDING = 1e-6


def sample(
    key: jax.Array,
    logits: jax.Array,
    *,
    temperature: Setting = 1.0,
    top_k: Setting | None = None,
    top_p: Setting | None = None,
) -> jax.Array:
    """Draws one token id per row.

    Args:
        key: a `jax.random` key.
        logits: float `[..., V]`.
        temperature: >= 0 and finite; 0 is greedy.
        top_k: integer >= 0, keeps the k most likely tokens; 0 or None keeps all.
        top_p: in [0, 1], keeps the fewest most likely tokens that together hold at least p.

    Returns:
        int32 `[...]`. A row that holds NaN or +inf, or nothing above -inf, has no next token: -1,
        an id that `CharTokenizer.decode` refuses.

    Raises:
        TypeError, ValueError: a setting has the wrong type, shape or range.
    """
    logits = _as_float32(logits)
    kept = apply_top_p(apply_top_k(apply_temperature(logits, temperature), top_k), top_p)
    token = jax.random.categorical(key, kept, axis=-1).astype(jnp.int32)
    return jnp.where(jnp.isfinite(jnp.max(logits, axis=-1)), token, jnp.int32(-1))


def sample_rows(
    seeds: jax.Array,
    indices: jax.Array,
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array | None,
    top_p: jax.Array | None,
) -> jax.Array:
    """Draws the next token of many texts at once, each with settings and a stream of its own.

    Token i of a text is drawn with `fold_in(key(seed), i)`, whatever it shares a batch with.

    Args:
        seeds: uint32 `[B]`, one a text.
        indices: int32 `[B]`, how many tokens of each text were drawn before.
        logits: float `[B, V]`.
        temperature: fp32 `[B]`; see `sample`, as for the other two.
        top_k: int32 `[B]`, 0 keeps all; None keeps all in all rows, and sorts nothing.
        top_p: fp32 `[B]`, 1 keeps all; None likewise.

    Returns:
        int32 `[B]`; -1 where `sample` gives it.
    """

    def draw(seed: jax.Array, i: jax.Array, row: jax.Array, t: jax.Array, k: Any, p: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(seed), i)
        return sample(key, row, temperature=t, top_k=k, top_p=p)

    return jax.vmap(draw)(seeds, indices, logits, temperature, top_k, top_p)


def check_settings(
    temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> None:
    """Raises what `sample` would raise for these settings of one row."""
    _checked("temperature", temperature, (), 0.0, _HOTTEST)
    if top_k is not None:
        _checked("top_k", top_k, (), 0, math.inf, integer=True)
    if top_p is not None:
        _checked("top_p", top_p, (), 0.0, 1.0)


def greedy(logits: jax.Array) -> jax.Array:
    """The most likely token id of each row, the lowest one on ties: int32 `[...]`."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def apply_temperature(logits: jax.Array, temperature: Setting) -> jax.Array:
    """`logits / temperature`, shifted so that the largest is 0; 0 keeps only the greedy token."""
    logits = _as_float32(logits)
    t = _setting("temperature", temperature, logits, 0.0, _HOTTEST)
    cold = t < _COLDEST
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / jnp.where(cold, 1.0, t)
    is_greedy = jnp.arange(logits.shape[-1], dtype=jnp.int32) == greedy(logits)[..., None]
    return jnp.where(cold, jnp.where(is_greedy, 0.0, -jnp.inf), scaled)


def apply_top_k(logits: jax.Array, top_k: Setting | None) -> jax.Array:
    """Keeps exactly k tokens, the most likely ones; of equal ones those with the lowest ids."""
    logits = _as_float32(logits)
    if top_k is None:
        return logits
    k = _setting("top_k", top_k, logits, 0, math.inf, integer=True)
    order = _most_likely_first(logits)
    return jnp.where((_ranks(order) < k) | (k == 0), logits, -jnp.inf)


def apply_top_p(logits: jax.Array, top_p: Setting | None) -> jax.Array:
    """Keeps the most likely tokens until they hold p of the mass (nucleus sampling).

    The mass is that of the tokens still above -inf, renormalised, so a filter before this one does
    not change what p means. A token is kept iff the tokens before it hold less than p.

    Source: Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020.
    """
    logits = _as_float32(logits)
    if top_p is None:
        return logits
    p = _setting("top_p", top_p, logits, 0.0, 1.0)
    order = _most_likely_first(logits)
    mass = jnp.take_along_axis(jax.nn.softmax(logits, axis=-1), order, axis=-1)
    mass_before = jnp.cumsum(mass, axis=-1) - mass
    rank = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    keep = (mass_before < p * (1.0 - _ROUNDING)) | (rank == 0) | (p >= 1.0)
    keep = jnp.take_along_axis(keep, _ranks(order), axis=-1)
    return jnp.where(keep, logits, -jnp.inf)


def _most_likely_first(logits: jax.Array) -> jax.Array:
    """Token ids from most to least likely, ties by id (the sort is stable): int32 `[..., V]`."""
    return jnp.argsort(-logits, axis=-1, stable=True).astype(jnp.int32)


def _ranks(order: jax.Array) -> jax.Array:
    """The inverse permutation: each token's place in `order`."""
    return jnp.argsort(order, axis=-1).astype(jnp.int32)


def _as_float32(logits: jax.Array) -> jax.Array:
    logits = jnp.asarray(logits)
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise TypeError(f"logits must be floating point, got {logits.dtype}")
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ValueError(f"logits must have shape [..., V] with V >= 1, got {logits.shape}")
    return logits.astype(jnp.float32)


def _setting(
    name: str,
    value: Setting,
    logits: jax.Array,
    low: float,
    high: float,
    integer: bool = False,
) -> jax.Array:
    """Checks a setting and returns it as an array that broadcasts against logits `[..., V]`."""
    value = _checked(name, value, logits.shape[:-1], low, high, integer)
    if integer and isinstance(value, np.ndarray):  # int32 must hold it; any k above V keeps all
        value = np.minimum(value, logits.shape[-1])
    return jnp.asarray(value).astype(jnp.int32 if integer else jnp.float32)[..., None]


def _checked(
    name: str,
    value: Setting,
    rows: tuple[int, ...],
    low: float,
    high: float,
    integer: bool = False,
) -> np.ndarray | jax.core.Tracer:
    """A setting as an array of shape () or `rows`, its range checked where it is known."""
    number = "an integer" if integer else "a number"
    rule = f"{number} in [{low:g}, {high:g}], or one per row"
    if not isinstance(value, jax.core.Tracer):
        value = np.asarray(value)
    real = jnp.issubdtype(value.dtype, jnp.floating) and not integer
    if not (real or jnp.issubdtype(value.dtype, jnp.integer)):
        raise TypeError(f"{name} must be {rule}, got {value}")
    if value.shape not in ((), rows):
        raise ValueError(f"{name} must be {rule} {rows}, got shape {value.shape}")
    # Not "outside": NaN must be refused too.
    if isinstance(value, np.ndarray) and not np.all((value >= low) & (value <= high)):
        raise ValueError(f"{name} must be {rule}, got {value}")
    return value
