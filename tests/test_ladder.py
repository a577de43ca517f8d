"""The steps of the ladder: right in interpret mode, without races, and compiled for Hopper.

On a GPU, asked for with JAX_FLASH_TEST_GPU=1, the same tests run the kernels themselves.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from bench import aot
from jax_flash import backends
from pallas_kernels import ladder
from tests import oracle64
from tests.kernel_cases import ON_GPU, WITH_RACES, qkv
from tests.tolerance import fast_jit


@pytest.fixture
def attend(capfd):
    """``ladder.attend`` under jit, in whose run no race may be reported."""
    if ON_GPU and backends.device_of().compute_capability != "9.0":
        pytest.skip("needs compute capability 9.0")

    def call(number, *arrays, **keywords):
        interpret = None if ON_GPU else WITH_RACES
        function = functools.partial(ladder.attend, number, interpret=interpret, **keywords)
        return np.asarray(fast_jit(function)(*arrays)).astype(np.float64)

    yield call
    assert "RACE DETECTED" not in capfd.readouterr().out


def check(out, arrays, **terms):
    expected, _ = oracle64.attention(*arrays, **terms)
    assert np.isfinite(out).all()
    assert np.linalg.norm(out - expected) <= 4e-3 * np.linalg.norm(expected)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("number", ladder.STAGES)
def test_every_step_agrees_with_the_oracle(number, is_causal, attend):
    arrays = qkv(1, 256, 256, 2, 2, 64)
    check(attend(number, *arrays, is_causal=is_causal), arrays, is_causal=is_causal)


@pytest.mark.parametrize("number", ladder.STAGES)
def test_float16_in_128_columns_and_two_sequences(number, attend):
    arrays = qkv(2, 128, 128, 1, 1, 128, dtype="float16")
    out = attend(number, *arrays, is_causal=True, scale=0.3)
    check(out, arrays, is_causal=True, scale=0.3)


@pytest.mark.parametrize("number", ladder.STAGES)
def test_large_logits_neither_overflow_nor_vanish(number, attend):
    """Scores up to a few hundred: exp of them is inf in fp32, and of their negatives 0."""
    q, k, v = qkv(1, 128, 128, 1, 1, 64)
    arrays = q * 10, k, v
    check(attend(number, *arrays), arrays)


def test_what_the_ladder_does_not_take():
    def call(shape, dtype="bfloat16", v_dtype=None):
        x = jax.ShapeDtypeStruct(shape, dtype)
        v = jax.ShapeDtypeStruct(shape, v_dtype or dtype)
        return jax.eval_shape(functools.partial(ladder.attend, 3), x, x, v)

    assert call((1, 64, 1, 64)).shape == (1, 64, 1, 64)
    for wrong in (((1, 96, 1, 64),), ((1, 64, 1, 96),), ((1, 64, 1, 64), "float32")):
        with pytest.raises(ValueError, match="the ladder takes"):
            call(*wrong)
    with pytest.raises(ValueError, match="must be alike"):
        call((1, 64, 1, 64), "bfloat16", "float16")


@pytest.mark.parametrize("number", ladder.STAGES)
def test_every_step_lowers_for_cuda(number):
    """Layouts, shapes and shared memory are checked by lowering, which needs no CUDA."""
    if aot.unavailable() is None:
        pytest.skip("tests/test_aot.py compiles them, which begins with this")
    cases = [case for case in aot.ladder_cases() if case.name.startswith(f"ladder {number} ")]
    assert len(cases) == 4
    for case in cases:
        lowered = jax.jit(case.function).trace(*case.args).lower(lowering_platforms=("cuda",))
        assert lowered.as_text().count("mosaic_gpu") >= (3 if number == 1 else 1)


@pytest.mark.skipif(ON_GPU, reason="interpret mode runs on the CPU")
@pytest.mark.parametrize(
    ("number", "barrier"),
    [(1, "full"), (2, "q_full"), (2, "kv_full"), (2, "state_full"), (6, "q_full"), (6, "full")],
)
def test_a_removed_barrier_is_caught(number, barrier, monkeypatch, capfd):
    """Race detection, or a barrier whose phase nobody waits for, notices each wait's absence."""
    intact = ladder._wait

    def wait(refs, name, slot=None):
        if name != barrier:
            intact(refs, name, slot)

    monkeypatch.setattr(ladder, "_wait", wait)
    x = jnp.asarray(qkv(1, 320, 320, 1, 1, 64)[0])
    caught = False
    try:
        jax.block_until_ready(ladder.attend(number, x, x, x, interpret=WITH_RACES))
    except Exception:  # the interpreter raises different types
        caught = True
    gpu_callbacks.reset_gpu_interpret_mode_state()
    assert caught or "RACE DETECTED" in capfd.readouterr().out
