"""What is hidden must reach nothing, and a query that sees nothing must be nothing.

Hidden keys, values, queries and biases are filled with NaN, infinities and huge numbers; results
and gradients must keep every bit. Empty rows, saturated biases and mask probes are here too.
"""

import functools
import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash import chunked, decode_attention, dot_product_attention
from tests import oracle64 as oracle
from tests.kernel_cases import ON_GPU, mostly_on_gpu
from tests.tolerance import (
    FLOATS,
    IMPLEMENTATIONS,
    assert_unmoved,
    bits,
    fast_jit,
    gradients,
    oracle_terms,
    rand,
    runs,
)

NAN, INF = np.nan, np.inf
DETERMINISTIC = {"deterministic": True}  # all gradients repeat bit for bit
FILLINGS = [NAN, INF, -INF, 3e38]


def with_implementations(cases, on_gpu=()):
    """Each case on each implementation, but on "mosaic" those in `on_gpu` only on a GPU."""
    pairs = list(itertools.product(cases, IMPLEMENTATIONS))
    return mostly_on_gpu(pairs, {(case, "mosaic") for case in on_gpu})


def is_interpreted(implementation):
    """Whether each launch takes a second rather than microseconds."""
    return implementation == "mosaic" and not ON_GPU


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(chunked, "_MAX_BLOCK", 8)


@functools.cache
def program(implementation, static):
    static = dict(static) | {"implementation": implementation, "return_residual": True}
    return gradients(dot_product_attention, **static)


@functools.cache
def forward_program(implementation, static):
    static = dict(static) | {"implementation": implementation, "return_residual": True}
    return fast_jit(partial(dot_product_attention, **static))


def run(implementation, arrays, static, cotangents):
    """((out, lse), gradients), or None where the implementation refuses."""
    keywords = arrays | static | {"return_residual": True}
    if not runs(implementation, dot_product_attention, **keywords):
        return None
    rest = dict(arrays)
    floats = {name: rest.pop(name) for name in FLOATS if name in rest}
    return program(implementation, tuple(static.items()))(floats, rest, cotangents)


def qkv(batch=2, tq=18, tk=20, heads=2, kv_heads=1, dim=64, dtype="bfloat16"):
    return {
        "query": rand(batch, tq, heads, dim, dtype=dtype, seed=1),
        "key": rand(batch, tk, kv_heads, dim, dtype=dtype, seed=2),
        "value": rand(batch, tk, kv_heads, dim, dtype=dtype, seed=3),
    }


def cotangents_of(arrays):
    query = arrays["query"]
    return rand(*query.shape, dtype=query.dtype, seed=5), rand(*query.shape[:3], seed=6)


B, TQ, TK, H = 2, 18, 20, 2
LENGTHS = {"query_seq_lengths": np.int32([18, 7]), "key_value_seq_lengths": np.int32([0, 11])}
# One program with every part of a mask, so that each hides alone while the others are there.
ALL_PARTS = {"is_causal": True, "local_window_size": (24, 3), "logits_soft_cap": 5.0}
NEUTRAL = {
    "q_offset": np.int32([TK, TK]),
    "mask": np.ones((B, 1, TQ, TK), bool),
    "query_seq_lengths": np.int32([TQ, TQ]),
    "key_value_seq_lengths": np.int32([TK, TK]),
    "query_segment_ids": np.zeros((B, TQ), np.int32),
    "key_value_segment_ids": np.zeros((B, TK), np.int32),
    "bias": np.zeros((B, H, TQ, TK), np.float32),
}
SEGMENTS = {
    "query_segment_ids": np.int32([[1] * 9 + [2] * 9, [3, 1] * 9]),
    "key_value_segment_ids": np.int32([[1] * 5 + [0] * 10 + [2] * 5, [1, 4] * 10]),
}
HIDDEN_BY = {  # static keywords, and arrays besides q, k and v
    "nothing but a future position": ({"is_causal": True}, {}),
    "nothing but a length": ({}, LENGTHS),
    "a future position": (ALL_PARTS, NEUTRAL | {"q_offset": np.int32([-2, -30])}),
    "a window": (ALL_PARTS, NEUTRAL | {"q_offset": np.int32([30, 60])}),
    "a length": (ALL_PARTS, NEUTRAL | LENGTHS),
    "another segment": (ALL_PARTS, NEUTRAL | SEGMENTS),
    "a boolean mask": (
        ALL_PARTS,
        NEUTRAL | {"mask": np.broadcast_to(np.arange(TK) % 5 > 1, (B, 1, TQ, TK))},
    ),
    "a bias of -inf": (
        ALL_PARTS,
        NEUTRAL | {"bias": np.where(np.arange(TK) < 9, np.float32(-INF), NEUTRAL["bias"])},
    ),
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("hider", HIDDEN_BY)
def test_hidden_values_reach_no_output_and_no_gradient(hider, implementation):
    static, arrays = HIDDEN_BY[hider]
    static = static | DETERMINISTIC
    arrays = qkv() | arrays
    if "bias" in arrays:
        arrays["bias"] = arrays["bias"] + rand(B, H, TQ, TK, seed=4)
    cotangents = cotangents_of(arrays)
    clean = run(implementation, arrays, static, cotangents)
    if clean is None:
        return

    terms = oracle_terms(arrays | static)
    names = ("q_offset", "q_lengths", "kv_lengths", "q_segments", "kv_segments", "mask", "window")
    terms = {name: x for name, x in terms.items() if name in (*names, "is_causal")}
    masked = ~oracle.visible(TQ, TK, batch=B, num_heads=H, **terms)  # [B, H, TQ, TK]
    hidden = masked | (arrays.get("bias", np.float32(0.0)) == -INF)
    hidden_keys = hidden.all((1, 2))
    empty_rows = hidden.all((1, 3))
    assert hidden_keys.any()
    assert not hidden_keys.all()
    fillings = FILLINGS
    if is_interpreted(implementation):  # two for each hider, in turn
        fillings = FILLINGS[list(HIDDEN_BY).index(hider) % 2 :: 2]
    for filling in fillings:
        poisoned = {name: np.copy(x) for name, x in arrays.items()}
        for name, where in (("query", empty_rows), ("key", hidden_keys), ("value", hidden_keys)):
            poisoned[name][where] = filling
        if "bias" in arrays:
            poisoned["bias"][masked] = filling
        got = run(implementation, poisoned, static, cotangents)
        assert_unmoved(implementation, got, clean, filling)
    (out, lse), grads = jax.tree.map(np.asarray, clean)
    assert np.isfinite(out).all()
    assert not out[empty_rows].any()
    np.testing.assert_array_equal(lse == -INF, np.broadcast_to(empty_rows[..., None], lse.shape))
    assert not grads["query"][empty_rows].any()
    assert not grads["key"][hidden_keys].any()
    assert not grads["value"][hidden_keys].any()
    assert grads["key"].any(), "the test would pass if all gradients were 0"
    if "bias" in arrays:
        assert not grads["bias"][hidden].any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("poisoned", ["query", "key", "value", "bias"])
def test_a_visible_nan_reaches_exactly_the_rows_that_see_it(poisoned, implementation):
    arrays = qkv() | NEUTRAL
    arrays |= {"q_offset": np.int32([0, 5]), "key_value_seq_lengths": np.int32([20, 15])}
    arrays |= {"mask": rand(B, 1, TQ, TK, seed=7) > -0.5, "bias": rand(B, H, TQ, TK, seed=4)}
    cotangents = cotangents_of(arrays)
    clean = run(implementation, arrays, ALL_PARTS | DETERMINISTIC, cotangents)
    if clean is None:
        return
    sick = np.copy(arrays[poisoned])
    sick[{"query": (1, 6, 1, 2), "bias": (0, 1, 9, 3)}.get(poisoned, (1, 11, 0, 2))] = NAN
    got = run(implementation, arrays | {poisoned: sick}, ALL_PARTS | DETERMINISTIC, cotangents)
    (out, lse), (clean_out, clean_lse) = jax.tree.map(np.asarray, (got[0], clean[0]))
    want_out, want_lse = oracle.attention(**oracle_terms(arrays | {poisoned: sick} | ALL_PARTS))
    tainted = np.isnan(want_lse)
    assert 0 < tainted.sum() < tainted.size / 2
    np.testing.assert_array_equal(np.isnan(out), np.isnan(want_out))
    np.testing.assert_array_equal(np.isnan(lse), tainted)
    assert_unmoved(
        implementation,
        [out[~tainted], lse[~tainted]],
        [clean_out[~tainted], clean_lse[~tainted]],
    )


EIGHT = {"batch": 1, "tq": 8, "tk": 8, "heads": 1, "dtype": "float32"}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_row_with_one_visible_key_is_that_value_whatever_is_hidden(implementation):
    arrays, results = qkv(**EIGHT), []
    arrays["mask"] = np.broadcast_to(np.arange(8) == 0, (1, 1, 8, 8))
    for filling in (NAN, INF, 1e10):
        arrays["key"][:, 1:], arrays["value"][:, 1:] = filling, filling
        results.append(run(implementation, arrays, DETERMINISTIC, cotangents_of(arrays)))
        if results[-1] is None:
            return
    for other in results[1:]:
        assert_unmoved(implementation, other, results[0])
    rounding = 2**-22 if implementation == "mosaic" else 0  # fp32 there is a sum of products
    for (out, _), _ in results:
        np.testing.assert_allclose(out, arrays["value"][:, [0] * 8], rtol=rounding)
    grads = results[0][1]
    assert not np.any(grads["key"][:, 1:])
    assert not np.any(grads["value"][:, 1:])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_that_a_mask_leaves_without_keys_are_zero(implementation):
    arrays = qkv(**EIGHT)
    arrays["mask"] = np.zeros((1, 1, 8, 8), bool)
    arrays["mask"][..., :4, :4] = True
    do, dlse = cotangents_of(arrays)
    got = run(implementation, arrays, DETERMINISTIC, (do, dlse))
    if got is None:
        return
    (out, lse), grads = jax.tree.map(np.asarray, got)
    assert not out[:, 4:].any()
    assert (lse[:, 4:] == -INF).all()
    assert not any(grad[:, 4:].any() for grad in grads.values())
    cut = [arrays[name][:, :4] for name in ("query", "key", "value")]
    want_out, want_lse = oracle.attention(*cut)
    want = oracle.attention_grads(*cut, do[:, :4], dlse[:, :4])
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    close(out[:, :4], want_out)
    close(lse[:, :4], want_lse)
    for name, grad in grads.items():
        close(grad[:, :4], want[f"d{name[0]}"])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_empty_rows_leave_the_gradients_of_a_dense_layer_alone(implementation):
    """A causal band of 2 and padding of keys 2 and 3 in batch row 1 leave its row 3 no key."""
    x, weights = rand(2, 4, 6), rand(3, 6, 8, seed=1)
    terms = {
        "is_causal": True,
        "local_window_size": (1, 0),
        "mask": np.array([[1, 1, 1, 1], [1, 1, 0, 0]], bool)[:, None, None],
    }
    q = rand(2, 4, 1, 8)
    if not runs(implementation, dot_product_attention, q, q, q, **terms):
        return

    @fast_jit
    def gradient(weights, seen):
        def loss(weights):
            # "highest": a GPU would round to TF32 otherwise
            q, k, v = (
                jnp.einsum("btc,cd->btd", x, w, precision="highest")[:, :, None] for w in weights
            )
            out = dot_product_attention(q, k, v, **terms, implementation=implementation)
            return jnp.sum(jnp.where(seen, jnp.sin(out), 0.0))

        return jax.grad(loss)(weights)

    seen = np.array([[True] * 4, [True] * 3 + [False]])[..., None, None]
    got = np.asarray(gradient(weights, seen))
    qkv = [(x @ np.float64(w))[:, :, None] for w in weights]
    exact = oracle_terms(terms)
    out, lse = oracle.attention(*qkv, **exact)
    np.testing.assert_array_equal(lse[..., None] > -INF, seen)
    grads = oracle.attention_grads(*qkv, np.where(seen, np.cos(out), 0.0), **exact)
    want = [np.einsum("btc,btd->cd", x, grads[name][:, :, 0]) for name in ("dq", "dk", "dv")]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    # An empty row may be left in the loss: whatever its cotangent, it moves nothing.
    assert bits(gradient(weights, np.ones_like(seen))) == bits(got)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_saturated_biases_add_up_to_a_mask(dtype, implementation):
    """As when a causal and a padding bias of the lowest number are added: -inf where both hide."""
    q, k, v = (rand(2, 9, 1, 8, dtype=dtype, seed=seed) for seed in range(3))
    lowest = jnp.finfo(dtype).min
    future, padding = ~np.tri(9, dtype=bool), np.arange(9) < np.array([[0], [9]])[..., None, None]
    bias = np.where(future, lowest, 0).astype(dtype)
    with np.errstate(over="ignore"):
        bias = bias + np.where(padding, lowest, 0).astype(dtype)
    bias[0, 0, 8] = -INF
    visible = bias == 0
    arrays = q, k, v, bias, np.ones(bias.shape, bool)
    if not runs(implementation, dot_product_attention, *arrays, return_residual=True):
        return
    call = forward_program(implementation, ())
    got = call(*arrays)
    want = call(q, k, v, np.zeros_like(bias), visible)
    rows = visible.any(-1)[:, 0]
    got, want = (tuple(map(np.asarray, x)) for x in (got, want))
    assert_unmoved(implementation, [x[rows] for x in got], [x[rows] for x in want])
    out, lse = (np.asarray(x)[0, 8] for x in got)  # its biases are all -inf
    assert not out.any()
    assert (lse == -INF).all()
    assert all(np.isfinite(np.float32(x)).all() for x in (got[0], got[1][:, :8]))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_lowest_finite_bias_is_a_bias_and_not_a_mask(dtype, implementation):
    arrays = qkv(**EIGHT | {"dtype": dtype})
    lowest = float(jnp.finfo("float32").min)
    arrays["bias"] = np.zeros((1, 1, 8, 8), np.float32)
    arrays["bias"][..., 1, :] = lowest  # a row of nothing else
    arrays["bias"][..., 2, 1:] = lowest  # a row with one better key
    got = run(implementation, arrays, {}, cotangents_of(arrays))
    if got is None:
        return
    assert all(np.isfinite(np.float32(x)).all() for x in jax.tree.leaves(got))
    out, lse = (np.float64(x)[0, :, 0] for x in got[0])
    query, key, value = (np.float64(arrays[name]) for name in ("query", "key", "value"))
    # The sum of the bias and a logit is rounded: the row may have become uniform.
    no_bias, _ = oracle.attention(query, key, value)
    allowed = np.stack([no_bias[0, 1, 0], value[0, :, 0].mean(0)])
    tolerance = 4 * float(jnp.finfo(dtype).eps)
    assert np.abs(out[1] - allowed).max(-1).min() <= tolerance
    assert lse[1] <= 0.99 * lowest
    np.testing.assert_array_equal(out[2], value[0, 0, 0])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shift", [512.0, -1024.0])
def test_the_same_bias_for_all_keys_moves_lse_alone(shift, implementation):
    arrays = qkv(**EIGHT)
    arrays["bias"] = np.zeros((1, 1, 8, 8), np.float32)
    do, dlse = cotangents_of(arrays)
    before = run(implementation, arrays, {}, (do, 0 * dlse))
    if before is None:
        return
    arrays["bias"] = arrays["bias"] + np.float32(shift)  # not in place: a call may still read it
    after = run(implementation, arrays, {}, (do, 0 * dlse))
    np.testing.assert_allclose(after[0][1], before[0][1] + np.float32(shift), atol=1e-3)
    for x, y in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
        if x.shape != dlse.shape:  # the logits have lost 10 of their 24 bits
            np.testing.assert_allclose(x, y, atol=2e-3)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_long_row_keeps_its_accuracy(implementation, monkeypatch):
    monkeypatch.setattr(chunked, "_MAX_BLOCK", 64)
    tq, tk = 16, 4096 if is_interpreted(implementation) else 65536
    q, k = rand(1, tq, 1, 64, dtype="bfloat16"), np.zeros((1, tk, 1, 64), jnp.bfloat16)
    v = np.broadcast_to((np.arange(tk) % 2)[:, None, None], k.shape).astype(k.dtype)
    if not runs(implementation, dot_product_attention, q, k, v, return_residual=True):
        return
    out, lse = forward_program(implementation, ())(q, k, v)
    np.testing.assert_allclose(np.float32(out), 0.5, atol=1e-3)
    np.testing.assert_allclose(lse, np.log(tk), rtol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_tenth_call_equals_the_first_bit_for_bit(implementation):
    """Also when freed memory holds NaN, and for gradients."""
    arrays = qkv() | LENGTHS
    cotangents = cotangents_of(arrays)
    results = []
    times = 2 if is_interpreted(implementation) else 10  # its memory is new each time
    for _ in range(times):
        for x in (*arrays.values(), *cotangents):
            if x.dtype != np.int32:
                jnp.full(x.shape, NAN, x.dtype).block_until_ready().delete()
        results.append(run(implementation, arrays, DETERMINISTIC, cotangents))
        if results[-1] is None:
            return
    results = list(map(bits, results))
    assert results == results[:1] * times


def probe(implementation, tq, tk, q_offset=0, **static):
    """Which keys each row sees, found by q = 0 and one-hot values; None where refused."""
    dim = 64 if tk <= 64 else 128
    q, k = np.zeros((1, tq, 1, dim), jnp.bfloat16), rand(1, tk, 1, dim, dtype="bfloat16")
    v = np.eye(tk, dim).astype(jnp.bfloat16)[None, :, None]
    arrays = {"query": q, "key": k, "value": v}
    if q_offset:
        arrays["q_offset"] = np.int32([q_offset])
    keywords = arrays | static | {"return_residual": True}
    if not runs(implementation, dot_product_attention, **keywords):
        return None
    out, lse = forward_program(implementation, tuple(static.items()))(**arrays)
    weights = np.float32(out)[0, :, 0, :tk]
    count = (weights > 0).sum(-1)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(np.asarray(lse)[0, :, 0], np.log(count), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(weights, (weights > 0) / np.maximum(count, 1)[:, None], rtol=1e-2)
    return weights > 0


@pytest.mark.parametrize(
    ("lengths", "implementation"),
    with_implementations([(2, 5), (5, 2), (3, 128), (1, 8)], on_gpu={(2, 5), (1, 8)}),
)
def test_causal_alignment_is_top_left_plus_q_offset(lengths, implementation, monkeypatch):
    tq, tk = lengths
    monkeypatch.setattr(chunked, "_MAX_BLOCK", 4)
    for q_offset in (-1, tk - tq, tk):  # bottom-right is tk - tq
        seen = probe(implementation, tq, tk, q_offset, is_causal=True)
        if seen is not None:
            np.testing.assert_array_equal(seen, np.tri(tq, tk, q_offset, dtype=bool))


WINDOWS = [
    *(((left, right), False) for left, right in ((0, 0), (2, 0), (0, 2), (8, 0), (100, 0))),
    *((window, True) for window in ((2, 0), (0, 2), 2)),
    (2, False),
]


@pytest.mark.parametrize(
    ("band", "implementation"),
    with_implementations(
        WINDOWS, on_gpu={((0, 0), False), ((8, 0), False), ((100, 0), False), ((2, 0), True)}
    ),
)
def test_windows_include_both_ends(band, implementation, monkeypatch):
    """The last two queries stand beyond the keys: a short window leaves them none."""
    window, is_causal = band
    monkeypatch.setattr(chunked, "_MAX_BLOCK", 4)
    seen = probe(implementation, 9, 7, local_window_size=window, is_causal=is_causal)
    if seen is not None:
        left, right = window if isinstance(window, tuple) else (window, window)
        ahead = np.arange(7) - np.arange(9)[:, None]
        want = (-left <= ahead) & (ahead <= (min(right, 0) if is_causal else right))
        np.testing.assert_array_equal(seen, want)


@pytest.mark.parametrize("implementation", ["xla", "chunked"])
def test_hidden_nan_does_not_reach_the_gradient_of_a_scale(implementation):
    q, k, v = rand(2, 1, 2, 8), rand(2, 16, 2, 8), rand(2, 16, 2, 8)
    lens = jnp.array([5, 16], jnp.int32)

    def loss(k, v, scale, k_scale, v_scale):
        out = decode_attention(
            q * scale, k, v, lens, k_scale=k_scale, v_scale=v_scale, implementation=implementation
        )
        return jnp.sum(jnp.sin(out))

    gradients = jax.grad(loss, (0, 1, 2, 3, 4))
    scales = jnp.float32(0.5), jnp.full((2, 16, 2), 0.7), jnp.full((2, 16, 2), 1.3)
    want = gradients(k, v, *scales)
    tail = jnp.arange(16)[None, :, None] >= lens[:, None, None]
    poisoned = [jnp.where(tail, jnp.nan, x) for x in scales[1:]]
    k, v = (jnp.where(tail[..., None], jnp.nan, x) for x in (k, v))
    for got, clean in zip(gradients(k, v, scales[0], *poisoned), want, strict=True):
        assert np.isfinite(got).all()
        np.testing.assert_allclose(got, clean, rtol=1e-6)


def test_hidden_nan_does_not_reach_the_gradient_of_a_traced_scale():
    q, k, v = rand(2, 4, 2, 8), rand(2, 4, 2, 8), rand(2, 4, 2, 8)
    lengths = jnp.array([2, 4], jnp.int32)

    def slope(q):
        def loss(scale):
            out = dot_product_attention(
                q, k, v, scale=scale, query_seq_lengths=lengths, implementation="xla"
            )
            return jnp.sum(jnp.sin(out))

        return jax.grad(loss)(jnp.float32(0.3))

    want = slope(q)
    padding = jnp.arange(4)[None, :] >= lengths[:, None]
    got = slope(jnp.where(padding[..., None, None], jnp.nan, q))
    np.testing.assert_allclose(got, want, rtol=1e-6)
