"""Packed sequences: each sees only itself, its queries are the last ones of its keys."""

import functools
from functools import partial
from itertools import pairwise

import jax
import numpy as np
import pytest

from jax_flash import chunked, dot_product_attention, ragged_attention
from tests import oracle64 as oracle
from tests.kernel_cases import ON_GPU
from tests.tolerance import (
    FLOATS,
    IMPLEMENTATIONS,
    ORACLE_NAMES,
    assert_close,
    assert_unmoved,
    bits,
    fast_jit,
    gradients,
    oracle_results,
    plain_errors,
    rand,
    runs,
)

NAN, INF = np.nan, np.inf
ALWAYS = {"return_residual": True, "deterministic": True}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(chunked, "_MAX_BLOCK", 8)


def packed(tokens_q, tokens_k, heads=(4, 2), dims=(64, 64), dtype="float32"):
    return {
        "query": rand(tokens_q, heads[0], dims[0], dtype=dtype, seed=1),
        "key": rand(tokens_k, heads[1], dims[0], dtype=dtype, seed=2),
        "value": rand(tokens_k, heads[1], dims[1], dtype=dtype, seed=3),
    }


def cotangents_of(arrays):
    tokens, heads = arrays["query"].shape[:2]
    shape = (tokens, heads, arrays["value"].shape[2])
    return rand(*shape, dtype=arrays["query"].dtype, seed=4), rand(tokens, heads, seed=5)


@functools.cache
def program(implementation, static):
    static = dict(static) | {"implementation": implementation} | ALWAYS
    return gradients(ragged_attention, **static)


def run(implementation, arrays, static, cotangents=None):
    """((out, lse), gradients), or None where the implementation refuses."""
    if not runs(implementation, ragged_attention, **arrays, **static, **ALWAYS):
        return None
    cotangents = cotangents_of(arrays) if cotangents is None else cotangents
    rest = dict(arrays)
    floats = {name: rest.pop(name) for name in FLOATS if name in rest}
    return program(implementation, tuple(static.items()))(floats, rest, cotangents)


def as_dense(arrays, static):
    """The same call as one of dot_product_attention that spells the mask and ALiBi out.

    Returns:
      Its keywords, and key_index − query_position [Tq, Tk] (0 between sequences).
    """
    dense = {name: arrays[name][None] for name in ("query", "key", "value")}
    tq, tk = dense["query"].shape[1], dense["key"].shape[1]
    visible, distance = np.zeros((tq, tk), bool), np.zeros((tq, tk))
    cu_q = arrays["cu_seqlens_q"].tolist()
    cu_k = arrays.get("cu_seqlens_k", arrays["cu_seqlens_q"]).tolist()
    for (q0, q1), (k0, k1) in zip(pairwise(cu_q), pairwise(cu_k), strict=True):
        lengths, q_offset = (q1 - q0, k1 - k0), (k1 - k0) - (q1 - q0)
        rule = {"is_causal": static["is_causal"], "window": static.get("local_window_size")}
        seen = oracle.visible(*lengths, batch=1, num_heads=1, q_offset=q_offset, **rule)
        visible[q0:q1, k0:k1] = seen[0, 0]
        distance[q0:q1, k0:k1] = np.arange(k1 - k0) - np.arange(q1 - q0)[:, None] - q_offset
    slopes = arrays.get("alibi_slopes", np.zeros(arrays["query"].shape[1], np.float32))
    dense["bias"] = (slopes[:, None, None] * distance)[None].astype(np.float32)
    rest = {name: x for name, x in (arrays | static).items() if name in ("sinks", "scale")}
    rest |= {"logits_soft_cap": static.get("logits_soft_cap")}
    return dense | rest | {"mask": visible[None, None]}, distance


@functools.cache
def expectation(case):
    """What is right for the arrays and static keywords that `case()` gives; the plain errors."""
    arrays, static = case()
    do, dlse = cotangents_of(arrays)
    terms = {ORACLE_NAMES.get(name, name): x for name, x in (arrays | static).items()}
    cu_q = terms.pop("cu_seqlens_q")
    terms |= {"cu_q": cu_q, "cu_k": terms.pop("cu_seqlens_k", None)}
    want = dict(zip(("out", "lse"), oracle.ragged_attention(**terms), strict=True))
    want |= oracle.ragged_attention_grads(**terms, do=do, dlse=dlse)
    dense, distance = as_dense(arrays, static)
    dense_want = oracle_results(dense, do[None], dlse[None])
    errors = plain_errors(dense, dense_want, do[None], dlse[None])
    errors["dalibi_slopes"] = errors["dbias"] * np.sqrt((distance**2).sum())
    return want, errors


def check(implementation, case):
    """Compares a call with the oracle; says whether it ran."""
    got = run(implementation, *case())
    if got is None:
        return False
    want, errors = expectation(case)
    (out, lse), grads = got
    grads = {f"d{ORACLE_NAMES.get(name, name)}": x for name, x in grads.items()}
    for name, x in ({"out": out, "lse": lse} | grads).items():
        assert_close(x, want[name], errors[name], name)
    for name in ("dk", "dv"):  # that of a key without a query is exactly 0
        assert not np.any(np.asarray(grads[name])[(want[name] == 0).all((1, 2))])
    return True


EDGES = {  # 16 query and 20 key tokens in 4 sequences
    "full": ([0, 5, 6, 13, 16], [0, 7, 8, 17, 20]),
    "more queries than keys": ([0, 8, 12, 15, 16], [0, 3, 9, 10, 11]),
    "no queries in some, no keys in others": ([0, 0, 4, 9, 9], [0, 5, 5, 11, 20]),
    "empty at both ends": ([0, 0, 9, 16, 16], [0, 0, 12, 20, 20]),
    "tokens before, and after": ([3, 5, 5, 9, 12], [2, 4, 7, 11, 15]),
    "nothing at all": ([0, 0, 0, 0, 0], [0, 0, 0, 0, 0]),
    "one sequence is all": ([0, 0, 16, 16, 16], [0, 0, 20, 20, 20]),
    "nothing, but at the end": ([16, 16, 16, 16, 16], [20, 20, 20, 20, 20]),
    "single tokens": ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4]),
}


PLAIN = {"is_causal": False}, {}, "float32"
CAUSAL = {"is_causal": True}, {}, "bfloat16"
ALL_TERMS = (
    {"is_causal": True, "local_window_size": (3, 1), "logits_soft_cap": 2.0, "scale": 0.7},
    {"alibi_slopes": np.float32([0.1, 0.5, 0.0, -0.2]), "sinks": rand(4)},
    "float32",
)


@functools.cache
def edge_case(edges, terms):
    """A call, as a function that gives its arrays and static keywords."""
    static, arrays, dtype = {"plain": PLAIN, "causal": CAUSAL, "all terms": ALL_TERMS}[terms]
    cu_q, cu_k = map(np.int32, EDGES[edges])
    cu = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    return lambda: (packed(16, 20, dtype=dtype) | arrays | cu, static)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("edges", EDGES)
@pytest.mark.parametrize("terms", ["plain", "causal", "all terms"])
def test_every_sequence_stands_alone_and_ends_at_its_last_key(terms, edges, implementation):
    check(implementation, edge_case(edges, terms))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sequences_without_queries_or_keys_under_grouped_heads(implementation):
    cu = {"cu_seqlens_q": np.int32([0, 0, 1, 1, 2]), "cu_seqlens_k": np.int32([0, 0, 3, 3, 8])}
    check(implementation, lambda: (packed(2, 8, (9, 3)) | cu, {"is_causal": True}))


def full():
    """The arrays of 16 queries and 20 keys in 4 sequences, as in the table."""
    arrays, _ = edge_case("full", "causal")()
    return {name: np.copy(x) for name, x in arrays.items()}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_tokens_outside_every_sequence_are_empty_and_reach_nothing(implementation):
    ends = {"cu_seqlens_q": np.int32([2, 5, 5, 8, 11]), "cu_seqlens_k": np.int32([1, 5, 6, 9, 14])}
    arrays = full() | ends
    do, dlse = cotangents_of(arrays)
    outside_q, outside_k = np.r_[0:2, 11:16], np.r_[0:1, 14:20]
    do[outside_q], dlse[outside_q] = 1e3, 1e3
    clean = run(implementation, arrays, {"is_causal": True}, (do, dlse))
    if clean is None:
        return
    for filling in (NAN, INF, 3e38):
        arrays["query"][outside_q] = filling
        arrays["key"][outside_k], arrays["value"][outside_k] = filling, filling
        got = run(implementation, arrays, {"is_causal": True}, (do, dlse))
        assert_unmoved(implementation, got, clean, filling)
    (out, lse), grads = jax.tree.map(np.asarray, clean)
    assert not out[outside_q].any()
    assert (lse[outside_q] == -INF).all()
    assert not grads["query"][outside_q].any()
    assert not grads["key"][outside_k].any()
    assert not grads["value"][outside_k].any()
    assert grads["value"][1:5].any(axis=(1, 2)).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_sequence_does_not_hear_its_neighbours(implementation):
    arrays, results = full(), []
    (q0, q1), (k0, k1) = (arrays[f"cu_seqlens_{x}"][[2, 3]] for x in "qk")
    for _ in range(2):
        got = run(implementation, arrays, {"is_causal": True})
        if got is None:
            return
        (out, lse), grads = jax.tree.map(np.asarray, got)
        parts = [x[q0:q1] for x in (out, lse, grads["query"])]
        results.append(bits(parts + [grads[name][k0:k1] for name in ("key", "value")]))
        for name, start, stop in (("query", q0, q1), ("key", k0, k1), ("value", k0, k1)):
            arrays[name][:start] += np.asarray(100, arrays[name].dtype)
            arrays[name][stop:] -= np.asarray(100, arrays[name].dtype)
    assert results[0] == results[1]


@functools.cache
def loop_over_sequences():
    """Each sequence alone through dot_product_attention, bottom-right by its q_offset."""
    arrays, results = full(), []
    q, k, v, cu_q, cu_k = arrays.values()
    terms = {"is_causal": True, "return_residual": True, "implementation": "xla"}
    attend = fast_jit(partial(dot_product_attention, **terms))
    for (q0, q1), (k0, k1) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        offset = np.int32((k1 - k0) - (q1 - q0))
        results.append(attend(q[q0:q1], k[k0:k1], v[k0:k1], q_offset=offset))
    return [np.concatenate(x) for x in zip(*results, strict=True)]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_packing_equals_a_loop_over_sequences(implementation):
    got = run(implementation, full(), {"is_causal": True})
    if got is not None:
        for x, right in zip(got[0], loop_over_sequences(), strict=True):
            np.testing.assert_allclose(np.float32(x), np.float32(right), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("tokens_q", "tokens_k"), [(0, 0), (0, 5), (5, 0)])
def test_no_tokens_give_no_results_or_empty_rows(tokens_q, tokens_k, implementation):
    cu = {"cu_seqlens_q": np.int32([0, 0, tokens_q]), "cu_seqlens_k": np.int32([0, 0, tokens_k])}
    check(implementation, lambda: (packed(tokens_q, tokens_k) | cu, {"is_causal": True}))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_batch_of_no_sequences_gives_empty_rows(implementation):
    arrays = packed(6, 6) | {"cu_seqlens_q": np.int32([0])}
    check(implementation, lambda: (arrays, {"is_causal": False}))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_pullback_that_is_compiled_by_itself_gives_the_same(implementation):
    """As under a scan over layers: XLA then sees where residuals go, not where they are from."""
    tokens, heads = (16384, 16) if ON_GPU and implementation == "mosaic" else (200, 2)
    arrays = packed(tokens, tokens, heads=(heads, heads), dtype="bfloat16")
    cu = np.int32([0, 0.3 * tokens, 0.35 * tokens, tokens])
    static = {"is_causal": True, "implementation": implementation}
    if not runs(implementation, ragged_attention, **arrays, cu_seqlens_q=cu, is_causal=True):
        return
    do, _ = cotangents_of(arrays)

    def with_pullback(query, key, value):
        attend = partial(ragged_attention, cu_seqlens_q=cu, **static)
        return jax.vjp(attend, query, key, value)

    def both(do, *qkv):
        return with_pullback(*qkv)[1](do)

    want = fast_jit(both)(do, *arrays.values())
    _, pullback = fast_jit(with_pullback)(*arrays.values())
    got = fast_jit(lambda pullback, do: pullback(do))(pullback, do)
    for x, right in zip(got, want, strict=True):
        np.testing.assert_allclose(np.float32(x), np.float32(right), rtol=2**-7, atol=2**-7)
