"""Checks and times configurations of one call, one at a time, in a child process.

One that hangs or crashes takes its child with it, and another child goes on with the rest. Run as a
program, this is the child.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import math
import os
import pickle
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import IO, Any

import jax
import jax.numpy as jnp

from jax_flash import backends
from jax_flash.spec import AttentionSpec, Operands

Array = jax.Array

# Largest error of a row of out against plain JAX, relative to the row: some roundings to 8 bits.
_ROW_TOLERANCE = 2e-2
_LSE_TOLERANCE = 1e-3
_START_S = 300.0  # for JAX, the driver and the plain computation
_NUM_COMPILERS = 8
_TIMED_US = 50e3  # of launches, each time
_HELD_BYTES = 2**32  # of outputs that are held meanwhile
WORKER = (sys.executable, "-m", "jax_flash.measure")


class TuningError(RuntimeError):
    """Nothing could be measured; says why."""


class _DiedError(Exception):
    """A measuring process ended without an answer; says how."""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What became of one configuration.

    Attributes:
        time_us: median time, µs; infinite if there is none.
        failure: the reason why there is none.
        is_last: whether the process that measured can measure no more.
    """

    time_us: float = math.inf
    failure: str | None = None
    is_last: bool = False


class Worker:
    """A child process that measures; replaced by another one when it is lost.

    Args:
        name: of the implementation.
        spec: the call.
        timeout_s: for one configuration.
        command: what to run.
    """

    def __init__(self, name: str, spec: AttentionSpec, *, timeout_s: float, command: Sequence[str]):
        self._task = (name, spec)
        self._timeout_s = timeout_s
        self._command = command
        self._awaited: tuple[Any, ...] = ()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop()

    def prepare(self, configs: Iterable[Any]) -> None:
        """Says what will be measured next, so that it is compiled meanwhile, several at a time."""
        self._awaited = tuple(configs)
        if self._process is not None:
            try:
                self._ask(self._awaited)
            except _DiedError:
                self._awaited = ()

    def measure(self, config: Any) -> Measurement:
        """Measures one configuration; waits no longer than the timeout.

        Raises:
            TuningError: no process can be started.
        """
        alone = not self._awaited
        self._awaited = tuple(x for x in self._awaited if x != config)
        try:
            return self._attempt(config)
        except _DiedError as error:
            if alone:
                return Measurement(failure=str(error))
        self._awaited = ()  # one of them, being compiled, may have been the cause
        return self.measure(config)

    def _attempt(self, config: Any) -> Measurement:
        if self._process is None:
            self._start()
            try:
                ready = self._ask(self._task, _START_S)
            except _DiedError as error:
                raise TuningError(f"the measuring process did not start: {error}") from error
            if ready.failure is not None:
                raise TuningError(f"the measuring process did not start: {ready.failure}")
            self._ask(self._awaited)
        return self._ask(config)

    def _start(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed in _stop)
        self._replies: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors
        )
        assert self._process.stdout is not None
        threading.Thread(
            target=_forward_lines, args=(self._process.stdout, self._replies), daemon=True
        ).start()

    def _ask(self, request: Any, timeout_s: float | None = None) -> Measurement:
        """Sends a request and waits for the answer.

        Raises:
            _DiedError: the process ended without one.
        """
        if self._process is None:  # lost by the request before
            raise _DiedError("the process was stopped")
        assert self._process.stdin is not None
        timeout_s = timeout_s or self._timeout_s
        try:
            pickle.dump(request, self._process.stdin)
            self._process.stdin.flush()
            line = self._replies.get(timeout=timeout_s)
        except queue.Empty:
            self._stop()
            return Measurement(failure=f"no result within {timeout_s:g} s, stopped")
        except BrokenPipeError:
            line = b""
        if not line:
            status = self._process.wait()
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace").strip().splitlines()[-1:]
            self._stop()
            raise _DiedError(" ".join([f"the process ended with status {status}", *said]))
        result = Measurement(**json.loads(line))
        if result.is_last:
            self._stop()
        return result

    def _stop(self) -> None:
        """Kills the child; a kernel that hangs ends with it."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # a request that nobody has read
                pipe.close()
        self._errors.close()
        self._process = None


def _forward_lines(source: IO[bytes], replies: queue.SimpleQueue[bytes]) -> None:
    """Every line; an empty one at the end."""
    while line := source.readline():
        replies.put(line)
    replies.put(b"")


# In the child.


class Bench:
    """One call on random arrays, its plain result, and what is compiled so far."""

    def __init__(self, name: str, spec: AttentionSpec):
        self._attend: Callable[..., Any] = backends.load(name).attend  # type: ignore[union-attr]
        self._spec = spec
        self._operands = random_operands(spec)
        self._expected = jax.jit(functools.partial(backends.plain().forward, spec))(self._operands)
        self._compilers = concurrent.futures.ThreadPoolExecutor(_NUM_COMPILERS)
        self._compiled: dict[Any, concurrent.futures.Future[Any]] = {}
        self._checked: set[Any] = set()

    def prepare(self, configs: Iterable[Any]) -> None:
        """Begins to compile configurations that are new."""
        for config in configs:
            if config not in self._compiled:
                self._compiled[config] = self._compilers.submit(self._compile, config)

    def _compile(self, config: Any) -> Callable[..., Any]:
        launch = jax.jit(functools.partial(self._attend, self._spec, config=config))
        return launch.lower(self._operands).compile()

    def measure(self, config: Any) -> Measurement:
        """Checks a configuration when it is new, and times it."""
        self.prepare([config])
        compiled = self._compiled[config].result()
        if config not in self._checked:
            if (failure := self._check(compiled)) is not None:
                return Measurement(failure=failure)
            self._checked.add(config)
        try:
            return Measurement(self.time_us(compiled))
        except RuntimeError:  # a kernel of what is being compiled meanwhile came between
            return Measurement(self.time_us(compiled))

    def _check(self, compiled: Callable[..., Any]) -> str | None:
        """Why the result is wrong; None if it is right, and the same each time."""
        first = compiled(self._operands)
        row_error, lse_error = map(float, _errors(first, self._expected))
        if not (row_error <= _ROW_TOLERANCE and lse_error <= _LSE_TOLERANCE):
            return f"wrong: error {row_error:.1e} of a row, {lse_error:.1e} of the log-sum-exp"
        for _ in range(3):
            if not _same(first, compiled(self._operands)):
                return "wrong: not the same from run to run"
        return None

    def time_us(self, compiled: Any) -> float:
        """Median time of all kernels of a call, as CUPTI reports it."""
        from jax.experimental.mosaic.gpu import profiler

        # Attaching it again would take a second each time.
        cupti = profiler.Cupti(finalize=False)  # type: ignore[call-arg]

        def median(iterations: int) -> float:
            _, times_ms = cupti.measure(compiled, iterations=iterations)(self._operands)
            if times_ms is None:
                raise RuntimeError("CUPTI reported no kernel")
            return 1e3 * statistics.median(times_ms)

        out_bytes = sum(x.nbytes for x in self._expected)
        most = min(200, _HELD_BYTES // out_bytes)
        estimate_us = median(3)
        return median(max(3, min(most, math.ceil(_TIMED_US / estimate_us))))


def random_operands(spec: AttentionSpec) -> Operands:
    """Normal numbers in the place of the call's query, keys and values.

    Raises:
        TuningError: the call has other arrays, whose values would matter.
    """
    arrays = (spec.arrays.query, spec.arrays.key, spec.arrays.value)
    if len(jax.tree.leaves(spec.arrays)) != len(arrays):
        raise TuningError(f"{spec} has arrays beside query, key and value: no numbers to tune with")
    keys = jax.random.split(jax.random.key(0), len(arrays))
    query, key, value = (
        jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, arrays, strict=True)
    )
    return dataclasses.replace(spec.arrays, query=query, key=key, value=value)


@jax.jit
def _errors(result: tuple[Array, Array], expected: tuple[Array, Array]) -> tuple[Array, Array]:
    """The largest error of a row of out, relative to it, and of lse; NaN if there is one."""
    (out, lse), (ref, ref_lse) = result, expected
    out, ref = out.astype(jnp.float32), ref.astype(jnp.float32)
    error, size = (jnp.linalg.norm(x, axis=-1) for x in (out - ref, ref))
    row_error = jnp.where(error == 0.0, 0.0, error / size)
    lse_error = jnp.where(lse == ref_lse, 0.0, jnp.abs(lse - ref_lse))
    return row_error.max(), lse_error.max()


@jax.jit
def _same(one: Any, other: Any) -> Array:
    return jnp.array([jnp.all(x == y) for x, y in zip(one, other, strict=True)]).all()


def serve(bench: type[Bench] = Bench) -> None:
    """Measures what comes as pickles on standard input, and answers with lines of JSON.

    The first pickle is the task ``(name, spec)``, those that follow are configurations or tuples of
    them, to be prepared.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what compilers print must not get among the answers

    def answer(result: Measurement) -> None:
        print(json.dumps(dataclasses.asdict(result)), file=answers)

    try:
        call = bench(*pickle.load(sys.stdin.buffer))
        answer(Measurement(0.0))
        while True:
            request = pickle.load(sys.stdin.buffer)
            try:
                if isinstance(request, tuple):
                    call.prepare(request)
                    answer(Measurement(0.0))
                else:
                    answer(call.measure(request))
            except (NotImplementedError, TypeError, ValueError) as error:
                answer(Measurement(failure=_first_line(error)))  # of the compiler: no harm done
    except EOFError:
        return
    except Exception as error:  # of the device: what comes after it would fail too
        answer(Measurement(failure=_first_line(error), is_last=True))


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0][:200]}"


if __name__ == "__main__":
    serve()
