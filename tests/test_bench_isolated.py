"""Suites that run in processes of their own: memory and train, and what starts these processes."""

import dataclasses
import json
import sys
import time

import jax
import numpy as np
import pytest

import jax_flash
from bench import isolated, memory, peers, results, train
from bench.cases import Case
from tests.gpu_bench import pretend, ran

TINY = train.Shape("tiny", 2, 16, 2, 8, 1, 11)
SMALL = (Case(1, 32, 2, 2, 16, True), Case(1, 64, 2, 2, 16, True))


def counting(first, last):
    """What the tests' child processes run."""
    yield from ({"number": number} for number in range(first, last))
    if last > 3:
        raise RuntimeError(f"cannot count to {last}")


def sleeping():
    yield 1
    time.sleep(60)


def test_a_child_yields_json_until_it_dies():
    target = "tests.test_bench_isolated:counting"
    assert [x["number"] for x in isolated.items(target, 1, 3, timeout_s=100)] == [1, 2]
    found = []
    with pytest.raises(isolated.DiedError, match=r"status 1 .* cannot count to 4"):
        found.extend(isolated.items(target, 2, 4, timeout_s=100))
    assert [x["number"] for x in found] == [2, 3]


def test_a_child_is_stopped_after_its_time_or_if_nobody_listens():
    start = time.perf_counter()
    items = isolated.items("tests.test_bench_isolated:sleeping", timeout_s=100)
    assert next(items) == 1
    items.close()
    with pytest.raises(isolated.DiedError, match="limit 1 s"):
        list(isolated.items("tests.test_bench_isolated:sleeping", timeout_s=1))
    assert time.perf_counter() - start < 50


@pytest.fixture
def here(monkeypatch):
    """Children run in this process, on a stand-in for a GPU; a peak is 1000 bytes, then 2000..."""
    if jax.default_backend() == "gpu":
        pytest.skip("a stand-in for a GPU needs a CPU")
    pretend(monkeypatch)
    peaks = iter(range(1000, 99000, 1000))

    def items(target, *arguments, timeout_s):
        module, function = target.split(":")
        for item in getattr(sys.modules[module], function)(*json.loads(json.dumps(arguments))):
            yield json.loads(json.dumps(item))

    monkeypatch.setattr(isolated, "items", items)
    monkeypatch.setattr(memory, "peak_bytes", lambda: next(peaks))
    monkeypatch.setattr(memory, "limit_bytes", lambda: 10**9)
    monkeypatch.setattr(memory, "CASES", SMALL)
    monkeypatch.setattr(train, "SHAPES", (TINY,))
    monkeypatch.delenv("XLA_PYTHON_CLIENT_ALLOCATOR", raising=False)
    jax.config.update("jax_numpy_dtype_promotion", "standard")  # Optax, and jax.nn on XLA
    yield
    jax.config.update("jax_numpy_dtype_promotion", "strict")


def chunked(case):
    def attend(q, k, v):
        return jax_flash.dot_product_attention(
            q, k, v, is_causal=case.is_causal, implementation="chunked"
        )

    return attend


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_memory_is_measured_in_both_modes(tmp_path, monkeypatch):
    monkeypatch.setitem(peers.IMPLEMENTATIONS, results.OURS, chunked)
    out = tmp_path / "memory.json"
    assert ran("memory", "--out", str(out)) == 0
    found = results.read(out)
    assert set(found.modes) == {m + end for m in memory.MODES for end in ("", " planned")}
    amounts = {(row.case, row.impl, row.mode): row.amount for row in found.rows}
    names = [case.name for case in SMALL]
    assert [amounts[name, results.OURS, "fwd"] for name in names] == [1000.0, 2000.0]
    for impl in memory.IMPLEMENTATIONS:
        for name, length in zip(names, (32, 64), strict=True):
            arrays = 4 * length * 2 * 16 * 2  # q, k, v and out
            assert amounts[name, impl, "fwd planned"] >= arrays
            assert amounts[name, impl, "value_and_grad planned"] >= 1.5 * arrays


@pytest.mark.usefixtures("here")
def test_what_does_not_fit_is_recorded_and_is_not_the_end(tmp_path, monkeypatch):
    def too_large(case):
        def attend(q, k, v):
            raise RuntimeError("RESOURCE_EXHAUSTED: 1 TiB" if case.seq_len > 32 else "no luck")

        return attend

    def died(target, *_, timeout_s):
        yield {"peak": 5, "planned": 4, "note": None}
        raise isolated.DiedError("crashed")

    monkeypatch.setitem(memory.IMPLEMENTATIONS, "naive", too_large)
    monkeypatch.setitem(peers.IMPLEMENTATIONS, results.OURS, chunked)
    out = tmp_path / "memory.json"
    assert ran("memory", "--out", str(out)) == 0
    notes = {(r.case, r.mode): r.note for r in results.read(out).rows if r.impl == "naive"}
    assert notes[SMALL[0].name, "fwd"] == "RuntimeError: no luck"
    assert notes[SMALL[1].name, "fwd"] == memory.OUT_OF_MEMORY

    def ours():
        return {(r.case, r.mode): r for r in results.read(out).rows if r.impl == results.OURS}

    limit = ours()[SMALL[0].name, "fwd planned"].amount
    monkeypatch.setattr(memory, "limit_bytes", lambda: limit)
    assert ran("memory", "--out", str(out)) == 1
    assert ours()[SMALL[0].name, "fwd"].amount is not None
    too_large = ours()[SMALL[1].name, "fwd"]
    assert (too_large.amount, too_large.note) == (None, memory.OUT_OF_MEMORY)
    assert ours()[SMALL[1].name, "fwd planned"].amount > limit
    monkeypatch.setattr(isolated, "items", died)
    assert ran("memory", "--out", str(out)) == 1
    (last,) = (
        row
        for row in results.read(out).rows
        if (row.case, row.impl, row.mode) == (SMALL[1].name, results.OURS, "fwd")
    )
    assert last.note == "DiedError: crashed"


@pytest.mark.parametrize("name", ["naive", "xla"])
def test_what_ours_is_compared_with_computes_attention(name, standard_promotion):
    q, k, v = (
        jax.random.normal(key, SMALL[0].shapes[0]) for key in jax.random.split(jax.random.key(0), 3)
    )
    expected = chunked(SMALL[0])(q, k, v)
    np.testing.assert_allclose(memory.IMPLEMENTATIONS[name](SMALL[0])(q, k, v), expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_a_model_trains_on_each_attention(tmp_path, monkeypatch):
    intact = train.steps
    monkeypatch.setattr(train, "_DISPATCHES", 2)
    monkeypatch.setattr(train, "IMPLEMENTATIONS", ("xla", results.OURS))
    attention = jax_flash.dot_product_attention
    calls = []

    def ours(*args, implementation, **keywords):
        calls.append(implementation)
        return attention(*args, implementation="chunked", **keywords)

    def steps(fields, impl):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jax_flash, "dot_product_attention", ours)
            yield from intact(fields, impl)

    monkeypatch.setattr(train, "steps", steps)
    out = tmp_path / "train.json"
    assert ran("train", "--out", str(out)) == 0
    assert set(calls) == {"mosaic"}
    rows = {(row.impl, row.mode): row for row in results.read(out).rows}
    assert rows.keys() == {(i, m) for i in ("xla", results.OURS) for m in ("step", "memory")}
    step = rows[results.OURS, "step"]
    assert step.case == "tiny B2 S16 H2/2 D8 L1 causal bf16"
    assert step.amount == pytest.approx(2 * 16 / step.time_us * 1e6, rel=1e-2)
    assert step.error < 1e-2
    assert rows[results.OURS, "memory"].amount == 2000.0


def test_the_shapes_are_those_of_the_models():
    mini, gpt2 = train.SHAPES
    assert dataclasses.astuple(mini)[1:5] == (64, 256, 6, 64)
    assert dataclasses.astuple(gpt2)[1:6] == (16, 1024, 12, 64, 12)
