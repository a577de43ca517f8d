"""The Mosaic backward kernel, run by JAX's GPU interpret mode with race detection.

As in tests/test_pallas_forward.py the whole path of a call runs, here the derivative's; the forward
pass is the dense implementation's, so that only one kernel is at stake. One thread block walks all
tiles: between blocks, adding to dQ is atomic on a GPU and would be a race in interpret mode.
"""

import functools
import itertools
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash import backends, dot_product_attention, explain, ragged_attention, reference
from pallas_kernels import backend
from pallas_kernels import backward_config as kernel_config
from pallas_kernels.backward_body import Kernel
from tests import oracle64
from tests.conftest import ROOT
from tests.kernel_cases import (
    COMMON_CASES,
    FP32_TOLERANCE,
    HOPPER,
    ON_GPU,
    SEGMENTS,
    WITH_RACES,
    i32,
    mostly_on_gpu,
    qkv,
    rand,
)
from tests.tolerance import fast_jit


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


def cotangents(q, v):
    return rand(3, *q.shape[:-1], v.shape[-1], dtype=q.dtype), rand(
        4, *q.shape[:-1], dtype="float32"
    )


def program(attention=dot_product_attention, **keywords):
    """(dq, dk, dv) as a function of q, k, v, do and dlse, compiled once; arrays are traced."""
    arrays = {name: x for name, x in keywords.items() if isinstance(x, np.ndarray)}
    static = {name: x for name, x in keywords.items() if name not in arrays}

    @fast_jit
    def call(q, k, v, do, dlse, arrays):
        call = functools.partial(
            attention, implementation="mosaic", return_residual=True, **static, **arrays
        )
        return jax.vjp(call, q, k, v)[1]((do, dlse))

    return functools.partial(call, arrays=arrays)


def run(q, k, v, do, dlse, attention=dot_product_attention, **keywords):
    return program(attention, **keywords)(q, k, v, do, dlse)


def check(got, want, tolerance=4e-3):
    """Relative error as of a computation with rounded probabilities and score gradients."""
    for name, x in zip(("dq", "dk", "dv"), got, strict=True):
        x = np.asarray(x).astype(np.float64)
        assert np.isfinite(x).all(), name
        scale = np.linalg.norm(want[name])
        assert np.linalg.norm(x - want[name]) <= tolerance * max(scale, 1e-30), name


CASES = COMMON_CASES | {
    "D64/128": ((1, 70, 140, 1, 1, 64, 128), {}, {}),
    "grouped heads": ((1, 130, 200, 4, 2, 128), {"is_causal": True, "q_offset": 70}, None),
    "D96": ((1, 100, 140, 2, 1, 96), {"is_causal": True, "q_offset": 40}, None),
    "D80": ((1, 70, 130, 1, 1, 80), {}, {}),
    "D88/64": ((1, 70, 130, 1, 1, 88, 64), {}, {}),
    "D72/128": ((1, 64, 130, 1, 1, 72, 128), {}, {}),
    "D192/128": ((1, 64, 130, 2, 1, 192, 128), {}, {}),
    "D256": ((1, 70, 130, 2, 2, 256), {"is_causal": True, "q_offset": 60}, None),
    "D256 full": ((2, 140, 130, 2, 1, 256), {}, {}),
    "whole tiles": ((2, 128, 128, 2, 1, 128), {"is_causal": True}, None),
    "keys that none sees": ((1, 64, 300, 1, 1, 128), {"is_causal": True}, None),
    "lengths": (
        (4, 100, 200, 1, 1, 128),
        {"query_seq_lengths": i32(100, 3, 70, 0), "key_value_seq_lengths": i32(130, 200, 0, 9)},
        {"q_lengths": i32(100, 3, 70, 0), "kv_lengths": i32(130, 200, 0, 9)},
    ),
    "segments": ((1, 150, 150, 1, 1, 64), *SEGMENTS),
    "grouped heads D256": ((2, 70, 130, 2, 1, 256), {"is_causal": True}, None),
    "segments D256": ((1, 150, 150, 1, 1, 256), *SEGMENTS),
    "negative scale": ((1, 64, 64, 1, 1, 64), {"scale": -0.3}, None),
    "zero scale": ((1, 64, 64, 1, 1, 64), {"scale": 0.0}, None),
}


@pytest.mark.parametrize("name", mostly_on_gpu(CASES, {"causal window"}))
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


OF_FP32 = [name for name, (shape, *_) in CASES.items() if max(shape[5:]) <= 128]
IN_CI = {"empty rows", "keys that none sees", "D64/128", "segments"}


@pytest.mark.parametrize("name", mostly_on_gpu(OF_FP32, {*OF_FP32} - IN_CI))
def test_fp32_is_exact(name, interpreted):
    shape, keywords, terms = CASES[name]
    q, k, v = qkv(*shape, dtype="float32")
    do, dlse = cotangents(q, v)
    terms = keywords if terms is None else terms
    want = oracle64.attention_grads(q, k, v, do=do, dlse=dlse, **terms)
    check(run(q, k, v, do, dlse, **keywords), want, FP32_TOLERANCE)


@pytest.mark.parametrize("term", ["dropout", "the gradient of alibi_slopes", None])
@pytest.mark.parametrize(("d", "dv"), [(64, 64), (64, 72), (128, 128)])
def test_gradients_in_fp32_that_shared_memory_has_no_room_for_are_lent(d, dv, term, monkeypatch):
    """And ``explain`` says by whom, and why."""
    monkeypatch.setattr(backends, "device_of", lambda *_: HOPPER)
    structs = [jax.ShapeDtypeStruct((1, 64, 1, dim), "float32") for dim in (d, d, dv)]
    keywords = {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)} if term == "dropout" else {}

    def loss(q, k, v, slopes):
        slopes = slopes if term and "slopes" in term else None
        call = functools.partial(dot_product_attention, implementation="mosaic", **keywords)
        return call(q, k, v, alibi_slopes=slopes).sum()

    slopes = jax.ShapeDtypeStruct((1,), "float32")
    forward, *gradient = explain(jax.grad(loss, range(4)), *structs, slopes).decisions
    assert forward.chosen == "mosaic"
    is_lent = term is not None and max(d, dv) > 64
    assert [decision.chosen for decision in gradient] == (["chunked"] if is_lent else [])
    for decision in gradient:
        reason = f"gradients in float32 of head dims above 64 leave no room for {term}; got {d}"
        assert decision.reasons["mosaic"] == f"{reason} and {dv}"


CONFIGS = {
    "a branch at edges": kernel_config.BackwardConfig(split_edges=False),
    "out of turn": kernel_config.BackwardConfig(take_turns=False, ds_buffers=3, head_group=2),
    "128 queries": kernel_config.BackwardConfig(block_q=128),
    "two parts": kernel_config.BackwardConfig(block_q=128, parts=2, q_stages=1, do_stages=3),
    "two K and V": kernel_config.BackwardConfig(block_q=128, parts=2, kv_stages=2),
    "own gradients": kernel_config.BackwardConfig(
        own_gradients=True, ds_buffers=1, q_stages=1, dq_columns=32, split_edges=False
    ),
    "dQ from registers": kernel_config.BackwardConfig(adds_registers=True),
    "dQ from registers, of rows": kernel_config.BackwardConfig(
        block_q=128, parts=2, adds_registers=True
    ),
    "dQ from registers, own gradients": kernel_config.BackwardConfig(
        own_gradients=True, adds_registers=True
    ),
    "dQ first": kernel_config.BackwardConfig(
        own_gradients=True, adds_registers=True, dq_first=True, ds_buffers=1
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_option(name, interpreted):
    config = CONFIGS[name]
    interpreted(config=config)
    # With 64 queries in a tile the layout of own keys halves dQ's columns: 64 is no head dim then.
    q, k, v = qkv(1, 140, 200, 2, 1, 64 if config.splits_rows else 128)
    do, dlse = cotangents(q, v)
    keywords = {"is_causal": True, "q_offset": 50}
    window = (90, 3)
    want = oracle64.attention_grads(q, k, v, do=do, dlse=dlse, window=window, **keywords)
    check(run(q, k, v, do, dlse, local_window_size=window, **keywords), want)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("d", mostly_on_gpu([64, 80, 256], {80}))
def test_deterministic_sums_add_up(d, is_causal, interpreted):
    """The same sums in one order; on a GPU also the same bits."""
    if not ON_GPU:
        interpreted(num_blocks=3)  # three tiles of different slabs or heads at a time: no race
    q, k, v = qkv(1, 140, 300, 2, 1, d)
    do, dlse = cotangents(q, v)
    keywords = {"is_causal": True, "q_offset": 160} if is_causal else {}
    want = oracle64.attention_grads(q, k, v, do=do, dlse=dlse, **keywords)
    call = program(deterministic=True, **keywords)
    first = call(q, k, v, do, dlse)
    check(first, want)
    if ON_GPU:
        for again in (call(q, k, v, do, dlse) for _ in range(20)):
            for one, other in zip(first, again, strict=True):
                assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize("window", mostly_on_gpu([(None,), ((30, 0),)], {(None,)}))
def test_ragged(window, interpreted):
    cu_q, cu_k = i32(0, 50, 50, 51, 120, 128), i32(0, 70, 80, 81, 81, 140)
    q, k, v = (x[0] for x in qkv(1, 135, 150, 2, 1, 64))
    do, dlse = cotangents(q, v)
    clean = q.copy(), k.copy(), v.copy()
    q[128:] = np.nan  # queries of no sequence
    k[140:], v[140:] = np.nan, np.inf
    k[70:80], v[70:80] = np.inf, np.nan  # keys of a sequence without queries
    terms = {"is_causal": True, "window": window}
    want = oracle64.ragged_attention_grads(*clean, do=do, dlse=dlse, cu_q=cu_q, cu_k=cu_k, **terms)
    got = run(
        q, k, v, do, dlse, ragged_attention, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, is_causal=True,
        local_window_size=window,
    )  # fmt: skip
    check(got, want)
    assert not np.asarray(got[0], np.float32)[128:].any()
    for gradient in got[1:]:
        assert not np.asarray(gradient, np.float32)[70:80].any()


@pytest.mark.parametrize(
    ("d", "filling"),
    mostly_on_gpu(
        list(itertools.product((64, 80, 128, 256), (np.nan, np.inf, 3e38))),
        {(64, np.inf), (64, 3e38), (80, np.inf), (80, 3e38)}
        | {(128, np.nan), (128, 3e38), (256, np.inf)},
    ),
)
def test_hidden_keys_and_values_may_be_anything(d, filling, interpreted):
    """Those that no query sees, beside visible ones of the same tile."""
    q, k, v = qkv(2, 100, 150, 1, 1, d)
    do, dlse = cotangents(q, v)
    lengths = i32(90, 130)
    want = oracle64.attention_grads(q, k, v, do=do, dlse=dlse, kv_lengths=lengths)
    for batch, length in enumerate(lengths):
        k[batch, length:], v[batch, length:] = filling, -filling
    got = run(q, k, v, do, dlse, key_value_seq_lengths=lengths)
    check(got, want)
    for gradient in got[1:]:
        for batch, length in enumerate(lengths):
            assert not np.asarray(gradient, np.float32)[batch, length:].any()


def test_empty_queries_may_be_nan(interpreted):
    q, k, v = qkv(1, 100, 64, 1, 1, 64)
    do, dlse = cotangents(q, v)
    keywords = {"is_causal": True, "q_offset": -30}
    want = oracle64.attention_grads(q, k, v, do=do, dlse=dlse, **keywords)
    q[:, :30] = np.nan
    check(run(q, k, v, do, dlse, **keywords), want)


@pytest.mark.parametrize(
    ("d", "dtype", "options"),
    [
        (128, "bfloat16", {"do_stages": 3}),
        (80, "float16", {}),
        (64, "bfloat16", {"block_q": 128, "parts": 2, "take_turns": False}),
        (192, "bfloat16", {"own_gradients": True}),
        (256, "bfloat16", None),
        (64, "float32", None),
        (128, "float32", None),
    ],
)
def test_queries_without_gradient_may_be_nan(d, dtype, options, interpreted):
    interpreted(config=None if options is None else kernel_config.BackwardConfig(**options))
    cu_q, cu_k = i32(0, 40, 90, 200, 220), i32(0, 70, 70, 130, 140)
    q, k, v = (x[0].copy() for x in qkv(1, 240, 150, 1, 1, d, dtype=dtype))
    do, dlse = cotangents(q, v)
    clean = {"do": do.copy(), "dlse": dlse}
    want = oracle64.ragged_attention_grads(q, k, v, cu_q=cu_q, cu_k=cu_k, is_causal=True, **clean)
    for rows in (slice(40, 90), slice(90, 140), slice(200, 210), slice(220, 240)):
        q[rows], do[rows] = np.nan, np.inf  # no keys; more queries than keys, twice; no sequence
    got = run(
        q, k, v, do, dlse, ragged_attention, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, is_causal=True
    )
    check(got, want)


@pytest.mark.parametrize("zero", ["batch", "tq", "tk", "dv"])
def test_zero_sizes(zero, interpreted):
    sizes = {"batch": 1, "tq": 9, "tk": 9, "hq": 1, "hk": 1, "d": 64, "dv": 64} | {zero: 0}
    batch, tq, tk, hq, hk, d, dv = sizes.values()
    q, k, v = rand(0, batch, tq, hq, d), rand(1, batch, tk, hk, d), rand(2, batch, tk, hk, dv)
    do, dlse = cotangents(q, v)
    got = run(q, k, v, do, dlse)
    assert [x.shape for x in got] == [q.shape, k.shape, v.shape]
    assert np.asarray(got[0], np.float32).any() == (zero == "dv")  # through the log-sum-exp


def test_zero_cotangents_give_zero(interpreted):
    q, k, v = qkv(1, 70, 70, 1, 1, 128)
    do, dlse = cotangents(q, v)
    for gradient in run(q, k, v, np.zeros_like(do), np.zeros_like(dlse), is_causal=True):
        assert not np.asarray(gradient, np.float32).any()


def test_transforms_launch_the_kernel(interpreted):
    """Under vmap, scan and remat the gradients are those of a plain call."""
    q, k, v = qkv(2, 64, 64, 1, 1, 64)

    def loss(q, k, v):
        out = dot_product_attention(q, k, v, implementation="mosaic", is_causal=True)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    gradient = jax.grad(loss, (0, 1, 2))
    want = fast_jit(gradient)(q, k, v)
    mapped = fast_jit(jax.vmap(gradient))(q[:, None], k[:, None], v[:, None])
    _, scanned = fast_jit(
        lambda *x: jax.lax.scan(
            lambda _, x: (None, jax.grad(jax.remat(loss), (0, 1, 2))(*x)), None, x
        )
    )(q[:, None], k[:, None], v[:, None])
    for plain, *others in zip(want, mapped, scanned, strict=True):
        for other in others:
            np.testing.assert_array_equal(plain, other[:, 0])


BOTH = ["q_full", "do_full", "ds_full", "ds_empty"]
WAITS = {
    "own keys": [*BOTH, "q_empty", "do_empty", "k_full", "q_raw", "do_raw"],
    "own gradients": [*BOTH, "p_full", "p_empty", "v_full", "q_raw", "do_raw"],
}
MUTATIONS = [(layout, name) for layout, names in WAITS.items() for name in [*names, "meeting"]]


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="interpret mode runs on the CPU")
@pytest.mark.parametrize(("layout", "barrier"), MUTATIONS)
def test_a_removed_barrier_is_caught(layout, barrier):
    """By race detection, by an error of the interpreter, or because everything then waits."""
    assert is_caught(layout, barrier)


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="interpret mode runs on the CPU")
@pytest.mark.parametrize("layout", WAITS)
def test_nothing_is_caught_where_nothing_is_removed(layout):
    assert not is_caught(layout, "none")


def is_caught(layout, barrier):
    """Runs the kernel without a barrier in a process of its own, which may hang.

    It takes seconds; after minutes it waits for ever.
    """
    command = [sys.executable, "-u", "-m", "tests.test_pallas_backward", layout, barrier]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        timer = threading.Timer(240.0, process.kill)
        timer.start()
        try:
            for line in process.stdout:
                if "RACE DETECTED" in line:
                    process.kill()
                    return True
            return process.wait() != 0
        finally:
            timer.cancel()


def test_nan_in_a_value_meets_no_row_that_sees_nothing(interpreted):
    q, k, v = qkv(1, 128, 128, 1, 1, 64)
    v[0, 5] = np.nan
    dq = run(q, k, v, *cotangents(q, v), query_seq_lengths=i32(70))[0]
    assert not np.asarray(dq)[0, 70:].any()

    q, k, v = (x[0] for x in qkv(1, 192, 194, 1, 1, 128))
    v[40] = np.nan  # the second sequence has no keys, and the third begins its window later
    cu_seqlens = {"cu_seqlens_q": i32(0, 64, 128, 192), "cu_seqlens_k": i32(0, 30, 30, 194)}
    window = {"is_causal": True, "local_window_size": (40, 0)}
    gradients = run(q, k, v, *cotangents(q, v), ragged_attention, **cu_seqlens, **window)
    assert all(np.isfinite(np.asarray(x).astype(np.float32)).all() for x in gradients)


def run_without(layout, barrier):
    """What :func:`is_caught` runs; wrong gradients are an error too."""
    intact = Kernel.wait

    def wait(self, name, slot=0):
        if name != barrier:
            intact(self, name, slot)

    Kernel.wait = wait
    if barrier == "meeting":
        Kernel.meet = lambda self: None
    own_gradients = layout == "own gradients"
    config = kernel_config.BackwardConfig(
        own_gradients=own_gradients, q_stages=1, do_stages=1, ds_buffers=1 if own_gradients else 2
    )
    options = {"config": config, "interpret": WITH_RACES, "num_blocks": 1}
    backend.backward = functools.partial(backend.differentiate, **options)
    backend.forward = reference.forward
    backends.device_of = lambda *_: HOPPER
    q, k, v = qkv(1, 192, 256, 1, 1, 128)
    do, dlse = cotangents(q, v)
    mask = {"is_causal": True, "q_offset": -70}  # cleans keys and queries
    want = oracle64.attention_grads(q, k, v, do=do, dlse=dlse, **mask)
    check(run(q, k, v, do, dlse, **mask), want)


@pytest.mark.parametrize(
    ("dims", "padded"),
    [
        ((8, 64), (64, 64)),
        ((65, 64), (80, 64)),
        ((80, 72), (80, 80)),
        ((96, 72), (96, 96)),
        ((64, 81), (80, 96)),  # no halves of 32 columns
        ((64, 97), (128, 128)),
        ((88, 97), (96, 128)),
        ((97, 65), (128, 128)),
        ((80, 129), (128, 192)),
        ((193, 96), (256, 128)),
    ],
)
def test_dims_are_padded_to_what_has_tiles(dims, padded):
    assert kernel_config.padded_dims(*dims) == padded
    assert not {80, 96} & {*kernel_config.padded_dims(*dims, is_split=True)}


FP32_OPTIONS = {  # each with what else it wants
    "dq_warpgroup": {"keys_in_registers": True, "consumer_registers": 208},
    "hands_over_in_ds": {"ds_buffers": 1},
}


@pytest.mark.parametrize(
    ("options", "d", "dtype", "message"),
    [
        ({}, 96, "bfloat16", "head_dim=96: own gradients want halves"),
        ({"adds_registers": True}, 64, "float32", "adds_registers: not of fp32"),
        *(
            ({name: True, **others}, 64, "bfloat16", f"{name}: of fp32, not bfloat16")
            for name, others in FP32_OPTIONS.items()
        ),
    ],
)
def test_what_own_gradients_cannot_do_is_refused(options, d, dtype, message, interpreted):
    interpreted(config=kernel_config.BackwardConfig(own_gradients=True, **options))
    q, k, v = qkv(1, 64, 64, 1, 1, d, dtype=dtype)
    with pytest.raises(ValueError, match=message):
        run(q, k, v, *cotangents(q, v))


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("d", [64, 80, 96, 128, 192, 256])
def test_twenty_runs_agree(d, is_causal, interpreted):
    """dk and dv bit for bit; dq to its last bits, which depend on the order of sums."""
    q, k, v = qkv(2, 1000, 1000, 8, 4, d)
    do, dlse = cotangents(q, v)
    call = program(is_causal=is_causal)
    first = [np.asarray(x, np.float32) for x in call(q, k, v, do, dlse)]
    for _ in range(20):
        again = [np.asarray(x, np.float32) for x in call(q, k, v, do, dlse)]
        assert first[1].tobytes() == again[1].tobytes()
        assert first[2].tobytes() == again[2].tobytes()
        assert np.linalg.norm(first[0] - again[0]) <= 1e-3 * np.linalg.norm(first[0])


if __name__ == "__main__":
    run_without(*sys.argv[1:])
