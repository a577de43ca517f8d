"""Kernels under compute-sanitizer: the calls run, and what the tool says decides."""

import argparse
import os

import jax
import numpy as np
import pytest

from bench import sanitize

CALLS = sanitize.calls("xla", "xla")
TOOL = """#!/bin/sh
echo "$@" >>{log}
echo "{summary}"
exit {status}
"""


def ran(monkeypatch, tmp_path, summary, status=0, arguments=()):
    """Exit status, and what the tool was asked: it prints a summary in place of running a call."""
    log, tool = tmp_path / "log", tmp_path / "compute-sanitizer"
    tool.write_text(TOOL.format(log=log, summary=summary, status=status))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    in_a_process = sanitize._ran
    monkeypatch.setattr(
        sanitize, "_ran", lambda tool, *rest: in_a_process(tool, *rest) if tool else (0, "")
    )
    parser = argparse.ArgumentParser()
    sanitize.add_arguments(parser)
    found = sanitize.run(parser.parse_args(arguments))
    return found, log.read_text().splitlines() if log.exists() else []


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.usefixtures("standard_promotion")
def test_every_call_computes_numbers(name):
    call = CALLS[name]
    for x in jax.tree.leaves(jax.jit(call.function)(*call.args)):
        assert np.isfinite(np.asarray(x, np.float32)).all()


def test_a_clean_run_is_0_and_asks_both_tools(monkeypatch, tmp_path):
    status, asked = ran(monkeypatch, tmp_path, "========= ERROR SUMMARY: 0 errors")
    assert status == 0
    assert [line.split()[1] for line in asked] == ["memcheck", "racecheck"]
    for line in asked:
        assert "-m bench.sanitize gradients, grouped heads, causal gradients, window" in line
        assert line.endswith("decode, append")


@pytest.mark.parametrize(
    ("summary", "status"),
    [
        ("========= ERROR SUMMARY: 3 errors", 0),
        ("========= RACECHECK SUMMARY: 12 hazards displayed (12 errors, 0 warnings)", 0),
        ("========= ERROR SUMMARY: 0 errors", 1),
        ("the tool said nothing", 0),
    ],
)
def test_errors_a_failed_program_or_no_summary_are_1(
    summary, status, monkeypatch, tmp_path, capsys
):
    assert ran(monkeypatch, tmp_path, summary, status)[0] == 1
    assert summary in capsys.readouterr().out


def test_cases_and_tools_are_chosen(monkeypatch, tmp_path):
    arguments = ["--cases", "D256", "append", "--tools", "racecheck"]
    clean = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"
    status, (asked,) = ran(monkeypatch, tmp_path, clean, arguments=arguments)
    assert status == 0
    names = asked.partition("bench.sanitize ")[2]
    assert names == "gradients, D256 gradients, D256, lengths decode, cluster, D256 decode, append"


def test_without_the_tool_nothing_runs(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sanitize, "_PLACES", ("/nowhere/compute-sanitizer",))
    assert sanitize.run(argparse.Namespace(cases=[""], tools=sanitize.TOOLS)) == 2
    assert "install NVIDIA's CUDA toolkit" in capsys.readouterr().err
