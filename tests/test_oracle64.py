"""Checks of the float64 oracle against loops, closed forms and finite differences."""

import itertools
import math

import numpy as np
import pytest

from tests import oracle64 as oracle

NAN, INF = np.nan, np.inf


def rand(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def qkv(batch=2, tq=3, tk=4, hq=4, hk=2, d=3, dv=2):
    return (
        rand(batch, tq, hq, d, seed=1),
        rand(batch, tk, hk, d, seed=2),
        rand(batch, tk, hk, dv, seed=3),
    )


def probe(tq, tk, **terms):
    """The mask probe: q = 0 and one-hot v, so row i is (its visible keys) / (their count)."""
    q, k, v = np.zeros((1, tq, 1, 2)), rand(1, tk, 1, 2), np.eye(tk)[None, :, None]
    out, lse = oracle.attention(q, k, v, **terms)
    return out[0, :, 0], lse[0, :, 0]


def rows_of(tk, *visible_keys):
    """What the probe gives when row i sees visible_keys[i], and the lse that goes with it."""
    seen = np.array([[j in keys for j in range(tk)] for keys in visible_keys], float)
    count = seen.sum(-1)
    lse = [math.log(n) if n else -INF for n in count]
    return seen / np.maximum(count, 1)[:, None], np.array(lse)


def assert_same(got, want, **tolerance):
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, **({"rtol": 1e-12, "atol": 1e-13} | tolerance))


def assert_equal(got, want):
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x, y)


def assert_empty(out, lse):
    assert (out == 0).all()
    assert (lse == -INF).all()


def by_loops(q, k, v, *, seen, scale, bias, slopes, offset, cap, sinks, keep, rate):
    """The forward pass in scalar Python, term by term in the contract's order."""
    out, lse = np.zeros((*q.shape[:3], v.shape[-1])), np.full(q.shape[:3], -INF)
    for b, i, h in np.ndindex(q.shape[:3]):
        g = h // (q.shape[2] // k.shape[2])
        logits = {}
        for j in np.flatnonzero(seen[b, h, i]):
            x = scale * sum(a * c for a, c in zip(q[b, i, h], k[b, j, g], strict=True))
            x += bias[b, h, i, j] + slopes[h] * (j - (i + offset[b]))
            logits[j] = cap * math.tanh(x / cap)
        if logits:
            total = sum(map(math.exp, logits.values())) + math.exp(sinks[h])
            lse[b, i, h] = math.log(total)
            for j, s in logits.items():
                p = math.exp(s) / total
                out[b, i, h] += p * keep[b, h, i, j] / (1 - rate) * v[b, j, g]
    return out, lse


def test_forward_equals_loops():
    q, k, v = qkv()
    seen = rand(2, 4, 3, 4, seed=4) > 0
    offset, slopes, cap, rate = np.array([1, -2]), rand(4, seed=8), 1.5, 0.25
    terms = {"scale": 0.7, "bias": 3 * rand(2, 4, 3, 4, seed=5), "sinks": rand(4, seed=6)}
    terms["keep"] = rand(2, 4, 3, 4, seed=7) > 0
    renamed = {"q_offset": offset, "alibi_slopes": slopes, "soft_cap": cap, "dropout_rate": rate}
    got = oracle.attention(q, k, v, mask=seen, **renamed, **terms)
    want = by_loops(q, k, v, seen=seen, offset=offset, slopes=slopes, cap=cap, rate=rate, **terms)
    assert (want[1] == -INF).any()
    assert_same(got, want)


@pytest.mark.parametrize(
    ("tq", "tk", "terms", "visible_keys"),
    [
        (2, 5, {"is_causal": True}, [[0], [0, 1]]),
        (2, 5, {"is_causal": True, "q_offset": 3}, [range(4), range(5)]),
        (5, 2, {"is_causal": True, "q_offset": -3}, [[], [], [], [0], [0, 1]]),
        (1, 8, {"is_causal": True, "q_offset": 7}, [range(8)]),
        (9, 9, {"window": (0, 0)}, [[i] for i in range(9)]),
        (9, 9, {"window": (2, 0)}, [range(max(i - 2, 0), i + 1) for i in range(9)]),
        (9, 9, {"window": (0, 2)}, [range(i, min(i + 3, 9)) for i in range(9)]),
        (9, 9, {"window": 2}, [range(max(i - 2, 0), min(i + 3, 9)) for i in range(9)]),
        (9, 9, {"window": 2, "is_causal": True}, [range(max(i - 2, 0), i + 1) for i in range(9)]),
        (9, 9, {"window": (8, 0)}, [range(i + 1) for i in range(9)]),
        (5, 2, {"window": (1, 0)}, [[0], [0, 1], [1], [], []]),
        (2, 5, {"window": (1, 1), "q_offset": 2}, [[1, 2, 3], [2, 3, 4]]),
        (3, 4, {"q_lengths": [2], "kv_lengths": [3]}, [range(3), range(3), []]),
        (3, 4, {"kv_lengths": [0]}, [[], [], []]),
        (3, 4, {"q_segments": [[1, 2, 7]], "kv_segments": [[2, 1, 1, 0]]}, [[1, 2], [0], []]),
        (3, 3, {"is_causal": True, "mask": np.array([0, 1, 1])}, [[], [1], [1, 2]]),
        (2, 3, {"bias": np.array([[0, -INF, 0], [-INF] * 3])}, [[0, 2], []]),
        (2, 3, {"bias": np.array([[0, -INF, 0], [-INF] * 3]), "soft_cap": 2.0}, [[0, 2], []]),
    ],
)
def test_mask_probe(tq, tk, terms, visible_keys):
    assert_same(probe(tq, tk, **terms), rows_of(tk, *visible_keys))


def test_visible_differs_by_batch_row_and_head():
    mask = np.ones((1, 2, 1, 4), bool)
    mask[0, 1, 0, 0] = False
    lengths = {"q_lengths": np.array([2, 1]), "kv_lengths": np.array([4, 2])}
    causal = {"is_causal": True, "q_offset": np.array([0, 2])}
    seen = oracle.visible(2, 4, batch=2, num_heads=2, mask=mask, **causal, **lengths)
    head0 = np.array([[[1, 0, 0, 0], [1, 1, 0, 0]], [[1, 1, 0, 0], [0, 0, 0, 0]]], bool)
    head1 = head0 & [False, True, True, True]
    np.testing.assert_array_equal(seen, np.stack([head0, head1], axis=1))


def test_segments_come_in_pairs():
    with pytest.raises(ValueError, match="go together"):
        oracle.visible(2, 2, batch=1, num_heads=1, q_segments=[[0, 1]])


def test_segments_and_lengths_equal_the_mask():
    q, k, v = qkv(batch=1, tq=8, tk=8)
    ids = np.array([[1, 1, 1, 2, 2, 2, 0, 0]])
    got = oracle.attention(q, k, v, q_segments=ids, kv_segments=ids, is_causal=True)
    same = (ids[:, :, None] == ids[:, None, :])[:, None] & np.tri(8, dtype=bool)
    assert_equal(got, oracle.attention(q, k, v, mask=same))
    k[:, :3], v[:, :3] = k[:, :3] + 1e3, v[:, :3] + 1e3
    moved = oracle.attention(q, k, v, q_segments=ids, kv_segments=ids, is_causal=True)
    assert_equal([x[:, 3:6] for x in moved], [x[:, 3:6] for x in got])


@pytest.mark.parametrize("ones", list(itertools.product((False, True), repeat=4)))
def test_broadcast_mask_and_bias(ones):
    q, k, v = qkv()
    full = (2, 4, 3, 4)
    shape = tuple(1 if one else n for one, n in zip(ones, full, strict=True))
    mask, bias = rand(*shape, seed=1) > -0.5, rand(*shape, seed=2)
    got = oracle.attention(q, k, v, mask=mask, bias=bias)
    explicit = {"mask": np.broadcast_to(mask, full), "bias": np.broadcast_to(bias, full)}
    assert_equal(got, oracle.attention(q, k, v, **explicit))
    do = rand(2, 3, 4, 2)
    dbias = oracle.attention_grads(q, k, v, do, bias=bias, mask=mask)["dbias"]
    want = oracle.attention_grads(q, k, v, do, **explicit)["dbias"]
    np.testing.assert_allclose(want.sum(-1), 0, atol=1e-14)
    axes = tuple(axis for axis, one in enumerate(ones) if one)
    np.testing.assert_allclose(dbias, want.sum(axes, keepdims=True), rtol=1e-12, atol=1e-14)


def test_finite_bias_is_only_a_bias():
    low = float(np.finfo(np.float32).min)
    q, k, v = qkv(batch=1, tq=2)
    plain, lse = oracle.attention(0 * q, k, v)
    out, low_lse = oracle.attention(0 * q, k, v, bias=np.full((1, 4), low))
    assert_same([out, low_lse], [plain, lse + low])
    out, _ = oracle.attention(q, k, v, bias=np.array([0, low, low, low]))
    np.testing.assert_array_equal(out, np.repeat(v[:, [0, 0]], 2, axis=2))


def test_empty_rows_have_no_gradient_and_no_say():
    q, k, v = qkv(tq=4)
    terms = {"is_causal": True, "window": (1, 0), "sinks": np.ones(4)}
    padding = np.array([[1, 1, 1, 1], [1, 1, 0, 0]], bool)[:, None, None]
    do, dlse = rand(2, 4, 4, 2), rand(2, 4, 4)
    do[1, 3], dlse[1, 3], q[1, 3] = NAN, INF, NAN  # row 3 of batch row 1 sees nothing
    out, lse = oracle.attention(q, k, v, mask=padding, **terms)
    assert_empty(out[1, 3], lse[1, 3])
    grads = oracle.attention_grads(q, k, v, do, dlse, mask=padding, **terms)
    assert not grads["dq"][1, 3].any()

    whole = oracle.attention_grads(*(x[:1] for x in (q, k, v, do, dlse)), **terms)
    cut = [x[1:, :n] for x, n in ((q, 3), (k, 2), (v, 2), (do, 3), (dlse, 3))]
    cut = oracle.attention_grads(*cut, **terms)
    for name, n in (("dq", 3), ("dk", 2), ("dv", 2)):
        np.testing.assert_allclose(grads[name][:1], whole[name], rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(grads[name][1:, :n], cut[name], rtol=1e-12, atol=1e-14)
        assert not grads[name][1, n:].any()
    np.testing.assert_allclose(grads["dsinks"], whole["dsinks"] + cut["dsinks"], rtol=1e-12)


@pytest.mark.parametrize("bad", [NAN, INF, 1e10])
def test_hidden_values_reach_nothing(bad):
    q, k, v = qkv(batch=1, tq=2, tk=2, hq=2)
    do, mask = rand(1, 2, 2, 2), np.array([True, False])
    k[:, 1], v[:, 1] = bad, bad
    out, _ = oracle.attention(q, k, v, mask=mask)
    np.testing.assert_array_equal(out, v[:, [0, 0]])
    grads = oracle.attention_grads(q, k, v, do, mask=mask, bias=np.array([0.0, bad]))
    assert all(np.isfinite(x).all() for x in grads.values() if x is not None)
    assert not grads["dk"][:, 1].any()
    assert not grads["dv"][:, 1].any()


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["q", "k", "v", "bias"])
def test_visible_non_finite_values_taint_whole_rows_only(bad, where):
    q, k, v = qkv(batch=1, tq=4)
    bias, do, dlse = rand(1, 4, 4, 4), rand(1, 4, 4, 2), rand(1, 4, 4)
    clean = [x.copy() for x in (q, k, v)]
    tainted = np.zeros((1, 4, 4), bool)  # [B, Tq, Hq]
    sick = {"q": q[0, 2, 1], "k": k[0, 2, 1], "v": v[0, 2, 1], "bias": bias[0, 1, 2]}[where]
    sick[1] = bad
    if where in "kv":
        tainted[0, 2:, 2:] = True  # causal: rows 2 and 3; key/value head 1: query heads 2 and 3
    else:
        tainted[0, 2, 1] = not (where == "bias" and bad == -INF)
    terms = {"is_causal": True, "sinks": rand(4)}
    out, lse = oracle.attention(q, k, v, bias=bias, **terms)
    np.testing.assert_array_equal(np.isnan(lse), tainted)
    np.testing.assert_array_equal(np.isnan(out), np.repeat(tainted[..., None], 2, axis=-1))
    healthy = np.where(np.isfinite(bias) | (bias == -INF), bias, 0)
    want = oracle.attention(*clean, bias=healthy, **terms)
    assert_equal([out[~tainted], lse[~tainted]], [x[~tainted] for x in want])
    grads = oracle.attention_grads(q, k, v, do, dlse, bias=bias, **terms)
    quiet = np.where(tainted[..., None], 0, do), np.where(tainted, 0, dlse)
    want = oracle.attention_grads(*clean, *quiet, bias=healthy, **terms)
    for name in ("dq", "dk", "dv", "dbias", "dsinks"):
        np.testing.assert_array_equal(grads[name], want[name])


def test_soft_cap_sink_and_alibi_closed_forms():
    q, k, v = np.ones((1, 1, 1, 1)), np.array([0.0, 5.0]).reshape(1, 2, 1, 1), np.eye(2)[None]
    _, lse = oracle.attention(q, k, v[:, :, None], soft_cap=2.0, bias=np.array([1.0, 0.0]))
    s = 2 * np.tanh(np.array([1.0, 5.0]) / 2)
    np.testing.assert_allclose(lse.item(), np.log(np.exp(s).sum()), rtol=1e-14)
    out, lse = probe(1, 3, sinks=np.array([math.log(5.0)]))
    assert_same([out, lse], [np.full((1, 3), 1 / 8), [math.log(8)]])
    slope = np.array([math.log(2)])
    out, lse = probe(1, 3, alibi_slopes=slope, q_offset=2, is_causal=True)
    assert_same([out, lse], [[[1 / 7, 2 / 7, 4 / 7]], [math.log(7 / 4)]])
    assert_same(probe(2, 3, sinks=np.array([-INF])), probe(2, 3))


def test_default_scale():
    q, k, v = qkv(d=4)
    assert_equal(oracle.attention(q, k, v), oracle.attention(q, k, v, scale=0.5))


def test_long_row():
    q, k = np.zeros((1, 1, 1, 1)), np.zeros((1, 524288, 1, 1))
    out, lse = oracle.attention(q, k, np.arange(524288.0).reshape(k.shape) % 2)
    assert_same([out.item(), lse.item()], [0.5, math.log(524288)])


@pytest.mark.parametrize(("hq", "hk"), [(5, 1), (12, 2), (28, 4), (3, 3), (71, 1)])
def test_gqa_reads_its_own_head(hq, hk):
    q, k, _ = qkv(hq=hq, hk=hk)
    v = np.broadcast_to(np.arange(hk)[:, None], (2, 4, hk, 2))
    out, _ = oracle.attention(q, k, v)
    want = np.broadcast_to((np.arange(hq) // (hq // hk))[:, None], out.shape)
    np.testing.assert_allclose(out, want, rtol=1e-14)


def test_gqa_gradients_are_group_sums():
    q, k, v = qkv(hq=12, hk=3)
    do = rand(2, 3, 12, 2)
    got = oracle.attention_grads(q, k, v, do)
    want = oracle.attention_grads(q, np.repeat(k, 4, 2), np.repeat(v, 4, 2), do)
    np.testing.assert_allclose(got["dq"], want["dq"], rtol=1e-13)
    for name in ("dk", "dv"):
        summed = want[name].reshape(2, 4, 3, 4, -1).sum(3)
        np.testing.assert_allclose(got[name], summed, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    "sizes", [{"batch": 0}, {"tq": 0}, {"tk": 0}, {"hq": 0, "hk": 0}, {"dv": 0}]
)
def test_zero_sizes(sizes):
    q, k, v = qkv(**sizes)
    hq = q.shape[2]
    out, lse = oracle.attention(q, k, v, sinks=np.zeros(hq), is_causal=True)
    assert out.shape == (*q.shape[:3], v.shape[3])
    assert lse.shape == q.shape[:3]
    if k.shape[1] == 0:
        assert_empty(out, lse)
    grads = oracle.attention_grads(q, k, v, out, lse, sinks=np.zeros(hq), is_causal=True)
    for name, x in {"dq": q, "dk": k, "dv": v, "dsinks": np.zeros(hq)}.items():
        assert grads[name].shape == x.shape
        assert np.isfinite(grads[name]).all()


def test_dropout():
    q, k, _ = qkv(tk=64)
    v, keep = np.ones((2, 64, 2, 2)), rand(2, 4, 3, 64) > 0
    plain = oracle.attention(q, k, v)
    assert_equal(oracle.attention(q, k, v, dropout_rate=0.0), plain)
    out, lse = oracle.attention(q, k, v, dropout_rate=0.5, keep=keep)
    np.testing.assert_array_equal(lse, plain[1])
    p = oracle.forward(q, k, v).p
    np.testing.assert_allclose(out[..., 0].swapaxes(1, 2), 2 * (p * keep).sum(-1), rtol=1e-13)
    out, lse = oracle.attention(q, k, v, dropout_rate=1.0)
    assert_equal([out, lse], [0 * out, plain[1]])
    grads = oracle.attention_grads(q, k, v, rand(*out.shape), dropout_rate=1.0)
    assert not any(grads[name].any() for name in ("dq", "dk", "dv"))
    with pytest.raises(ValueError, match="needs keep"):
        oracle.attention(q, k, v, dropout_rate=0.5)


KEEP = rand(2, 4, 3, 4, seed=9) > -0.5
HIDING = np.where(rand(1, 4, 1, 4, seed=10) > 0.5, -INF, rand(1, 4, 1, 4, seed=11))


def check_against_differences(function, grad_function, inputs, output_shape):
    """Compares gradients of sum(do·out) + sum(dlse·lse) with central differences."""
    do, dlse = rand(*output_shape, seed=12), rand(*output_shape[:-1], seed=13)

    def loss(inputs):
        out, lse = function(**inputs)
        return (do * out).sum() + (dlse * np.where(lse == -INF, 0, lse)).sum()

    grads = grad_function(**inputs, do=do, dlse=dlse)
    assert set(grads) == {"dq", "dk", "dv", "dbias", "dsinks", "dalibi_slopes"}
    for name, grad in grads.items():
        if name[1:] not in inputs:
            assert grad is None
            continue
        x = inputs[name[1:]]
        assert grad.shape == x.shape
        want, step = np.zeros(x.shape), 1e-5
        for index in np.ndindex(x.shape):
            for sign in (1, -1):
                moved = x.copy()
                moved[index] += sign * step
                want[index] += sign * loss(inputs | {name[1:]: moved}) / (2 * step)
        np.testing.assert_allclose(grad, want, rtol=1e-6, atol=1e-8, err_msg=name)


EVERYTHING = {"bias": rand(2, 1, 3, 4), "alibi_slopes": rand(4), "sinks": rand(4, seed=1)}
EVERYTHING |= {"scale": 0.8, "soft_cap": 0.9, "keep": KEEP, "dropout_rate": 0.3, "q_offset": 1}
EVERYTHING |= {"is_causal": True, "window": (2, 1), "q_lengths": [3, 2], "kv_lengths": [3, 4]}


@pytest.mark.parametrize(
    "terms",
    [
        {},
        {"scale": 0.3, "is_causal": True, "q_offset": np.array([1, -1])},
        {"bias": HIDING, "sinks": rand(4), "alibi_slopes": rand(4, seed=1)},
        {"bias": rand(3, 1), "soft_cap": 1.2, "window": (1, 0), "kv_lengths": [4, 2]},
        {"keep": KEEP, "dropout_rate": 0.3, "sinks": rand(4)},
        EVERYTHING,
    ],
)
def test_gradients_against_finite_differences(terms):
    inputs = dict(zip("qkv", qkv(), strict=True)) | terms
    check_against_differences(
        oracle.attention, oracle.attention_grads, inputs, output_shape=(2, 3, 4, 2)
    )


def test_ragged_gradients_against_finite_differences():
    q, k, v = rand(7, 4, 3), rand(9, 2, 3, seed=1), rand(9, 2, 2, seed=2)
    ends = {"cu_q": np.array([0, 2, 2, 5, 6]), "cu_k": np.array([0, 4, 6, 8, 8])}
    terms = {"sinks": rand(4), "alibi_slopes": rand(4, seed=1), "soft_cap": 2.0, "is_causal": True}
    inputs = {"q": q, "k": k, "v": v} | ends | terms
    check_against_differences(
        oracle.ragged_attention, oracle.ragged_attention_grads, inputs, output_shape=(7, 4, 2)
    )


@pytest.mark.parametrize("is_causal", [False, True])
def test_ragged_sequences_stand_alone(is_causal):
    cu_q, cu_k = [0, 0, 2, 5, 6, 7], [0, 3, 7, 9, 9, 14]  # 0 queries of 3 keys, 2/4, 3/2, 1/0, 1/5
    q, k, v = rand(9, 9, 4), rand(16, 3, 4, seed=1), rand(16, 3, 4, seed=2)
    for x, end in ((q, 7), (k, 14), (v, 14)):
        x[end:] = NAN
    do = np.where(np.isnan(q), NAN, rand(9, 9, 4, seed=3))
    out, lse = oracle.ragged_attention(q, k, v, cu_q, cu_k, is_causal=is_causal)
    assert_empty(out[5], lse[5])
    assert_empty(out[7:], lse[7:])
    for (a, b), (c, d) in (((0, 2), (3, 7)), ((2, 5), (7, 9)), ((6, 7), (9, 14))):
        mask = np.tri(b - a, d - c, (d - c) - (b - a), dtype=bool) | (not is_causal)
        want = oracle.attention(q[None, a:b], k[None, c:d], v[None, c:d], mask=mask)
        assert_same([out[None, a:b], lse[None, a:b]], want)
    assert (lse[2] == -INF).all() == is_causal
    grads = oracle.ragged_attention_grads(q, k, v, do, cu_q=cu_q, cu_k=cu_k, is_causal=is_causal)
    assert all(np.isfinite(grads[name]).all() for name in ("dq", "dk", "dv"))
    for name in ("dk", "dv"):
        assert not grads[name][:3].any()
        assert not grads[name][14:].any()
        assert grads[name].any()
    assert not grads["dq"][7:].any()


def test_ragged_window_and_default_keys():
    q, v = np.zeros((5, 1, 1)), np.eye(5)[:, None]
    out, _ = oracle.ragged_attention(q, q, v, [0, 2, 5], is_causal=False, window=(1, 0))
    np.testing.assert_allclose(out[:, 0], rows_of(5, [0], [0, 1], [2], [2, 3], [3, 4])[0])
    out, _ = oracle.ragged_attention(q, q, v, [0, 2], [0, 4], is_causal=False, window=(1, 0))
    np.testing.assert_allclose(out[:, 0], rows_of(5, [1, 2], [2, 3], [], [], [])[0])


def paged(lens, page_size, layout, new_tokens=2):
    """A poisoned pool, and the dense keys and values that its tables spell out."""
    rng = np.random.default_rng(page_size)
    columns = -(-max(lens) // page_size) + 1
    num_pages = len(lens) * columns + 1
    spare = rng.permutation(num_pages).tolist()
    tables = np.array([-1, num_pages, 2**31 - 1])[rng.integers(0, 3, (len(lens), columns))]
    pools = np.full((2, num_pages, page_size, 2, 3), NAN)
    dense = np.full((2, len(lens), max(lens), 2, 3), NAN)
    for b, length in enumerate(lens):
        for column in range(-(-length // page_size)):
            tables[b, column] = spare.pop()
        for j in range(length):
            dense[:, b, j] = rng.standard_normal((2, 2, 3))
            pools[:, tables[b, j // page_size], j % page_size] = dense[:, b, j]
    pools = pools.swapaxes(2, 3) if layout == "HND" else pools
    return rand(len(lens), new_tokens, 4, 3), pools, tables.astype(np.int32), dense


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("page_size", [1, 2, 8])
@pytest.mark.parametrize("is_causal", [True, False])
def test_paged_equals_dense(layout, page_size, is_causal):
    lens = np.array([1, page_size + 1, 0, page_size, 3 * page_size, 7])
    q, pools, tables, dense = paged(lens.tolist(), page_size, layout)
    terms = {"sinks": rand(4), "window": (5, 1), "soft_cap": 3.0, "alibi_slopes": rand(4, seed=1)}
    terms["is_causal"] = is_causal
    out, lse = oracle.paged_attention(q, *pools, tables, lens, page_layout=layout, **terms)
    assert_same(
        [out, lse], oracle.attention(q, *dense, q_offset=lens - 2, kv_lengths=lens, **terms)
    )
    assert_empty(out[2], lse[2])
    assert np.isfinite(out).all()


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_paged_scales(layout):
    lens = [5, 3]
    q, pools, tables, dense = paged(lens, 2, layout)
    shared = {"page_layout": layout}
    halved = dense * np.array([0.5, 0.25]).reshape(2, 1, 1, 1, 1)
    causal = {"is_causal": True, "q_offset": np.array(lens) - 2}
    want = oracle.attention(q, *halved, kv_lengths=lens, **causal)
    for like in (np.ones(()), np.ones(2), np.ones(pools.shape[1:-1])):
        scales = {"k_scale": 0.5 * like, "v_scale": 0.25 * like}
        assert_same(oracle.paged_attention(q, *pools, tables, lens, **scales, **shared), want)
    per_head, per_token = np.array([0.5, 2.0]), 1 + rand(*pools.shape[1:-1]) ** 2
    got = oracle.paged_attention(
        q, *pools, tables, lens, k_scale=per_token, v_scale=per_head, **shared
    )
    scaled = pools[0] * per_token[..., None]
    heads_last = per_head[:, None, None] if layout == "HND" else per_head[:, None]
    want = oracle.paged_attention(q, scaled, pools[1] * heads_last, tables, lens, **shared)
    assert_same(got, want)


def test_paged_refuses_what_the_table_cannot_hold():
    q, pools, tables, _ = paged([5, 3], 2, "HND")
    with pytest.raises(ValueError, match="sequence 0 of kv_len 99"):
        oracle.paged_attention(q, *pools, tables, [99, 3])
    tables[1, 0] = -1
    with pytest.raises(ValueError, match="sequence 1 of kv_len 3"):
        oracle.paged_attention(q, *pools, tables, [5, 3])


def test_merge():
    q, k, v = qkv(tk=9)
    bounds = [(0, 4), (4, 4), (4, 9)]
    parts = [oracle.attention(q, k[:, a:b], v[:, a:b]) for a, b in bounds]
    parts[1] = (np.full_like(parts[1][0], NAN), parts[1][1])  # an EMPTY part has no say
    assert_same(oracle.merge(*zip(*parts, strict=True)), oracle.attention(q, k, v))
    out, lse = oracle.merge([[[0.0]], [[1.0]]], [[0.0], [math.log(3)]])
    assert_same([out, lse], [[[0.75]], [math.log(4)]])
    assert_empty(*oracle.merge([[[NAN]], [[1.0]]], [[-INF], [-INF]]))
    assert np.isnan(oracle.merge([[[NAN]], [[1.0]]], [[NAN], [0.0]])[1]).all()
