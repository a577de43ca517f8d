"""Measures a kernel's configurations on this machine: what ``jax-flash tune`` does.

The kernel package proposes configurations, which :mod:`jax_flash.measure` checks and times. First
come all shapes of a thread block, then one option at a time is changed while that helps.
The fastest few are timed again, taking turns with the default, which is replaced only by one that
is faster by more than 1 % in every round.

An implementation that can be tuned offers, beside what :mod:`jax_flash.backends` lists,
``attend(spec, operands, config=...)``, and in the module ``tune`` ``candidates(problem)``, the
default first, ``neighbours(problem, config)`` and ``source()``. Its ``forward`` asks
:func:`jax_flash.tuning.choose` for a configuration.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from jax_flash import backends, measure, tuning
from jax_flash.measure import Measurement, TuningError
from jax_flash.spec import AttentionSpec, Device

Log = Callable[[str], None]

_MIN_GAIN = 1.01
_ROUNDS = 2
_NUM_FINALISTS = 4
_NUM_CLIMBS = 4


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
        worker: command line of the child process, which calls :func:`jax_flash.measure.serve`;
            None is :mod:`jax_flash.measure` itself.

    Raises:
        TuningError: the default configuration could not be measured.
    """
    choice = posed(name, spec)
    problem, default = choice.problem, choice.default
    package = backends.load(name).tune  # type: ignore[union-attr]
    deadline = time.monotonic() + seconds
    measured: dict[Any, Measurement] = {}

    with measure.Worker(name, spec, timeout_s=timeout_s, command=worker or measure.WORKER) as child:

        def measure_one(config: Any) -> Measurement:
            result = child.measure(config)
            text = result.failure or f"{result.time_us:9.1f} us"
            log(f"{len(measured) + 1:>4} {text}  {describe(default, config)}")
            return result

        def measure_all(configs: Iterable[Any]) -> Any:
            new = [config for config in dict.fromkeys(configs) if config not in measured]
            child.prepare(new)
            for config in new:
                if time.monotonic() < deadline:
                    measured[config] = measure_one(config)
            return min(measured, key=lambda config: measured[config].time_us)

        measured[default] = measure_one(default)
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
