"""The suite ``serving`` on the CPU, in fp32, where engine and loop must draw the same tokens."""

import json
import sys

import jax
import numpy as np
import pytest

from bench import isolated, results, servers, serving, timing
from bench.serving import ENGINE, IMPLEMENTATIONS, Mix, Step
from tests.gpu_bench import pretend, ran

TINY = {
    "title": "tiny",
    "context_length": 64,
    "num_layers": 2,
    "num_heads": 2,
    "head_dim": 16,
    "vocab_size": 31,
    "dtype": "float32",
    "page_size": 4,
}
MIX = Mix(
    **TINY,
    num_requests=12,
    prompt_median=9.0,
    output_median=6.0,
    shortest=3,
    longest_prompt=40,
    longest_output=20,
    rows=2,
    max_batch_size=4,
    max_prefill_tokens=32,
    min_prefill_tokens=32,
)
STEP = Step(**TINY, batch_size=3, length=20, draws=2)
KERNELS = [("fusion_1", 6.0), ("gemm_fusion_dot_2_0", 8.0), ("fusion_12", 4.0)]


@pytest.fixture
def here(monkeypatch, standard_promotion):
    """Children run in this process, on a stand-in for a GPU: a launch takes 8 µs, its host 2."""
    if jax.default_backend() == "gpu":
        pytest.skip("a stand-in for a GPU needs a CPU")
    pretend(monkeypatch)

    def items(target, *arguments, timeout_s):
        module, function = target.split(":")
        for item in getattr(sys.modules[module], function)(*json.loads(json.dumps(arguments))):
            yield json.loads(json.dumps(item))

    def sustained_us(call, estimate_us):
        for _ in range(3):
            jax.block_until_ready(call())
        return 8.0

    def launched_us(function):
        assert jax.block_until_ready(function()).shape == (2, 2, 3)
        return KERNELS

    monkeypatch.setattr(isolated, "items", items)
    monkeypatch.setattr(timing, "sustained_us", sustained_us)
    monkeypatch.setattr(timing, "dispatch_us", lambda calls: dict.fromkeys(calls, 2.0))
    monkeypatch.setattr(timing, "launched_us", launched_us)
    monkeypatch.setattr(serving, "MIXES", (MIX,))
    monkeypatch.setattr(serving, "STEPS", (STEP,))
    monkeypatch.setattr(serving, "IMPLEMENTATIONS", IMPLEMENTATIONS[:2])  # no cuDNN on a CPU
    monkeypatch.delenv("XLA_PYTHON_CLIENT_ALLOCATOR", raising=False)


@pytest.mark.usefixtures("here")
def test_engine_and_loop_serve_the_same_texts(tmp_path):
    out = tmp_path / "serving.json"
    assert ran("serving", "--cases", "requests", "--out", str(out)) == 0
    rows = {(row.impl, row.mode): row for row in results.read(out).rows}
    assert {row.case for row in rows.values()} == {"tiny 12 requests S64 H2/2 D16 L2 fp32"}
    loop = IMPLEMENTATIONS[0]
    total = sum(count for _, count in MIX.requests())
    for impl in (ENGINE, loop):
        row = rows[impl, "serve"]
        assert row.unit == "tokens/s"
        assert row.amount == pytest.approx(total / row.time_us * 1e6, rel=1e-3)
    same = "100.0 % of the first tokens, 100.0 % of all before the first other one, 100.0 %"
    assert f"as flax loop xla: {same} of the whole texts" in rows[ENGINE, "serve"].note
    assert "decode rows on 'xla', prompts on 'xla'" in rows[ENGINE, "serve"].note
    assert rows[loop, "running"].amount == 2.0
    assert 2.0 < rows[ENGINE, "running"].amount <= 4.0
    assert 0.0 < rows[ENGINE, "waste"].amount < 30.0 < rows[loop, "waste"].amount < 100.0
    latencies = {"first token p50", "between tokens p50", "between tokens p99"}
    assert {mode for _, mode in rows} == {"serve", "running", "waste", *latencies}
    assert (loop, "first token p50") not in rows
    assert rows[ENGINE, "between tokens p50"].time_us <= rows[ENGINE, "between tokens p99"].time_us


@pytest.mark.usefixtures("here")
def test_a_decode_step_is_taken_apart(tmp_path, monkeypatch):
    out = tmp_path / "serving.json"
    assert ran("serving", "--cases", "decode", "--out", str(out)) == 0
    rows = {row.mode: row for row in results.read(out).rows}
    assert rows["step"].case == "tiny decode B3 S20 H2/2 D16 L2 fp32"
    assert (rows["step"].time_us, rows["dispatch"].time_us) == (4.0, 1.0)
    assert rows["kernels"].time_us == 18.0 / (2 * serving.LAUNCHES)
    assert rows["kernels"].note == (
        "45 % of a step; fusion 1.0 µs (0.2), gemm_fusion_dot 0.8 µs (0.1)"
    )

    def none(function):
        raise RuntimeError("CUPTI reported no kernel")

    monkeypatch.setattr(timing, "launched_us", none)
    assert ran("serving", "--cases", "decode", "--out", str(out)) == 1
    rows = {row.mode: row for row in results.read(out).rows}
    assert rows["step"].time_us == 4.0
    assert rows["kernels"].note == "RuntimeError: CUPTI reported no kernel"


@pytest.mark.usefixtures("here")
def test_who_fails_is_a_row_and_another_cache_is_seen(tmp_path, monkeypatch):
    def died(fields):
        raise ValueError("out of luck")
        yield

    monkeypatch.setattr(servers, "engine", died)
    monkeypatch.setattr(servers, "decode_step", died)
    monkeypatch.setattr(serving, "IMPLEMENTATIONS", ("flax loop xla", ENGINE, "flax loop None"))
    attention = servers._attention

    def forgets(implementation):
        attend = attention("xla")
        if implementation == "xla":
            return attend

        def attend_newest(cache, query, *arguments, **terms):
            if query.shape[1] == 1:
                cache = jax.tree.map(lambda x: x if x.ndim == 1 else x.at[:, :3].set(0), cache)
            return attend(cache, query, *arguments, **terms)

        return attend_newest

    monkeypatch.setattr(servers, "_attention", forgets)
    out = tmp_path / "serving.json"
    assert ran("serving", "--out", str(out)) == 1
    rows = {(row.impl, row.mode): row for row in results.read(out).rows}
    assert rows[ENGINE, "step"].note == rows[ENGINE, "serve"].note == "ValueError: out of luck"
    note = rows["flax loop None", "serve"].note
    assert "100.0 % of the first tokens" in note
    assert "100.0 % of all" not in note


def test_agreement_counts_what_comes_before_the_first_other_token():
    expected = [[1, 2, 3, 4], [5, 6], [7, 8]]
    assert serving._agreement([[1, 2, 9, 4], [5, 6], [9, 8]], expected) == (
        "66.7 % of the first tokens, 50.0 % of all before the first other one, "
        "33.3 % of the whole texts"
    )


def test_the_mix_is_what_the_bars_are_about():
    (mix,) = serving.MIXES
    requests = mix.requests()
    assert requests == mix.requests()
    prompts = np.array([len(prompt) for prompt, _ in requests])
    outputs = np.array([count for _, count in requests])
    assert len(requests) == 256
    assert len(requests) % mix.rows == 0
    assert (prompts.min(), prompts.max()) == (32, 1024)
    assert (outputs.min(), outputs.max()) == (32, 512)
    assert mix.longest_prompt + mix.longest_output == mix.context_length
    assert mix.num_pages * mix.page_size == mix.rows * mix.context_length
    assert 200 < prompts.mean() < 240
    assert 100 < outputs.mean() < 140
    (step,) = serving.STEPS
    assert (step.batch_size, step.length, step.dtype) == (64, 200, "bfloat16")


def test_a_function_is_timed_as_it_is(monkeypatch):
    """CUPTI's timer neither compiles it nor calls it more often than it says."""
    from jax.experimental.mosaic.gpu import profiler

    calls = []

    class Cupti:
        def __init__(self, finalize):
            assert not finalize

        def measure(self, f, *, aggregate):
            assert isinstance(f, jax.stages.Wrapped)
            assert not aggregate

            def wrapper():
                f()
                return f(), [("a", len(calls) * 1e-3), ("b", 1e-3)] if calls else None

            return wrapper

    monkeypatch.setattr(profiler, "Cupti", Cupti)
    launched = timing.launched_us(lambda: calls.append(0), rounds=3)
    assert launched == [("a", pytest.approx(4.0)), ("b", pytest.approx(1.0))]
    assert len(calls) == 6
    with pytest.raises(RuntimeError, match="no kernel"):
        timing.launched_us(lambda: calls.clear(), rounds=1)
