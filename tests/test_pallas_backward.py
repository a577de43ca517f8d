"""The Mosaic backward kernel, run by JAX's GPU interpret mode with race detection.

As in tests/test_pallas_forward.py the whole path of a call runs, here the derivative's; the forward
pass is the dense implementation's, so that only one kernel is at stake. One thread block walks all
tiles: between blocks, adding to dQ is atomic on a GPU and would be a race in interpret mode.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_flash import backends, dot_product_attention, ragged_attention, reference
from jax_flash.mask import Mask
from jax_flash.spec import Device
from pallas_kernels import backend, schedule
from pallas_kernels import backward as kernel
from pallas_kernels import forward as forward_kernel
from tests import oracle64

HOPPER = Device("gpu", "9.0", "NVIDIA H200")
WITH_RACES = plgpu.InterpretGPUParams(detect_races=True)
ON_GPU = jax.default_backend() == "gpu"


@pytest.fixture
def interpreted(monkeypatch, capfd):
    """Sends derivatives to the kernel in interpret mode, where no race may be reported.

    On a GPU, asked for with JAX_FLASH_TEST_GPU=1, the same tests run the kernels themselves.
    """
    if ON_GPU and backends.device_of().compute_capability != "9.0":
        pytest.skip("needs compute capability 9.0")
    interpret = {} if ON_GPU else {"interpret": WITH_RACES, "num_blocks": 1}

    def use(**options):
        differentiate = functools.partial(backend.differentiate, **{**interpret, **options})
        monkeypatch.setattr(backend, "backward", differentiate)

    use()
    if not ON_GPU:
        monkeypatch.setattr(backends, "device_of", lambda *_: HOPPER)
        monkeypatch.setattr(backend, "forward", reference.forward)
    yield use
    assert "RACE DETECTED" not in capfd.readouterr().out


def rand(seed, *shape, dtype="bfloat16"):
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(jnp.dtype(dtype))


def qkv(batch, tq, tk, hq, hk, d, dv=None, dtype="bfloat16"):
    return (
        rand(0, batch, tq, hq, d, dtype=dtype),
        rand(1, batch, tk, hk, d, dtype=dtype),
        rand(2, batch, tk, hk, dv or d, dtype=dtype),
    )


def cotangents(q, v):
    return rand(3, *q.shape[:-1], v.shape[-1], dtype=q.dtype), rand(
        4, *q.shape[:-1], dtype="float32"
    )


def run(q, k, v, do, dlse, attention=dot_product_attention, **keywords):
    """(dq, dk, dv) of the public call under jit, arrays among the keywords traced."""
    arrays = {name: x for name, x in keywords.items() if isinstance(x, np.ndarray)}
    static = {name: x for name, x in keywords.items() if name not in arrays}

    @jax.jit
    def call(q, k, v, do, dlse, arrays):
        call = functools.partial(
            attention, implementation="mosaic", return_residual=True, **static, **arrays
        )
        return jax.vjp(call, q, k, v)[1]((do, dlse))

    return call(q, k, v, do, dlse, arrays)


def check(got, want, tolerance=4e-3):
    """Relative error as of a computation with rounded probabilities and score gradients."""
    for name, x in zip(("dq", "dk", "dv"), got, strict=True):
        x = np.asarray(x).astype(np.float64)
        assert np.isfinite(x).all(), name
        scale = np.linalg.norm(want[name])
        assert np.linalg.norm(x - want[name]) <= tolerance * max(scale, 1e-30), name


def i32(*values):
    return np.array(values, np.int32)


# name: shapes (batch, tq, tk, hq, hk, d[, dv]), the call's keywords, the oracle's keywords
CASES = {
    "one token": ((1, 1, 1, 1, 1, 64), {}, {}),
    "odd lengths": ((1, 65, 131, 2, 1, 64), {}, {}),
    "narrow dims": ((1, 70, 70, 1, 1, 40, 24), {"is_causal": True}, {"is_causal": True}),
    "D64/128": ((1, 70, 140, 1, 1, 64, 128), {}, {}),
    "grouped heads": ((2, 130, 200, 4, 2, 128), {"is_causal": True, "q_offset": 70}, None),
    "D192/128": ((1, 64, 130, 2, 1, 192, 128), {}, {}),
    "D256": ((1, 70, 130, 2, 2, 256), {"is_causal": True, "q_offset": 60}, None),
    "empty rows": ((1, 150, 64, 1, 1, 64), {"is_causal": True, "q_offset": -70}, None),
    "keys that none sees": ((1, 64, 300, 1, 1, 128), {"is_causal": True}, None),
    "window": (
        (1, 200, 200, 1, 1, 64),
        {"local_window_size": (40, 20), "q_offset": 10},
        {"window": (40, 20), "q_offset": 10},
    ),
    "causal window": (
        (1, 260, 260, 1, 1, 128),
        {"local_window_size": (70, 0), "is_causal": True},
        {"window": (70, 0), "is_causal": True},
    ),
    "offsets": (
        (2, 100, 150, 1, 1, 64),
        {"is_causal": True, "q_offset": i32(-30, 50)},
        {"is_causal": True, "q_offset": i32(-30, 50)},
    ),
    "lengths": (
        (4, 100, 200, 1, 1, 128),
        {"query_seq_lengths": i32(100, 3, 70, 0), "key_value_seq_lengths": i32(130, 200, 0, 9)},
        {"q_lengths": i32(100, 3, 70, 0), "kv_lengths": i32(130, 200, 0, 9)},
    ),
    "segments": (
        (1, 150, 150, 1, 1, 64),
        {
            "query_segment_ids": np.repeat(i32(1, 0, 2), 50)[None],
            "key_value_segment_ids": np.repeat(i32(1, 2, 3), 50)[None],
        },
        {
            "q_segments": np.repeat(i32(1, 0, 2), 50)[None],
            "kv_segments": np.repeat(i32(1, 2, 3), 50)[None],
        },
    ),
    "negative scale": ((1, 64, 64, 1, 1, 64), {"scale": -0.3}, None),
    "zero scale": ((1, 64, 64, 1, 1, 64), {"scale": 0.0}, None),
}


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_oracle(name, interpreted):
    shape, keywords, terms = CASES[name]
    q, k, v = qkv(*shape)
    do, dlse = cotangents(q, v)
    terms = keywords if terms is None else terms
    want = oracle64.attention_grads(q, k, v, do=do, dlse=dlse, **terms)
    check(run(q, k, v, do, dlse, **keywords), want)


def test_float16(interpreted):
    q, k, v = qkv(1, 100, 100, 2, 1, 64, dtype="float16")
    do, dlse = cotangents(q, v)
    want = oracle64.attention_grads(q, k, v, do=do, dlse=dlse, is_causal=True)
    check(run(q, k, v, do, dlse, is_causal=True), want)
