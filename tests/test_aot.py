"""Compiles shipped kernels for Hopper with ptxas, without a GPU: spills and serialised products.

As each takes seconds, these are a sixth of the cases; ``python -m bench aot`` compiles all.
"""

import argparse
import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import jax
import pytest

from bench import aot
from jax_flash import backends, ragged_attention
from jax_flash.spec import Device

ROOT = Path(__file__).parents[1]


PULLBACK = "pullback"
HEAVY_TERMS = ("soft cap, dropout, sinks", "bias")


def is_compiled_here(name):
    """Heavy terms, and all; the usual mask without grouped heads, with them some heavy masks.

    Not fp16, which spills what bf16 does, and of unequal head dims those that models have.
    """
    problem, _, terms = name.partition(", ")
    dims = re.search(r" D(\d+)/(\d+) ", problem)
    if " float16" in name or (dims and dims[1] != dims[2] and dims.groups() != ("192", "128")):
        return False
    is_grouped = problem.endswith("grouped")
    if problem.startswith("ladder"):
        return problem.endswith(("D64 full", "D128 causal"))
    if terms:
        is_heavy = "bfloat16" in problem and terms in HEAVY_TERMS and int(dims[1]) >= 128
        return terms == "everything" if is_grouped else is_heavy
    if is_grouped:
        dims = {"segments": (64, 128, 256), "causal": (128, 256)}.get(problem.split()[2], ())
        return "bfloat16" in problem and any(f"D{d}/{d}" in problem for d in dims)
    return "causal" in problem


def test_every_kernel_lowers_for_cuda():
    """Layouts, shapes and shared memory are checked by lowering, which needs no CUDA."""
    if aot.unavailable() is None:
        pytest.skip("the kernels are compiled, which begins with this")
    for cases in (list(aot.forward_cases()), list(aot.backward_cases())):
        for case in cases[:: max(len(cases) // 6, 1)]:
            lowered = jax.jit(case.function).trace(*case.args).lower(lowering_platforms=("cuda",))
            assert "mosaic_gpu" in lowered.as_text()


def in_a_process_of_its_own(task):
    """The plugin is loaded where it is not in use."""
    reason = aot.unavailable()
    if reason is not None:
        pytest.skip(reason)
    result = subprocess.run(
        [sys.executable, "-m", "tests.test_aot", task],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["forward", "backward", "ladder"])
def test_kernels_pass_ptxas(kernel):
    printed = in_a_process_of_its_own(kernel)
    assert printed.splitlines()[-1] == "0 failed"
    assert printed.count(f"\n{kernel} D" if kernel != "ladder" else "\nladder ") > 10


@pytest.mark.slow
def test_no_program_has_the_fusion_that_xla_gets_wrong():
    """One that transposes the log-sum-exp and compares it, too: packed gradients were wrong."""
    name, count, *wrong = in_a_process_of_its_own(PULLBACK).splitlines()
    assert name == PULLBACK
    assert int(count) > 5
    assert wrong == []


def pullback_of_packed_documents():
    """The optimised HLO for an H200, where the pullback is compiled by itself."""
    tokens = jax.ShapeDtypeStruct((16384, 16, 64), "bfloat16")
    boundaries = jax.ShapeDtypeStruct((9,), "int32")
    attend = functools.partial(ragged_attention, is_causal=True, implementation="mosaic")

    def with_pullback(q, k, v, cu_seqlens):
        return jax.vjp(lambda *qkv: attend(*qkv, cu_seqlens), q, k, v)

    hopper = Device("gpu", "9.0", "NVIDIA H200")
    with mock.patch.object(backends, "device_of", return_value=hopper):
        pullback = jax.eval_shape(with_pullback, tokens, tokens, tokens, boundaries)[1]
        jitted = jax.jit(
            lambda pullback, do: pullback(do),
            in_shardings=aot._sharding(),
            out_shardings=aot._sharding(),
        )
        lowered = jitted.trace(pullback, tokens).lower(lowering_platforms=("cuda",))
    return lowered.compile().as_text()


def transposes_and_compares(fusion):
    """Of a fused computation in HLO: whether it has results of numbers and of truths."""
    results = fusion.partition("\n")[0].partition("->")[2]
    return " transpose(" in fusion and "pred[" in results and "f32[" in results


def test_a_failure_is_one():
    fields = {"name": "x", "registers": 168, "smem_bytes": 0, "compile_s": 1.0}
    good = aot.Report(spill_bytes=8, budget_bytes=8, serialised=(), **fields)
    assert good.passed
    assert not aot.Report(spill_bytes=9, budget_bytes=8, serialised=(), **fields).passed
    assert not aot.Report(spill_bytes=0, budget_bytes=8, serialised=("C7514",), **fields).passed


if __name__ == "__main__":
    if sys.argv[1] == PULLBACK:
        assert aot.unavailable() is None  # which finds the plugin
        fusions = re.findall(
            r"^%fused.*?^}", pullback_of_packed_documents(), re.MULTILINE | re.DOTALL
        )
        wrong = [x.partition("\n")[0] for x in fusions if transposes_and_compares(x)]
        print(PULLBACK, len(fusions), *wrong, sep="\n")
        sys.exit()
    all_cases = aot.cases
    aot.cases = lambda: (case for case in all_cases() if is_compiled_here(case.name))
    sys.exit(aot.run(argparse.Namespace(match=sys.argv[1])))
