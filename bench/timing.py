"""Times compiled calls on a GPU, and what Python and the compiler take.

Short timings are kernel times that CUPTI reports, one call after another with pauses between; the
chip may clock higher than it could for long. Copies and fills that are no kernels (memset) are not
in them. Sustained timings are wall-clock time of a loop of more than a second, everything included.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Call:
    """A compiled function and its arguments."""

    compiled: Callable[..., Any]
    args: tuple[Any, ...]

    def __call__(self) -> Any:
        """Enqueues it."""
        return self.compiled(*self.args)


def kernel_times_us(
    calls: dict[str, Call], *, rounds: int = 5, iterations: int = 5
) -> dict[str, float | Exception]:
    """The time of all kernels of a call, for several calls, interleaved so that drift cancels.

    Args:
        calls: what to time, in order.
        rounds: how often each is timed, taking turns.
        iterations: launches each time, after one that is not counted.

    Returns:
        For each name the median over rounds of the median over launches, in µs; the exception if
        the call failed.
    """
    from jax.experimental.mosaic.gpu import profiler

    cupti = profiler.Cupti(finalize=False)  # attaching it again takes a second each time
    times: dict[str, list[float]] = {name: [] for name in calls}
    failed: dict[str, Exception] = {}
    order = list(calls.items())
    for turn in range(rounds):
        first = turn % max(len(order), 1)  # nobody is always the first after a pause
        for name, call in order[first:] + order[:first]:
            if name in failed:
                continue
            try:
                _, times_ms = cupti.measure(call.compiled, iterations=iterations)(*call.args)
                if times_ms is None:
                    raise RuntimeError("CUPTI reported no kernel")
                times[name].append(statistics.median(_as_list(times_ms)) * 1e3)
            except Exception as error:
                failed[name] = error
    return {name: failed.get(name) or statistics.median(times[name]) for name in calls}


def _as_list(times: Any) -> list[float]:
    return times if isinstance(times, list) else [times]


def sustained_us(call: Call, estimate_us: float, *, seconds: float = 1.2) -> float:
    """Wall-clock time of one call in a loop of at least ``seconds``, in µs.

    Calls are enqueued without waiting. A quarter of the loop comes first and is not counted: the
    chip heats up and settles at its power limit.

    Args:
        call: what to time.
        estimate_us: about how long it takes.
        seconds: of the loop.
    """
    count = math.ceil(seconds * 1e6 / estimate_us)
    _wall_s(call, max(count // 4, 1))
    return _wall_s(call, count) / count * 1e6


def _wall_s(call: Call, count: int) -> float:
    jax.block_until_ready(call())
    start = time.perf_counter()
    for _ in range(count):
        result = call()
    jax.block_until_ready(result)
    return time.perf_counter() - start


@dataclasses.dataclass(frozen=True)
class CompileTime:
    """Seconds from a Python function to an executable."""

    trace_s: float
    lower_s: float
    compile_s: float

    @property
    def total_s(self) -> float:
        """Of all three."""
        return self.trace_s + self.lower_s + self.compile_s


def compile_time(function: Callable[..., Any], args: Sequence[Any]) -> CompileTime:
    """Traces, lowers and compiles ``function(*args)`` (ShapeDtypeStructs will do)."""

    def fresh(*args: Any) -> Any:  # what JAX has not seen, it cannot have cached
        return function(*args)

    marks = [time.perf_counter()]
    traced = jax.jit(fresh).trace(*args)
    marks.append(time.perf_counter())
    lowered = traced.lower()
    marks.append(time.perf_counter())
    lowered.compile()
    marks.append(time.perf_counter())
    return CompileTime(*(end - start for start, end in itertools.pairwise(marks)))


def dispatch_us(
    calls: dict[str, Call], *, batches: int = 200, calls_per_batch: int = 20
) -> dict[str, float]:
    """Python's time for enqueueing a call that is compiled already, in µs.

    Args:
        calls: jitted functions with arguments so small that the device is never behind.
        batches: how often each is timed, taking turns; the median counts.
        calls_per_batch: calls between two waits for the device, which are not counted.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(batches):
        for name, call in calls.items():
            result = jax.block_until_ready(call())
            start = time.perf_counter()
            for _ in range(calls_per_batch):
                result = call()
            times[name].append((time.perf_counter() - start) / calls_per_batch * 1e6)
            jax.block_until_ready(result)
    return {name: statistics.median(x) for name, x in times.items()}


class _AsItIs:
    """A function for CUPTI's timer, which would jit one that it does not take for jitted."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function

    def __call__(self) -> Any:
        return self._function()

    def trace(self) -> Any:
        """Part of ``jax.stages.Wrapped``; nobody calls it."""
        raise NotImplementedError

    lower = trace


def launched_us(function: Callable[[], Any], *, rounds: int = 5) -> list[tuple[str, float]]:
    """The kernels that a function launches, in order, each with its time in µs.

    It may launch many programs, and keep state from call to call.

    Args:
        function: called twice a round, the first time not counted.
        rounds: the one of the median total is told.
    """
    from jax.experimental.mosaic.gpu import profiler

    cupti = profiler.Cupti(finalize=False)
    found = []
    for _ in range(rounds):
        _, launched = cupti.measure(_AsItIs(function), aggregate=False)()
        if not launched:
            raise RuntimeError("CUPTI reported no kernel")
        found.append([(name, time_ms * 1e3) for name, time_ms in launched])
    return sorted(found, key=lambda one: sum(time_us for _, time_us in one))[rounds // 2]
