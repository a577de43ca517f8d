"""The suite ``decode`` on the CPU: its cases and checks, with a stand-in for the GPU's clock."""

import argparse
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import decode, decode_peers, results, timing
from bench.results import Row
from cuda_ffi import library
from jax_flash import backends

needs_twin = pytest.mark.skipif(
    library.missing("cpu") is not None, reason="the kernels' twin is not built"
)


@pytest.fixture
def small(monkeypatch):
    """Cases that the twin computes in no time, and kernels that always take 5 µs."""
    if jax.default_backend() == "gpu":
        pytest.skip("stands in for a GPU")
    for name, value in {"_Q_HEADS": 4, "_KV_HEADS": 2, "_HEAD_DIM": 64, "_CALLS": 2}.items():
        monkeypatch.setattr(decode, name, value)
    plain = (decode.Case((32,), page_sizes=(16, 64, 1), has_peers=True, has_unsplit=True),)
    skewed = decode.Case((48, 16), page_sizes=(16,))
    equal = decode.Case((32, 32), page_sizes=(16,))
    eight_bit = (decode.Case((32,), cache_dtype="float8_e4m3fn", page_sizes=(16,)),)
    speculative = (decode.Case((32,), q_len=8, page_sizes=(16,)),)
    for name, value in {
        "PLAIN": plain,
        "SKEWED": skewed,
        "EQUAL": equal,
        "EIGHT_BIT": eight_bit,
        "SPECULATIVE": speculative,
        "CASES": (*plain, skewed, equal, *eight_bit, *speculative),
        "STEPS": plain,
        "PLANNED": (skewed,),
        "_SIZES": ((1, 32),),
        "_COLD_BYTES": 5e4,
        "_LAYERS": 2,
        "_APPENDED": 3,
    }.items():
        monkeypatch.setattr(decode, name, value)

    def five(calls, **_):
        for call in calls.values():
            jax.block_until_ready(call())
        return dict.fromkeys(calls, 5.0)

    monkeypatch.setattr(timing, "kernel_times_us", five)
    monkeypatch.setattr(decode, "_detach", lambda: None)
    monkeypatch.setattr(backends, "_NEEDS_GPU", ("mosaic", "cudnn"))


def measured(peers="xla", cases=None):
    arguments = argparse.Namespace(cases=cases, peers=peers, quick=True)
    return list(decode.measure(arguments))


@needs_twin
@pytest.mark.usefixtures("small", "standard_promotion")
def test_everything_is_measured_and_right(capsys):
    rows = measured()
    keys = [(row.case, row.impl, row.mode) for row in rows]
    assert len(set(keys)) == len(keys)
    assert {row.note for row in rows} == {None}
    assert all(row.time_us is not None for row in rows)
    plain = decode.PLAIN[0].name
    ours = [f"{decode.OURS} page{size}" for size in (16, 64, 1)]
    for impl in ours:
        modes = {mode for case, name, mode in keys if (case, name) == (plain, impl)}
        assert modes == {"program warm", "program cold", "decode warm", "decode cold"}
    assert (plain, "xla", "decode warm") in keys
    assert (plain, f"{ours[0]} fused", "decode cold") in keys
    assert (plain, f"{ours[0]} unsplit", "program warm") in keys
    assert (decode.SKEWED.name, f"{ours[0]} plan", "program warm") in keys
    errors = [row.error for row in rows if row.case == plain]
    assert all(1e-4 < error < 1e-2 for error in errors)
    cold = [row for row in rows if (row.case, row.mode) == (plain, "decode cold")]
    copies = 4  # of a cache of 16 KB, to more than 50
    assert {row.time_us for row in cold} == {5.0 / copies}
    assert cold[0].gbps == round(decode.PLAIN[0].cache_bytes / (5.0 / copies) / 1e3, 1)
    assert {row.mode for row in rows if row.case.startswith("step of 2 layers")} == {"step"}
    assert sum(row.case.startswith("append 3 tokens") for row in rows) == 1
    printed = capsys.readouterr().out
    for what in ("skewed / equal", "bf16 / fp8", "8 new tokens / 1", "page 1 / page 64", "cold"):
        assert what in printed


@needs_twin
@pytest.mark.usefixtures("small", "standard_promotion")
def test_a_wrong_result_is_marked_and_one_that_fails_is_a_line(monkeypatch):
    right = decode._ours
    monkeypatch.setattr(decode, "_ours", lambda *args: right(*args) * 1.02)
    (case,) = decode.PLAIN
    rows = measured("none", [case.name])
    assert {row.note for row in rows} == {results.INACCURATE}

    def fails(*_):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(decode, "_ours", fails)
    rows = measured("xla", [case.name])
    assert {row.note for row in rows if row.impl != "xla"} == {"RuntimeError: out of luck"}
    assert [row.time_us for row in rows if row.impl == "xla"] == [5.0]
    chain = decode._Program.chain
    monkeypatch.setattr(decode, "_ours", right)
    monkeypatch.setattr(
        decode._Program, "chain", lambda x, n, caches: chain(x, n, fails() if n > 2 else caches)
    )
    rows = measured("none", [case.name])
    assert len({(row.impl, row.mode) for row in rows}) == len(rows)
    assert {row.mode for row in rows if row.note} == {"program cold"}


def test_pages_are_those_of_the_lengths_in_random_order():
    case = decode.Case((40, 5, 64))
    cache = decode.paged_cache(case, 16)
    tables = np.asarray(cache["block_tables"])
    assert [(row >= 0).sum() for row in tables] == [3, 1, 4]
    used = tables[tables >= 0]
    assert sorted(used) == list(range(8))
    assert list(used) != list(range(8))
    assert cache["key_pages"].shape == (8, 8, 16, 128)
    assert not np.array_equal(cache["key_pages"], cache["value_pages"])
    names = [case.name for case in decode.CASES]
    assert len(set(names)) == len(names)


def test_peers_get_the_same_keys():
    case = decode.Case((64, 64))
    pages = decode.paged_cache(case, 16)
    cache = decode_peers.cache_of("cudnn", pages)
    assert cache["key"].shape == (2, 64, 8, 128)
    page = int(pages["block_tables"][1, 2])
    for name in ("key", "value"):
        np.testing.assert_array_equal(cache[name][1, 37], pages[f"{name}_pages"][page, :, 5])
    cache = decode_peers.cache_of("pallas page16", pages)
    np.testing.assert_array_equal(cache["key"][3, page], pages["key_pages"][page, 3])


def test_the_summary_compares_what_both_have():
    case = decode.PLAIN[0]
    rows = [
        Row(case.name, "cudnn", "decode warm", 6.0),
        Row(case.name, "cudnn", "program warm", 8.0),
        Row(case.name, f"{decode.OURS} page16", "decode warm", 9.0),
        Row(case.name, f"{decode.OURS} page16", "program warm", 5.0),
        Row(case.name, f"{decode.OURS} page16", "decode cold", 7.0),
        Row(decode.SKEWED.name, f"{decode.OURS} page16", "decode warm", 9.0),
    ]
    lines = decode.summary(rows)
    limit = 6.5 + 4096 * 1024 / 4.2e6
    assert lines == [
        f"cuDNN / {decode.OURS} page16: 1.200  {case.name}",
        f"cuDNN / {decode.OURS} page16: 1.200  geometric mean of 1",
        f"cold, page 16: 7.0 of {limit:.1f} µs  {case.name}",
    ]


def test_a_missing_flashinfer_is_a_note():
    (found,) = decode_peers.flashinfer(["a"], [(1, 64)])
    assert found[:3] == ("all cases", 16, None)
    assert "Error" in found[3]


def test_what_flashinfer_printed_is_read(monkeypatch):
    text = f"noise\nprint({json.dumps([0, 64, 12.5])!r})\nraise SystemExit('enough')"
    monkeypatch.setattr(decode_peers, "_FLASHINFER", text.replace("noise", "print('noise')"))
    found = list(decode_peers.flashinfer(["a"], [(1, 64)]))
    assert found == [("a", 64, 12.5, None), ("all cases", 16, None, "enough")]


def test_unknown_peers_are_refused():
    assert decode_peers.chosen("none") == []
    assert decode_peers.chosen("xla,flashinfer") == ["xla", "flashinfer"]
    assert "cudnn" in decode_peers.chosen("all")
    with pytest.raises(ValueError, match="fa9"):
        decode_peers.chosen("fa9")


def test_the_right_result_is_that_of_the_definition():
    case = decode.Case((20,), q_len=2)
    cache = decode.paged_cache(case, 16)
    query = decode._random((1, 2, 32, 128), 1, "bfloat16")
    reference = decode._Reference(case, query, cache)
    keys, values = (
        np.concatenate(
            [np.asarray(cache[x][page], np.float64) for page in cache["block_tables"][0]], 1
        )
        for x in ("key_pages", "value_pages")
    )
    out = np.zeros((1, 2, 32, 128))
    for t in range(2):
        for head in range(32):
            x = keys[head // 4, : 19 + t] @ np.asarray(query[0, t, head], np.float64) / 128**0.5
            p = np.exp(x - x.max())
            out[0, t, head] = p / p.sum() @ values[head // 4, : 19 + t]
    error, is_good = reference.judge(jnp.asarray(out, jnp.float32))
    assert error < 1e-6
    assert is_good
    error, is_good = reference.judge(jnp.asarray(out, jnp.float32) * 1.02)
    assert error == pytest.approx(0.02, rel=1e-3)
    assert not is_good
