"""Masks and terms in the Mosaic backward kernel, run by JAX's GPU interpret mode.

The kernel is given the residuals of the dense implementation, so that it alone is at stake.
"""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash import backends, calls, dot_product_attention, reference, vjp
from jax_flash.mask import Mask, dropout_keep, dropout_seeds
from jax_flash.spec import Residuals
from pallas_kernels import backend, backward
from pallas_kernels import backward_config as kernel_config
from pallas_kernels.config import Problem
from tests import oracle64
from tests.kernel_cases import (
    FP32_TOLERANCE,
    ON_GPU,
    SEGMENTS,
    WITH_RACES,
    i32,
    mostly_on_gpu,
    qkv,
    rand,
)
from tests.tolerance import fast_jit

SLOPES = np.float32([0.2, -0.1])
SINKS = np.float32([0.5, -1.0])
OWN_GRADIENTS = kernel_config.BackwardConfig(own_gradients=True)


@pytest.fixture(autouse=True)
def without_races(capfd):
    """On a GPU, asked for with JAX_FLASH_TEST_GPU=1, the same tests run the kernel itself."""
    if ON_GPU and backends.device_of().compute_capability != "9.0":
        pytest.skip("needs compute capability 9.0")
    yield
    assert "RACE DETECTED" not in capfd.readouterr().out


def run(q, k, v, do, dlse, config=None, **keywords):
    """Gradients of the public call by the kernel; arrays among the keywords are traced."""
    arrays = {name: x for name, x in keywords.items() if isinstance(x, np.ndarray | jax.Array)}
    static = {name: x for name, x in keywords.items() if name not in arrays}
    defaults = inspect.signature(dot_product_attention).parameters
    defaults = {name: p.default for name, p in defaults.items() if name not in ("query", "key")}
    del defaults["value"], defaults["implementation"], defaults["return_residual"]
    options = {} if ON_GPU else {"interpret": WITH_RACES, "num_blocks": 1}

    @fast_jit
    def gradients(q, k, v, do, dlse, arrays):
        terms = {**defaults, **static, **arrays, "return_lse": True}
        terms["soft_cap"] = terms.pop("logits_soft_cap")
        spec, operands = calls.dense_call(q, k, v, **terms)
        residuals = Residuals(operands, *reference.forward(spec, operands))
        delta = vjp.delta(residuals, do, dlse)
        return backend.differentiate(spec, residuals, do, delta, config=config, **options)

    return gradients(q, k, v, do, dlse, arrays)


def cotangents(q, v):
    return rand(3, *q.shape[:-1], v.shape[-1], dtype=q.dtype), rand(
        4, *q.shape[:-1], dtype="float32"
    )


def check(got, want, names=("dq", "dk", "dv"), tolerance=5e-3):
    """Relative error as of a computation with rounded probabilities and score gradients."""
    fields = {"dq": "query", "dk": "key", "dv": "value"}
    for name in names:
        x = np.asarray(getattr(got, fields.get(name, name[1:])))
        assert np.isfinite(x.astype(np.float32)).all(), name
        error = np.linalg.norm(x.astype(np.float64).reshape(want[name].shape) - want[name])
        # One number, in which most of its summands cancel.
        allowed = 4 * tolerance if name == "dalibi_slopes" else tolerance
        assert error <= allowed * max(np.linalg.norm(want[name]), 1e-30), (name, error)


def mask_of(*shape, seed=8, threshold=-0.5):
    return rand(seed, *shape, dtype="float32") > threshold


def bias_of(*shape, dtype="float32"):
    """With some entries that hide."""
    bias = rand(6, *shape, dtype=dtype)
    return np.where(rand(5, *shape, dtype="float32") > 1.0, bias.dtype.type(-np.inf), bias)


# Per head: tiles with nothing, with everything, and one that needs a look.
BLOCKS = np.kron(mask_of(1, 4, 3, 5, threshold=0.2), np.ones((1, 1, 64, 64), bool))
BLOCKS = BLOCKS[:, :, :140, :300] ^ (np.arange(300) == 70)


# name: shapes, the call's keywords, the oracle's where they differ
CASES = {
    "soft cap": ((1, 70, 130, 2, 1, 64), {"logits_soft_cap": 3.0}, {"soft_cap": 3.0}),
    "soft cap, causal": (
        (1, 130, 200, 2, 2, 128),
        {"logits_soft_cap": 3.0, "is_causal": True, "q_offset": 60},
        {"soft_cap": 3.0, "is_causal": True, "q_offset": 60},
    ),
    "soft cap, own gradients": (
        (1, 70, 130, 2, 1, 192, 128),
        {"logits_soft_cap": 3.0, "is_causal": True, "q_offset": 60},
        {"soft_cap": 3.0, "is_causal": True, "q_offset": 60},
    ),
    "sinks": ((2, 70, 130, 2, 1, 64), {"sinks": SINKS}, None),
    "sinks, empty rows": (
        (1, 70, 64, 2, 1, 64),
        {"sinks": np.float32([3.0, -np.inf]), "is_causal": True, "q_offset": -30},
        None,
    ),
    "ALiBi": ((1, 140, 140, 2, 1, 64), {"alibi_slopes": SLOPES, "is_causal": True}, None),
    "ALiBi, own gradients": ((1, 70, 140, 2, 2, 192), {"alibi_slopes": SLOPES}, None),
    "ALiBi, soft cap, offsets": (
        (2, 70, 130, 2, 1, 64),
        {"alibi_slopes": SLOPES, "q_offset": i32(60, 1000), "logits_soft_cap": 5.0},
        {"alibi_slopes": SLOPES, "q_offset": i32(60, 1000), "soft_cap": 5.0},
    ),
    "ALiBi, far away": ((1, 70, 70, 2, 1, 64), {"alibi_slopes": SLOPES, "q_offset": 10**4}, None),
    "ALiBi, offsets, segments": (
        (2, 130, 130, 2, 1, 128),
        {
            "alibi_slopes": SLOPES,
            "q_offset": i32(5, -3),
            "query_segment_ids": np.repeat(i32(1, 2), 65)[None],
            "key_value_segment_ids": np.repeat(i32(1, 2), 65)[None],
        },
        {
            "alibi_slopes": SLOPES,
            "q_offset": i32(5, -3),
            "q_segments": np.repeat(i32(1, 2), 65)[None],
            "kv_segments": np.repeat(i32(1, 2), 65)[None],
        },
    ),
    "bias of a row": ((2, 70, 130, 2, 1, 64), {"bias": bias_of(2, 1, 1, 130)}, None),
    "bias of a row, causal": (
        (1, 130, 130, 2, 1, 128),
        {"bias": bias_of(1, 2, 1, 130), "is_causal": True},
        None,
    ),
    "bias of a column": ((2, 70, 130, 2, 1, 64), {"bias": bias_of(1, 2, 70, 1)}, None),
    "bias of a column, soft cap, sinks": (
        (2, 70, 130, 2, 1, 64),
        {"bias": bias_of(1, 2, 70, 1), "logits_soft_cap": 2.0, "sinks": SINKS},
        {"bias": bias_of(1, 2, 70, 1), "soft_cap": 2.0, "sinks": SINKS},
    ),
    "bias of one number": ((1, 70, 70, 2, 1, 64), {"bias": np.float32([[[[2.0]]]])}, None),
    "full bias": ((2, 70, 130, 2, 1, 64), {"bias": bias_of(2, 2, 70, 130)}, None),
    "full bias, bfloat16, window": (
        (1, 150, 150, 2, 2, 128),
        {"bias": bias_of(1, 2, 150, 150, dtype="bfloat16"), "local_window_size": (60, 20)},
        {"bias": bias_of(1, 2, 150, 150, dtype="bfloat16"), "window": (60, 20)},
    ),
    "full bias, unequal shares": (
        (1, 70, 130, 2, 1, 88),
        {"bias": bias_of(1, 2, 70, 130, dtype="bfloat16")},
        None,
    ),
    "full bias, own gradients, lengths": (
        (2, 70, 131, 2, 1, 192),
        {"bias": bias_of(1, 1, 70, 131), "key_value_seq_lengths": i32(100, 0)},
        {"bias": bias_of(1, 1, 70, 131), "kv_lengths": i32(100, 0)},
    ),
    "full bias, soft cap": (
        (1, 70, 130, 2, 1, 64),
        {"bias": bias_of(1, 2, 70, 130), "logits_soft_cap": 2.0},
        {"bias": bias_of(1, 2, 70, 130), "soft_cap": 2.0},
    ),
    "full mask": ((2, 70, 130, 2, 1, 64), {"mask": mask_of(2, 2, 70, 130)}, None),
    "full mask, causal": (
        (1, 150, 150, 2, 2, 128),
        {"mask": mask_of(1, 1, 150, 150), "is_causal": True},
        None,
    ),
    "full mask, own gradients, lengths": (
        (2, 150, 70, 2, 1, 192),
        {"mask": mask_of(1, 2, 150, 70), "query_seq_lengths": i32(100, 3)},
        {"mask": mask_of(1, 2, 150, 70), "q_lengths": i32(100, 3)},
    ),
    "mask of blocks": ((2, 140, 300, 2, 1, 64), {"mask": BLOCKS[:, :2]}, None),
    "mask of blocks, causal, own gradients": (
        (1, 140, 300, 2, 1, 192),
        {"mask": BLOCKS[:, :1], "is_causal": True, "q_offset": 160},
        None,
    ),
    "mask of a row": ((2, 70, 130, 2, 1, 64), {"mask": mask_of(2, 1, 1, 130)}, None),
    "mask of a column": ((2, 70, 130, 2, 1, 128), {"mask": mask_of(1, 2, 70, 1)}, None),
    "mask of one": ((1, 70, 130, 2, 1, 64), {"mask": np.zeros((1, 1, 1, 1), bool)}, None),
    "everything": (
        (2, 130, 140, 2, 1, 64),
        {
            "logits_soft_cap": 4.0,
            "sinks": SINKS,
            "alibi_slopes": SLOPES,
            "bias": bias_of(1, 2, 130, 140),
            "mask": mask_of(2, 1, 130, 140),
            "is_causal": True,
            "q_offset": i32(10, 20),
            "key_value_seq_lengths": i32(140, 90),
        },
        {
            "soft_cap": 4.0,
            "sinks": SINKS,
            "alibi_slopes": SLOPES,
            "bias": bias_of(1, 2, 130, 140),
            "mask": mask_of(2, 1, 130, 140),
            "is_causal": True,
            "q_offset": i32(10, 20),
            "kv_lengths": i32(140, 90),
        },
    ),
}


ON_GPU_ONLY = {
    "soft cap, causal",
    "sinks",
    "ALiBi, soft cap, offsets",
    "bias of a row, causal",
    "bias of a column",
    "full bias",
    "bias of one number",
    "full mask",
    "full mask, own gradients, lengths",
    "mask of a column",
}


@pytest.mark.parametrize("name", mostly_on_gpu(CASES, ON_GPU_ONLY))
def test_agrees_with_oracle(name):
    shape, keywords, terms = CASES[name]
    q, k, v = qkv(*shape)
    do, dlse = cotangents(q, v)
    terms = keywords if terms is None else terms
    want = oracle64.attention_grads(q, k, v, do=do, dlse=dlse, **terms)
    got = run(q, k, v, do, dlse, **keywords)
    names = [f"d{name}" for name in ("bias", "alibi_slopes", "sinks") if name in keywords]
    check(got, want, names=("dq", "dk", "dv", *names))


def keep_of(key, rate, batch, num_heads, tq, tk):
    counts = (jnp.arange(n, dtype=jnp.int32) for n in (num_heads, tq, tk))
    return np.asarray(dropout_keep(dropout_seeds(key, batch), *counts, rate))


SOFT_CAP = {"logits_soft_cap": 3.0}, {"soft_cap": 3.0}
DROPOUTS = {
    "own keys": ((2, 70, 130, 2, 1, 128), {}, {}),
    "own gradients, causal": ((1, 130, 130, 1, 1, 192), {"is_causal": True}, {"is_causal": True}),
    "soft cap, mask": (
        (1, 70, 130, 2, 2, 64),
        {"logits_soft_cap": 3.0, "mask": mask_of(1, 2, 70, 130)},
        {"soft_cap": 3.0, "mask": mask_of(1, 2, 70, 130)},
    ),
    "soft cap, own gradients": ((1, 70, 70, 1, 1, 256), *SOFT_CAP),
    "segments": ((1, 150, 150, 1, 1, 64), *SEGMENTS),
}


@pytest.mark.parametrize("name", mostly_on_gpu(DROPOUTS, {"own gradients, causal"}))
def test_dropout_draws_the_same_mask(name):
    shape, keywords, terms = DROPOUTS[name]
    q, k, v = qkv(*shape)
    do, dlse = cotangents(q, v)
    key, rate = jax.random.key(7), 0.3
    keep = keep_of(key, rate, shape[0], shape[3], *shape[1:3])
    assert 0.6 < keep.mean() < 0.8
    want = oracle64.attention_grads(
        q, k, v, do=do, dlse=dlse, keep=keep, dropout_rate=rate, **terms
    )
    if name == "segments":  # queries that see no key
        q[terms["q_segments"] == 0], do[terms["q_segments"] == 0] = np.nan, np.inf
    check(run(q, k, v, do, dlse, dropout_rng=key, dropout_rate=rate, **keywords), want)


@pytest.mark.parametrize("dtype", mostly_on_gpu(["bfloat16", "float32"], {"float32"}))
def test_dropout_drops_what_the_generator_says(dtype):
    """Equal probabilities, and output gradients that show them one by one in dV."""
    batch, num_rows, num_keys, num_heads, dim = 1, 200, 140, 2, 64
    first, key, rate = 70, jax.random.key(7), 0.3  # on both sides of a tile's edge
    q = np.zeros((batch, num_rows, num_heads, dim), dtype)
    k = np.zeros((batch, num_keys, num_heads, dim), dtype)
    do, dlse = np.zeros_like(q), np.zeros(q.shape[:3], np.float32)
    do[:, first : first + dim] = np.eye(dim)[:, None]
    got = run(q, k, k, do, dlse, dropout_rng=key, dropout_rate=rate)
    keep = keep_of(key, rate, batch, num_heads, num_rows, num_keys)
    shown = np.transpose(keep[:, :, first : first + dim], (0, 3, 1, 2))
    np.testing.assert_array_equal(np.asarray(got.value) > 0, shown)


FAR_FROM_0 = {"ALiBi, far away", "ALiBi, soft cap, offsets"}  # where logits have fewer digits
OF_FP32 = [
    name for name, (shape, *_) in CASES.items() if max(shape[5:]) <= 64 and name not in FAR_FROM_0
]


@pytest.mark.parametrize("name", mostly_on_gpu([*OF_FP32, "dropout"], OF_FP32))
def test_fp32_is_exact(name):
    mixture = {"bias": bias_of(1, 2, 70, 130), "is_causal": True, "q_offset": 60}
    shape, keywords, terms = CASES.get(name, ((1, 70, 130, 2, 1, 64), mixture, None))
    q, k, v = qkv(*shape, dtype="float32")
    do, dlse = cotangents(q, v)
    terms = keywords if terms is None else terms
    if name == "dropout":
        key, rate = jax.random.key(7), 0.3
        keep = keep_of(key, rate, shape[0], shape[3], *shape[1:3])
        terms = {**terms, "keep": keep, "dropout_rate": rate}
        keywords = {**keywords, "dropout_rng": key, "dropout_rate": rate}
    want = oracle64.attention_grads(q, k, v, do=do, dlse=dlse, **terms)
    got = run(q, k, v, do, dlse, **keywords)
    names = [f"d{name}" for name in ("bias", "alibi_slopes", "sinks") if name in keywords]
    check(got, want, ("dq", "dk", "dv", *names), FP32_TOLERANCE)


def test_with_all_dropped_only_the_log_sum_exp_has_a_gradient():
    q, k, v = qkv(1, 70, 70, 1, 1, 64)
    do, dlse = cotangents(q, v)
    want = oracle64.attention_grads(q, k, v, do=do, dlse=dlse, dropout_rate=1.0)
    got = run(q, k, v, do, dlse, dropout_rng=jax.random.key(7), dropout_rate=1.0)
    check(got, want)
    assert not np.asarray(got.value, np.float32).any()


@pytest.mark.parametrize("deterministic", mostly_on_gpu([False, True], {True}))
def test_float16(deterministic):
    q, k, v = qkv(1, 130, 150, 2, 1, 64, dtype="float16")
    do, dlse = cotangents(q, v)
    bias, mask = bias_of(1, 1, 130, 150, dtype="float16"), mask_of(1, 1, 1, 150)
    want = oracle64.attention_grads(q, k, v, do=do, dlse=dlse, bias=bias, mask=mask, soft_cap=5.0)
    keywords = {"bias": bias, "mask": mask, "logits_soft_cap": 5.0}
    check(run(q, k, v, do, dlse, deterministic=deterministic, **keywords), want)


def test_deterministic_sums_with_lists_and_a_bias_add_up():
    q, k, v = qkv(1, 140, 300, 4, 2, 64)
    do, dlse = cotangents(q, v)
    keywords = {"mask": BLOCKS, "bias": bias_of(1, 4, 140, 300)}
    want = oracle64.attention_grads(q, k, v, do=do, dlse=dlse, **keywords)
    got = run(q, k, v, do, dlse, deterministic=True, **keywords)
    check(got, want, names=("dq", "dk", "dv", "dbias"))


HIDING = {
    "mask of a row": {"mask": np.arange(150)[None, None, None] % 3 > 0},
    "full mask": {"mask": np.tile(np.arange(150) % 3 > 0, (1, 1, 70, 1))},
    "bias of a row": {"bias": np.where(np.arange(150) % 3, 0.5, -np.inf)[None, None, None]},
    "full bias": {"bias": np.tile(np.where(np.arange(150) % 3, 0.5, -np.inf), (1, 2, 70, 1))},
}


@pytest.mark.parametrize(
    ("name", "d", "soft_cap"),
    [
        ("mask of a row", 128, 4.0),
        ("full mask", 192, None),
        ("bias of a row", 192, None),
        ("full bias", 128, 4.0),
        pytest.param("mask of a row", 192, None, marks=pytest.mark.gpu),
        pytest.param("full mask", 128, 4.0, marks=pytest.mark.gpu),
        pytest.param("bias of a row", 128, 4.0, marks=pytest.mark.gpu),
        pytest.param("full bias", 192, None, marks=pytest.mark.gpu),
    ],
)
def test_what_is_hidden_may_be_anything(name, d, soft_cap):
    """Keys, values and biases that no query sees, beside visible ones of the same tile."""
    q, k, v = qkv(1, 70, 150, 2, 1, d)
    do, dlse = cotangents(q, v)
    keywords = dict(HIDING[name])
    if "bias" in keywords:
        keywords["bias"] = keywords["bias"].astype(np.float32)
    want = oracle64.attention_grads(q, k, v, do=do, dlse=dlse, soft_cap=soft_cap, **keywords)
    k[:, ::3], v[:, ::3] = np.nan, np.inf
    got = run(q, k, v, do, dlse, logits_soft_cap=soft_cap, **keywords)
    check(got, want)
    for gradient in (got.key, got.value):
        assert not np.asarray(gradient, np.float32)[:, ::3].any()
    if "bias" in keywords:
        check(got, want, names=("dbias",))
        assert not np.asarray(got.bias)[..., ::3].any()


@pytest.mark.parametrize(
    ("kind", "shape", "d"),
    [
        ("mask", (1, 1), 64),
        ("mask", (2, 2), 128),
        pytest.param("mask", (2, 1), 80, marks=pytest.mark.gpu),
        pytest.param("mask", (2, 2), 192, marks=pytest.mark.gpu),
        ("bias", (1, 2), 128),
        pytest.param("bias", (2, 2), 96, marks=pytest.mark.gpu),
        pytest.param("bias", (2, 1), 64, marks=pytest.mark.gpu),
    ],
)
def test_queries_that_are_left_without_keys_may_be_anything(kind, shape, d):
    """Beside others of a tile. Where consumers have keys of their own, the kernel zeroes them."""
    q, k, v = qkv(2, 140, 150, 2, 1, d)
    do, dlse = cotangents(q, v)
    mask = mask_of(*shape, 140, 150)
    mask[-1, -1, 70:90] = False
    hidden = {"mask": mask}
    if kind == "bias":
        hidden = {"bias": np.where(mask, bias_of(*mask.shape), -np.inf).astype("bfloat16")}
    want = oracle64.attention_grads(q, k, v, do=do, dlse=dlse, **hidden)
    sees_nothing = np.broadcast_to(~mask.any(axis=3), (2, 2, 140)).swapaxes(1, 2)
    q[sees_nothing], do[sees_nothing] = np.nan, np.inf
    check(run(q, k, v, do, dlse, **hidden), want)


def test_gradients_of_terms_take_the_room_of_a_second_k_and_v():
    sizes = {"batch": 1, "q_len": 64, "kv_len": 64, "num_q_heads": 1, "num_kv_heads": 1}
    dims = {"head_dim": 64, "value_dim": 64, "dtype": jnp.dtype("bfloat16"), "scale": 1.0}
    problem = Problem(**sizes, **dims, mask=Mask(), has_alibi=True)
    config = kernel_config.default_config(problem)
    assert config.kv_stages == 2
    assert backward.fitting(problem, config, ()) == config
    less = dataclasses.replace(config, kv_stages=1)
    assert backward.fitting(problem, config, ("dslopes",)) == less
    with pytest.raises(ValueError, match=r"q_stages=4.*takes \d+ bytes of shared memory"):
        backward.fitting(problem, dataclasses.replace(config, q_stages=4), ())


def test_queries_that_see_a_nan_in_the_bias_have_no_gradient():
    q, k, v = qkv(1, 70, 100, 2, 1, 64)
    do, dlse = cotangents(q, v)
    bias = bias_of(1, 2, 70, 100)
    bias[0, 0, 3, 5], bias[0, 1, 60, 7] = np.nan, np.inf
    want = oracle64.attention_grads(q, k, v, do=do, dlse=dlse, bias=bias)
    check(run(q, k, v, do, dlse, bias=bias), want)


@pytest.mark.parametrize("columns", [1, 70])
def test_a_huge_bias_of_all_keys_leaves_other_rows_alone(columns):
    """Rows whose logits differ by less than fp32 holds have finite gradients, if not much more."""
    q, k, v = qkv(1, 70, 70, 1, 1, 64)
    do, dlse = cotangents(q, v)
    do[:, 30:], dlse[:, 30:] = 0.0, 0.0
    bias = np.broadcast_to(np.where(np.arange(70) < 30, 0.0, -1e10)[:, None], (1, 1, 70, columns))
    bias = np.array(bias, np.float32)
    want = oracle64.attention_grads(q, k, v, do=do, dlse=dlse, bias=bias)
    check(run(q, k, v, do, dlse, bias=bias), want)


@pytest.mark.parametrize(
    ("shape", "bias", "keywords", "counters"),
    [
        # Two parts a step, and key tiles that nobody sees.
        ((3, 150, 300, 2, 1, 64), bias_of(1, 2, 150, 300, dtype="bfloat16"), {}, (2, 3, 2)),
        # Query tiles in two loops, and gradients staged in two pieces.
        ((2, 150, 150, 2, 2, 80), bias_of(1, 2, 150, 150, dtype="bfloat16"), {}, (2, 2, 2)),
        ((2, 70, 130, 2, 1, 64), bias_of(2, 2, 70, 130, dtype="bfloat16"), {}, ()),
        ((1, 70, 130, 2, 1, 64), bias_of(1, 2, 70, 130), {"is_causal": False}, ()),
        ((2, 70, 130, 2, 1, 64), bias_of(1, 1, 70, 130), {}, None),
        ((2, 70, 130, 2, 1, 64), bias_of(1, 2, 70, 130), {}, None),
        ((2, 70, 70, 1, 1, 64), bias_of(1, 1, 70, 70), {"key_value_seq_lengths": i32(9, 70)}, None),
        ((2, 70, 70, 1, 1, 64), bias_of(2, 1, 70, 70), {"key_value_seq_lengths": i32(9, 70)}, ()),
        ((1, 140, 300, 4, 2, 64), bias_of(1, 4, 140, 300, dtype="float16"), {"mask": BLOCKS}, ()),
    ],
)
def test_how_a_bias_gradient_begins(shape, bias, keywords, counters, monkeypatch):
    """Written, by all batch elements or by the first, whom the others wait for; or added.

    Interpret mode has nothing to wait for, but what a GPU would wait for is in the counters: all of
    them must say at last that all rows are there.
    """
    seen = []

    def launch(problem, *args, **options):
        *gradients, found = backward.attention_backward(problem, *args, **options)
        jax.debug.callback(lambda found: seen.append(found), found)
        return *gradients, found

    ways = []
    decide = backward._writes_bias
    monkeypatch.setattr(backward, "_ADDED_BYTES", 0)
    monkeypatch.setattr(backward, "_writes_bias", lambda *x: ways.append(decide(*x)) or ways[-1])
    monkeypatch.setattr(backend, "_launch_backward", launch)
    q, k, v = qkv(*shape)
    do, dlse = cotangents(q, v)
    keywords = {"is_causal": True, **keywords}
    terms = dict(keywords)
    if "key_value_seq_lengths" in terms:
        terms["kv_lengths"] = terms.pop("key_value_seq_lengths")
    want = oracle64.attention_grads(q, k, v, do=do, dlse=dlse, bias=bias, **terms)
    got = run(q, k, v, do, dlse, bias=bias, **keywords)
    check(got, want, names=("dq", "dk", "dv", "dbias"))
    jax.effects_barrier()
    assert ways == [counters is not None]
    assert ("dbias_rows" in seen[0]) == bool(counters)
    if counters:
        np.testing.assert_array_equal(
            seen[0]["dbias_rows"], np.full(counters, np.iinfo(np.int32).max)
        )
