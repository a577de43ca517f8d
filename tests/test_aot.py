"""Compiles shipped kernels for Hopper with ptxas, without a GPU: spills and serialised products.

As each takes seconds, these are a third of the cases; ``python -m bench aot`` compiles all.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from bench import aot

ROOT = Path(__file__).parents[1]


HEAVY_TERMS = ("soft cap, dropout, sinks", "bias")


def is_compiled_here(name):
    """The usual mask, at the usual dims the heaviest too; the heaviest terms, and all at once."""
    problem, _, terms = name.partition(", ")
    if problem.startswith("ladder"):
        return problem.endswith(("D64 full", "D128 causal"))
    if terms:
        return terms == "everything" or ("bfloat16" in problem and terms in HEAVY_TERMS)
    heaviest = "segments" in problem and any(f"D{d}/{d}" in problem for d in (64, 128, 256))
    return heaviest or "causal" in problem


def test_every_kernel_lowers_for_cuda():
    """Layouts, shapes and shared memory are checked by lowering, which needs no CUDA."""
    if aot.unavailable() is None:
        pytest.skip("the kernels are compiled, which begins with this")
    for cases in (list(aot.forward_cases()), list(aot.backward_cases())):
        for case in cases[:: max(len(cases) // 6, 1)]:
            lowered = jax.jit(case.function).trace(*case.args).lower(lowering_platforms=("cuda",))
            assert "mosaic_gpu" in lowered.as_text()


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["forward", "backward", "ladder"])
def test_kernels_pass_ptxas(kernel):
    """In a process of its own: the plugin is loaded where it is not in use."""
    reason = aot.unavailable()
    if reason is not None:
        pytest.skip(reason)
    result = subprocess.run(
        [sys.executable, "-m", "tests.test_aot", kernel],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1] == "0 failed"
    assert result.stdout.count(f"\n{kernel} D" if kernel != "ladder" else "\nladder ") > 10


def test_a_failure_is_one():
    fields = {"name": "x", "registers": 168, "smem_bytes": 0, "compile_s": 1.0}
    good = aot.Report(spill_bytes=8, budget_bytes=8, serialised=(), **fields)
    assert good.passed
    assert not aot.Report(spill_bytes=9, budget_bytes=8, serialised=(), **fields).passed
    assert not aot.Report(spill_bytes=0, budget_bytes=8, serialised=("C7514",), **fields).passed


if __name__ == "__main__":
    all_cases = aot.cases
    aot.cases = lambda: (case for case in all_cases() if is_compiled_here(case.name))
    sys.exit(aot.run(argparse.Namespace(match=sys.argv[1])))
