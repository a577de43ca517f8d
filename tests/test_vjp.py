"""The custom derivative and vmap rule that all kernels share, on a stand-in for kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash import (
    backends,
    decode_attention,
    dot_product_attention,
    explain,
    paged_attention,
    ragged_attention,
    vjp,
)
from jax_flash.spec import Device
from tests import tolerance
from tests.fake_kernels import (
    FakeKernels,
    FakeKernelsWithBackward,
    equations_of,
    launches,
    register,
)
from tests.tolerance import bits, fast_jit

B, TQ, TK, HQ, HK, D = 2, 5, 7, 4, 2, 8
KEY = jax.random.key(0)


fused = functools.partial(dot_product_attention, implementation="fake")
dense = functools.partial(dot_product_attention, implementation="xla")


@pytest.fixture(autouse=True)
def kernels(request, monkeypatch):
    register(monkeypatch, getattr(request, "param", FakeKernelsWithBackward))
    yield
    backends.load.cache_clear()


with_and_without_backward = pytest.mark.parametrize(
    "kernels",
    [FakeKernelsWithBackward, FakeKernels],
    ids=["backward", "no backward"],
    indirect=True,
)


def fused_and_dense(run):
    """Results of `run(attention)` with the stand-in and with the oracle, compiled together."""
    return fast_jit(lambda: (run(fused), run(dense)))()


def rand(*shape, dtype="float32", seed=0):
    return jnp.asarray(tolerance.rand(*shape, dtype=dtype, seed=seed))


def ints(*rows):
    return jnp.array(rows, jnp.int32)


def qkv(*leading, dtype="float32"):
    shapes = ((TQ, HQ, D), (TK, HK, D), (TK, HK, D))
    return [rand(*leading, *x, dtype=dtype, seed=i) for i, x in enumerate(shapes)]


def named_qkv(dtype="float32"):
    return dict(zip(("query", "key", "value"), qkv(B, dtype=dtype), strict=True))


def ids(length):
    return jnp.arange(B * length, dtype=jnp.int32).reshape(B, length) % 2


CALLS = {  # floating-point arguments that get gradients, and the rest
    "plain": ({}, {}),
    "mask parts": (
        {},
        {
            "mask": rand(B, 1, TQ, TK, seed=3) > -0.8,
            "is_causal": True,
            "q_offset": ints(1, 3),
            "local_window_size": (4, 1),
            "query_seq_lengths": ints(4, 5),
            "key_value_seq_lengths": ints(7, 5),
        },
    ),
    "segments": ({}, {"query_segment_ids": ids(TQ), "key_value_segment_ids": ids(TK)}),
    "terms": (
        {"bias": rand(1, HQ, 1, TK), "alibi_slopes": rand(HQ), "sinks": rand(HQ, seed=1)},
        {"is_causal": True, "logits_soft_cap": 2.0, "scale": 0.7},
    ),
    "dropout": (
        {"bias": rand(B, 1, TQ, TK)},
        {"dropout_rate": 0.3, "dropout_rng": KEY, "deterministic": True},
    ),
}


def results_and_gradients(attention, floats, rest, dtype="float32"):
    def call(floats):
        return attention(**floats, **rest, return_residual=True)

    (out, lse), pullback = jax.vjp(call, floats)
    cotangents = rand(*out.shape, dtype=dtype, seed=8), rand(*lse.shape, seed=9)
    return (out, lse), pullback(cotangents)[0]


def assert_close(got, want, rtol=1e-4, atol=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), got, want)


# Gradients.


@pytest.mark.parametrize("name", CALLS)
@with_and_without_backward
def test_gradients_equal_those_of_the_oracle(name):
    terms, rest = CALLS[name]
    floats = named_qkv() | terms
    got, want = fused_and_dense(lambda f: results_and_gradients(f, floats, rest))
    assert_close(got, want)
    for key, x in floats.items():
        assert got[1][key].shape == x.shape
        assert np.any(got[1][key] != 0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@with_and_without_backward
def test_gradients_have_the_dtype_of_their_array(dtype):
    floats = named_qkv(dtype) | {"bias": rand(1, HQ, 1, TK), "sinks": rand(HQ, dtype=dtype)}
    run = functools.partial(results_and_gradients, fused, floats, {}, dtype=dtype)
    results, grads = fast_jit(run)()
    assert [x.dtype for x in results] == [dtype, "float32"]
    assert {name: x.dtype for name, x in grads.items()} == {n: x.dtype for n, x in floats.items()}


@with_and_without_backward
def test_cotangents_of_zero_give_exactly_zero():
    terms, rest = CALLS["terms"]
    floats = named_qkv() | terms

    @fast_jit
    def run(floats):
        call = functools.partial(fused, **rest, return_residual=True)
        results, pullback = jax.vjp(lambda floats: call(**floats), floats)
        return pullback(jax.tree.map(jnp.zeros_like, results))[0]

    for gradient in run(floats).values():
        np.testing.assert_array_equal(gradient, 0.0)


def test_delta_is_rowsum_of_do_times_out_minus_the_cotangent_of_lse():
    out, do = (rand(B, TQ, HQ, D, dtype="bfloat16", seed=i) for i in (0, 1))
    lse, dlse = (rand(B, TQ, HQ, seed=i) for i in (0, 1))
    got = vjp.delta(vjp.Residuals(None, out, lse), do, dlse)
    out, do = (np.asarray(x, np.float64) for x in (out, do))
    assert got.dtype == jnp.float32
    assert_close(got, (out * do).sum(-1) - dlse)


@pytest.mark.parametrize("i", [0, 1], ids=["out", "lse"])
def test_a_loss_may_use_one_of_the_two_results(i):
    q, k, v = qkv(B)

    def gradient(attention):
        return jax.grad(lambda q: jnp.sum(jnp.sin(attention(q, k, v, return_residual=True)[i])))(q)

    assert launches(lambda: gradient(fused)) == [("forward", B), ("backward", B)]
    assert_close(*fused_and_dense(gradient))


def test_ragged_calls_run_on_kernels_too():
    arrays = [x[0] for x in qkv(1)]
    cu_seqlens = ints(0, 2, 2, 4), ints(0, 3, 5, 7)

    def run(name):
        def loss(*qkv):
            attention = functools.partial(ragged_attention, implementation=name)
            return jnp.sum(jnp.sin(attention(*qkv, *cu_seqlens, is_causal=True)))

        return jax.value_and_grad(loss, (0, 1, 2))(*arrays)

    assert launches(lambda: run("fake")) == [("forward", 1), ("backward", 1)]
    assert_close(*fast_jit(lambda: (run("fake"), run("xla")))())


# vmap: one launch, with the mapped axis folded into the batch.


@pytest.mark.parametrize(
    ("axes", "bias_axis"),
    [((0, 0, 0), 0), ((0, None, None), None), ((None, 0, 0), 2), ((3, 1, 2), None)],
    ids=["all", "query only", "keys only", "other axes"],
)
def test_vmap_launches_once_on_the_folded_batch(axes, bias_axis):
    def stack(x, axis):
        return x if axis is None else jnp.stack([x, -x, 2 * x], axis)

    axes = (*axes, bias_axis)
    arrays = [stack(x, i) for x, i in zip((*qkv(B), rand(1, HQ, 1, TK)), axes, strict=True)]
    mapped = jax.vmap(fused, axes)
    assert launches(mapped, *arrays) == [("forward", 3 * B)]
    names = {e.primitive.name for e in equations_of(mapped, *arrays)}
    assert not names & {"scan", "while"}
    assert_close(*fused_and_dense(lambda f: jax.vmap(f, axes)(*arrays)))


def test_arrays_that_serve_all_batch_elements_are_not_copied_by_vmap():
    q, k, v = qkv(B)
    bias = rand(1, HQ, TQ, TK)
    found = equations_of(jax.vmap(fused, (0, None, None, None)), jnp.stack([q, q]), k, v, bias)
    (launch,) = [e for e in found if e.primitive.name == "fake_forward"]
    shapes = [x.aval.shape for x in launch.invars]
    assert (2 * B, TQ, HQ, D) in shapes
    assert bias.shape in shapes


def test_nested_vmap_launches_once():
    q, k, v = qkv(3, B)
    v = jnp.stack([v[0], 2 * v[0]])

    def nested(attention):
        inner = jax.vmap(attention, (0, 0, None))
        return jax.vmap(inner, (None, None, 0), 2)(q, k, v)

    assert launches(lambda: nested(fused)) == [("forward", 2 * 3 * B)]
    got, want = fused_and_dense(nested)
    assert got.shape == (3, B, 2, TQ, HQ, D)
    assert_close(got, want)


def test_vmap_of_mask_parts_alone_gives_each_instance_its_mask():
    q, k, v = qkv(B)
    parts = {
        "mask": rand(3, 1, 1, TQ, TK) > -0.5,
        "key_value_seq_lengths": ints([7, 3], [0, 5], [2, 2]),
        "query_segment_ids": jnp.stack([ids(TQ), 1 - ids(TQ), 0 * ids(TQ)]),
    }

    def run(attention):
        def call(parts):
            return attention(q, k, v, key_value_segment_ids=ids(TK), return_residual=True, **parts)

        return jax.vmap(call)(parts)

    assert launches(lambda: run(fused)) == [("forward", 3 * B)]
    assert_close(*fused_and_dense(run))


def test_decode_calls_fold_under_vmap():
    q, k, v = qkv(3, B)
    lens = ints([7, 3], [1, 5], [2, 0])

    def run(name):
        call = functools.partial(decode_attention, implementation=name)
        return jax.vmap(call)(q[:, :, :1], k, v, lens)

    assert launches(lambda: run("fake")) == [("forward", 3 * B)]
    assert_close(*fast_jit(lambda: (run("fake"), run("xla")))())


@pytest.mark.parametrize("pool_axis", [None, 0])
def test_paged_calls_work_under_vmap(pool_axis):
    pool = rand(6, HK, 4, D) if pool_axis is None else rand(3, 6, HK, 4, D)
    q = rand(3, B, 1, HQ, D)
    tables = jnp.arange(3 * B * 2, dtype=jnp.int32).reshape(3, B, 2) % 6
    lens = ints([8, 3], [1, 5], [2, 0])

    def run(name):
        call = functools.partial(paged_attention, implementation=name)
        return jax.vmap(call, (0, pool_axis, pool_axis, 0, 0))(q, pool, pool, tables, lens)

    want = fast_jit(lambda: run("xla"))()
    assert_close(fast_jit(lambda: run("fake"))(), want)


SHARED = {"bias": rand(1, HQ, 1, TK), "alibi_slopes": rand(HQ), "sinks": rand(HQ, seed=1)}


@with_and_without_backward
def test_vmap_of_grad_gives_each_instance_its_gradient_of_what_they_share():
    q, k, v = qkv(B)
    q = jnp.stack([q, -q, q + 1])

    def run(attention):
        def loss(q, shared):
            return jnp.sum(jnp.sin(attention(q, value=v, **shared)))

        return jax.vmap(jax.grad(loss, (0, 1)), (0, None))(q, SHARED | {"key": k})

    assert {batch for _, batch in launches(lambda: run(fused))} == {3 * B}
    got, want = fused_and_dense(run)
    assert got[1]["bias"].shape == (3, 1, HQ, 1, TK)
    assert_close(got, want)


def test_grad_of_vmap_sums_the_gradients_of_what_is_shared():
    q, k, v = qkv(B)
    q = jnp.stack([q, -q, q + 1])

    def run(attention):
        def loss(q, shared):
            mapped = jax.vmap(lambda q, shared: attention(q, value=v, **shared), (0, None))
            return jnp.sum(jnp.sin(mapped(q, shared)))

        return jax.grad(loss, (0, 1))(q, SHARED | {"key": k})

    assert launches(lambda: run(fused)) == [("forward", 3 * B), ("backward", 3 * B)]
    assert_close(*fused_and_dense(run))


def test_a_jacobian_launches_the_backward_kernel_once():
    q, k, v = (x[:, :2, :, :2] for x in qkv(B))

    def jacobian(attention):
        return jax.jacrev(lambda k: attention(q, k, v, rand(1, 1, 1, 2)))(k)

    assert launches(lambda: jacobian(fused)) == [("forward", B), ("backward", B * q.size)]
    assert_close(*fused_and_dense(jacobian))


def test_dropout_under_vmap_draws_what_a_loop_draws():
    q, k, v = qkv(3, B)
    keys = jax.random.split(KEY, 3)

    def call(q, k, v, key):
        return fused(q, k, v, dropout_rate=0.5, dropout_rng=key)

    assert launches(jax.vmap(call), q, k, v, keys) == [("forward", 3 * B)]
    got, one = fast_jit(jax.vmap(call))(q, k, v, keys), fast_jit(call)
    want = [one(*args) for args in zip(q, k, v, keys, strict=True)]
    assert_close(got, np.stack(want))
    assert not np.allclose(want[0], one(q[0], k[0], v[0], keys[1]))


def test_one_dropout_key_serves_all_instances_of_a_batch_of_one():
    q, k, v = qkv(3, 1)

    def call(q):
        return fused(q, k[0], v[0], dropout_rate=0.5, dropout_rng=KEY)

    got, one = fast_jit(jax.vmap(call))(q), fast_jit(call)
    assert_close(got, np.stack([one(x) for x in q]))


# Rematerialisation and scan.

POLICIES = jax.checkpoint_policies


@pytest.mark.parametrize(
    ("policy", "forward_launches"),
    [
        (POLICIES.everything_saveable, 1),
        (POLICIES.save_only_these_names("flash_out", "flash_lse"), 1),
        (POLICIES.nothing_saveable, 2),
        (POLICIES.dots_saveable, 2),
    ],
    ids=["everything", "our names", "nothing", "dots"],
)
def test_remat_that_saves_our_names_runs_the_forward_kernel_once_a_layer(policy, forward_launches):
    weights, x = rand(2, 3, D, D), rand(B, TQ, HQ, D)

    def block(x, weights):
        q, k, v = (x @ w for w in weights)
        return x + fused(q, k, v, is_causal=True), None

    def gradients(block):
        return jax.grad(lambda *a: jnp.sum(jax.lax.scan(block, a[1], a[0])[0] ** 2), (0, 1))

    remat, plain = gradients(jax.checkpoint(block, policy=policy)), gradients(block)
    found = launches(remat, weights, x)  # one layer: the body of the scan
    assert found.count(("forward", B)) == forward_launches
    assert found.count(("backward", B)) == 1
    assert bits(fast_jit(remat)(weights, x)) == bits(fast_jit(plain)(weights, x))


# What kernels cannot do.


@pytest.mark.parametrize(
    "derivative",
    [
        lambda f, q: jax.jvp(f, (q,), (q,)),
        lambda f, q: jax.hessian(lambda q: jnp.sum(f(q)))(q),
        lambda f, q: jax.grad(lambda q: jnp.sum(jax.grad(lambda q: jnp.sum(f(q) ** 2))(q)))(q),
    ],
    ids=["jvp", "hessian", "grad of grad"],
)
def test_other_derivatives_are_errors_that_name_attention_and_the_remedy(derivative):
    q, k, v = qkv(B)
    with pytest.raises((TypeError, NotImplementedError, ValueError)) as info:
        derivative(lambda q: fused(q, k, v), q)
    message = str(info.value)
    assert "attention" in message, message
    assert "chunked" in message, message


WRAPPED = {
    "plain": lambda call: call,
    "jit": jax.jit,
    "remat": jax.remat,
    "vmap": lambda call: lambda *x: jax.vmap(call)(*(a[None] for a in x))[0],
    "scan": lambda call: lambda *x: jax.lax.scan(lambda c, _: (c, call(*x)), 0, length=1)[1],
}


@with_and_without_backward
@pytest.mark.parametrize("wrapped", WRAPPED)
@pytest.mark.parametrize("wanted", [(0,), (3, 4)])
def test_only_what_is_differentiated_gets_a_gradient(wanted, wrapped):
    """What is not is named to the kernel, which need not compute it."""
    arrays = (*qkv(), rand(1, HQ, 1, TK, seed=4), rand(HQ, seed=5), rand(HQ, seed=6))
    names = ("query", "key", "value", "bias", "alibi_slopes", "sinks")

    def loss(attention):
        def call(q, k, v, bias, slopes, sinks):
            return jnp.sum(attention(q, k, v, bias, alibi_slopes=slopes, sinks=sinks) ** 2)

        return WRAPPED[wrapped](call)

    def gradients(attention):
        return jax.grad(lambda *x: jnp.sum(loss(attention)(*x)), wanted)(*arrays)

    assert_close(*fast_jit(lambda: (gradients(fused), gradients(dense)))())
    constants = {name for i, name in enumerate(names) if i not in wanted}
    found = [
        set(e.params["spec"].constants)
        for e in equations_of(lambda: gradients(fused))
        if e.primitive.name == "fake_backward"
    ]
    assert all(x == constants for x in found)
    assert len(found) == hasattr(backends.load("fake"), "backward")


def test_the_gradient_of_a_cache_scale_is_never_silently_zero():
    q, k, v = qkv(B)

    def slope(name):
        def loss(scale):
            call = functools.partial(decode_attention, k_scale=scale, implementation=name)
            return jnp.sum(jnp.sin(call(q[:, :1], k, v, ints(7, 3))))

        return fast_jit(jax.grad(loss))(jnp.float32(1.5))

    want = slope("xla")
    assert abs(want) > 1e-3
    got = slope("fake")
    assert np.isnan(got) or np.allclose(got, want, rtol=1e-4)


@pytest.mark.parametrize("kernels", [FakeKernels], indirect=True)
def test_explain_says_what_lends_a_kernel_its_gradient():
    q, k, v = qkv(B)
    report = explain(jax.grad(lambda q: jnp.sum(fused(q, k, v))), q)
    assert report.chosen == ("fake", "chunked")
    assert [decision.is_gradient for decision in report.decisions] == [False, True]
    assert "gradient of dense" in str(report)


@pytest.mark.parametrize("kernels", [FakeKernels], indirect=True)
def test_a_gradient_on_plain_xla_warns_once_where_a_gpu_is_present(monkeypatch):
    q, k, v = qkv(B)
    monkeypatch.setattr(backends, "device_of", lambda *_: Device("gpu", "9.0", "NVIDIA H200"))
    monkeypatch.setattr(backends, "_warned", set())
    slope = jax.grad(lambda q: jnp.sum(fused(q, k, v)))
    with pytest.warns(UserWarning, match=r"the gradient of attention .* runs on plain XLA"):
        slope(q)
    slope(q + 1)
