"""Flax: its own modules with our `attention_fn`, unmodified, and the layer of this package."""

import contextlib
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_flash import UnsupportedError, layers
from jax_flash.layers import FlashCausalSelfAttention, attention_fn
from tests.fake_kernels import equations_of
from tests.tolerance import bits, fast_jit, rand

B, T, WIDTH, HEADS = 2, 6, 16, 4
KEY = jax.random.key(0)


def ours(implementation=None):
    return functools.partial(attention_fn, implementation=implementation)


def x_of(*leading, length=T, dtype="float32", seed=0):
    return jnp.asarray(rand(*leading, length, WIDTH, dtype=dtype, seed=seed))


def assert_close(got, want, rtol=1e-4, atol=1e-5):
    def check(a, b):
        np.testing.assert_allclose(np.asarray(a, "f8"), np.asarray(b, "f8"), rtol=rtol, atol=atol)

    jax.tree.map(check, got, want)


# Flax's own modules: outputs and gradients of parameters and inputs, ours and the default.


def filled(abstract):
    """Parameters of the given shapes, without the cost of initialising a layer."""
    leaves, tree = jax.tree.flatten(abstract)
    drawn = [jnp.asarray(0.3 * rand(*x.shape, seed=i)) for i, x in enumerate(leaves)]
    return jax.tree.unflatten(tree, drawn)


@functools.partial(fast_jit, static_argnums=0, static_argnames=("deterministic", "is_causal"))
def run(graph, state, *args, **kwargs):
    return nnx.merge(graph, state)(*args, **kwargs)


def nnx_layer(**options):
    def build():
        return nnx.MultiHeadAttention(HEADS, WIDTH, rngs=nnx.Rngs(0), keep_rngs=False, **options)

    graph, state = nnx.split(nnx.eval_shape(build))
    return nnx.merge(graph, filled(state))


def nnx_results(attention, x, call_options, **options):
    given = {} if attention is None else {"attention_fn": attention}
    graph, params = nnx.split(nnx_layer(decode=False, **given, **options))

    def loss(params, x):
        out = nnx.merge(graph, params)(x, **call_options)
        return jnp.sum(jnp.sin(out.astype(jnp.float32))), out

    gradients, out = jax.grad(loss, (0, 1), has_aux=True)(params, x)
    return out, nnx.to_pure_dict(gradients[0]), gradients[1]


def linen_results(attention, x, call_options, **options):
    given = {} if attention is None else {"attention_fn": attention}
    layer = nn.MultiHeadDotProductAttention(HEADS, qkv_features=2 * WIDTH, **given, **options)
    variables = filled(jax.eval_shape(layer.init, KEY, x))

    def loss(variables, x):
        out = layer.apply(variables, x, **call_options)
        return jnp.sum(jnp.sin(out.astype(jnp.float32))), out

    gradients, out = jax.grad(loss, (0, 1), has_aux=True)(variables, x)
    return out, *gradients


FRAMEWORKS = {"nnx": nnx_results, "linen": linen_results}
TOKENS = jnp.array([[1, 2, 3, 4, 0, 0], [1, 2, 3, 4, 5, 6]])
CAUSAL, PADDING = nn.make_causal_mask(TOKENS), (TOKENS > 0)[:, None, None, :]
MASKS = {
    "none": None,
    "causal, float": CAUSAL,
    "causal, bool": CAUSAL.astype(bool),
    "padding": PADDING,
    "combined": nn.combine_masks(CAUSAL, PADDING.astype(CAUSAL.dtype)),
    "integers": jnp.asarray(rand(B, HEADS, T, T) > -1.0, jnp.int32).at[..., 0].set(2),
}


@pytest.mark.parametrize(
    ("framework", "mask"),
    [("nnx", "causal, bool"), ("nnx", "padding"), ("nnx", "integers"),
     ("linen", "none"), ("linen", "causal, float"), ("linen", "combined")],
)  # fmt: skip
def test_flax_modules_give_what_they_give_by_default(framework, mask):
    run = functools.partial(FRAMEWORKS[framework], x=x_of(B), call_options={"mask": MASKS[mask]})
    assert_close(*fast_jit(lambda: (run(ours()), run(None)))())


@pytest.mark.parametrize(
    ("framework", "implementation"), [("nnx", "chunked"), ("linen", ("cudnn", "chunked"))]
)
def test_flax_modules_take_an_implementation_by_partial(framework, implementation):
    run = functools.partial(
        FRAMEWORKS[framework], x=x_of(B), call_options={"mask": MASKS["combined"]}
    )
    assert_close(*fast_jit(lambda: (run(ours(implementation)), run(None)))())
    with pytest.raises(UnsupportedError, match="cudnn: needs an NVIDIA GPU"):
        run(ours("cudnn"))


@pytest.mark.parametrize(
    ("x", "call_options", "options"),
    [
        (x_of(B), {"is_causal": True}, {}),
        (x_of(B), {"is_causal": True, "mask": MASKS["padding"]}, {"num_kv_heads": 2}),
        (x_of(B), {"mask": MASKS["combined"]}, {"num_kv_heads": 1, "normalize_qk": True}),
        (x_of(B, 3), {"mask": CAUSAL[:, None]}, {}),
        (x_of(B, 1, 2), {"mask": MASKS["padding"][:, None, None]}, {"num_kv_heads": 2}),
        (x_of(), {"is_causal": True}, {}),
    ],
    ids=["causal", "causal, padded, GQA", "MQA, normalised", "batch axes", "GQA, batch axes",
         "no batch axis"],
)  # fmt: skip
def test_nnx_options_give_what_they_give_by_default(x, call_options, options):
    run = functools.partial(nnx_results, x=x, call_options=call_options, **options)

    def flax_default():
        # Flax's fast path wants one batch axis: give it one, with the mask repeated.
        if x.ndim <= 3:
            return run(None)
        flat = x.reshape(-1, *x.shape[-2:])
        mask = call_options["mask"]
        mask = jnp.broadcast_to(mask, (*x.shape[:-2], *mask.shape[-3:]))
        mask = mask.reshape(-1, *mask.shape[-3:])
        out, params, dx = run(None, x=flat, call_options={"mask": mask})
        return out.reshape(x.shape), params, dx.reshape(x.shape)

    assert_close(*fast_jit(lambda: (run(ours()), flax_default()))())


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_bfloat16_modules_compute_in_bfloat16(framework):
    x = x_of(B, dtype="bfloat16")
    run = functools.partial(FRAMEWORKS[framework], x=x, call_options={}, dtype=jnp.bfloat16)
    exact = functools.partial(FRAMEWORKS[framework], x=x.astype(jnp.float32), call_options={})
    (out, grads, dx), want = fast_jit(lambda: (run(ours()), exact(None)))()
    assert out.dtype == dx.dtype == jnp.bfloat16
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype("float32")}  # the parameters'
    for got, right in zip(*map(jax.tree.leaves, ((out, grads, dx), want)), strict=True):
        error = np.asarray(got, "f8") - np.asarray(right, "f8")
        assert np.linalg.norm(error) < 0.03 * max(np.linalg.norm(right), 1.0)


def test_a_bias_and_bare_arrays_of_any_rank_are_accepted():
    q, k = jnp.asarray(rand(2, 3, 5, HEADS, 8)), jnp.asarray(rand(2, 3, 7, 2, 8))
    bias = jnp.asarray(rand(3, 1, 5, 7))
    attend = fast_jit(attention_fn)
    flat_q, flat_k = q.reshape(6, 5, HEADS, 8), k.reshape(6, 7, 2, 8)
    want = attend(flat_q, flat_k, flat_k, jnp.tile(bias, (2, 1, 1, 1)))
    assert_close(attend(q, k, k, bias).reshape(want.shape), want)
    assert_close(attend(q[0, 0], k[0, 0], k[0, 0], bias[0]), want[0])


# Decoding with Flax's cache.


@pytest.mark.parametrize(("is_causal", "kv_heads"), [(False, HEADS), (True, 2)])
def test_nnx_decoding_step_by_step_equals_the_full_pass(is_causal, kv_heads):
    x = x_of(B)
    options = {"num_kv_heads": kv_heads, "attention_fn": attention_fn, "decode": False}
    layer = nnx_layer(**options)
    full = run(*nnx.split(layer), x, is_causal=True)
    layer.init_cache(x.shape)

    @nnx.jit
    def step(layer, token):
        return layer(token, decode=True, is_causal=is_causal)

    steps = [step(layer, x[:, i : i + 1]) for i in range(T)]
    assert_close(jnp.concatenate(steps, axis=1), full)


def test_linen_decoding_step_by_step_equals_the_full_pass():
    x = x_of(B)
    layer = nn.MultiHeadDotProductAttention(HEADS, attention_fn=attention_fn)
    decoder = layer.clone(decode=True)
    variables = jax.jit(decoder.init)(KEY, x)
    cache = variables.pop("cache")
    full = jax.jit(layer.apply)(variables, x, mask=CAUSAL[:1])

    @jax.jit
    def step(cache, token):
        out, new = decoder.apply({**variables, "cache": cache}, token, mutable=["cache"])
        return new["cache"], out

    outs = []
    for i in range(T):
        cache, out = step(cache, x[:, i : i + 1])
        outs.append(out)
    assert_close(jnp.concatenate(outs, axis=1), full)


def test_a_decode_step_that_is_flagged_causal_still_sees_the_whole_cache():
    q, k = jnp.asarray(rand(B, 1, HEADS, 8)), jnp.asarray(rand(B, T, HEADS, 8))
    filled = (jnp.arange(T) < 4)[None, None, None]
    got = fast_jit(functools.partial(attention_fn, is_causal=True))(q, k, k, mask=filled)
    assert_close(got, fast_jit(attention_fn)(q, k[:, :4], k[:, :4]))


# Dropout and what is not offered.


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_dropout_in_flax_modules_is_random_and_keeps_the_mean(framework):
    x = x_of(8)
    if framework == "nnx":
        layer = nnx_layer(dropout_rate=0.5, attention_fn=attention_fn, decode=False)
        draw = fast_jit(lambda key: layer(x, deterministic=False, rngs=nnx.Rngs(key)))
        plain = run(*nnx.split(layer), x, deterministic=True)
    else:
        layer = nn.MultiHeadDotProductAttention(HEADS, dropout_rate=0.5, attention_fn=ours())
        variables = filled(
            jax.eval_shape(functools.partial(layer.init, deterministic=True), KEY, x)
        )
        call = functools.partial(layer.apply, variables, x)
        draw = fast_jit(lambda key: call(deterministic=False, rngs={"dropout": key}))
        plain = fast_jit(functools.partial(call, deterministic=True))()
    noisy = np.stack([draw(key) for key in jax.random.split(KEY, 60)])
    assert noisy.shape[1:] == x.shape
    assert np.isfinite(noisy).all()
    assert not np.array_equal(noisy[0], noisy[1])
    standard_error = noisy.std(0) / 60**0.5
    assert np.mean(np.abs(noisy.mean(0) - plain) < 3 * standard_error) > 0.98


def test_sowing_attention_weights_is_refused():
    layer = nnx_layer(attention_fn=attention_fn, decode=False)
    with pytest.raises(UnsupportedError, match=r"sow_weights=True.*Use Flax's own attention_fn"):
        jax.eval_shape(lambda x: layer(x, sow_weights=True), x_of(B))
    linen = nn.MultiHeadDotProductAttention(HEADS, attention_fn=attention_fn)
    with pytest.raises(UnsupportedError, match="sow_weights=True"):
        jax.eval_shape(lambda x: linen.init(KEY, x, sow_weights=True), x_of(B))


def test_no_array_of_queries_by_keys_is_made_where_flax_makes_one():
    length = 1088  # more than one tile of 1024, and no other size of the layer
    x = jnp.zeros((1, length, WIDTH))

    def shapes(attention):
        found = equations_of(lambda x: nnx_results(attention, x, {"is_causal": True}), x)
        return {out.aval.shape for equation in found for out in equation.outvars}

    def squares(shapes):
        return [shape for shape in shapes if len(shape) > 1 and min(shape[-2:]) >= length]

    assert squares(shapes(None))
    assert squares(shapes(ours("xla")))
    assert not squares(shapes(ours("chunked")))


# FlashCausalSelfAttention.

OPTIONS = {
    "plain": {},
    "RoPE": {"rope_theta": 100.0},
    "GQA": {"num_kv_heads": 2, "use_bias": False},
    "RoPE and MQA": {"num_kv_heads": 1, "rope_theta": 10000.0, "head_dim": 6},
}


def flash(**options):
    def build():
        return FlashCausalSelfAttention(HEADS, WIDTH, rngs=nnx.Rngs(0), **options)

    graph, state = nnx.split(nnx.eval_shape(build))
    return nnx.merge(graph, filled(state))


def by_hand(layer, x):
    """The layer's definition, written out with a dense softmax."""
    batch, length, _ = x.shape
    sizes = [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads]
    qkv = layer.qkv(x).reshape(batch, length, sum(sizes), layer.head_dim)
    q, k, v = jnp.split(qkv, np.cumsum(sizes)[:2], axis=2)
    if layer.rope_theta is not None:
        half = layer.head_dim // 2
        angle = jnp.arange(length, dtype=jnp.float32)[:, None] * layer.rope_theta ** (
            -jnp.arange(half, dtype=jnp.float32) / half
        )
        turn = jax.lax.complex(jnp.cos(angle), jnp.sin(angle))[None, :, None]

        def rotate(x):
            z = jax.lax.complex(x[..., :half], x[..., half:]) * turn
            return jnp.concatenate([z.real, z.imag], axis=-1)

        q, k = rotate(q), rotate(k)
    k, v = (jnp.repeat(x, layer.num_heads // layer.num_kv_heads, axis=2) for x in (k, v))
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) * layer.head_dim**-0.5
    logits = jnp.where(jnp.tril(jnp.ones((length, length), bool)), logits, -jnp.inf)
    out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits), v)
    return layer.out(out.reshape(batch, length, -1))


@pytest.mark.parametrize("options", OPTIONS)
def test_the_layer_is_causal_attention_with_its_options(options):
    layer, x = flash(**OPTIONS[options]), x_of(B)
    graph, state = nnx.split(layer)

    def run(call, state):
        def loss(state):
            out = call(nnx.merge(graph, state), x)
            return jnp.sum(jnp.sin(out)), out

        return jax.grad(loss, has_aux=True)(state)

    got, want = fast_jit(
        lambda state: (run(lambda layer, x: layer(x), state), run(by_hand, state))
    )(state)
    assert_close(nnx.to_pure_dict(got[0]), nnx.to_pure_dict(want[0]))
    assert_close(got[1], want[1])


def full_pass(layer, x):
    return run(*nnx.split(layer), x)


def extend(layer, x, cache, new_lengths=None):
    return run(*nnx.split(layer), x, cache=cache, new_lengths=new_lengths)


@pytest.mark.parametrize(
    ("options", "chunks"),
    [("RoPE and MQA", (1,) * 12), ("RoPE and MQA", (5, *(1,) * 7)), ("RoPE and MQA", (4, 4, 4)),
     ("RoPE and MQA", (12,)), ("plain", (4, 4, 4)), ("GQA", (5, *(1,) * 7))],
    ids=str,
)  # fmt: skip
def test_the_cache_gives_what_the_full_pass_gives(options, chunks):
    layer, x = flash(**OPTIONS[options]), x_of(B, length=12)
    cache = layer.init_cache(B, 12)
    outs, start = [], 0
    for size in chunks:
        out, cache = extend(layer, x[:, start : start + size], cache)
        outs.append(out)
        start += size
    assert_close(jnp.concatenate(outs, axis=1), full_pass(layer, x))
    np.testing.assert_array_equal(cache.lengths, 12)


def test_prompts_of_unequal_lengths_decode_as_if_alone():
    layer, x = flash(**OPTIONS["RoPE and MQA"]), x_of(2, length=9)
    lengths = jnp.array([5, 2], jnp.int32)
    prompt = jnp.where(jnp.arange(5)[None, :, None] < lengths[:, None, None], x[:, :5], 1e3)
    out, cache = extend(layer, prompt, layer.init_cache(2, 16), lengths)
    np.testing.assert_array_equal(cache.lengths, lengths)
    want = full_pass(layer, x)
    for row, length in enumerate([5, 2]):
        assert_close(out[row, :length], want[row, :length])
    empty = layer.out(jnp.zeros((1, layer.num_heads * layer.head_dim)))[0]
    assert_close(out[1, 2:], jnp.broadcast_to(empty, (3, WIDTH)))
    for step in range(4):
        token = jnp.stack([x[0, 5 + step], x[1, 2 + step]])[:, None]
        out, cache = extend(layer, token, cache)
        assert_close(out[:, 0], jnp.stack([want[0, 5 + step], want[1, 2 + step]]))
    # A row may also rest while the other goes on.
    out, cache = extend(layer, x[:, 6:7], cache, jnp.array([0, 1], jnp.int32))
    np.testing.assert_array_equal(cache.lengths, [9, 7])
    assert_close(out[1, 0], want[1, 6])


@pytest.mark.parametrize(
    ("tokens", "new_lengths", "longest"),
    [(3, None, 8), (4, None, 9), (4, [3, 4], 8), (4, [4, 0], 9), (4, [1, 2], 6)],
)
def test_a_full_cache_is_an_error_where_lengths_are_known(tokens, new_lengths, longest):
    layer = flash()
    slots = jnp.zeros((B, 8, HEADS, WIDTH // HEADS))
    cache = layers.KVCache(slots, slots, jnp.array([5, 4], jnp.int32))
    new_lengths = None if new_lengths is None else jnp.array(new_lengths, jnp.int32)

    def trace():  # the cache is a constant: its lengths are known
        call = functools.partial(layer, cache=cache, new_lengths=new_lengths)
        return jax.eval_shape(call, x_of(B, length=tokens))

    if longest <= 8:
        trace()
    else:
        with pytest.raises(ValueError, match=r"cache after this call=9: must not.* capacity, 8"):
            trace()


@pytest.mark.parametrize("new", [1, 3])
def test_a_full_cache_under_jit_drops_the_token_and_says_so_with_nan(new):
    layer, x = flash(), x_of(B, length=8)
    _, cache = extend(layer, x[:, :6], layer.init_cache(B, 8), jnp.array([6, 5]))
    while new == 1 and int(cache.lengths[0]) < 8:
        _, cache = extend(layer, x[:, 6:7], cache)
    before = bits(cache)
    room = 8 - np.asarray(cache.lengths)
    out, after = extend(layer, x_of(B, length=new, seed=7), cache)
    assert bits(cache) == before  # not donated: still valid
    dropped = np.arange(new) >= room[:, None]
    assert dropped[0, -1]
    np.testing.assert_array_equal(np.isnan(out).all(-1), dropped)
    np.testing.assert_array_equal(np.isnan(out).any(-1), dropped)
    np.testing.assert_array_equal(after.lengths, np.minimum(cache.lengths + new, 8))
    for row, length in enumerate(np.asarray(cache.lengths)):
        for old, now in ((cache.key, after.key), (cache.value, after.value)):
            np.testing.assert_array_equal(old[row, :length], now[row, :length])
            assert np.isfinite(now[row]).all()


def test_a_donated_cache_gives_the_same_and_two_continuations_of_one_do_not_meet():
    layer, x = flash(), x_of(B, length=7)
    graph, state = nnx.split(layer)
    _, cache = extend(layer, x[:, :5], layer.init_cache(B, 8))

    def step(state, x, cache):
        return nnx.merge(graph, state)(x, cache=cache)

    first, one = jax.jit(step)(state, x[:, 5:6], cache)
    second, two = jax.jit(step)(state, x[:, 6:7], cache)
    assert not np.array_equal(one.key[:, 5], two.key[:, 5])
    assert_close(full_pass(layer, x[:, :6])[:, 5:], first)
    assert_close(full_pass(layer, x[:, jnp.array([0, 1, 2, 3, 4, 6])])[:, 5:], second)
    out, donated = jax.jit(step, donate_argnums=2)(state, x[:, 5:6], cache)
    assert cache.key.is_deleted()
    assert_close((out, donated.key), (first, one.key), rtol=1e-6, atol=1e-7)


def test_dropout_of_the_layer_needs_its_key_and_is_a_function_of_it():
    parts, x = nnx.split(flash(dropout_rate=0.5)), x_of(B)
    noisy = functools.partial(run, *parts, x, deterministic=False)
    one, again, other = (noisy(dropout_rng=jax.random.key(i)) for i in (0, 0, 1))
    assert bits(one) == bits(again)
    assert np.isfinite(one).all()
    assert not np.allclose(one, other)
    assert_close(run(*parts, x), full_pass(flash(), x))
    with pytest.raises(ValueError, match=r"dropout_rng=None.*jax\.random\.key"):
        noisy()


def test_dropout_with_a_cache_is_not_silently_left_out():
    layer, x = flash(dropout_rate=0.9), x_of(B)
    with contextlib.suppress(ValueError, UnsupportedError):  # a refusal is fine too
        cache = layer.init_cache(B, T)
        out, _ = run(*nnx.split(layer), x, deterministic=False, dropout_rng=KEY, cache=cache)
        assert not np.allclose(out, full_pass(layer, x))


def test_the_layer_computes_in_its_dtype_and_keeps_its_parameters():
    layer = flash(dtype=jnp.bfloat16, rope_theta=1e4, implementation="xla")
    x = x_of(B)
    assert layer.qkv.kernel[...].dtype == jnp.float32
    out = full_pass(layer, x)
    assert out.dtype == jnp.bfloat16
    assert_close(out, full_pass(flash(rope_theta=1e4), x), rtol=0.05, atol=0.05)
    cache = layer.init_cache(B, T)
    assert cache.key.dtype == jnp.bfloat16
    cached, cache = extend(layer, x, cache)
    assert cache.key.dtype == jnp.bfloat16
    assert_close(cached, out, rtol=0.05, atol=0.05)
    wide, _ = extend(layer, x, layer.init_cache(B, T, jnp.float32))
    assert_close(wide, out, rtol=0.05, atol=0.05)
    with pytest.raises(UnsupportedError, match="cudnn"):
        flash(implementation="cudnn")(x)


def test_rotation_turns_pairs_of_channels_by_their_position():
    x = jnp.asarray(rand(1, 3, 2, 6))
    positions = jnp.array([[0, 7, 100]], jnp.int32)
    got = np.asarray(layers.rotate(x, positions, 50.0))
    np.testing.assert_array_equal(got[:, 0], x[:, 0])  # position 0: nothing
    z = np.asarray(x[..., :3]) + 1j * np.asarray(x[..., 3:])
    angle = np.asarray(positions)[..., None] * 50.0 ** (-np.arange(3) / 3)
    want = z * np.exp(1j * angle)[:, :, None]
    np.testing.assert_allclose(got, np.concatenate([want.real, want.imag], -1), atol=1e-5)
