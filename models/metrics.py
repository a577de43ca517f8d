"""What an engine measures about itself."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

KEPT = 10_000
"""Newest latencies that percentiles are taken over."""


class Metrics:
    """Counts since the start, and latencies of the newest tokens.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.submitted = 0
        self.finished: dict[str, int] = {}
        self.generated_tokens = 0
        self.steps = 0
        self.busy_s = 0.0
        self._first_s: deque[float] = deque(maxlen=KEPT)
        self._between_s: deque[float] = deque(maxlen=KEPT)
        self._pages: deque[float] = deque(maxlen=KEPT)
        self._waste: deque[float] = deque(maxlen=KEPT)

    def token(self, now_s: float, submitted_s: float, last_s: float | None) -> None:
        """Counts a token that was read now, of a request, and the one before it."""
        self.generated_tokens += 1
        if last_s is None:
            self._first_s.append(now_s - submitted_s)
        else:
            self._between_s.append(now_s - last_s)

    def finish(self, reason: str) -> None:
        """Counts the end of a text."""
        self.finished[reason] = self.finished.get(reason, 0) + 1

    def step(self, seconds: float, occupancy: float, waste: float | None) -> None:
        """Counts a step: its time, and the shares of pages owned and of owned slots unused."""
        self.steps += 1
        self.busy_s += seconds
        self._pages.append(occupancy)
        if waste is not None:
            self._waste.append(waste)

    def snapshot(self) -> dict[str, float]:
        """All numbers by name; a latency or share that was never measured is left out."""
        numbers: dict[str, float] = {
            "requests_submitted_total": self.submitted,
            "generated_tokens_total": self.generated_tokens,
            "steps_total": self.steps,
            "busy_seconds_total": self.busy_s,
        }
        for reason, count in sorted(self.finished.items()):
            numbers[f"finished_{reason}_total"] = count
        if self.busy_s:
            numbers["tokens_per_busy_second"] = self.generated_tokens / self.busy_s
        for name, values, percentiles in (
            ("time_to_first_token_seconds", self._first_s, (50, 99)),
            ("inter_token_seconds", self._between_s, (50, 99)),
        ):
            for percentile in percentiles if values else ():
                numbers[f"{name}_p{percentile}"] = float(np.percentile(values, percentile))
        for name, shares in (("page_occupancy", self._pages), ("page_waste", self._waste)):
            if shares:
                numbers[f"{name}_mean"] = float(np.mean(shares))
        return numbers


def prometheus(numbers: dict[str, float], prefix: str = "jax_flash_") -> str:
    """The numbers in the text format that Prometheus reads."""
    return "".join(_lines(numbers.items(), prefix))


def _lines(numbers: Iterable[tuple[str, float]], prefix: str) -> Iterable[str]:
    for name, value in numbers:
        kind = "counter" if name.endswith("_total") else "gauge"
        yield f"# TYPE {prefix}{name} {kind}\n{prefix}{name} {value:.9g}\n"
