"""The suite ``packed`` on the CPU: every way computes the same documents."""

import jax
import numpy as np
import pytest

import jax_flash
from bench import packed, peers, results
from bench.cases import Case
from tests.gpu_bench import pretend, ran

SMALL = Case(1, 90, 2, 1, 16, True, lengths=(30, 7, 53))


@pytest.fixture
def on_a_gpu(monkeypatch):
    if jax.default_backend() == "gpu":
        pytest.skip("a stand-in for a GPU needs a CPU")
    pretend(monkeypatch)

    def ours(case):
        def attend(q, k, v, cu_seqlens):
            return jax_flash.ragged_attention(
                q, k, v, cu_seqlens, is_causal=True, implementation="chunked"
            )

        return attend

    monkeypatch.setattr(packed, "CASE", SMALL)
    monkeypatch.setattr(packed, "_OURS", "chunked")
    monkeypatch.setattr(packed, "_PEER", "xla")
    monkeypatch.setattr(packed, "_ROUND_UP", 16)
    monkeypatch.setitem(peers.IMPLEMENTATIONS, results.OURS, ours)
    jax.config.update("jax_numpy_dtype_promotion", "standard")  # jax.nn on XLA
    yield
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_enable_compilation_cache", True)


@pytest.mark.usefixtures("on_a_gpu")
def test_every_way_computes_the_documents(tmp_path, monkeypatch):
    out = tmp_path / "packed.json"
    assert ran("packed", "--out", str(out)) == 0
    rows = {(row.impl, row.mode): row for row in results.read(out).rows}
    assert rows.keys() == {(impl, mode) for impl in packed.WAYS for mode in packed.MODES}
    for (impl, _), row in rows.items():
        if impl == "fa3":
            assert row.note.startswith("AbsentError")
            continue
        assert row.note is None, row
        assert 1e-3 < row.error < 1e-2
        assert row.tflops == round(SMALL.flops(row.mode) / row.time_us / 1e6, 1)
        assert row.amount == pytest.approx(90 / row.time_us * 1e6)


@pytest.mark.usefixtures("on_a_gpu")
def test_a_way_that_mixes_documents_is_marked(tmp_path, monkeypatch):
    def mixes(q, k, v, lengths):
        return jax.nn.dot_product_attention(q, k, v, is_causal=False, implementation="xla")

    ways = {"mixes": lambda case: packed._padded(mixes, case)}
    monkeypatch.setattr(packed, "WAYS", ways)
    out = tmp_path / "packed.json"
    ran("packed", "--out", str(out))
    assert {row.note for row in results.read(out).rows} == {results.INACCURATE}


def test_padding_and_back_is_the_same(monkeypatch):
    way = packed._padded(lambda *_: None, SMALL)
    x = np.random.default_rng(0).standard_normal((90, 2, 16), np.float32)
    padded = way.arrange(x)
    assert padded.shape == (3, 128, 2, 16)
    assert not np.asarray(padded)[1, 7:].any()
    np.testing.assert_array_equal(way.restore(padded), x)
