"""What the tests of the forward and of the backward Mosaic kernel share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_flash.spec import Device

HOPPER = Device("gpu", "9.0", "NVIDIA H200")
WITH_RACES = plgpu.InterpretGPUParams(detect_races=True)
ON_GPU = jax.default_backend() == "gpu"
FP32_TOLERANCE = 2e-6  # of the norm; with products in TF32 it is 2e-4, in bf16 3e-3


def rand(seed, *shape, dtype="bfloat16"):
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(jnp.dtype(dtype))


def qkv(batch, tq, tk, hq, hk, d, dv=None, dtype="bfloat16"):
    return (
        rand(0, batch, tq, hq, d, dtype=dtype),
        rand(1, batch, tk, hk, d, dtype=dtype),
        rand(2, batch, tk, hk, dv or d, dtype=dtype),
    )


def i32(*values):
    return np.array(values, np.int32)


def mostly_on_gpu(names, on_gpu):
    """Parameters, of which those in `on_gpu` are left to a GPU, where a case takes no time.

    They are mixtures and sizes whose parts other cases have: in interpret mode each costs seconds.
    """
    assert set(on_gpu) <= set(names), "a case that is not there"
    values = [x if isinstance(x, tuple) else (x,) for x in names]
    marks = [pytest.mark.gpu if x in on_gpu else () for x in names]
    return [pytest.param(*x, marks=mark) for x, mark in zip(values, marks, strict=True)]


# name: shapes (batch, tq, tk, hq, hk, d[, dv]), the call's keywords, the oracle's keywords, which
# are the same if None
COMMON_CASES = {
    "one token": ((1, 1, 1, 1, 1, 64), {}, {}),
    "odd lengths": ((1, 65, 131, 2, 1, 64), {}, {}),
    "narrow dims": ((1, 70, 70, 1, 1, 40, 24), {"is_causal": True}, {"is_causal": True}),
    "empty rows": ((1, 150, 64, 1, 1, 64), {"is_causal": True, "q_offset": -70}, None),
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
}

_IDS = np.repeat(i32(1, 0, 2), 50)[None], np.repeat(i32(1, 2, 3), 50)[None]
SEGMENTS = (  # the keywords of both; queries of segment 0 see no key
    dict(zip(("query_segment_ids", "key_value_segment_ids"), _IDS, strict=True)),
    dict(zip(("q_segments", "kv_segments"), _IDS, strict=True)),
)
