"""The Mosaic forward kernel, run by JAX's GPU interpret mode with race detection.

The whole path of a call runs, from the public function to the kernel, on small shapes; only the
choice of device and the launch are replaced. What interpret mode does not model (layouts, wait
counts, register pressure) is left to tests/test_aot.py and to a GPU.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from jax_flash import backends, dot_product_attention, explain, ragged_attention
from jax_flash.spec import Device
from pallas_kernels import backend
from pallas_kernels import forward as kernel
from tests import oracle64
from tests.kernel_cases import (
    COMMON_CASES,
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


@pytest.fixture
def interpreted(monkeypatch, capfd):
    """Sends calls to the kernel in interpret mode, where no race may be reported.

    On a GPU, asked for with JAX_FLASH_TEST_GPU=1, the same tests run the kernel itself.
    """
    if ON_GPU and backends.device_of().compute_capability != "9.0":
        pytest.skip("needs compute capability 9.0")
    interpret = {} if ON_GPU else {"interpret": WITH_RACES, "num_blocks": 2}

    def use(**options):
        attend = functools.partial(backend.attend, **{**interpret, **options})
        monkeypatch.setattr(backend, "forward", attend)

    use()
    if not ON_GPU:
        monkeypatch.setattr(backends, "device_of", lambda *_: HOPPER)
    yield use
    assert "RACE DETECTED" not in capfd.readouterr().out


def check(result, expected, tolerance=4e-3, of_lse=1e-4):
    """Relative error of out as of a computation with rounded probabilities; lse in fp32."""
    (out, lse), (ref, ref_lse) = (tuple(map(np.asarray, x)) for x in (result, expected))
    out = out.astype(np.float64)
    assert np.isfinite(out).all()
    assert np.linalg.norm(out - ref) <= tolerance * max(np.linalg.norm(ref), 1e-30)
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(ref_lse))
    seen = np.isfinite(ref_lse)
    np.testing.assert_allclose(lse[seen], ref_lse[seen], atol=of_lse)
    assert (out[~seen] == 0).all()


def program(**keywords):
    """The public call as a function of q, k and v, compiled once; arrays are traced."""
    arrays = {name: x for name, x in keywords.items() if isinstance(x, np.ndarray)}
    static = {name: x for name, x in keywords.items() if name not in arrays}

    @fast_jit
    def call(q, k, v, arrays):
        return dot_product_attention(
            q, k, v, implementation="mosaic", return_residual=True, **static, **arrays
        )

    return functools.partial(call, arrays=arrays)


def run(q, k, v, **keywords):
    return program(**keywords)(q, k, v)


ANY_IDS = np.random.default_rng(7).integers(-2, 3, (2, 140)).astype(np.int32)
SORTED_IDS = np.sort(np.random.default_rng(8).integers(0, 5, (2, 150)), axis=1).astype(np.int32)

CASES = COMMON_CASES | {
    "two rounds": ((1, 200, 136, 3, 3, 64), {"is_causal": True}, {"is_causal": True}),
    "D128": ((1, 130, 200, 2, 1, 128), {"is_causal": True, "q_offset": 70}, None),
    "D192/128": ((1, 64, 130, 1, 1, 192, 128), {}, {}),
    "D256": ((1, 70, 130, 1, 1, 256), {"is_causal": True, "q_offset": 60}, None),
    "lengths": (
        (4, 100, 200, 1, 1, 64),
        {"query_seq_lengths": i32(100, 3, 70, 0), "key_value_seq_lengths": i32(130, 200, 0, 9)},
        {"q_lengths": i32(100, 3, 70, 0), "kv_lengths": i32(130, 200, 0, 9)},
    ),
    "causal lengths": (
        (2, 150, 150, 2, 1, 128),
        {"is_causal": True, "key_value_seq_lengths": i32(77, 150)},
        {"is_causal": True, "kv_lengths": i32(77, 150)},
    ),
    "D80": ((1, 70, 130, 1, 1, 80), {"is_causal": True, "q_offset": 60}, None),
    "D96/72": ((1, 70, 130, 1, 1, 96, 72), {}, {}),
    "segments": (
        (2, 150, 150, 2, 1, 64),
        {"query_segment_ids": SORTED_IDS, "key_value_segment_ids": SORTED_IDS, "is_causal": True},
        {"q_segments": SORTED_IDS, "kv_segments": SORTED_IDS, "is_causal": True},
    ),
    "segments in any order": (
        (2, 100, 140, 1, 1, 64),
        {"query_segment_ids": ANY_IDS[:, :100], "key_value_segment_ids": ANY_IDS},
        {"q_segments": ANY_IDS[:, :100], "kv_segments": ANY_IDS},
    ),
    "negative scale": ((1, 64, 64, 1, 1, 64), {"scale": -0.3}, None),
    "zero scale": ((1, 64, 64, 1, 1, 64), {"scale": 0.0}, None),
}


ON_GPU_ONLY = {"causal window", "causal lengths", "D80"}


@pytest.mark.parametrize("name", mostly_on_gpu(CASES, ON_GPU_ONLY))
def test_agrees_with_oracle(name, interpreted):
    shape, keywords, terms = CASES[name]
    arrays = qkv(*shape)
    expected = oracle64.attention(*arrays, **(keywords if terms is None else terms))
    check(run(*arrays, **keywords), expected)


def test_float16(interpreted):
    arrays = qkv(1, 100, 100, 2, 1, 64, dtype="float16")
    check(run(*arrays, is_causal=True), oracle64.attention(*arrays, is_causal=True))


OF_FP32 = [name for name, (shape, *_) in CASES.items() if max(shape[5:]) <= 128]


@pytest.mark.parametrize("name", mostly_on_gpu(OF_FP32, {*OF_FP32} - {"narrow dims"}))
def test_fp32_is_exact(name, interpreted):
    shape, keywords, terms = CASES[name]
    arrays = qkv(*shape, dtype="float32")
    expected = oracle64.attention(*arrays, **(keywords if terms is None else terms))
    check(run(*arrays, **keywords), expected, FP32_TOLERANCE, of_lse=4e-6)


CONFIGS = {
    "plain": kernel.ForwardConfig(lazy_growth=0.0, partial_sums=False, take_turns=False),
    "one consumer": kernel.ForwardConfig(num_warpgroups=1, block_kv=64, num_stages=3),
    "loops for edges": kernel.ForwardConfig(
        block_kv=64, split_edges=True, early_wait=True, opaque_index=True
    ),
    "shared out": kernel.ForwardConfig(block_kv=64, share_out=True),
    "three consumers": kernel.ForwardConfig(
        num_warpgroups=3, consumer_registers=160, producer_registers=32, early_wait=True
    ),
    "Q in registers": kernel.ForwardConfig(query_registers=True, head_group=2),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_option(name, interpreted):
    interpreted(config=CONFIGS[name])
    arrays = qkv(1, 140, 200, 2, 1, 64)
    keywords = {"is_causal": True, "q_offset": 50}
    window = (90, 3)
    expected = oracle64.attention(*arrays, window=window, **keywords)
    check(run(*arrays, local_window_size=window, **keywords), expected)


@pytest.mark.parametrize("window", mostly_on_gpu([(None,), ((30, 0),)], {(None,)}))
def test_ragged(window, interpreted):
    cu_q, cu_k = i32(0, 50, 50, 51, 120, 128), i32(0, 70, 80, 81, 81, 140)
    q, k, v = (x[0] for x in qkv(1, 135, 150, 2, 1, 64))
    k[140:], v[140:] = np.nan, np.nan
    k[70:80], v[70:80] = np.nan, np.nan  # keys of a sequence without queries
    call = fast_jit(
        lambda q, k, v, cu_q, cu_k: ragged_attention(
            q, k, v, cu_q, cu_k, is_causal=True, local_window_size=window,
            implementation="mosaic", return_residual=True,
        )
    )  # fmt: skip
    expected = oracle64.ragged_attention(
        q, np.nan_to_num(k), np.nan_to_num(v), cu_q, cu_k, is_causal=True, window=window
    )
    check(call(q, k, v, cu_q, cu_k), expected)


def test_keys_that_no_query_sees_may_be_nan(interpreted):
    q, k, v = qkv(2, 100, 200, 1, 1, 64)
    clean = k.copy(), v.copy()
    k[0, 90:], v[0, 90:] = np.nan, np.inf
    k[1, 150:], v[1, 150:] = np.nan, np.nan
    expected = oracle64.attention(q, *clean, kv_lengths=i32(90, 150))
    check(run(q, k, v, key_value_seq_lengths=i32(90, 150)), expected)
    k, v = (x.copy() for x in clean)
    k[:, 100:], v[:, 100:] = np.nan, np.nan  # past the last causal query
    check(run(q, k, v, is_causal=True), oracle64.attention(q, *clean, is_causal=True))


@pytest.mark.parametrize(
    ("d", "bad"),
    mostly_on_gpu(
        [(64, np.nan), (80, np.inf), (128, np.nan), (256, np.inf)], {(80, np.inf), (128, np.nan)}
    ),
)
def test_nan_reaches_just_the_queries_that_see_it(d, bad, interpreted):
    """Also where the value shares a tile with some that other rows of the tile see."""
    q, k, v = qkv(1, 70, 70, 1, 1, d)
    clean, clean_lse = oracle64.attention(q, k, v, is_causal=True)
    v[0, 40, 0, 7] = bad
    out, lse = map(np.array, run(q, k, v, is_causal=True))
    assert np.isnan(out[0, 40:].astype(np.float32)).all()
    assert np.isnan(lse[0, 40:]).all()
    out[0, 40:], lse[0, 40:] = clean[0, 40:], clean_lse[0, 40:]
    check((out, lse), (clean, clean_lse))


@pytest.mark.parametrize("d", mostly_on_gpu([64, 256], {256}))
def test_nan_that_all_see_reaches_all(d, interpreted):
    q, k, v = qkv(1, 70, 70, 1, 1, d)
    v[0, 40, 0, 7] = np.nan
    for x in run(q, k, v):
        assert np.isnan(np.asarray(x, np.float32)).all()


def test_nan_stays_in_its_segment(interpreted):
    q, k, v = qkv(2, 150, 150, 2, 1, 64)
    terms = {"q_segments": SORTED_IDS, "kv_segments": SORTED_IDS}
    clean, _ = oracle64.attention(q, k, v, **terms)
    k[SORTED_IDS == 2] = np.nan
    v[SORTED_IDS == 2] = np.inf
    segments = {"query_segment_ids": SORTED_IDS, "key_value_segment_ids": SORTED_IDS}
    out, lse = map(np.asarray, run(q, k, v, **segments))
    out = out.astype(np.float32)
    assert np.isnan(out[SORTED_IDS == 2]).all()
    assert np.isfinite(lse[SORTED_IDS != 2]).all()
    out[SORTED_IDS == 2] = clean[SORTED_IDS == 2]
    assert np.linalg.norm(out - clean) <= 4e-3 * np.linalg.norm(clean)


@pytest.mark.parametrize("zero", ["batch", "tq", "tk", "dv"])
def test_zero_sizes(zero, interpreted):
    sizes = {"batch": 1, "tq": 9, "tk": 9, "hq": 1, "hk": 1, "d": 64, "dv": 64} | {zero: 0}
    batch, tq, tk, hq, hk, d, dv = sizes.values()
    arrays = rand(0, batch, tq, hq, d), rand(1, batch, tk, hk, d), rand(2, batch, tk, hk, dv)
    out, lse = run(*arrays)
    assert out.shape == (batch, tq, hq, dv)
    assert lse.shape == (batch, tq, hq)
    assert not np.asarray(out).any()
    assert np.isneginf(lse).all() == (zero != "dv" or 0 in lse.shape)


def test_vmap_launches_once(interpreted):
    q, k, v = qkv(2, 64, 64, 1, 1, 64)
    call = functools.partial(dot_product_attention, implementation="mosaic", is_causal=True)
    stacked = fast_jit(jax.vmap(call))(q[:, None], k[:, None], v[:, None])[:, 0]
    np.testing.assert_array_equal(stacked, fast_jit(call)(q, k, v))


@pytest.mark.skipif(ON_GPU, reason="interpret mode runs on the CPU")
@pytest.mark.parametrize("barrier", ["k_empty", "v_empty", "k_full", "v_full", "q_full"])
def test_a_removed_barrier_is_caught(barrier, interpreted, monkeypatch, capfd):
    """Race detection, or a barrier whose phase nobody waits for, notices each wait's absence."""
    intact = kernel._Kernel.wait

    def wait(self, name, slot=0):
        if name != barrier:
            intact(self, name, slot)

    monkeypatch.setattr(kernel._Kernel, "wait", wait)
    interpreted(num_blocks=1, config=kernel.ForwardConfig(block_kv=64))
    caught = False
    try:
        jax.block_until_ready(run(*qkv(1, 64, 320, 1, 1, 64)))
    except Exception:  # the interpreter raises different types
        caught = True
    gpu_callbacks.reset_gpu_interpret_mode_state()
    races = "RACE DETECTED" in capfd.readouterr().out
    assert caught or races


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128, 192, 256])
def test_twenty_runs_are_bit_equal(d, interpreted):
    arrays = qkv(2, 2000, 2000, 8, 4, d)
    call = program(is_causal=True)
    first = tuple(map(np.asarray, call(*arrays)))
    for _ in range(20):
        for one, other in zip(first, call(*arrays), strict=True):
            assert one.tobytes() == np.asarray(other).tobytes()


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements(interpreted):
    """And more than 65535 heads in all."""
    few = jnp.asarray(rand(0, 4, 256, 16, 64))
    call = jax.jit(functools.partial(dot_product_attention, implementation="mosaic"))
    many = jnp.tile(few, (2050, 1, 1, 1))
    out = call(many, many, many)
    for first in (0, 4096, 8196):
        np.testing.assert_array_equal(out[first : first + 4], out[:4])
    np.testing.assert_array_equal(out[:4], call(few, few, few))


def refusal(device=HOPPER, **keywords):
    """What the kernel answers to a call, traced only."""
    x = jax.ShapeDtypeStruct((2, 64, 4, keywords.pop("d", 64)), keywords.pop("dtype", "bfloat16"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "device_of", lambda *_: device)
        report = explain(dot_product_attention, x, x, x, implementation="mosaic", **keywords)
    return report.decisions[0].reasons.get("mosaic")


def test_supports_answers():
    assert refusal() is None
    assert refusal(d=256, is_causal=True, local_window_size=7, q_offset=3) is None
    assert "device is cpu" in refusal(device=Device("cpu"))
    assert "9.0" in refusal(device=Device("gpu", "8.0"))
    assert "9.0" in refusal(device=Device("gpu", "10.0"))
    assert refusal(dtype="float32") is None
    assert "up to 128 in float32" in refusal(dtype="float32", d=192)
    assert "257" in refusal(d=257)
    assert refusal(mask=np.ones((1, 1, 64, 64), bool), logits_soft_cap=3.0) is None
    assert refusal(bias=np.ones((1, 1, 1, 64), np.float32), sinks=np.ones(4, np.float32)) is None
    assert refusal(alibi_slopes=np.ones(4, np.float32)) is None
    segments = np.zeros((2, 64), np.int32)
    assert refusal(query_segment_ids=segments, key_value_segment_ids=segments) is None


def test_configs_ask_for_no_more_than_there_is():
    with pytest.raises(ValueError, match="consumer_registers=120"):
        kernel.ForwardConfig(num_warpgroups=4, consumer_registers=120, producer_registers=32)
    with pytest.raises(ValueError, match="early_wait"):
        kernel.ForwardConfig(num_stages=1, early_wait=True)
