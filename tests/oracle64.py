"""The attention contract in float64 NumPy: slow, dense, and independent of jax_flash and of JAX.

Written from the contract alone (design.md, section 2), so that every implementation can be held to
it. With x the logits before the soft cap, c the cap, and sink a logit that has no value row:

    x     = scale·q·k + bias + slope·(key_index − query_position)
    s     = c·tanh(x / c), and −inf where the key is hidden
    lse   = log(exp(sink) + Σ_j exp(s_j))          p = exp(s − lse)
    out   = (p·drop) · v                           drop = keep / (1 − dropout_rate)
    delta = rowsum(do·out) − dlse
    ds    = p·(drop·(do·vᵀ) − delta)               dx = ds·(1 − tanh²(x / c))
    dq    = scale·dx·k      dk = scale·dxᵀ·q       dv = (p·drop)ᵀ·do
    dbias = dx              dslope = Σ dx·(key_index − query_position)
    dsink = −Σ exp(sink − lse)·delta

Two kinds of row are set apart. An EMPTY row sees no key: out 0, lse −inf, no gradient, whatever
its q. A tainted row sees a key and meets a non-finite number (in its own q, in the k or v of a key
it sees, or in a visible bias, where −inf hides instead): out and lse NaN, no gradient. No other row
is touched by a non-finite number.

Letters: B batch, Tq/Tk lengths, Hq/Hk heads, D and Dv head dims, P pages, S page size.
"""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np


def visible(
    tq,
    tk,
    *,
    batch,
    num_heads,
    is_causal=False,
    window=None,
    q_offset=0,
    q_lengths=None,
    kv_lengths=None,
    q_segments=None,
    kv_segments=None,
    mask=None,
):
    """Says which keys each query sees: the AND of everything given.

    Args:
      tq: number of query rows.
      tk: number of keys.
      batch: B.
      num_heads: Hq.
      is_causal: hide keys after the query's position, which is row + q_offset.
      window: (left, right), or w for (w, w): the keys kept beside that position, inclusive.
      q_offset: int, or int [B].
      q_lengths: int [B]; rows at or beyond it see nothing.
      kv_lengths: int [B]; keys at or beyond it are hidden.
      q_segments: int [B, Tq]; a key is seen only by queries of its own segment.
      kv_segments: int [B, Tk]; given exactly when q_segments is.
      mask: bool, broadcastable to the result; True keeps.

    Returns:
      bool [B, Hq, Tq, Tk].
    """
    ahead = _distance(tq, tk, q_offset)
    seen = np.ones((batch, tq, tk), bool)
    if is_causal:
        seen &= ahead <= 0
    if window is not None:
        left, right = np.broadcast_to(window, 2)
        seen &= (ahead >= -left) & (ahead <= right)
    if q_lengths is not None:
        seen &= np.arange(tq)[:, None] < np.reshape(q_lengths, (batch, 1, 1))
    if kv_lengths is not None:
        seen &= np.arange(tk) < np.reshape(kv_lengths, (batch, 1, 1))
    if (q_segments is None) != (kv_segments is None):
        raise ValueError("q_segments and kv_segments go together: one of them is missing")
    if q_segments is not None:
        seen &= np.asarray(q_segments)[:, :, None] == np.asarray(kv_segments)[:, None, :]
    seen = np.repeat(seen[:, None], num_heads, axis=1)
    return seen if mask is None else seen & np.broadcast_to(np.asarray(mask, bool), seen.shape)


def forward(
    q,
    k,
    v,
    *,
    scale=None,
    bias=None,
    alibi_slopes=None,
    soft_cap=None,
    sinks=None,
    keep=None,
    dropout_rate=0.0,
    q_offset=0,
    **mask_keywords,
):
    """Computes attention and everything its gradients need.

    Args:
      q: [B, Tq, Hq, D].
      k: [B, Tk, Hk, D]; query head h reads key/value head h // (Hq / Hk).
      v: [B, Tk, Hk, Dv].
      scale: float; 1/sqrt(D) when None.
      bias: broadcastable to [B, Hq, Tq, Tk]; −inf hides the key, any finite value is only a bias.
      alibi_slopes: [Hq]; adds slope·(key_index − query_position), so ≤ 0 in the past.
      soft_cap: float c > 0.
      sinks: [Hq], logits that join the softmax denominator only.
      keep: bool [B, Hq, Tq, Tk], the probabilities that dropout keeps; needed if 0 < rate < 1.
      dropout_rate: float in [0, 1]; at 1 nothing is kept.
      q_offset: int, or int [B]: position of row 0 among the keys.
      **mask_keywords: the other keywords of `visible`.

    Returns:
      A namespace in the layout [B, Hq, T, ...]: cleaned q, and k and v repeated to Hq heads; scale;
      distance; slope (ds/dx); p; drop; p_sink; out; lse; ok, the rows neither EMPTY nor tainted.
    """
    q, k, v = (np.swapaxes(_float64(x), 1, 2) for x in (q, k, v))
    (batch, num_heads, tq, head_dim), tk = q.shape, k.shape[2]
    k, v = (np.repeat(x, num_heads // max(x.shape[1], 1), axis=1) for x in (k, v))
    scale = head_dim**-0.5 if scale is None else scale
    bias = _float64(0.0 if bias is None else bias)
    distance = _distance(tq, tk, q_offset)[:, None]
    seen = visible(tq, tk, batch=batch, num_heads=num_heads, q_offset=q_offset, **mask_keywords)
    seen &= bias != -np.inf

    bad_q = ~np.isfinite(q).all(-1)
    bad_kv = ~(np.isfinite(k).all(-1) & np.isfinite(v).all(-1))
    tainted = (seen & (bad_q[..., None] | bad_kv[:, :, None, :] | ~np.isfinite(bias))).any(-1)
    empty = ~seen.any(-1)
    q, k, v, bias = (np.where(np.isfinite(x), x, 0.0) for x in (q, k, v, bias))

    x = scale * (q @ np.swapaxes(k, 2, 3)) + bias
    if alibi_slopes is not None:
        x = x + _float64(alibi_slopes)[:, None, None] * distance
    s, slope = x, 1.0
    if soft_cap is not None:
        s = soft_cap * np.tanh(x / soft_cap)
        slope = 1.0 - (s / soft_cap) ** 2
    s = np.where(seen, s, -np.inf)

    sink = _float64(np.full(num_heads, -np.inf) if sinks is None else sinks)[:, None]
    m = np.maximum(s.max(-1, initial=-np.inf), sink)
    m = np.where(m == -np.inf, 0.0, m)
    exp_s, exp_sink = np.exp(s - m[..., None]), np.exp(sink - m)
    total = np.where(empty, 1.0, exp_s.sum(-1) + exp_sink)
    p = exp_s / total[..., None]
    lse = np.where(tainted, np.nan, np.where(empty, -np.inf, m + np.log(total)))

    if 0.0 < dropout_rate < 1.0 and keep is None:
        raise ValueError(f"dropout_rate={dropout_rate} needs keep, the bool [B, Hq, Tq, Tk]")
    drop = np.float64(dropout_rate < 1.0)
    if keep is not None and dropout_rate < 1.0:
        drop = np.asarray(keep, bool) / (1.0 - dropout_rate)
    out = np.where(tainted[..., None], np.nan, (p * drop) @ v)
    return SimpleNamespace(
        q=q,
        k=k,
        v=v,
        scale=scale,
        distance=distance,
        slope=slope,
        p=p,
        drop=drop,
        p_sink=exp_sink / total,
        out=out,
        lse=lse,
        ok=~(empty | tainted),
    )


def attention(q, k, v, **terms):
    """Computes attention: out [B, Tq, Hq, Dv] and its natural-log lse [B, Tq, Hq].

    Takes the arguments of `forward` and, as keywords, those of `visible`.
    """
    fwd = forward(q, k, v, **terms)
    return np.swapaxes(fwd.out, 1, 2), np.swapaxes(fwd.lse, 1, 2)


def attention_grads(q, k, v, do, dlse=None, *, bias=None, alibi_slopes=None, sinks=None, **terms):
    """Computes the gradients of attention, from the formulas at the head of this file.

    Takes the arguments of `attention` and the cotangents do [B, Tq, Hq, Dv] and dlse [B, Tq, Hq]
    (None for 0), whose values in EMPTY and tainted rows are ignored.

    Returns:
      {"dq", "dk", "dv", "dbias", "dsinks", "dalibi_slopes"}, each shaped like the input it belongs
      to, or None where that input is None.
    """
    fwd = forward(q, k, v, bias=bias, alibi_slopes=alibi_slopes, sinks=sinks, **terms)
    do = np.where(fwd.ok[..., None], np.swapaxes(_float64(do), 1, 2), 0.0)
    dlse = 0.0 if dlse is None else np.where(fwd.ok, np.swapaxes(_float64(dlse), 1, 2), 0.0)
    delta = (do * np.where(fwd.ok[..., None], fwd.out, 0.0)).sum(-1) - dlse
    ds = fwd.p * (fwd.drop * (do @ np.swapaxes(fwd.v, 2, 3)) - delta[..., None])
    dx = ds * fwd.slope

    def per_kv_head(x):  # [B, Hq, Tk, D] -> [B, Tk, Hk, D]
        num_kv_heads = np.shape(k)[2]
        group = x.shape[1] // max(num_kv_heads, 1)
        x = x.reshape(x.shape[0], num_kv_heads, group, *x.shape[2:]).sum(2)
        return np.swapaxes(x, 1, 2)

    return {
        "dq": np.swapaxes(fwd.scale * (dx @ fwd.k), 1, 2),
        "dk": per_kv_head(fwd.scale * (np.swapaxes(dx, 2, 3) @ fwd.q)),
        "dv": per_kv_head(np.swapaxes(fwd.p * fwd.drop, 2, 3) @ do),
        "dbias": None if bias is None else _sum_to_shape(dx, np.shape(bias)),
        "dsinks": None if sinks is None else -(fwd.p_sink * delta).sum((0, 2)),
        "dalibi_slopes": None if alibi_slopes is None else (dx * fwd.distance).sum((0, 2, 3)),
    }


def ragged_attention(q, k, v, cu_q, cu_k=None, *, is_causal, **terms):
    """Computes attention within each of B packed sequences, queries last (bottom-right).

    Args:
      q: [total_q, Hq, D].
      k: [total_k, Hk, D].
      v: [total_k, Hk, Dv].
      cu_q: int [B + 1], where each sequence's queries start and end; rows outside are EMPTY.
      cu_k: int [B + 1], the same for keys; cu_q when None.
      is_causal: bool; row i of a sequence stands at position i + kv_len − q_len.
      **terms: scale, window, soft_cap, sinks, alibi_slopes.

    Returns:
      out [total_q, Hq, Dv] and lse [total_q, Hq].
    """
    out = np.zeros((*np.shape(q)[:2], np.shape(v)[2]))
    lse = np.full(np.shape(q)[:2], -np.inf)
    for rows, keys, q_offset in _sequences(cu_q, cu_k):
        qkv = q[None, rows], k[None, keys], v[None, keys]
        out[None, rows], lse[None, rows] = attention(
            *qkv, is_causal=is_causal, q_offset=q_offset, **terms
        )
    return out, lse


def ragged_attention_grads(q, k, v, do, dlse=None, *, cu_q, cu_k=None, is_causal, **terms):
    """Computes the gradients of `ragged_attention`.

    Takes its arguments and the cotangents do [total_q, Hq, Dv] and dlse [total_q, Hq] (None for 0).
    Returns what `attention_grads` does; tokens outside every sequence get zeros.
    """
    grads = {name: np.zeros(np.shape(x)) for name, x in (("dq", q), ("dk", k), ("dv", v))}
    grads |= dict.fromkeys(("dbias", "dsinks", "dalibi_slopes"))
    summed = [f"d{name}" for name in ("sinks", "alibi_slopes") if terms.get(name) is not None]
    grads |= {name: np.zeros(np.shape(q)[1]) for name in summed}
    dlse = np.zeros(np.shape(q)[:2]) if dlse is None else dlse
    for rows, keys, q_offset in _sequences(cu_q, cu_k):
        inputs = q[None, rows], k[None, keys], v[None, keys], do[None, rows], dlse[None, rows]
        part = attention_grads(*inputs, is_causal=is_causal, q_offset=q_offset, **terms)
        for name, where in (("dq", rows), ("dk", keys), ("dv", keys)):
            grads[name][where] = part[name][0]
        for name in summed:
            grads[name] += part[name]
    return grads


def paged_attention(
    q,
    key_pages,
    value_pages,
    block_tables,
    kv_lens,
    *,
    page_layout="HND",
    is_causal=True,
    k_scale=None,
    v_scale=None,
    **terms,
):
    """Computes attention of the last Tq tokens of each sequence on a paged cache (bottom-right).

    Args:
      q: [B, Tq, Hq, D].
      key_pages: [P, Hk, S, D] (HND) or [P, S, Hk, D] (NHD).
      value_pages: the same with Dv.
      block_tables: int [B, max_pages]; entries at or beyond ceil(kv_len / S) are never read.
      kv_lens: int [B], the keys of each sequence, those of the Tq new tokens included.
      page_layout: "HND" or "NHD".
      is_causal: bool; row i stands at position i + kv_len − Tq.
      k_scale: multiplies the keys read: a scalar, [Hk], or the pool's shape without its last axis.
      v_scale: the same for the values.
      **terms: scale, window, soft_cap, sinks, alibi_slopes.

    Returns:
      out [B, Tq, Hq, Dv] and lse [B, Tq, Hq].
    """

    def gather(pool, pool_scale, pages, kv_len):
        def rows(x):  # [P, S, Hk, ...] or [P, Hk, S, ...] -> [1, kv_len, Hk, ...]
            x = _float64(np.asarray(x)[pages])
            x = np.swapaxes(x, 1, 2) if page_layout == "HND" else x
            return x.reshape(1, len(pages) * page_size, *x.shape[2:])[:, :kv_len]

        pool_scale = np.asarray(1.0 if pool_scale is None else pool_scale)
        factor = rows(pool_scale) if pool_scale.ndim == 3 else _float64(pool_scale)
        return rows(pool) * factor[..., None]

    page_size = key_pages.shape[{"HND": 2, "NHD": 1}[page_layout]]
    outs = [np.zeros((0, *np.shape(q)[1:3], np.shape(value_pages)[3]))]
    lses = [np.zeros((0, *np.shape(q)[1:3]))]
    for b, kv_len in enumerate(np.asarray(kv_lens).tolist()):
        num_pages = -(-kv_len // page_size)
        pages = np.asarray(block_tables)[b, :num_pages].astype(np.int64)
        if len(pages) < num_pages or (pages < 0).any() or (pages >= len(key_pages)).any():
            raise ValueError(
                f"sequence {b} of kv_len {kv_len} has pages {pages}: too few or not in the pool"
            )
        k = gather(key_pages, k_scale, pages, kv_len)
        v = gather(value_pages, v_scale, pages, kv_len)
        q_offset = kv_len - np.shape(q)[1]
        out, lse = attention(q[b : b + 1], k, v, is_causal=is_causal, q_offset=q_offset, **terms)
        outs.append(out)
        lses.append(lse)
    return np.concatenate(outs), np.concatenate(lses)


def merge(outs, lses):
    """Merges attention over disjoint sets of keys into attention over their union.

    Args:
      outs: N arrays [..., Dv].
      lses: N arrays [...]; a part whose lse is −inf has no say, whatever its out.

    Returns:
      out [..., Dv] and lse [...]; EMPTY where every part is.
    """
    outs, lses = _float64(outs), _float64(lses)
    m = lses.max(0)
    m = np.where(m == -np.inf, 0.0, m)
    outs = np.where(lses[..., None] == -np.inf, 0.0, outs)
    weights = np.exp(lses - m)
    empty = weights.sum(0) == 0.0
    total = np.where(empty, 1.0, weights.sum(0))
    out = (weights[..., None] * outs).sum(0) / total[..., None]
    return out, np.where(empty, -np.inf, m + np.log(total))


def _float64(x):
    return np.asarray(x).astype(np.float64)


def _distance(tq, tk, q_offset):
    """Returns key_index − query_position, int [1 or B, Tq, Tk]."""
    return np.arange(tk) - np.arange(tq)[:, None] - np.reshape(q_offset, (-1, 1, 1))


def _sequences(cu_q, cu_k):
    """Yields each sequence's query slice, key slice and q_offset."""
    cu_q = np.asarray(cu_q).tolist()
    cu_k = cu_q if cu_k is None else np.asarray(cu_k).tolist()
    for (q0, q1), (k0, k1) in zip(pairwise(cu_q), pairwise(cu_k), strict=True):
        yield slice(q0, q1), slice(k0, k1), (k1 - k0) - (q1 - q0)


def _sum_to_shape(x, shape):
    """Sums x over the axes along which `shape` was broadcast to x.shape."""
    x = x.sum(tuple(range(x.ndim - len(shape))))
    axes = tuple(axis for axis, size in enumerate(shape) if size == 1)
    return x.sum(axes, keepdims=True)
