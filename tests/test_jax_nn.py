"""The dense call stands in for `jax.nn.dot_product_attention`; where it differs, it is on purpose.

Truth is the float64 oracle: ours may be at most twice as far from it as `jax.nn` is, plus a few
roundings of the result.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash import chunked, dot_product_attention
from tests import oracle64 as oracle
from tests.tolerance import fast_jit, rand

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

IMPLEMENTATIONS = ("xla", "chunked", None)
PLAIN = IMPLEMENTATIONS[:2]  # None would choose "xla" at these sizes
DTYPES = ("float32", "bfloat16", "float16")
NAMES = ("query", "key", "value", "bias", "mask")

# Each example compiles a program, so a failure is shown as it was found, not searched for a
# smaller one.
examples = functools.partial(
    hypothesis.settings, phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate)
)


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    """Tiles of 4 x 4, so that "chunked" has several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked, "_MAX_BLOCK", 4)
        yield


def jax_nn(query, key, value, *args, **kwargs):
    """`jax.nn.dot_product_attention`; fp16, which it refuses on a CPU, goes through fp32."""
    dtype = query.dtype
    qkv = [x.astype(jnp.float32 if dtype == "float16" else dtype) for x in (query, key, value)]
    with jax.numpy_dtype_promotion("standard"):  # it adds a bias to logits of another dtype
        results = jax.nn.dot_product_attention(*qkv, *args, implementation="xla", **kwargs)
    return jax.tree.map(lambda x: x.astype(dtype), results)


def ours(implementation):
    return functools.partial(dot_product_attention, implementation=implementation)


def both(implementation, *arrays, **keywords):
    """Our results and those of `jax.nn`, as NumPy arrays."""

    @fast_jit
    def run(arrays):
        attentions = ours(implementation), jax_nn
        return [attention(*arrays, **keywords) for attention in attentions]

    return jax.tree.map(np.asarray, run(arrays))


@st.composite
def calls(draw, dtypes=DTYPES, infinite_bias=True):
    """Draws a call: its arrays, its lengths and its other keywords, all documented by jax.nn."""
    rank = draw(st.sampled_from((3, 4)))
    batch = 1 if rank == 3 else draw(st.sampled_from((1, 2, 3)))
    tq, tk, head_dim = (draw(st.sampled_from(sizes)) for sizes in ((1, 4, 7), (3, 7), (4, 8)))
    kv_heads, group = draw(st.sampled_from((1, 2))), draw(st.sampled_from((1, 2, 3)))
    dtype = draw(st.sampled_from(dtypes))
    q_shape, kv_shape = (batch, tq, kv_heads * group, head_dim), (batch, tk, kv_heads, head_dim)
    qkv = [
        rand(*shape, dtype=dtype, seed=seed).reshape(shape[4 - rank :])
        for seed, shape in enumerate((q_shape, kv_shape, kv_shape))
    ]

    def table(seed):  # with any of its axes broadcast
        sizes = [draw(st.sampled_from((1, n))) for n in (batch, kv_heads * group, tq, tk)]
        return rand(*sizes[4 - rank :], seed=seed)

    arrays = dict(zip(NAMES, qkv, strict=False))
    if draw(st.booleans()):
        bias = table(3)
        if infinite_bias and draw(st.booleans()):
            bias = np.where(bias > 1.0, -np.inf, bias)
        arrays["bias"] = bias.astype(draw(st.sampled_from((dtype, "float32"))))
    if draw(st.booleans()):
        arrays["mask"] = table(4) > -0.5
    for name, length in (("query_seq_lengths", tq), ("key_value_seq_lengths", tk)):
        if draw(st.booleans()):
            lengths = st.lists(st.integers(0, length), min_size=batch, max_size=batch)
            arrays[name] = np.array(draw(lengths), np.int32)
    options = {"is_causal": draw(st.booleans())}
    if draw(st.booleans()):
        options["scale"] = draw(st.sampled_from((0.0, 0.3, 1, -2.0)))
    if draw(st.booleans()):
        sides = st.integers(0, 4)
        options["local_window_size"] = draw(st.one_of(sides, st.tuples(sides, sides)))
    return arrays, options


def assert_close(got, want, plain, name, roundings=4):
    """Asserts that `got` is as near to `want` as `plain` is, and finite where `want` is."""
    unit = float(jnp.finfo(got.dtype).eps)
    got, plain = (np.asarray(x, np.float64) for x in (got, plain))
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[~finite], want[~finite], err_msg=name)
    got, plain, want = got[finite], plain[finite], want[finite]
    assert np.isfinite(got).all(), f"{name} is not finite"
    allowed = 2 * np.abs(plain - want).max(initial=0)
    allowed += roundings * unit * np.abs(want).max(initial=1)
    assert np.abs(got - want).max(initial=0) <= allowed, name


def oracle_arguments(arrays, options):
    short = {"query": "q", "key": "k", "value": "v", "local_window_size": "window",
             "query_seq_lengths": "q_lengths", "key_value_seq_lengths": "kv_lengths"}  # fmt: skip
    with_batch = {
        name: arrays[name] if arrays[name].ndim == 4 else arrays[name][None] for name in NAMES[:3]
    }
    return {short.get(name, name): x for name, x in (arrays | with_batch | options).items()}


def test_its_signature_begins_with_that_of_jax_nn():
    def facts(function):
        parameters = inspect.signature(function).parameters.values()
        return [(p.name, p.kind, p.default) for p in parameters]

    theirs = facts(jax.nn.dot_product_attention)
    assert facts(dot_product_attention)[: len(theirs)] == theirs
    for _, kind, default in facts(dot_product_attention)[len(theirs) :]:
        assert kind == inspect.Parameter.KEYWORD_ONLY
        assert default is not inspect.Parameter.empty


@examples(max_examples=20)
@hypothesis.given(calls(), st.sampled_from(PLAIN))
def test_every_documented_argument_means_what_it_does_in_jax_nn(call, implementation):
    arrays, options = call

    @fast_jit
    def run(arrays):
        keywords = arrays | options | {"return_residual": True}
        return ours(implementation)(**keywords), jax_nn(**keywords)

    (our_out, our_lse), (their_out, their_lse) = run(arrays)
    out, lse = oracle.attention(**oracle_arguments(arrays, options))
    out, lse = out.reshape(their_out.shape), lse.reshape(their_lse.shape)
    # Documented differences: jax.nn averages all values in a row that sees no key, gives it the
    # lse of its mask constant, and NaN where a bias hides all keys.
    empty = np.isneginf(lse)
    plain_out = np.where(empty[..., None], 0.0, their_out)
    plain_lse = np.where(empty, -np.inf, their_lse)
    assert our_out.dtype == their_out.dtype
    assert our_lse.dtype == jnp.float32
    assert_close(our_out, out, plain_out, "out")
    assert_close(our_lse, lse, plain_lse, "lse")


@examples(max_examples=6)
@hypothesis.given(calls(dtypes=("float32",), infinite_bias=False), st.sampled_from(PLAIN))
def test_gradients_are_those_of_jax_nn(call, implementation):
    arrays, options = call
    floats = {name: arrays.pop(name) for name in NAMES[:4] if name in arrays}
    truth = oracle_arguments(floats | arrays, options)
    lse = oracle.attention(**truth)[1]
    # Rows that see no key are left out of the loss: with jax.nn they have a gradient.
    do = np.where(np.isneginf(lse)[..., None], 0.0, rand(*truth["q"].shape, seed=5))
    do = do.astype("float32").reshape(floats["query"].shape)

    def gradients(attention, floats):
        return jax.vjp(lambda floats: attention(**floats, **arrays, **options), floats)[1](do)[0]

    @fast_jit
    def run(floats):
        return gradients(ours(implementation), floats), gradients(jax_nn, floats)

    got, theirs = run(floats)
    grads = oracle.attention_grads(do=do.reshape(truth["q"].shape), **truth)
    for name, short in zip(NAMES[:4], ("dq", "dk", "dv", "dbias"), strict=True):
        if name in floats:
            assert got[name].dtype == jnp.float32
            want = grads[short].reshape(got[name].shape)
            plain = theirs[name].reshape(want.shape)
            # A broadcast bias sums over a hundred terms that cancel.
            assert_close(got[name], want, plain, short, roundings=32)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_numpy_arrays_and_array_scalars_are_accepted(implementation):
    q, k, v = rand(2, 3, 4, 8), rand(2, 5, 2, 8), rand(2, 5, 2, 8, seed=1)
    attention = ours(implementation)
    scales = (np.float32(0.5), np.array(0.5), jnp.float32(0.5))
    want, *alike = fast_jit(
        lambda: (jax_nn(q, k, v, scale=0.5), *(attention(q, k, v, scale=x) for x in scales))
    )()
    for got in alike:
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


# What differs on purpose.


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_query_that_sees_no_key_gets_zero_and_not_the_mean_of_all_values(implementation):
    q = k = v = rand(1, 3, 1, 4)
    mask = np.array([[[[True, True, True], [False, False, False], [False, True, False]]]])
    (out, lse), (theirs, _) = both(implementation, q, k, v, mask=mask, return_residual=True)
    np.testing.assert_allclose(theirs[0, 1], v.mean(1)[0], rtol=1e-5)
    np.testing.assert_array_equal(out[0, 1], 0.0)
    assert lse[0, 1, 0] == -np.inf
    np.testing.assert_allclose(out[0, ::2], theirs[0, ::2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_bias_that_hides_all_keys_gives_zero_and_not_nan(implementation):
    q = k = v = rand(1, 2, 1, 4)
    bias = np.array([[[[0.0, 0.0], [-np.inf, -np.inf]]]], np.float32)
    out, theirs = both(implementation, q, k, v, bias)
    assert np.isnan(theirs[0, 1]).all()
    np.testing.assert_array_equal(out[0, 1], 0.0)
    np.testing.assert_allclose(out[0, 0], theirs[0, 0], rtol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_log_sum_exp_is_fp32_and_has_a_gradient(implementation):
    q, k = (jnp.asarray(rand(1, n, 2, 8, dtype="bfloat16", seed=n)) for n in (3, 5))

    @functools.partial(fast_jit, static_argnums=0)
    def lse_and_gradient(attention):
        lse, pullback = jax.vjp(lambda q: attention(q, k, k, return_residual=True)[1], q)
        # d lse / d q is scale times the mean of the keys, weighted by the probabilities.
        mean_key = attention(q, k, k).astype(jnp.float32) * 8**-0.5
        return lse, pullback(jnp.ones_like(lse))[0].astype(jnp.float32), mean_key

    lse, gradient, mean_key = lse_and_gradient(ours(implementation))
    their_lse, their_gradient, _ = lse_and_gradient(jax_nn)
    assert lse.dtype == jnp.float32
    assert their_lse.dtype == jnp.bfloat16
    np.testing.assert_allclose(gradient, mean_key, rtol=2e-2, atol=2e-3)
    np.testing.assert_array_equal(their_gradient, 0.0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_past_the_query_length_have_no_log_sum_exp(implementation):
    q = k = rand(2, 4, 1, 8)
    options = {"query_seq_lengths": np.array([1, 4], np.int32), "return_residual": True}
    (out, lse), (their_out, their_lse) = both(implementation, q, k, k, **options)
    np.testing.assert_allclose(out, their_out, rtol=1e-5, atol=1e-6)
    assert np.isfinite(their_lse).all()
    np.testing.assert_array_equal(np.isneginf(lse[..., 0]), np.arange(4) >= [[1], [4]])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_values_may_have_a_head_dim_of_their_own(implementation):
    q, k, v = rand(2, 3, 4, 8), rand(2, 5, 2, 8), rand(2, 5, 2, 3)
    with pytest.raises(ValueError, match="value shape should be"):
        jax_nn(q, k, v)
    out = fast_jit(ours(implementation))(q, k, v)
    padded = np.pad(v, [(0, 0)] * 3 + [(0, 5)])
    np.testing.assert_allclose(out, jax_nn(q, k, padded)[..., :3], rtol=1e-5, atol=1e-6)
