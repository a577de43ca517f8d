"""The run of a suite, its errors and peers, on the CPU with a stand-in for the GPU's clock."""

import functools
import importlib
import itertools
import os
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from bench import accuracy, cases, peers, provenance, results, run, timing
from bench.cases import Case
from bench.provenance import ROOT
from bench.results import Row
from tests import oracle64 as oracle
from tests.gpu_bench import pretend, ran

SMALL = (
    Case(2, 96, 4, 2, 16, True),
    Case(1, 70, 2, 2, 16, window=(17, 3)),
    Case(1, 90, 2, 1, 16, True, lengths=(30, 7, 53)),
)


def chunked(case):
    terms = {"is_causal": case.is_causal, "local_window_size": case.window}
    call = jax_flash.ragged_attention if case.lengths else jax_flash.dot_product_attention
    return functools.partial(call, **terms, implementation="chunked")


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_the_reference_agrees_with_the_float64_oracle(case, monkeypatch):
    """And so errors are those of the arrays that are judged, from the right rows and heads."""
    monkeypatch.setattr(accuracy, "_CHUNK_ROWS", 32)  # several chunks, the last one not full
    q, k, v, *_ = run.inputs(case)
    do = run._random(case.shapes[0], case.dtype, seed=1)
    reference = accuracy.Reference(case, (q, k, v), do)
    right = {"out": np.zeros(q.shape), "dq": np.zeros(q.shape), "dk": np.zeros(k.shape)}
    right["dv"] = np.zeros(v.shape)
    parts = [np.index_exp[b : b + 1] for b in range(case.batch)]
    if case.lengths is not None:
        bounds = case.cu_seqlens
        parts = [np.index_exp[a:b] for a, b in itertools.pairwise(bounds)]
    for part in parts:
        wide = [np.asarray(x[part], np.float64) for x in (q, k, v, do)]
        wide = [x if case.lengths is None else x[None] for x in wide]
        terms = dict(zip("qkv", wide, strict=False))
        terms |= {"is_causal": case.is_causal, "window": case.window}
        out, lse = oracle.attention(**terms)
        grads = oracle.attention_grads(do=wide[3], dlse=np.zeros_like(lse), **terms)
        for name, x in ({"out": out} | grads).items():
            if name in right:
                right[name][part] = x if case.lengths is None else x[0]
    exact = {name: jnp.asarray(x, jnp.float32) for name, x in right.items()}
    error, is_good = reference.judge(exact)
    assert error < 1e-6
    assert is_good
    assert reference.plain_errors.keys() == exact.keys()
    for name, x in exact.items():
        plain = reference.plain_errors[name]
        rounding, is_good = reference.judge({name: x.astype(jnp.bfloat16)})
        assert 1e-3 < rounding < plain < 2e-2
        assert is_good
        for factor in (1.9, 2.1):
            error, is_good = reference.judge({name: x * (1.0 + factor * plain)})
            assert error == pytest.approx(factor * plain, rel=1e-3)
            assert is_good == (factor < 2.0), name
    *_, tokens = case.probes[-1]
    last = (tokens.stop - 1, -1) if case.lengths else (-1, tokens.stop - 1, -1)
    for name, x in exact.items():
        _, is_good = reference.judge(exact | {name: x.at[last].add(1.0)})
        assert not is_good, name
        with pytest.raises(FloatingPointError):
            reference.judge(exact | {name: x.at[last].set(jnp.nan)})


@pytest.fixture
def on_a_gpu(monkeypatch):
    """As on a GPU, with small cases and ours on XLA."""
    pretend(monkeypatch)
    monkeypatch.setitem(peers.IMPLEMENTATIONS, results.OURS, chunked)
    for suite, (_, modes) in cases.SUITES.items():
        monkeypatch.setitem(cases.SUITES, suite, (SMALL, modes))
    jax.config.update("jax_numpy_dtype_promotion", "standard")  # jax.nn on XLA, in any thread
    yield
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_enable_compilation_cache", True)


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("suite", ["forward", "backward"])
def test_a_suite_runs_and_is_recorded(suite, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cases, "SUSTAINED", SMALL[:1])
    monkeypatch.setattr(timing, "sustained_us", lambda call, estimate_us: 1.5 * estimate_us)
    out = tmp_path / f"{suite}.json"
    assert ran(suite, "--peers", "fa4,xla", "--sustained", "--out", str(out)) == 0
    found = results.read(out)
    assert found.meta.absent.keys() == {"fa4"}
    assert (found.meta.matmul_tflops, found.meta.jax) == (800.0, jax.__version__)
    modes = {"forward": ("fwd",), "backward": ("fwd+bwd", "bwd")}[suite]
    assert set(found.modes) == {"dispatch", "compile", *modes, *(f"{m} sustained" for m in modes)}
    for mode in modes:
        times = found.times(mode)
        assert list(times) == [case.name for case in SMALL]
        assert times[SMALL[0].name] == {results.OURS: 10.0, "xla": 20.0}
        assert found.times(f"{mode} sustained") == {
            SMALL[0].name: {results.OURS: 15.0, "xla": 30.0}
        }
        (refused,) = (r for r in found.rows if r.mode == mode and r.time_us is None)
        assert "no packed sequences" in refused.note
        for row in found.rows:
            if row.mode == mode and row.time_us is not None:
                assert 1e-3 < row.error < 1e-2
                assert row.note is None
                case = next(case for case in SMALL if case.name == row.case)
                assert row.tflops == round(case.flops(mode) / row.time_us / 1e6, 1)
    assert "(2.00×)" in capsys.readouterr().out


@pytest.mark.usefixtures("on_a_gpu")
def test_a_wrong_result_is_marked_and_fails_the_run(tmp_path, monkeypatch):
    def wrong(case):
        return lambda q, k, v: chunked(case)(q, k, v) * 1.03

    monkeypatch.setitem(peers.IMPLEMENTATIONS, results.OURS, wrong)
    out = tmp_path / "forward.json"
    name = SMALL[0].name
    assert ran("forward", "--cases", name, "--peers", "none", "--quick", "--out", str(out)) == 1
    (row,) = (row for row in results.read(out).rows if row.mode == "fwd")
    assert row.note == results.INACCURATE


@pytest.mark.usefixtures("on_a_gpu")
def test_an_implementation_that_fails_is_a_line_and_not_the_end(tmp_path, monkeypatch):
    def broken(case):
        def attend(q, k, v):
            raise RuntimeError("out of luck")

        return attend

    monkeypatch.setitem(peers.PEERS, "broken", broken)
    monkeypatch.setitem(peers.IMPLEMENTATIONS, "broken", broken)
    out = tmp_path / "forward.json"
    name = SMALL[0].name
    assert ran("forward", "--cases", name, "--peers", "broken", "--out", str(out)) == 0
    notes = [row.note for row in results.read(out).rows if row.impl == "broken"]
    assert notes == ["RuntimeError: out of luck"] * 2  # dispatch and fwd


@pytest.fixture
def suite(monkeypatch):
    """A suite "other" that is a module of its own, and measures what a test puts in ``rows``."""
    module = types.SimpleNamespace(
        rows=[], NOTE="by hand", ENVIRONMENT={"BENCH_OTHER": "1"}, measure=lambda _: module.rows
    )
    monkeypatch.setitem(sys.modules, "bench.other", module)
    monkeypatch.setitem(run.MODULES, "other", "bench.other")
    monkeypatch.setenv("BENCH_OTHER", "0")
    return module


@pytest.mark.usefixtures("on_a_gpu")
def test_a_module_is_a_suite(suite, tmp_path, capsys):
    out = tmp_path / "other.json"
    saved = []

    def rows():
        yield Row("a", "jax_flash.cuda", "decode", 10.0)
        saved.append(results.read(out).rows)
        assert os.environ["BENCH_OTHER"] == "1"
        yield Row("a", "xla", "decode", None, amount=2.0**30, unit="bytes")

    suite.rows = rows()
    assert ran("other", "--out", str(out)) == 0
    found = results.read(out)
    assert (found.meta.note, found.meta.matmul_tflops) == ("by hand", 800.0)
    assert [row.impl for row in found.rows] == ["jax_flash.cuda", "xla"]
    assert saved == [found.rows[:1]]  # what was measured survives what comes after it
    assert "1.000 GiB" in capsys.readouterr().out
    suite.rows = [Row("a", "jax_flash.cuda", "decode", None, note="no")]
    assert ran("other", "--quick") == 1
    suite.rows = []
    assert ran("other", "--quick") == 2
    assert "measured nothing" in capsys.readouterr().err


def test_the_modules_of_suites_exist():
    for name in run.MODULES.values():
        assert callable(importlib.import_module(name).measure)


def test_a_module_needs_a_gpu_too(suite, capsys):
    if jax.default_backend() == "gpu":
        pytest.skip("says what happens without a GPU")
    assert ran("other") == 2
    assert "needs an NVIDIA GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["forward"], "needs an NVIDIA GPU"),
        (["forward", "--peers", "fa3,nobody"], "unknown peers"),
        (["backward", "--cases", "nothing"], "no case"),
    ],
)
def test_what_cannot_run_says_why(arguments, message, capsys):
    if jax.default_backend() == "gpu":
        pytest.skip("says what happens without a GPU")
    assert ran(*arguments) == 2
    assert message in capsys.readouterr().err


def test_the_command_line():
    result = subprocess.run(
        [sys.executable, "-m", "bench", "run", "--help"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "--sustained" in result.stdout


def test_a_peer_that_is_not_there_is_absent(monkeypatch):
    for name in ("dew_flash_attn", "fa4_jax", "tokamax"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("fa3", "fa4", "tokamax"):
        with pytest.raises(peers.AbsentError, match="ModuleNotFoundError"):
            peers.PEERS[name](SMALL[0])


def test_peers_get_the_case_in_their_own_words(monkeypatch):
    asked = []
    package = types.SimpleNamespace(
        flash_mha=lambda *_, **terms: asked.append(terms),
        flash_mha_varlen=lambda *_, **terms: asked.append(terms),
    )
    monkeypatch.setitem(sys.modules, "dew_flash_attn", package)
    for case in SMALL:
        peers.flash_attention_3(case)()
    assert asked == [
        {"is_causal": True, "window_size": (-1, -1)},
        {"is_causal": False, "window_size": (17, 3)},
        {"is_causal": True, "window_size": (-1, -1), "max_seqlen": 53},
    ]


def test_the_dense_xla_path_is_refused_where_its_logits_do_not_fit():
    assert peers.jax_nn(Case(4, 4096, 32, 32, 64), "xla")
    with pytest.raises(peers.RefusedError, match="16 GiB"):
        peers.jax_nn(Case(1, 16384, 16, 16, 128), "xla")
    assert peers.jax_nn(Case(1, 16384, 16, 16, 128), "cudnn")


def test_compile_and_dispatch_times_are_of_what_they_say():
    x = jnp.ones(8)
    taken = timing.compile_time(lambda x: x + 1.0, (x,))
    assert taken.total_s == taken.trace_s + taken.lower_s + taken.compile_s
    assert min(taken.trace_s, taken.lower_s, taken.compile_s) > 0.0
    calls = []
    call = timing.Call(lambda x: calls.append(x) or x, (x,))
    assert timing.dispatch_us({"f": call}, batches=3, calls_per_batch=4)["f"] > 0.0
    assert len(calls) == 3 * (4 + 1)


def test_a_sustained_loop_runs_as_long_as_it_should():
    calls = []
    call = timing.Call(lambda: calls.append(0) or jnp.zeros(()), ())
    assert timing.sustained_us(call, estimate_us=1000.0, seconds=0.1) > 0.0
    assert len(calls) == (25 + 1) + (100 + 1)


def test_the_commit_says_whether_files_differ(tmp_path):
    def git(*arguments):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True, capture_output=True)

    assert provenance.commit(tmp_path) == provenance.UNKNOWN
    git("init", "-q")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("-c", "user.name=x", "-c", "user.email=x@x", "commit", "-qm", "one")
    clean = provenance.commit(tmp_path)
    assert 7 <= len(clean) <= 12
    (tmp_path / "a").write_text("2")
    assert provenance.commit(tmp_path) == f"{clean}-dirty"
