"""The suite ``terms`` on the CPU: every term is computed, checked and timed in both modes."""

import jax
import pytest

from bench import results, terms
from bench.cases import Case
from bench.results import OURS
from tests.gpu_bench import pretend, ran

SMALL = Case(2, 64, 2, 2, 16)


@pytest.fixture
def on_a_gpu(monkeypatch):
    if jax.default_backend() == "gpu":
        pytest.skip("a stand-in for a GPU needs a CPU")
    pretend(monkeypatch)
    monkeypatch.setattr(terms, "CASE", SMALL)
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
    ours = {(row.case, row.mode): row for row in results.read(out).rows if row.impl == OURS}
    assert len(ours) == 2 * len(terms.terms(SMALL)) - 1  # the gradient has no forward pass alone
    for row in ours.values():
        assert row.note is None, row
        assert row.error < 1e-2
        assert row.tflops == round(SMALL.flops(row.mode) / row.time_us / 1e6, 1)


@pytest.mark.usefixtures("on_a_gpu")
def test_a_wrong_result_is_marked(tmp_path, monkeypatch):
    wrong = terms.Term({"logits_soft_cap": 0.1})
    monkeypatch.setattr(terms, "terms", lambda case: {"nothing": wrong})
    monkeypatch.setattr(terms, "_error", lambda *_: 0.5)
    out = tmp_path / "terms.json"
    assert ran("terms", "--out", str(out)) == 1
    (fwd, both) = results.read(out).rows
    assert fwd.note == both.note == results.INACCURATE
