"""The suite ``ladder`` on the CPU, in interpret mode, with a stand-in for the GPU's clock."""

import functools

import jax
import pytest

from bench import ladder as suite
from bench import peers, results
from bench.cases import Case
from pallas_kernels import ladder
from tests.gpu_bench import pretend, ran
from tests.kernel_cases import ON_GPU, WITH_RACES

SMALL = (Case(1, 64, 1, 1, 64), Case(1, 128, 1, 1, 64, True))


def plain(case):
    return lambda q, k, v: ladder.attend(3, q, k, v, is_causal=case.is_causal)


@pytest.fixture
def on_a_gpu(monkeypatch):
    if ON_GPU:
        pytest.skip("a stand-in for a GPU needs a CPU")
    pretend(monkeypatch)
    interpreted = functools.partial(ladder.attend, interpret=WITH_RACES)
    monkeypatch.setattr(ladder, "attend", interpreted)
    monkeypatch.setattr(suite, "CASES", SMALL)
    monkeypatch.setitem(peers.IMPLEMENTATIONS, results.OURS, plain)
    yield
    jax.config.update("jax_enable_compilation_cache", True)


@pytest.mark.usefixtures("on_a_gpu")
def test_every_step_is_timed_and_weighed(tmp_path, capsys):
    out = tmp_path / "ladder.json"
    assert ran("ladder", "--out", str(out)) == 0
    found = results.read(out)
    names = [suite.impl(number) for number in range(1, 8)]
    assert names[0] == "jax_flash.ladder 1 naive"
    assert names[-1] == results.OURS
    full, causal = (case.name for case in SMALL)
    assert list(found.times("fwd")[causal]) == names
    assert list(found.times("fwd")[full]) == [name for name in names if " 4 " not in name]
    for row in found.rows:
        if row.mode == "fwd":
            case = next(case for case in SMALL if case.name == row.case)
            assert row.tflops == round(case.flops("fwd") / row.time_us / 1e6, 2)
            assert 1e-4 < row.error < 1e-2
            assert row.note is None
        else:
            assert (row.mode, row.unit) == ("memory", "bytes")
    sizes = {row.impl: row.amount for row in found.rows if row.mode == "memory"}
    arrays = 4 * 128 * 64 * 2  # q, k, v and out
    assert arrays <= sizes[names[2]] < sizes[names[0]]
    assert sizes[names[0]] >= arrays + 128 * 128 * 4  # S (in interpret mode P takes its place)
    assert "0 %" in capsys.readouterr().out


@pytest.mark.usefixtures("on_a_gpu")
def test_a_wrong_step_fails_the_run_and_a_broken_one_is_a_line(tmp_path, monkeypatch):
    intact = ladder.attend

    def attend(number, q, k, v, **options):
        if number == 5:
            raise RuntimeError("out of luck")
        return intact(number, q, k, v, **options) * (1.1 if number == 6 else 1.0)

    monkeypatch.setattr(ladder, "attend", attend)
    out = tmp_path / "ladder.json"
    assert ran("ladder", "--cases", SMALL[0].name, "--out", str(out)) == 1
    notes = {row.impl: row.note for row in results.read(out).rows if row.mode == "fwd"}
    assert notes[suite.impl(5)] == "RuntimeError: out of luck"
    assert notes[suite.impl(6)] == results.INACCURATE
    assert notes[suite.impl(3)] is None


def test_the_cases_have_the_same_work_for_each_head_dim():
    assert len(suite.CASES) == 2 * (8 + 1)
    for case in suite.CASES:
        assert case.batch * case.seq_len == 16384
        assert case.num_q_heads * case.head_dim == 2048
        assert case.seq_len % ladder.BLOCK == 0
