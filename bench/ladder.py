"""Times the steps of the ladder, from naive attention to the product's kernel.

16k tokens and 2048 columns in all, as in the grid of the other suites: what grows from case to case
is the length of a sequence, from 128 to 16384. A mode "memory" has the device memory of a call:
arguments, results and temporary arrays, as XLA allocates them.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from typing import Any

from bench import results
from bench.cases import Case
from bench.results import OURS, Row

NOTE = (
    "kernel time by CUPTI, median of 3 medians of 3 launches, steps interleaved; error: relative "
    "to fp32, last sequence, first and last head; memory: arguments, results and temporary arrays."
)
_TOKENS, _COLUMNS = 16384, 2048
_TIMING = {"rounds": 3, "iterations": 3}
# Without a mask there is nothing to prune: step 4 is step 3.
_ONLY_CAUSAL = (4,)


def _cases() -> Iterator[Case]:
    """Causal ones of every length; without a mask one length will do, it shows the same steps."""
    for head_dim in (64, 128):
        num_heads = _COLUMNS // head_dim
        for length in (128 * 2**i for i in range(8)):
            yield Case(_TOKENS // length, length, num_heads, num_heads, head_dim, True)
        yield Case(_TOKENS // 4096, 4096, num_heads, num_heads, head_dim, False)


CASES = tuple(_cases())


def impl(number: int) -> str:
    """What result files call a step of the ladder; the last one is the product's kernel."""
    from pallas_kernels import ladder

    if number == len(ladder.STAGES) + 1:
        return OURS
    return f"{OURS.partition('.')[0]}.ladder {number} {ladder.STAGES[number].name}"


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """Checks and times all steps, case after case."""
    import jax

    from bench import run
    from pallas_kernels import ladder

    wanted = arguments.cases or [""]
    chosen = [case for case in CASES if any(part in case.name for part in wanted)]
    jax.config.update("jax_enable_compilation_cache", False)
    steps = {
        (case, impl(number)): functools.partial(_compile, case, number)
        for case in chosen
        for number in (*ladder.STAGES, len(ladder.STAGES) + 1)
        if case.is_causal or number not in _ONLY_CAUSAL
    }
    references = {(case, None): functools.partial(_reference, case) for case in chosen}
    done = run.in_threads({**steps, **references})
    for case in chosen:
        compiled = {name: done.pop((of, name)) for of, name in steps if of == case}
        yield from _measure(case, compiled, done.pop((case, None)).result())


def attention(case: Case, number: int) -> Callable[..., Any]:
    """One step as a function of query, key and value."""
    from bench import peers
    from pallas_kernels import ladder

    if number in ladder.STAGES:
        return functools.partial(ladder.attend, number, is_causal=case.is_causal)
    return peers.IMPLEMENTATIONS[OURS](case)


def _compile(case: Case, number: int) -> Any:
    import jax

    from bench import run

    structs = jax.eval_shape(lambda: run.inputs(case))
    return jax.jit(attention(case, number)).lower(*structs).compile()


def _reference(case: Case) -> Any:
    from bench import accuracy, run

    return accuracy.Reference(case, run.inputs(case))


def _measure(case: Case, compiled: dict[str, Any], reference: Any) -> Iterator[Row]:
    from bench import run, timing

    args = run.inputs(case)
    calls: dict[str, timing.Call] = {}
    judged: dict[str, tuple[float, bool]] = {}
    for name, future in compiled.items():
        try:
            call = timing.Call(future.result(), args)
            judged[name] = reference.judge({"out": call()})
            calls[name] = call
        except Exception as error:  # one that cannot is a line of the table
            yield results.failure(case.name, name, "fwd", error)
    for name, time_us in timing.kernel_times_us(calls, **_TIMING).items():
        if isinstance(time_us, Exception):
            yield results.failure(case.name, name, "fwd", time_us)
            continue
        error, is_good = judged[name]
        yield Row(
            case=case.name,
            impl=name,
            mode="fwd",
            time_us=round(time_us, 2),
            tflops=round(case.flops("fwd") / time_us / 1e6, 2),
            error=float(f"{error:.2g}"),
            note=None if is_good else results.INACCURATE,
        )
        size = allocated_bytes(calls[name].compiled)
        yield Row(case.name, name, "memory", None, amount=float(size), unit="bytes")


def allocated_bytes(compiled: Any) -> int:
    """Device memory of an executable: arguments, results and temporary arrays."""
    sizes = compiled.memory_analysis()
    total = sizes.argument_size_in_bytes + sizes.output_size_in_bytes + sizes.temp_size_in_bytes
    return total - sizes.alias_size_in_bytes
