"""The suite ``terms`` on the CPU: every term is computed, checked and timed in both modes."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from bench import peers, results, run, terms, timing
from bench.cases import Case
from bench.results import OURS
from tests.gpu_bench import pretend, ran

SMALL = Case(2, 64, 2, 2, 16)
SMALL_FP32 = dataclasses.replace(SMALL, dtype="float32")


@pytest.fixture
def on_a_gpu(monkeypatch):
    if jax.default_backend() == "gpu":
        pytest.skip("a stand-in for a GPU needs a CPU")
    pretend(monkeypatch)
    monkeypatch.setattr(terms, "CASE", SMALL)
    monkeypatch.setattr(terms, "FP32_CASE", SMALL_FP32)
    monkeypatch.setattr(terms, "_BLOCK", 16)
    monkeypatch.setattr(terms, "_IMPLEMENTATION", "xla")
    jax.config.update("jax_numpy_dtype_promotion", "standard")  # jax.nn on XLA
    yield
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_enable_compilation_cache", True)


@pytest.mark.usefixtures("on_a_gpu")
def test_every_term_is_checked_and_timed(tmp_path):
    out = tmp_path / "terms.json"
    assert ran("terms", "--out", str(out)) == 0
    rows = [row for row in results.read(out).rows if SMALL.name in row.case]
    ours = {(row.case, row.mode): row for row in rows if row.impl == OURS}
    assert len(ours) == 2 * len(terms.terms(SMALL)) - 1  # the gradient has no forward pass alone
    for row in ours.values():
        assert row.note is None, row
        assert row.error < 1e-2
        assert row.tflops == round(SMALL.flops(row.mode) / row.time_us / 1e6, 1)


@pytest.mark.usefixtures("on_a_gpu")
def test_a_wrong_result_is_marked(tmp_path, monkeypatch):
    wrong = terms.Term({"logits_soft_cap": 0.1})
    monkeypatch.setattr(terms, "terms", lambda case: {"nothing": wrong})
    monkeypatch.setattr(terms, "_judge", lambda *_: (0.5, False))
    out = tmp_path / "terms.json"
    assert ran("terms", "--cases", SMALL.name, "--out", str(out)) == 1
    (fwd, both) = results.read(out).rows
    assert fwd.note == both.note == results.INACCURATE


@pytest.mark.usefixtures("on_a_gpu")
def test_fp32_is_timed_beside_xla(tmp_path):
    out = tmp_path / "terms.json"
    assert ran("terms", "--cases", "fp32", "--peers", "xla,cudnn", "--out", str(out)) == 0
    rows = results.read(out).rows
    asked = [(impl, mode) for mode in terms.MODES for impl in (OURS, "xla")]
    assert [(row.impl, row.mode) for row in rows] == asked
    for row in rows:
        assert row.case == f"{SMALL_FP32.name}, nothing"
        assert row.note is None, row
        assert (row.error is None) == (row.impl == "xla")
        assert row.error is None or 1e-9 < row.error < 1e-6  # of fp64, not of itself


@pytest.mark.usefixtures("on_a_gpu")
def test_all_is_compiled_before_anything_is_timed_and_what_cannot_be_is_a_line(
    tmp_path, monkeypatch
):
    def broken(*_, **__):
        raise RuntimeError("out of luck")

    events = []

    def noted(event, function):
        return lambda *args, **keywords: events.append(event) or function(*args, **keywords)

    monkeypatch.setitem(peers.IMPLEMENTATIONS, "xla", lambda case: broken)
    monkeypatch.setattr(terms, "_call", noted("compiled", terms._call))
    monkeypatch.setattr(timing, "kernel_times_us", noted("timed", timing.kernel_times_us))
    out = tmp_path / "terms.json"
    assert ran("terms", "--cases", "fp32", "--peers", "xla", "--out", str(out)) == 0
    per_mode = 4  # ours, XLA and two references
    assert events == ["compiled"] * per_mode * len(terms.MODES) + ["timed"] * len(terms.MODES)
    rows = results.read(out).rows
    notes = [(row.impl, row.note) for row in rows]
    assert notes == [("xla", "RuntimeError: out of luck"), (OURS, None)] * len(terms.MODES)


def test_xla_does_not_multiply_in_tf32():
    attend, keywords = terms._ways(SMALL_FP32, terms.Term({}, {}))["xla"]
    x = jax.ShapeDtypeStruct(SMALL_FP32.shapes[0], "float32")
    with jax.numpy_dtype_promotion("standard"):
        program = jax.make_jaxpr(jax.grad(lambda *x: attend(*x, **keywords).sum(), (0, 1, 2)))
        products = str(program(x, x, x)).split("dot_general[")[1:]
    assert len(products) == 6
    assert all("precision=(Precision.HIGHEST" in text for text in products)


@pytest.mark.parametrize("mode", terms.MODES)
def test_fp32_may_be_twice_as_wrong_as_xla(mode):
    """Products in TF32 are a thousand times."""
    arrays = *run.inputs(SMALL_FP32), {}
    do = arrays[0] + 1.0
    term = terms.Term({}, {})
    attend = terms._ways(SMALL_FP32, term)[OURS][0]
    attend = functools.partial(attend, implementation="chunked")
    got = terms._call(attend, {}, mode, arrays, do)[0]()
    reference = terms._compile_reference(term, mode, arrays, do)
    error, is_good = terms._judge(reference, got)
    assert is_good
    assert 1e-9 < error < 1e-6
    *leaves, last = jax.tree.leaves(got)
    off = jax.tree.unflatten(jax.tree.structure(got), [*leaves, last * np.float32(1.0 + 1e-5)])
    error, is_good = terms._judge(reference, off)
    assert not is_good
    assert 9e-6 < error < 2e-5
