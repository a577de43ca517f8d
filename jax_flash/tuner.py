"""Measures a kernel's configurations on this machine: what ``jax-flash tune`` does.

The kernel package proposes configurations; a child process compiles, checks and times them one at a
time. One that hangs or crashes takes its child with it, and another child goes on with the rest.

First come all shapes of a thread block, then one option at a time is changed while that helps.
The fastest few are timed again, taking turns with the default, which is replaced only by one that
is faster by more than 1 % in every round.

An implementation that can be tuned offers, beside what :mod:`jax_flash.backends` lists,
``attend(spec, operands, config=...)``, and in the module ``tune`` ``candidates(problem)``, the
default first, ``neighbours(problem, config)`` and ``source()``. Its ``forward`` asks
:func:`jax_flash.tuning.choose` for a configuration.
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
import time
from collections.abc import Callable, Iterable, Sequence
from typing import IO, Any

import jax
import jax.numpy as jnp

from jax_flash import backends, tuning
from jax_flash.spec import AttentionSpec, Device, Operands

Array = jax.Array
Log = Callable[[str], None]

# Largest error of a row of out against plain JAX, relative to the row: some roundings to 8 bits.
_ROW_TOLERANCE = 2e-2
_LSE_TOLERANCE = 1e-3
_MIN_GAIN = 1.01
_ROUNDS = 2
_NUM_FINALISTS = 4
_NUM_CLIMBS = 4
_START_S = 300.0  # for JAX, the driver and the plain computation
_NUM_COMPILERS = 8
_TIMED_US = 50e3  # of launches, each time
_HELD_BYTES = 2**32  # of outputs that are held meanwhile
_WORKER = (sys.executable, "-m", "jax_flash.tuner")


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


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of :func:`tune`.

    Attributes:
        key: the problem.
        default: the kernel's default configuration.
        winner: the fastest one, or the default.
        rounds: of the default and the finalists, the times in µs of each round.
        failures: configurations without a time, and why.
    """

    key: tuning.Key
    default: Any
    winner: Any
    rounds: dict[Any, list[float]]
    failures: dict[Any, str]

    def time_us(self, config: Any) -> float:
        """The slower round of a finalist."""
        return max(self.rounds[config])

    def entry(self, source: str, provenance: dict[str, str]) -> tuning.Entry:
        """For a table."""
        others = sorted((c for c in self.rounds if c != self.winner), key=self.time_us)
        return tuning.Entry(
            key=self.key,
            config=dataclasses.asdict(self.winner),
            time_us=self.time_us(self.winner),
            source=source,
            provenance=provenance,
            runners_up=tuple(
                {"changes": changes(self.winner, config), "time_us": self.time_us(config)}
                for config in others
            ),
        )

    def __str__(self) -> str:
        lines = [f"{self.key}:"]
        for config in sorted(self.rounds, key=self.time_us):
            times = "  ".join(f"{time_us:>9.1f}" for time_us in self.rounds[config])
            mark = "->" if config == self.winner else "  "
            lines.append(f"{mark} {times} us  {describe(self.default, config)}")
        gain = self.time_us(self.default) / self.time_us(self.winner) - 1.0
        verdict = "no configuration is reliably faster than the default by more than 1 %"
        if self.winner != self.default:
            verdict = f"{gain:.1%} faster than the default"
        return "\n".join([*lines, f"{verdict}; {len(self.failures)} failed"])


def changes(base: Any, config: Any) -> dict[str, Any]:
    """The fields in which a configuration differs from another one, with its values."""
    values = dataclasses.asdict(config)
    return {name: values[name] for name, x in dataclasses.asdict(base).items() if x != values[name]}


def describe(base: Any, config: Any) -> str:
    """The same as a line of text."""
    return " ".join(f"{name}={x}" for name, x in changes(base, config).items()) or "default"


def tunable(spec: AttentionSpec, device: Device) -> str:
    """The first implementation that runs the call and can be tuned.

    Raises:
        TuningError: there is none; lists the reasons.
    """
    reasons = {name: backends.reason_against(name, spec, device) for name in backends.NAMES}
    for name, reason in reasons.items():
        if reason is None and hasattr(backends.load(name), "tune"):
            return name
    raise TuningError(
        f"no kernel to tune for {spec} on {device.name or device.platform}: "
        + "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason)
        + ". Run this on the GPU that will run the call."
    )


def posed(name: str, spec: AttentionSpec) -> tuning.Choice[Any]:
    """What the implementation's forward would run the call with now. Nothing is computed."""
    with tuning.recording() as choices:
        jax.eval_shape(functools.partial(backends.load(name).forward, spec), spec.arrays)  # type: ignore[union-attr]
    if not choices:
        raise TuningError(f"{name} does not choose among configurations for {spec}")
    return choices[0]


def source(name: str) -> str:
    """The hash of the implementation's kernels, as tables know it."""
    return backends.load(name).tune.source()  # type: ignore[union-attr]


def tune(
    name: str,
    spec: AttentionSpec,
    *,
    seconds: float,
    timeout_s: float,
    log: Log,
    worker: Sequence[str] | None = None,
) -> Outcome:
    """Finds the fastest configuration of a call.

    Args:
        name: of the implementation.
        spec: the call, without arrays in its mask.
        seconds: after which no new configuration is tried; the last rounds come on top.
        timeout_s: for compiling, checking and timing one configuration.
        log: receives a line for each configuration.
        worker: command line of the child process, which calls :func:`serve`; None is this module.

    Raises:
        TuningError: the default configuration could not be measured.
    """
    choice = posed(name, spec)
    problem, default = choice.problem, choice.default
    package = backends.load(name).tune  # type: ignore[union-attr]
    deadline = time.monotonic() + seconds
    measured: dict[Any, Measurement] = {}

    with Worker(name, spec, timeout_s=timeout_s, command=worker or _WORKER) as child:

        def measure(config: Any) -> Measurement:
            result = child.measure(config)
            text = result.failure or f"{result.time_us:9.1f} us"
            log(f"{len(measured) + 1:>4} {text}  {describe(default, config)}")
            return result

        def measure_all(configs: Iterable[Any]) -> Any:
            new = [config for config in dict.fromkeys(configs) if config not in measured]
            child.prepare(new)
            for config in new:
                if time.monotonic() < deadline:
                    measured[config] = measure(config)
            return min(measured, key=lambda config: measured[config].time_us)

        measured[default] = measure(default)
        if (failure := measured[default].failure) is not None:
            raise TuningError(f"the default configuration of {name} cannot be measured: {failure}")
        best = measure_all([*package.candidates(problem), choice.config])
        for _ in range(_NUM_CLIMBS):
            previous, best = best, measure_all(package.neighbours(problem, best))
            if best == previous:
                break

        timed = [config for config in measured if measured[config].failure is None]
        fastest = sorted(timed, key=lambda config: measured[config].time_us)[:_NUM_FINALISTS]
        rounds: dict[Any, list[float]] = {c: [] for c in dict.fromkeys([default, *fastest])}
        for _ in range(_ROUNDS):
            for config in list(rounds):
                result = child.measure(config)
                if result.failure is None:
                    rounds[config].append(result.time_us)
                elif config == default:
                    raise TuningError(f"the default configuration failed later: {result.failure}")
                else:
                    measured[config] = result
                    del rounds[config]
    failures = {c: m.failure for c, m in measured.items() if m.failure is not None}
    return Outcome(choice.key, default, _winner(default, rounds), rounds, failures)


def _winner(default: Any, rounds: dict[Any, list[float]]) -> Any:
    """The fastest of those that beat the default in every round, else the default."""
    reliable = [
        config
        for config, times in rounds.items()
        if all(slow > _MIN_GAIN * fast for slow, fast in zip(rounds[default], times, strict=True))
    ]
    return min(reliable, key=lambda config: max(rounds[config]), default=default)


def provenance(version: str) -> dict[str, str]:
    """What a table's entry says about this machine, as far as it is known."""
    found = {
        "method": "jax-flash tune: CUPTI time of all kernels of a call, the slower of two medians",
        "jax": jax.__version__,
        "version": version,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        run = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30)
        found["driver"] = run.stdout.strip()
    return found


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

        cupti = profiler.Cupti(finalize=False)  # attaching it again takes a second each time

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
