"""Compiles shipped kernels for Hopper with ptxas, without a GPU: spills and serialised products."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from bench import aot

ROOT = Path(__file__).parents[1]


def test_every_kernel_lowers_for_cuda():
    """Layouts, shapes and shared memory are checked by lowering, which needs no CUDA."""
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
        [sys.executable, "-m", "bench", "aot", "--match", kernel],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 failed" in result.stdout


def test_a_failure_is_one():
    fields = {"name": "x", "registers": 168, "smem_bytes": 0, "compile_s": 1.0}
    good = aot.Report(spill_bytes=8, budget_bytes=8, serialised=(), **fields)
    assert good.passed
    assert not aot.Report(spill_bytes=9, budget_bytes=8, serialised=(), **fields).passed
    assert not aot.Report(spill_bytes=0, budget_bytes=8, serialised=("C7514",), **fields).passed
