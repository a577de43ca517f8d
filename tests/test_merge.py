"""Log-sum-exps are natural logs everywhere, and merge parts into the whole, gradients included."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash import (
    decode_attention,
    dot_product_attention,
    merge_attention,
    paged_attention,
    ragged_attention,
)
from tests import oracle64 as oracle
from tests.tolerance import IMPLEMENTATIONS, bits, fast_jit, rand, runs

NAN, INF = np.nan, np.inf
ZEROS = np.zeros((1, 8, 1, 64), jnp.bfloat16)
QUERY = ZEROS[:, :1]
KEYS = rand(1, 8, 1, 64, dtype="bfloat16")
PAGES, TABLE, LENS = KEYS.reshape(2, 4, 1, 64), np.int32([[0, 1]]), np.int32([8])
CALLS_WITH_EIGHT_KEYS = {
    "dense": (dot_product_attention, (QUERY, KEYS, KEYS), {}),
    "ragged": (
        ragged_attention,
        (QUERY[0], KEYS[0], KEYS[0], np.int32([0, 1]), np.int32([0, 8])),
        {"is_causal": True},
    ),
    "decode": (decode_attention, (QUERY, KEYS, KEYS, LENS), {}),
    "paged NHD": (paged_attention, (QUERY, PAGES, PAGES, TABLE, LENS), {"page_layout": "NHD"}),
    "paged HND": (
        paged_attention,
        (QUERY, PAGES.swapaxes(1, 2), PAGES.swapaxes(1, 2), TABLE, LENS),
        {"page_layout": "HND"},
    ),
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", CALLS_WITH_EIGHT_KEYS)
def test_lse_of_eight_equal_logits_is_the_natural_log_of_eight(kind, implementation):
    function, arrays, static = CALLS_WITH_EIGHT_KEYS[kind]
    static = static | {"return_residual": True}
    if runs(implementation, function, *arrays, **static):
        _, lse = fast_jit(partial(function, **static, implementation=implementation))(*arrays)
        assert lse.dtype == jnp.float32
        np.testing.assert_allclose(np.asarray(lse).ravel(), [math.log(8)], rtol=1e-6)


def test_weights_are_natural_exponentials_of_lse():
    out, lse = merge_attention(
        [np.float32([[0.0]]), np.float32([[1.0]])], np.float32([[0.0], [math.log(3)]])
    )
    np.testing.assert_allclose(out, [[0.75]], rtol=1e-6)
    np.testing.assert_allclose(lse, [math.log(4)], rtol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "as_list"),
    [("float32", True), ("float32", False), ("bfloat16", False), ("float16", True)],
)
def test_parts_merge_as_the_oracle_merges_them(dtype, as_list):
    outs, lses = rand(3, 2, 5, 4, 8, dtype=dtype), 30 * rand(3, 2, 5, 4)
    lses[0, 0], lses[:, 1, 2] = -INF, -INF
    outs[0, 0], outs[:, 1, 2] = NAN, INF  # not read
    want_out, want_lse = oracle.merge(outs, lses)
    out, lse = fast_jit(merge_attention)(*((list(outs), list(lses)) if as_list else (outs, lses)))
    assert (out.dtype, lse.dtype) == (outs.dtype, np.float32)
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.float64(out), want_out, rtol=eps, atol=eps)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6)
    assert not np.any(out[1, 2])
    assert (np.asarray(lse)[1, 2] == -INF).all()


def test_parts_may_come_in_any_order_and_one_part_is_itself():
    merge = fast_jit(merge_attention)
    outs, lses = rand(4, 3, 2, 8), rand(4, 3, 2, seed=1)
    lses[1, 0], outs[1, 0] = -INF, NAN
    want = merge(outs, lses)
    order = np.array([2, 0, 3, 1])
    first_two, last_two = merge(outs[:2], lses[:2]), merge(outs[2:], lses[2:])
    nested = merge(*zip(first_two, last_two, strict=True))
    for got in (merge(outs[order], lses[order]), nested):
        for x, y in zip(got, want, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    assert bits(merge(outs[:1], lses[:1])) == bits((outs[0], lses[0]))


def test_a_part_that_is_not_a_number_is_not_hidden():
    outs, lses = rand(2, 3, 8), rand(2, 3, seed=1)
    lses[1, 0], outs[0, 1, 2] = NAN, NAN
    out, lse = map(np.asarray, merge_attention(outs, lses))
    np.testing.assert_array_equal(np.isnan(lse), [True, False, False])
    np.testing.assert_array_equal(np.isnan(out).any(-1), [True, True, False])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_splitting_the_keys_and_merging_equals_one_pass(implementation):
    q, k, v = (rand(1, n, 2, 64, dtype="bfloat16", seed=n) for n in (2, 4096, 4097))
    v = v[:, :4096]
    call = {"return_residual": True, "implementation": implementation}
    if not runs(function=dot_product_attention, query=q, key=k, value=v, **call):
        return

    @partial(fast_jit, static_argnums=3)
    def split(q, k, v, at):
        run = partial(dot_product_attention, **call)
        parts = [run(q, k[:, :at], v[:, :at]), run(q, k[:, at:], v[:, at:])]
        return merge_attention(*zip(*parts, strict=True))

    out, lse = split(q, k, v, 4000)
    want_out, want_lse = oracle.attention(q, k, v)
    np.testing.assert_allclose(lse, want_lse, atol=1e-3)
    np.testing.assert_allclose(np.float32(out), want_out, atol=1e-3)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradients_flow_through_out_and_lse_of_every_part(implementation):
    """Two parts, of which a batch row sees both, one, or none."""
    q, k, v = (
        rand(3, n, h, 16, seed=seed) for seed, (n, h) in enumerate(((3, 4), (20, 2), (20, 2)))
    )
    do, dlse = rand(3, 3, 4, 16, seed=3), rand(3, 3, 4, seed=4)
    lengths = np.int32([[5, 8, 0], [12, 0, 0]])  # [part, batch row]
    call = {"return_residual": True, "implementation": implementation}
    if not runs(function=dot_product_attention, query=q, key=k, value=v, **call):
        return

    @fast_jit
    def run(q, k, v, do, dlse, lengths):
        def attend(q, k, v):
            parts = [
                dot_product_attention(
                    q, k[:, keys], v[:, keys], key_value_seq_lengths=lengths[n], **call
                )
                for n, keys in enumerate((slice(8), slice(8, None)))
            ]
            return merge_attention(*zip(*parts, strict=True))

        results, pullback = jax.vjp(attend, q, k, v)
        return *results, *pullback((do, dlse))

    got = run(q, k, v, do, dlse, lengths)
    j = np.arange(20)
    mask = np.where(j < 8, j < lengths[0][:, None], j - 8 < lengths[1][:, None])[:, None, None]
    want = oracle.attention(q, k, v, mask=mask)
    want_grads = oracle.attention_grads(q, k, v, do, dlse, mask=mask)
    want += want_grads["dq"], want_grads["dk"], want_grads["dv"]
    for x, right in zip(got, want, strict=True):
        np.testing.assert_allclose(x, right, rtol=1e-5, atol=2e-6)
    out, _, *grads = map(np.asarray, got)
    assert not any(x[2].any() for x in (out, *grads))


def test_empty_parts_have_no_gradient():
    outs, lses = rand(2, 3, 8), rand(2, 3, seed=1)
    lses[0, 0], outs[0, 0] = -INF, NAN
    lses[:, 1], outs[:, 1] = -INF, INF

    def loss(outs, lses):
        out, lse = merge_attention(outs, lses)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(jnp.isneginf(lse), 0.0, lse))

    douts, dlses = map(np.asarray, fast_jit(jax.grad(loss, (0, 1)))(outs, lses))
    assert np.isfinite(douts).all()
    assert np.isfinite(dlses).all()
    empty = lses == -INF
    assert not douts[empty].any()
    assert not dlses[empty].any()
    assert (douts[~empty] != 0).all()
    assert (dlses[~empty] != 0).all()
