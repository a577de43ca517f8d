"""The suite ``shakespeare`` on the CPU: what the command's log says is what its rows say."""

import json
import os
import subprocess
import time
from pathlib import Path

import jax
import pytest

import models
from bench import provenance, results, shakespeare
from bench.results import OURS
from bench.shakespeare import TRAINING, VALIDATION
from models import data, train
from tests.gpu_bench import pretend, ran

FIRST, SECOND, THIRD = shakespeare.RUNS
SETTINGS = {"batch_size": 64, "context_length": 256}
LOG = (
    {"step": 0, "elapsed_s": 10.0, "run": {"settings": SETTINGS, "parameters": 10_745_088}},
    {"step": 0, "elapsed_s": 18.0, "val_loss": 4.25},
    {"step": 10, "elapsed_s": 18.5, "train_loss": 3.5, "tokens_per_second": None},
    {"step": 250, "elapsed_s": 20.5, "train_loss": 2.0, "tokens_per_second": 2_000_000},
    {"step": 250, "elapsed_s": 21.0, "val_loss": 1.9},
    {"step": 500, "elapsed_s": 23.0, "train_loss": 1.5, "tokens_per_second": 2_048_000},
    {"step": 500, "elapsed_s": 23.5, "val_loss": 1.4696},
    {"step": 750, "elapsed_s": 26.5, "val_loss": 1.625},
)
STARTED_S = 0.25  # from the process's start to the import of models


@pytest.fixture
def on_a_gpu(tmp_path, monkeypatch):
    """A stand-in for a GPU, and a short text that passes for Shakespeare's."""
    if jax.default_backend() == "gpu":
        pytest.skip("a stand-in for a GPU needs a CPU")
    pretend(monkeypatch)
    text = tmp_path / "text.txt"
    text.write_text("ROMEO: to be, or not to be, that is the question.\n" * 40)
    monkeypatch.setenv(data.ENVIRONMENT_VARIABLE, str(text))
    monkeypatch.setattr(data, "_is_tinyshakespeare", lambda raw: True)
    monkeypatch.delenv("XLA_PYTHON_CLIENT_ALLOCATOR", raising=False)
    return text


@pytest.fixture
def command(on_a_gpu, monkeypatch):
    """The command writes LOG and ends with ``status``; returns what it was called with."""
    calls = []

    def fake(arguments, *, cwd, env, timeout, **_):
        calls.append((arguments[1:], env))
        assert (cwd, timeout) == (provenance.ROOT, 100.0)
        out = Path(arguments[arguments.index("--out") + 1])
        out.mkdir()
        log = out / "log.jsonl"
        log.write_text("".join(json.dumps(row) + "\n" for row in LOG))
        written = time.time() + LOG[-1]["elapsed_s"] + STARTED_S
        os.utime(log, (written, written))
        if fake.status is None:
            raise subprocess.TimeoutExpired("models.train", timeout)
        return subprocess.CompletedProcess(arguments, fake.status, stdout="error: out of luck")

    fake.status = 0
    fake.calls = calls
    monkeypatch.setattr(subprocess, "run", fake)
    monkeypatch.setattr(provenance, "device", lambda: dict.fromkeys(
        ("device", "driver", "jax", "cuda"), "some"))  # fmt: skip
    return fake


def measured(tmp_path, *arguments, status=0):
    out = tmp_path / "shakespeare.json"
    assert ran("shakespeare", "--out", str(out), "--commit", "abc", *arguments) == status
    return results.read(out)


def test_rows_are_what_the_log_says(command, on_a_gpu, tmp_path):
    found = measured(tmp_path)
    assert {row.impl for row in found.rows} == {OURS}
    rows = {(row.case, row.mode): row for row in found.rows}
    for case in (FIRST, SECOND, THIRD):
        losses = {0: 4.25, 250: 1.9, 500: 1.4696, 750: 1.625}
        for step, seconds in {0: 18.0, 250: 21.0, 500: 23.5, 750: 26.5}.items():
            row = rows[f"{case}, step {step}", VALIDATION]
            assert (row.amount, row.unit) == (losses[step], "nats a character")
            assert row.time_us / 1e6 == pytest.approx(seconds + STARTED_S, abs=0.1)
        assert (f"{case}, step 0", TRAINING) not in rows
        assert [rows[f"{case}, step {n}", TRAINING].amount for n in (250, 500)] == [2.0, 1.5]
        assert rows[case, "step"].time_us == 8000.0
        assert rows[case, "step"].amount == 2_048_000.0
        assert 0.0 < rows[case, "command"].time_us < 60e6
    (plain, env), (modern, _), (short, _) = command.calls
    assert plain == [
        *("-m", "models.train", "--preset", "shakespeare-char", "--out", plain[5]),
        *("--implementation", "mosaic", "--data", str(on_a_gpu)),
    ]
    assert modern[len(plain) :] == [
        *("--norm", "rmsnorm", "--mlp", "swiglu", "--position", "rope"),
        *("--dropout-rate", "0.3", "--weight-decay", "2.0"),
    ]
    assert short[len(plain) :] == ["--steps", "1000"]
    assert env["JAX_ENABLE_COMPILATION_CACHE"] == "false"
    assert "XLA_PYTHON_CLIENT_ALLOCATOR" not in env
    assert os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] == "platform"


def test_a_curve_knows_its_best_point(command, tmp_path):
    first, *others = shakespeare.curves(measured(tmp_path))
    assert first.name == "GPT-2 style"
    assert [curve.name for curve in others] == ["modern options", "GPT-2 style in 1000 steps"]
    assert [point.step for point in first.points] == [0, 250, 500, 750]
    assert (first.best.step, first.best.loss, first.best.training_loss) == (500, 1.4696, 1.5)
    assert first.points[0].training_loss is None
    assert first.reaches(2.0).step == 250
    assert first.reaches(shakespeare.PUBLISHED_LOSS) == first.best
    assert first.reaches(1.0) is None
    assert first.steps_per_second == 125.0


@pytest.mark.parametrize(
    ("status", "note"),
    [(1, "DiedError: it ended with status 1: error: out of luck"), (None, "timed out after 100")],
)
def test_a_run_that_dies_leaves_the_curve_so_far(command, tmp_path, status, note):
    command.status = status
    found = measured(tmp_path, "--cases", "modern", status=1)
    assert len(command.calls) == 1
    (curve,) = shakespeare.curves(found)
    assert len(curve.points) == 4
    (row,) = (row for row in found.rows if row.mode == "command")
    assert row.time_us is None
    assert note in row.note


def test_a_run_that_died_before_its_first_row_is_one_row(tmp_path):
    (tmp_path / "log.jsonl").write_text("")
    assert list(shakespeare.rows_of(FIRST, tmp_path / "log.jsonl", 0.0)) == []


def test_another_text_is_refused(command, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "_is_tinyshakespeare", lambda raw: False)
    found = measured(tmp_path, status=1)
    assert not command.calls
    assert [(row.case, row.mode) for row in found.rows] == [
        (case, "command") for case in shakespeare.RUNS
    ]
    assert "not tinyshakespeare" in found.rows[0].note
    assert data.ENVIRONMENT_VARIABLE in found.rows[0].note


@pytest.mark.usefixtures("on_a_gpu")
def test_the_command_itself_writes_such_a_log(tmp_path, monkeypatch):
    """In this process, so that nothing is imported again; its clock is that of the process."""

    def here(arguments, *, env, **_):
        assert arguments[1:3] == ["-m", "models.train"]
        return subprocess.CompletedProcess(arguments, train.main(arguments[3:]), stdout="")

    tiny = "--steps 20 --num-layers 1 --num-heads 2 --width 32 --context 16 --eval-interval 10"
    tiny = (*tiny.split(), "--eval-batches", "2", "--batch-size", "8", "--dtype", "float32")
    name, options = next(reversed(shakespeare.RUNS.items()))
    monkeypatch.setattr(shakespeare, "RUNS", {name: (*options, *tiny)})
    monkeypatch.setattr(shakespeare, "_IMPLEMENTATION", "xla")
    monkeypatch.setattr(subprocess, "run", here)
    monkeypatch.setattr(provenance, "device", lambda: dict.fromkeys(
        ("device", "driver", "jax", "cuda"), "some"))  # fmt: skip
    monkeypatch.setattr(models, "IMPORTED_S", models.IMPORTED_S - 1000.0)  # no part of the result
    found = measured(tmp_path)
    (curve,) = shakespeare.curves(found)
    assert [point.step for point in curve.points] == [0, 10, 20]
    assert curve.points[-1].loss < curve.points[0].loss
    assert curve.steps_per_second > 0
    rows = {row.mode: row for row in found.rows}
    assert 0.0 < curve.points[0].seconds <= curve.points[-1].seconds
    assert 1e6 * curve.points[-1].seconds < rows["command"].time_us + 5e4
    assert rows[TRAINING].case.endswith(", step 20")
