"""Measured tolerances: how wrong may an implementation be, and may it refuse?

The error of an implementation against the float64 oracle may be at most twice that of a plain
computation in the same precision (:func:`plain_attention`), plus one rounding of the data.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash import UnsupportedError, backends, explain
from jax_flash.mask import dropout_keep, dropout_seeds
from tests import oracle64 as oracle
from tests.kernel_cases import ON_GPU

IMPLEMENTATIONS = backends.NAMES
PLAIN_XLA = ("chunked", "xla")  # these run every valid call, everywhere
ORACLE_NAMES = {  # of the public keywords that the oracle calls something else
    "query": "q",
    "key": "k",
    "value": "v",
    "logits_soft_cap": "soft_cap",
    "local_window_size": "window",
    "query_seq_lengths": "q_lengths",
    "key_value_seq_lengths": "kv_lengths",
    "query_segment_ids": "q_segments",
    "key_value_segment_ids": "kv_segments",
}
FLOATS = ("query", "key", "value", "bias", "sinks", "alibi_slopes")

# LLVM's optimiser takes half of the compilation time on the CPU, and these arrays are tiny.
fast_jit = functools.partial(
    jax.jit,
    compiler_options={"xla_backend_optimization_level": 0}
    if jax.default_backend() == "cpu"
    else None,
)


def rand(*shape, dtype="float32", seed=0):
    """Standard normal numbers, rounded to `dtype`: a NumPy array, equal on every machine."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(jnp.dtype(dtype))


def bits(tree):
    """The arrays of a tree as bytes: NaN equals NaN, and -0 (0 times a hidden number) equals 0."""

    def of(x):
        x = np.asarray(x)
        return np.where(x == 0, np.zeros_like(x), x).tobytes()

    return jax.tree.map(of, tree)


def assert_unmoved(implementation, got, clean, note=""):
    """Nothing has changed a bit, except where `"mosaic"` computes out of a tile with NaN anew."""
    if implementation != "mosaic":
        assert bits(got) == bits(clean), note
        return
    leaves = jax.tree.leaves(clean)
    rounding = 2**-19 if all(x.dtype == jnp.float32 for x in leaves) else 2**-7
    for x, y in zip(jax.tree.leaves(got), leaves, strict=True):
        x, y = (np.asarray(a).astype(np.float64) for a in (x, y))
        np.testing.assert_array_equal(np.isfinite(x), np.isfinite(y), err_msg=str(note))
        seen = np.isfinite(y)
        limit = rounding * np.abs(y[seen]).max(initial=0.0)
        np.testing.assert_allclose(x[seen], y[seen], atol=limit, err_msg=str(note))


def runs(implementation, function, *args, **kwargs):
    """Says whether the implementation runs the call; where it does not, checks how it refuses.

    A refusal is an UnsupportedError that gives the reason of the implementation's `supports`. Calls
    that differ only in the values of their arrays have one answer, and are asked once.
    """
    if implementation in PLAIN_XLA:
        return True  # or the call, when made, raises
    leaves, tree = jax.tree.flatten((args, kwargs))
    is_array = [hasattr(x, "dtype") for x in leaves]
    arrays = [x for x, is_one in zip(leaves, is_array, strict=True) if is_one]
    facts = [
        (x.shape, x.dtype) if is_one else x for x, is_one in zip(leaves, is_array, strict=True)
    ]
    # A test may pretend to be on another device.
    question = (backends.device_of(), function, tree, *facts)
    if (implementation, question) in _answers:
        return _answers[implementation, question]

    def call(implementation, *arrays):
        arrays = iter(arrays)
        full = [next(arrays) if is_one else x for x, is_one in zip(leaves, is_array, strict=True)]
        args, kwargs = jax.tree.unflatten(tree, full)
        return function(*args, implementation=implementation, **kwargs)

    if question not in _specs:
        (decision,) = explain(call, "xla", *arrays).decisions
        _specs[question] = decision.spec, decision.device
    reason = backends.reason_against(implementation, *_specs[question])
    if reason is not None:
        assert reason.strip()
        with pytest.raises(UnsupportedError, match=re.escape(f"{implementation}: {reason}")):
            jax.eval_shape(functools.partial(call, implementation), *arrays)
    _answers[implementation, question] = reason is None
    return reason is None


_specs, _answers = {}, {}


def gradients(function, **static):
    """Compiles `function` with its gradients.

    Returns:
      A function of (floats, arrays, cotangents), all keywords of `function` but the last, which are
      (do, dlse), or (do,) without residual. It gives ((out, lse) or (out,), gradients of floats).
    """

    def forward(floats, arrays):
        def call(floats):
            results = function(**floats, **arrays, **static)
            return results if isinstance(results, tuple) else (results,)

        return jax.vjp(call, floats)

    def backward(pullback, cotangents):
        return pullback(cotangents)[0]

    def both(floats, arrays, cotangents):
        results, pullback = forward(floats, arrays)
        return results, backward(pullback, cotangents)

    if not (ON_GPU and static.get("implementation") == "mosaic"):
        return fast_jit(both)
    # One by one, as in a scan over layers: XLA once got a kernel wrong that it makes only there.
    forward, backward = fast_jit(forward), fast_jit(backward)
    return both


def oracle_terms(keywords):
    """Public keywords of a dense call as those of the oracle."""
    terms = {ORACLE_NAMES.get(name, name): x for name, x in keywords.items()}
    rng, rate = terms.pop("dropout_rng", None), terms.get("dropout_rate", 0.0)
    if rng is not None and rate > 0.0:
        (batch, tq, num_heads, _), tk = terms["q"].shape, terms["k"].shape[1]
        indices = (jnp.arange(n, dtype=jnp.int32) for n in (num_heads, tq, tk))
        terms["keep"] = np.asarray(dropout_keep(dropout_seeds(rng, batch), *indices, rate))
    return terms


def plain_attention(q, k, v, bias, sinks, alibi_slopes, *, distance, visible, drop, scale, cap):
    """Attention as one would write it: products in the inputs' dtype, softmax in fp32.

    Args:
      q: [B, Tq, Hq, D].
      k: [B, Tk, Hk, D].
      v: [B, Tk, Hk, Dv].
      bias: fp32 [B, Hq, Tq, Tk].
      sinks: fp32 [Hq].
      alibi_slopes: fp32 [Hq].
      distance: key_index − query_position, fp32 [1 or B, 1, Tq, Tk].
      visible: bool [B, Hq, Tq, Tk].
      drop: keep / (1 − dropout_rate), fp32 [B, Hq, Tq, Tk].
      scale: float.
      cap: the soft cap, or None.

    Returns:
      out [B, Tq, Hq, Dv] and lse [B, Tq, Hq].
    """
    group = q.shape[2] // max(k.shape[2], 1)
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    x = jnp.einsum("bqhd,bkhd->bhqk", q * scale.astype(q.dtype), k, precision="highest")
    x = x.astype(jnp.float32) + bias + alibi_slopes[:, None, None] * distance
    x = x if cap is None else cap * jnp.tanh(x / cap)
    sinks = sinks[:, None]
    m = jnp.maximum(jnp.max(x, axis=-1, where=visible, initial=-jnp.inf), sinks)
    m = jax.lax.stop_gradient(jnp.where(m == -jnp.inf, 0.0, m))
    p = jnp.where(visible, jnp.exp(jnp.where(visible, x - m[..., None], 0.0)), 0.0)
    empty = ~visible.any(-1)
    l = jnp.where(empty, 1.0, p.sum(-1) + jnp.exp(sinks - m))
    p = (p * drop).astype(q.dtype)
    out = jnp.einsum("bhqk,bkhd->bqhd", p, v, precision="highest")
    out = (out.astype(jnp.float32) / l.swapaxes(1, 2)[..., None]).astype(q.dtype)
    return out, jnp.where(empty, -jnp.inf, m + jnp.log(l)).swapaxes(1, 2)


@functools.cache
def _plain_program(cap):
    def run(floats, cotangents, distance, visible, drop, scale):
        def call(*floats):
            facts = {"distance": distance, "visible": visible, "drop": drop, "scale": scale}
            return plain_attention(*floats, **facts, cap=cap)

        if cotangents is None:
            return call(*floats)
        results, pullback = jax.vjp(call, *floats)
        return *results, *pullback(cotangents)

    return fast_jit(run)


def plain_errors(keywords, want, do=None, dlse=None, samples=4):
    """The errors of the plain computation of a dense call given by its public keywords.

    A small array has few errors, and they may all happen to be small. So the same call is computed
    several times, its axes shuffled, which changes the order of every sum.

    Args:
      keywords: the call's keywords, with query, key and value among them.
      want: what :func:`oracle_results` gave.
      do: cotangent of out; None to leave the gradients out.
      dlse: cotangent of lse.
      samples: number of computations.

    Returns:
      For each name in `want`, the largest error in that array (0.0 in an absent one).
    """
    terms = oracle_terms(keywords)
    q, k, v = (terms.pop(name) for name in "qkv")
    (batch, tq, hq, head_dim), tk, value_dim = q.shape, k.shape[1], v.shape[3]
    full = (batch, hq, tq, tk)
    cap, rate = terms.pop("soft_cap", None), terms.pop("dropout_rate", 0.0)
    scale = terms.pop("scale", None)
    scale = np.float32(head_dim**-0.5 if scale is None else scale)
    keep = np.broadcast_to(terms.pop("keep", np.bool(rate < 1.0)), full)
    drop = keep.astype(np.float32) / np.float32(1.0 - rate if rate < 1.0 else 1.0)
    given = {name: terms.pop(name, None) for name in ("bias", "sinks", "alibi_slopes")}
    visible = oracle.visible(tq, tk, batch=batch, num_heads=hq, **terms)
    bias = np.float32(0.0) if given["bias"] is None else np.asarray(given["bias"], np.float32)
    visible = visible & (bias != -np.inf)
    bias = np.broadcast_to(np.where(np.isfinite(bias), bias, np.float32(0.0)), full)
    sinks = np.full(hq, -np.inf, np.float32) if given["sinks"] is None else given["sinks"]
    slopes = np.zeros(hq, np.float32) if given["alibi_slopes"] is None else given["alibi_slopes"]
    distance = np.arange(tk) - np.arange(tq)[:, None]
    distance = distance - np.reshape(terms.get("q_offset", 0), (-1, 1, 1, 1))
    distance = np.broadcast_to(distance.astype(np.float32), (batch, 1, tq, tk))

    errors = dict.fromkeys(want, 0.0)
    for sample in range(samples):
        shuffle = np.random.default_rng(sample).permutation if sample else np.arange
        rows, keys, dims, value_dims = map(shuffle, (tq, tk, head_dim, value_dim))
        tile = np.ix_(range(batch), range(hq), rows, keys)
        plain = _plain_program(cap)(
            (
                q[:, rows][..., dims],
                k[:, keys][..., dims],
                v[:, keys][..., value_dims],
                bias[tile],
                sinks,
                slopes,
            ),
            None if do is None else (do[:, rows][..., value_dims], dlse[:, rows]),
            distance[:, :, rows][..., keys],
            visible[tile],
            drop[tile],
            scale,
        )
        every = [np.arange(n) for n in (batch, hq, k.shape[2])]
        shuffles = {
            "out": np.ix_(every[0], rows, every[1], value_dims),
            "lse": np.ix_(every[0], rows, every[1]),
            "dq": np.ix_(every[0], rows, every[1], dims),
            "dk": np.ix_(every[0], keys, every[2], dims),
            "dv": np.ix_(every[0], keys, every[2], value_dims),
            "dbias": tile,
            "dsinks": ...,
            "dalibi_slopes": ...,
        }
        for (name, shuffle), shuffled in zip(shuffles.items(), plain, strict=False):
            if want.get(name) is not None:
                x = np.empty_like(shuffled)
                x[shuffle] = shuffled
                x = _sum_to_shape(x, want[name].shape) if name == "dbias" else x
                errors[name] = max(errors[name], largest_error(x, want[name], f"plain {name}"))
    return errors


def _sum_to_shape(x, shape):
    axes = tuple(axis - len(shape) for axis, size in enumerate(shape) if size == 1)
    return np.asarray(jnp.sum(x, axes, keepdims=True)).reshape(shape)


def oracle_results(keywords, do, dlse):
    """What is right for a dense call given by its public keywords; see :func:`plain_results`."""
    terms = oracle_terms(keywords)
    out, lse = oracle.attention(**terms)
    return {"out": out, "lse": lse} | oracle.attention_grads(do=do, dlse=dlse, **terms)


def largest_error(got, want, name=""):
    """The largest error; asserts first that `got` is finite exactly where `want` is."""
    got = np.asarray(got).astype(np.float64)
    assert got.shape == np.shape(want), f"{name} has the shape {got.shape}, not {np.shape(want)}"
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[~finite], want[~finite], err_msg=name)
    assert np.isfinite(got[finite]).all(), f"{name} is not finite where it should be"
    return np.abs(got[finite] - want[finite]).max(initial=0.0)


def assert_close(got, want, plain_error=0.0, name="", *, slack=1.0, largest=1.0):
    """Asserts an error of at most twice that of the plain computation and one rounding.

    Args:
      got: the array to judge.
      want: float64, what is right; where it is not finite, `got` must be the same.
      plain_error: the largest error of the plain computation.
      name: what the array is, for the message.
      slack: times what is allowed.
      largest: the largest number that is rounded on the way; the data themselves are around 1.
    """
    error = largest_error(got, want, name)
    rounding = float(jnp.finfo(got.dtype).eps) * max(
        largest, np.abs(want, where=np.isfinite(want), out=np.zeros_like(want)).max(initial=0.0)
    )
    allowed = slack * (2.0 * plain_error + rounding)
    assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"
