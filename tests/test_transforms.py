"""JAX's transformations of the public calls, on the implementations that are plain JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash import chunked, dot_product_attention, ragged_attention
from tests import oracle64 as oracle
from tests.tolerance import bits, fast_jit, rand

PLAIN = ("xla", "chunked")
B, TQ, TK, HQ, HK, D = 2, 5, 7, 4, 2, 8
KEY = jax.random.key(0)


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    """Tiles of 4 x 4, so that "chunked" has several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked, "_MAX_BLOCK", 4)
        yield


@pytest.fixture(params=PLAIN)
def attention(request):
    return functools.partial(dot_product_attention, implementation=request.param)


def qkv(*leading, tq=TQ, tk=TK, hq=HQ, hk=HK, d=D, dtype="float32"):
    shapes = ((tq, hq, d), (tk, hk, d), (tk, hk, d))
    return [jnp.asarray(rand(*leading, *x, dtype=dtype, seed=i)) for i, x in enumerate(shapes)]


def ints(*shape, high, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, high, shape), jnp.int32)


def assert_close(got, want, **tolerance):
    tolerance = {"rtol": 2e-5, "atol": 2e-6} | tolerance
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), got, want)


def assert_same_bits(got, want):
    assert bits(got) == bits(want)


# jit and derivatives.


def test_jit_grad_and_value_and_grad_agree_with_the_oracle(attention):
    q, k, v = qkv(B)
    do = rand(B, TQ, HQ, D, seed=9)

    def loss(*qkv):
        return jnp.sum(attention(*qkv, is_causal=True) * do)

    out = oracle.attention(q, k, v, is_causal=True)[0]
    grads = list(oracle.attention_grads(q, k, v, do, is_causal=True).values())[:3]
    value, got = fast_jit(jax.value_and_grad(loss, (0, 1, 2)))(q, k, v)
    assert_close(value, np.sum(out * do), rtol=1e-4)
    assert_close(list(got), grads, rtol=1e-4, atol=1e-5)


def textbook(q, k, v):
    k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], 1) for x in (k, v))
    logits = jnp.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(logits), v)


def test_jvp_jacobian_hessian_and_grad_of_grad_match_a_plain_softmax(attention):
    arrays = qkv(tq=3, tk=4, hq=2, hk=1, d=4)
    tangents = [rand(*x.shape, seed=5) for x in arrays]

    def derivatives(function):
        def loss(q):
            return jnp.sum(jnp.sin(function(q, *arrays[1:])))

        def slope(q):  # a gradient penalty
            return jnp.sum(jax.grad(loss)(q) ** 2)

        return {
            "jvp": jax.jvp(function, arrays, tangents),
            "jacrev": jax.jacrev(function, argnums=1)(*arrays),
            "hessian": jax.hessian(loss)(arrays[0]),
            "grad of grad": jax.grad(slope)(arrays[0]),
        }

    got, want = fast_jit(lambda: (derivatives(attention), derivatives(textbook)))()
    assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_jvp_of_the_log_sum_exp_is_transposed_by_its_vjp(attention):
    q, k, v = qkv(B)
    call = functools.partial(attention, is_causal=True, q_offset=2, return_residual=True)
    tangents = tuple(rand(*x.shape, seed=5) for x in (q, k, v))
    cotangents = rand(B, TQ, HQ, D, seed=6), rand(B, TQ, HQ, seed=7)

    @fast_jit
    def products():
        _, pushed = jax.jvp(call, (q, k, v), tangents)
        pulled = jax.vjp(call, q, k, v)[1](cotangents)
        return [
            sum(jnp.vdot(a, b) for a, b in zip(*pair, strict=True))
            for pair in ((pushed, cotangents), (pulled, tangents))
        ]

    forward, backward = products()
    assert abs(forward) > 1.0
    assert_close(forward, backward, rtol=1e-4)


def test_a_traced_scale_has_its_gradient(attention):
    q, k, v = qkv(B)

    @fast_jit
    def value_and_slope(scale):
        return jax.value_and_grad(lambda scale: jnp.sum(attention(q, k, v, scale=scale) ** 3))(
            scale
        )

    def value(scale):
        return np.sum(oracle.attention(q, k, v, scale=scale)[0] ** 3)

    got_value, slope = value_and_slope(jnp.float32(0.4))
    assert_close(got_value, value(0.4), rtol=1e-4)
    assert_close(slope, (value(0.4 + 1e-5) - value(0.4 - 1e-5)) / 2e-5, rtol=1e-3)


@pytest.mark.parametrize(("hq", "hk"), [(6, 2), (12, 3)])
def test_gradients_of_shared_heads_are_sums_over_their_group(hq, hk):
    attention = dot_product_attention
    q, k, v = qkv(1, tq=17, tk=17, hq=hq, hk=hk, d=4)

    @fast_jit
    def gradients(*arrays):
        return jax.grad(lambda *a: jnp.sum(jnp.sin(attention(*a))), (0, 1, 2))(*arrays)

    dq, *dkv = gradients(q, k, v)
    want_dq, *repeated = gradients(q, *(jnp.repeat(x, hq // hk, axis=2) for x in (k, v)))
    want = [x.reshape(1, 17, hk, hq // hk, 4).sum(3) for x in repeated]
    assert [x.shape for x in dkv] == [k.shape, v.shape]
    assert_close([dq, *dkv], [want_dq, *want], rtol=1e-4, atol=1e-5)


# vmap.

MAPPED = {  # axes of: query, key, value, and what else
    "everything": ((0, 0, 0), {"mask": 0, "bias": 0, "sinks": 0, "kv_lengths": 0, "ids": 0}),
    "odd axes": ((2, 1, -1), {"mask": 2, "bias": -1, "sinks": 1, "kv_lengths": 1}),
    "query only": ((0, None, None), {"mask": None, "kv_lengths": None}),
    "keys but not the query": ((None, 0, 0), {"bias": None, "ids": None}),
    "values only": ((None, None, 1), {"sinks": None}),
    "mask only": ((None, None, None), {"mask": 0}),
    "bias only": ((None, None, None), {"bias": 1, "sinks": None}),
    "lengths and offsets only": ((None, None, None), {"kv_lengths": 0, "q_offset": 0}),
    "segment ids only": ((None, None, None), {"ids": 0}),
    "alibi only": ((None, None, None), {"alibi_slopes": 0}),
    "dropout keys only": ((None, None, None), {"rng": 0}),
}


def full_call(attention, q, k, v, terms):
    terms = dict(terms)
    names = {"kv_lengths": "key_value_seq_lengths", "rng": "dropout_rng"}
    keywords = {names.get(name, name): x for name, x in terms.items() if name != "ids"}
    if "ids" in terms:
        keywords |= {
            "query_segment_ids": terms["ids"][:, :TQ],
            "key_value_segment_ids": terms["ids"],
        }
    if "rng" in terms:
        keywords["dropout_rate"] = 0.5
    is_causal = "q_offset" in terms
    return attention(q, k, v, is_causal=is_causal, return_residual=True, **keywords)


def map_operands(size, axes, extra):
    """Arrays of a call, with an axis of `size` where one is mapped."""
    shapes = {"query": (B, TQ, HQ, D), "key": (B, TK, HK, D), "value": (B, TK, HK, D),
              "bias": (1, HQ, 1, TK), "sinks": (HQ,), "alibi_slopes": (HQ,)}  # fmt: skip

    def insert(shape, axis):
        if axis is None:
            return shape
        axis = axis % (len(shape) + 1)
        return (*shape[:axis], size, *shape[axis:])

    arrays = []
    for seed, (name, axis) in enumerate((*zip(("query", "key", "value"), axes, strict=True),
                                         *extra.items())):  # fmt: skip
        if name in shapes:
            x = jnp.asarray(rand(*insert(shapes[name], axis), seed=seed))
        elif name == "mask":
            x = jnp.asarray(rand(*insert((B, 1, TQ, TK), axis), seed=seed) > -0.5)
        elif name == "rng":
            x = jax.random.split(KEY, size)
        else:
            shape = {"kv_lengths": (B,), "q_offset": (B,), "ids": (B, TK)}[name]
            x = ints(*insert(shape, axis), high=2 if name == "ids" else TK + 1, seed=seed)
        arrays.append(x)
    return arrays[:3], dict(zip(extra, arrays[3:], strict=True))


def loop(function, axes, size):
    """What vmap means, one call at a time."""

    def run(*args):
        def call(i):
            def take(x, axis):
                return x if axis is None else jax.lax.dynamic_index_in_dim(x, i, axis, False)

            # A None in `axes` stands for no mapped axis, not for an empty pytree.
            return function(*(
                {name: take(x, axis[name]) for name, x in arg.items()}
                if isinstance(arg, dict) else take(arg, axis)
                for arg, axis in zip(args, axes, strict=True)
            ))  # fmt: skip

        return jax.lax.map(call, jnp.arange(size))

    return run


@pytest.mark.parametrize(
    ("implementation", "name"),
    [*(("xla", name) for name in MAPPED), ("chunked", "everything")],
)
def test_vmap_equals_a_loop(implementation, name):
    axes, extra = MAPPED[name]
    arrays, terms = map_operands(3, axes, extra)
    attention = functools.partial(dot_product_attention, implementation=implementation)
    call, axes = functools.partial(full_call, attention), (*axes, extra)

    @fast_jit
    def run(*args):
        return jax.vmap(call, axes)(*args), loop(call, axes, 3)(*args)

    got, want = run(*arrays, terms)
    assert_close(got, want)


def test_nested_vmaps_over_different_operands_equal_loops():
    attention = dot_product_attention
    q, k, v = qkv(B)
    q, v = (jnp.stack([x, 2 * x, x - 1]) for x in (q, v))
    k = jnp.stack([k, 3 * k])

    def nested(outer, inner):
        return outer(inner(attention, (0, None, 0), 3), (None, 0, None), 2)(q, k, v)

    def batched(function, axes, size):
        del size
        return jax.vmap(function, axes)

    got, want = fast_jit(lambda: (nested(batched, batched), nested(loop, loop)))()
    assert got.shape == (2, 3, B, TQ, HQ, D)
    assert_close(got, want)


def test_vmap_of_grad_and_grad_of_vmap_equal_loops():
    attention = dot_product_attention
    q, k, v = qkv(B)
    q = jnp.stack([q, -q, q + 1])
    bias = jnp.asarray(rand(1, HQ, 1, TK))

    def loss(q, k, bias):
        return jnp.sum(jnp.sin(attention(q, k, v, bias)))

    gradients, axes = jax.grad(loss, (0, 1, 2)), (0, None, None)

    def total(*args):
        return jnp.sum(jax.vmap(loss, axes)(*args))

    @fast_jit
    def run(*args):
        every = jax.vmap(gradients, axes)(*args)
        return every, loop(gradients, axes, 3)(*args), jax.grad(total, (0, 1, 2))(*args)

    got, want, of_total = run(q, k, bias)
    assert_close(got, want, rtol=1e-4, atol=1e-5)
    dq, dk, dbias = want
    assert_close(of_total, (dq, dk.sum(0), dbias.sum(0)), rtol=1e-4, atol=1e-5)


# Rematerialisation and scan.

POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "names": jax.checkpoint_policies.save_only_these_names("flash_out", "flash_lse"),
}


def two_layers(attention, remat, **options):
    """The loss of two scanned layers, as a function of their weights and the input."""

    def block(x, weights):
        q, k, v = (x @ w for w in weights)  # [B, T, H, D] each
        return x + attention(q, k, v, is_causal=True, **options), None

    return lambda weights, x: jnp.sum(jax.lax.scan(remat(block), x, weights)[0] ** 2)


def test_remat_under_any_policy_changes_no_bit_of_the_gradients(attention):
    weights, x = jnp.asarray(rand(2, 3, D, D)), jnp.asarray(rand(B, TQ, HQ, D))

    def gradients(remat, **options):
        return fast_jit(jax.grad(two_layers(attention, remat, **options), (0, 1)))(weights, x)

    options = {"dropout_rate": 0.3, "dropout_rng": KEY}
    plain = gradients(lambda block: block, **options)
    assert all(np.isfinite(x).all() and np.any(x != 0) for x in plain)
    chunked_too = attention.keywords["implementation"] == "chunked"
    for policy in ("names",) if chunked_too else POLICIES:  # it takes long to compile
        remat = functools.partial(jax.checkpoint, policy=POLICIES[policy])
        assert_same_bits(gradients(remat, **options), plain)


def test_remat_with_our_names_saves_out_and_lse(attention):
    q, k, v = qkv(B)
    remat = functools.partial(jax.checkpoint, policy=POLICIES["names"])

    @remat
    def block(q, k, v):
        out, lse = attention(q, k, v, return_residual=True)
        return jnp.sin(out), jnp.sin(lse)

    residuals = jax.eval_shape(lambda *qkv: jax.tree.leaves(jax.vjp(block, *qkv)[1]), q, k, v)
    saved = [x.shape for x in residuals]
    for shape in ((B, TQ, HQ, D), (B, TQ, HQ)):
        assert shape in saved
    assert not any(shape[-2:] == (TQ, TK) for shape in saved)


# Integer arguments under differentiation.


def two_calls(attention, qkv, **mask):
    layer = functools.partial(attention, **mask)
    return jnp.sum(layer(layer(*qkv), *qkv[1:]))


def scanned_calls(attention, qkv, ids):
    def step(carry, _):
        x, ids = carry
        return (attention(x, *qkv[1:], query_segment_ids=ids), ids), None

    return jnp.sum(jax.lax.scan(step, (qkv[0], ids), length=2)[0][0])


@pytest.mark.parametrize(
    ("implementation", "form"),
    [("xla", "closed over"), ("xla", "mapped"), ("xla", "in a scan"), ("chunked", "in a scan")],
)
def test_integer_ids_pass_through_differentiation(implementation, form):
    attention = functools.partial(dot_product_attention, implementation=implementation)
    qkv_arrays, ids = qkv(B, tk=TQ), ints(B, TQ, high=2)

    def shared_ids(qkv, ids):
        return two_calls(attention, qkv, query_segment_ids=ids)

    def gradients(qkv, ids):
        if form == "closed over":
            return jax.grad(lambda qkv: shared_ids(qkv, ids))(qkv)
        if form == "mapped":
            both = jax.vmap(jax.grad(shared_ids), (None, 0))(qkv, jnp.stack([1 - ids, ids]))
            return jax.tree.map(lambda x: x[1], both)
        return jax.grad(functools.partial(scanned_calls, attention))(qkv, ids)

    @fast_jit
    def run(qkv, ids):
        mask = ids[:, None, :, None] == ids[:, None, None, :]
        masked = jax.grad(lambda qkv: two_calls(dot_product_attention, qkv, mask=mask))(qkv)
        return gradients(qkv, ids), masked

    assert_close(*run(qkv_arrays, ids), rtol=1e-4, atol=1e-5)


def test_ragged_calls_differentiate_with_traced_lengths():
    arrays = [x[0] for x in qkv(1, tq=TK)]

    @fast_jit
    def gradients(cu_seqlens):
        def loss(qkv):
            return jnp.sum(jnp.sin(ragged_attention(*qkv, cu_seqlens, is_causal=False)))

        return jax.grad(loss)(arrays)

    for x in gradients(jnp.array([0, 3, 3, 6], jnp.int32)):
        assert all(x[token].any() for token in range(3, 6))
        np.testing.assert_array_equal(x[6], 0.0)  # in no sequence
