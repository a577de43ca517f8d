"""Masks and terms in the Mosaic forward kernel, run by JAX's GPU interpret mode."""

import functools

import jax
import numpy as np
import pytest

from jax_flash import backends, dot_product_attention
from jax_flash.mask import dropout_keep, dropout_seeds
from pallas_kernels import backend
from tests import oracle64
from tests.kernel_cases import (
    FP32_TOLERANCE,
    HOPPER,
    ON_GPU,
    WITH_RACES,
    i32,
    mostly_on_gpu,
    qkv,
    rand,
)
from tests.tolerance import fast_jit


@pytest.fixture(autouse=True)
def interpreted(monkeypatch, capfd):
    """Sends calls to the kernel in interpret mode, where no race may be reported."""
    if ON_GPU and backends.device_of().compute_capability != "9.0":
        pytest.skip("needs compute capability 9.0")
    if not ON_GPU:
        attend = functools.partial(backend.attend, interpret=WITH_RACES, num_blocks=2)
        monkeypatch.setattr(backend, "forward", attend)
        monkeypatch.setattr(backends, "device_of", lambda *_: HOPPER)
    yield
    assert "RACE DETECTED" not in capfd.readouterr().out


def mask_of(*shape):
    return rand(8, *shape, dtype="float32") > -0.5


def bias_of(*shape, dtype="float32"):
    bias = rand(4, *shape, dtype=dtype)
    hidden = (rand(5, *shape, dtype="float32") > 1.0) & (bias.size > 1)
    return np.where(hidden, bias.dtype.type(-np.inf), bias)


SLOPES = np.float32([0.2, -0.1])
BLOCKS = np.kron(mask_of(1, 2, 3, 5), np.ones((1, 1, 64, 64), bool))[:, :, :140, :300]
# name: shape, keywords, the oracle's where they differ
CASES = {
    "soft cap": ((1, 70, 130, 2, 1, 64), {"logits_soft_cap": 3.0}, {"soft_cap": 3.0}),
    "soft cap, causal": (
        (1, 70, 130, 2, 2, 128),
        {"logits_soft_cap": 3.0, "is_causal": True, "q_offset": 60},
        {"soft_cap": 3.0, "is_causal": True, "q_offset": 60},
    ),
    "sinks": ((2, 70, 130, 2, 1, 64), {"sinks": np.float32([0.5, -1.0])}, None),
    "sinks, empty rows": (
        (1, 70, 64, 2, 1, 64),
        {"sinks": np.float32([3.0, -np.inf]), "is_causal": True, "q_offset": -30},
        None,
    ),
    "ALiBi": ((1, 140, 140, 2, 1, 64), {"alibi_slopes": SLOPES, "is_causal": True}, None),
    "ALiBi, soft cap, offsets": (
        (2, 70, 130, 2, 1, 64),
        {"alibi_slopes": SLOPES, "q_offset": i32(60, 1000), "logits_soft_cap": 5.0},
        {"alibi_slopes": SLOPES, "q_offset": i32(60, 1000), "soft_cap": 5.0},
    ),
    "ALiBi, far away": (
        (1, 70, 70, 2, 1, 64),
        {"alibi_slopes": SLOPES, "q_offset": 10**6},
        None,
    ),
    "bias of a row": ((2, 70, 130, 2, 1, 64), {"bias": bias_of(2, 1, 1, 130)}, None),
    "bias of a column": ((2, 70, 130, 2, 1, 64), {"bias": bias_of(1, 2, 70, 1)}, None),
    "bias of a column, soft cap, sinks": (
        (2, 70, 130, 2, 1, 64),
        {
            "bias": bias_of(1, 2, 70, 1),
            "logits_soft_cap": 2.0,
            "sinks": np.float32([0.5, -1.0]),
        },
        {"bias": bias_of(1, 2, 70, 1), "soft_cap": 2.0, "sinks": np.float32([0.5, -1.0])},
    ),
    "bias of a column, sinks": (
        (2, 70, 130, 2, 1, 64),
        {"bias": bias_of(1, 2, 70, 1), "sinks": np.float32([0.5, -1.0])},
        None,
    ),
    "bias": ((2, 70, 130, 2, 1, 64), {"bias": bias_of(1, 2, 70, 130)}, None),
    "bias in bf16, causal": (
        (2, 140, 131, 2, 1, 128),
        {"bias": bias_of(2, 1, 140, 131, dtype="bfloat16"), "is_causal": True},
        None,
    ),
    "bias, soft cap": (
        (1, 70, 130, 2, 1, 64),
        {"bias": bias_of(1, 2, 70, 130), "logits_soft_cap": 2.0},
        {"bias": bias_of(1, 2, 70, 130), "soft_cap": 2.0},
    ),
    "bias of nothing but the lowest number": (
        (1, 64, 64, 1, 1, 64),
        {"bias": np.full((1, 1, 64, 64), np.finfo(np.float32).min, np.float32)},
        None,
    ),
    "mask": ((2, 140, 200, 2, 1, 64), {"mask": mask_of(2, 2, 140, 200)}, None),
    "mask of all heads": ((2, 70, 130, 2, 1, 64), {"mask": mask_of(2, 1, 70, 130)}, None),
    "mask of all elements": ((2, 70, 130, 2, 1, 128), {"mask": mask_of(1, 2, 70, 130)}, None),
    "mask of keys": ((2, 70, 200, 2, 1, 64), {"mask": mask_of(2, 1, 1, 200)}, None),
    "mask of queries": ((2, 140, 130, 2, 1, 64), {"mask": mask_of(1, 2, 140, 1)}, None),
    "mask of blocks": ((2, 140, 300, 2, 1, 64), {"mask": BLOCKS}, None),
    "mask, causal, lengths": (
        (2, 140, 200, 2, 1, 64),
        {
            "mask": mask_of(1, 2, 140, 200),
            "is_causal": True,
            "key_value_seq_lengths": i32(77, 200),
            "q_offset": 60,
        },
        {
            "mask": mask_of(1, 2, 140, 200),
            "is_causal": True,
            "kv_lengths": i32(77, 200),
            "q_offset": 60,
        },
    ),
    "mask of nothing": ((1, 70, 130, 1, 1, 64), {"mask": np.zeros((1, 1, 70, 130), bool)}, None),
    "mask and bias": (
        (2, 70, 130, 2, 1, 64),
        {"mask": mask_of(2, 1, 70, 130), "bias": bias_of(1, 2, 70, 130)},
        None,
    ),
    "dropout": (
        (2, 140, 200, 2, 1, 64),
        {"dropout_rate": 0.3, "dropout_rng": jax.random.key(3), "is_causal": True},
        None,
    ),
    "all dropped": (
        (1, 64, 64, 1, 1, 64),
        {"dropout_rate": 1.0, "dropout_rng": jax.random.key(3)},
        None,
    ),
}


def run(q, k, v, **keywords):
    """The public call under jit, arrays traced."""
    arrays = {name: x for name, x in keywords.items() if isinstance(x, np.ndarray | jax.Array)}
    static = {name: x for name, x in keywords.items() if name not in arrays}

    @fast_jit
    def call(q, k, v, arrays):
        return dot_product_attention(
            q, k, v, implementation="mosaic", return_residual=True, **static, **arrays
        )

    return call(q, k, v, arrays)


def check(result, expected, tolerance=5e-3, of_lse=2e-4):
    (out, lse), (ref, ref_lse) = (tuple(map(np.asarray, x)) for x in (result, expected))
    out = out.astype(np.float64)
    assert np.isfinite(out).all()
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(ref_lse))
    seen = np.isfinite(ref_lse)
    np.testing.assert_allclose(lse[seen], ref_lse[seen], atol=of_lse, rtol=1e-6)
    assert np.linalg.norm(out - ref) <= tolerance * max(np.linalg.norm(ref), 1e-30)
    assert (out[~seen] == 0).all()


def expected_of(arrays, keywords):
    """The oracle's out and lse; it is told what dropout keeps."""
    keywords = dict(keywords)
    if (key := keywords.pop("dropout_rng", None)) is not None:
        (batch, tq, heads), tk = arrays[0].shape[:3], arrays[1].shape[1]
        sizes = (np.arange(size, dtype=np.int32) for size in (heads, tq, tk))
        seeds = dropout_seeds(key, batch)
        keywords["keep"] = np.asarray(dropout_keep(seeds, *sizes, keywords["dropout_rate"]))
    return oracle64.attention(*arrays, **keywords)


ON_GPU_ONLY = {
    "soft cap, causal",
    "sinks",
    "ALiBi, soft cap, offsets",
    "bias of a column",
    "bias of a column, sinks",
    "bias, soft cap",
    "mask",
    "mask of all heads",
    "mask of all elements",
}


@pytest.mark.parametrize("name", mostly_on_gpu(CASES, ON_GPU_ONLY))
def test_agrees_with_oracle(name):
    shape, keywords, terms = CASES[name]
    arrays = qkv(*shape)
    check(run(*arrays, **keywords), expected_of(arrays, keywords if terms is None else terms))


@pytest.mark.parametrize("dtype", mostly_on_gpu(["bfloat16", "float32"], {"float32"}))
def test_dropout_drops_what_the_generator_says(dtype):
    """Equal probabilities, and values that show them one by one."""
    batch, num_rows, num_keys, num_heads, dim = 2, 140, 200, 2, 64
    first, key, rate = 70, jax.random.key(3), 0.3  # on both sides of a tile's edge
    q = np.zeros((batch, num_rows, num_heads, dim), dtype)
    v = np.zeros((batch, num_keys, num_heads, dim), dtype)
    v[:, first : first + dim] = np.eye(dim)[:, None]
    out, _ = run(q, np.zeros_like(v), v, dropout_rate=rate, dropout_rng=key)
    sizes = (np.arange(size, dtype=np.int32) for size in (num_heads, num_rows, num_keys))
    keep = np.asarray(dropout_keep(dropout_seeds(key, batch), *sizes, rate))
    shown = np.swapaxes(keep[..., first : first + dim], 1, 2)
    np.testing.assert_array_equal(np.asarray(out) > 0, shown)


IN_FP32 = {
    **{name: case for name, case in CASES.items() if name != "ALiBi, far away"},  # few digits left
    "bias, causal, dropout": (
        (1, 70, 130, 2, 1, 128),
        {
            "bias": bias_of(1, 2, 70, 130),
            "is_causal": True,
            "q_offset": 60,
            "dropout_rate": 0.3,
            "dropout_rng": jax.random.key(3),
        },
        None,
    ),
}


@pytest.mark.parametrize("name", mostly_on_gpu(IN_FP32, {*IN_FP32} - {"bias, causal, dropout"}))
def test_fp32_is_exact(name):
    shape, keywords, terms = IN_FP32[name]
    arrays = qkv(*shape, dtype="float32")
    expected = expected_of(arrays, keywords if terms is None else terms)
    check(run(*arrays, **keywords), expected, FP32_TOLERANCE, of_lse=4e-6)


@pytest.mark.parametrize(
    "name",
    mostly_on_gpu(
        ["mask of blocks", "bias in bf16, causal", "dropout", "ALiBi"], {"mask of blocks", "ALiBi"}
    ),
)
def test_nan_in_a_hidden_value_is_not_seen(name):
    """Also where rows must be computed again, which has all terms too."""
    shape, keywords, _ = CASES[name]
    q, k, v = qkv(*shape)
    mask = np.ones((1, 1, shape[1], shape[2]), bool)
    mask[..., 10:75, 60] = False
    keywords = keywords | {"mask": mask & keywords.get("mask", True)}
    v[:, 60] = np.nan
    out, lse = map(np.asarray, run(q, k, v, **keywords))
    blind = ~np.asarray(keywords["mask"])[..., 60]
    clean = np.where(np.isnan(v), np.zeros_like(v), v)
    expected, expected_lse = expected_of((q, k, clean), keywords)
    rows = np.isnan(out.astype(np.float32)).any(axis=-1)
    np.testing.assert_array_equal(np.isnan(lse), rows)
    blind = np.broadcast_to(np.swapaxes(blind, 1, 2), rows.shape)
    assert not (rows & blind).any()
    error = np.where(blind[..., None], out.astype(np.float64) - expected, 0.0)
    assert np.linalg.norm(error) <= 5e-3 * np.linalg.norm(expected)
    np.testing.assert_allclose(lse[np.isfinite(lse)], expected_lse[np.isfinite(lse)], atol=2e-4)
    assert rows.any()


@pytest.mark.skipif(ON_GPU, reason="there the other tests compile")
@pytest.mark.parametrize("d", [64, 128, 256])
def test_odd_lengths_lower_for_cuda(d, monkeypatch):
    """Copies by TMA want multiples of 8, which interpret mode does not check."""
    monkeypatch.setattr(backend, "forward", backend.attend)
    q, k, v = qkv(2, 70, 131, 2, 1, d)
    bias, mask = bias_of(1, 2, 70, 131), mask_of(2, 1, 70, 131)

    def loss(q, k, v, bias):
        out = dot_product_attention(
            q, k, v, bias, mask, implementation="mosaic", alibi_slopes=SLOPES, logits_soft_cap=3.0
        )
        return out.astype("float32").sum()

    gradients = jax.jit(jax.grad(loss, (0, 1, 2, 3)))
    lowered = gradients.trace(q, k, v, bias).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("mosaic_gpu") >= 2
