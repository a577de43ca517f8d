"""How a run tells of itself: the progress line, the JSONL log and the loss curve."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

BAR_WIDTH = 24
PLAIN_INTERVAL_S = 10.0


class Progress:
    """One line that rewrites itself on a terminal; elsewhere a plain line every few seconds."""

    def __init__(self, total: int, tokens_per_step: int, stream: TextIO | None = None) -> None:
        self.total = total
        self.tokens_per_step = tokens_per_step
        self.stream = sys.stdout if stream is None else stream
        self.on_terminal = self.stream.isatty()
        self.last_plain = -float("inf")
        self.width = 0

    def update(self, step: int, loss: float, tokens_per_second: float | None) -> None:
        """Shows the training loss after `step` steps, and the speed once it is known."""
        line = f"step {step:>{len(str(self.total))}}/{self.total}  loss {loss:.4f}"
        if tokens_per_second:
            eta = (self.total - step) * self.tokens_per_step / tokens_per_second
            line += f"  {tokens_per_second:>9,.0f} tokens/s  ETA {_clock(eta)}"
        now = time.monotonic()
        if self.on_terminal:
            full = BAR_WIDTH * step // self.total
            line = f"[{'#' * full}{'.' * (BAR_WIDTH - full)}] {line}"
            self.stream.write("\r" + line.ljust(self.width))
            self.width = len(line)
            self.stream.flush()
        elif now - self.last_plain >= PLAIN_INTERVAL_S or step == self.total:
            self.last_plain = now
            self.say(line)

    def say(self, line: str) -> None:
        """Prints a line of its own, above the progress line."""
        if self.on_terminal and self.width:
            self.stream.write("\r" + " " * self.width + "\r")
            self.width = 0
        self.stream.write(line + "\n")
        self.stream.flush()


class Log:
    """A JSONL file, one object per line, each with the step that it was written at."""

    def __init__(self, path: Path, resume_at: int | None = None) -> None:
        """Starts a log, or goes on with one, forgetting what was written after `resume_at`."""
        self.path = path
        rows = [] if resume_at is None else [row for row in self.rows() if row["step"] <= resume_at]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def write(self, step: int, **fields: Any) -> None:
        """Appends one row."""
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **fields}) + "\n")

    def rows(self) -> list[dict[str, Any]]:
        """All rows; a last line that was cut off in the middle is left out."""
        if not self.path.exists():
            return []
        rows = []
        for line in self.path.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                break
        return rows


def draw_losses(rows: Iterable[dict[str, Any]], path: Path, title: str) -> bool:
    """Draws training and validation loss over steps as a PNG; False if there is no Matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7, 4.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    rows = list(rows)
    for key, label, style in (
        ("train_loss", "training", {"linewidth": 0.8, "alpha": 0.7}),
        ("val_loss", "validation", {"marker": "o", "markersize": 4}),
    ):
        points = [(row["step"], row[key]) for row in rows if key in row]
        if points:
            steps, losses = zip(*points, strict=True)
            axes.plot(steps, losses, label=f"{label} (last {losses[-1]:.3f})", **style)
    axes.set_xlabel("optimiser step")
    axes.set_ylabel("cross entropy (nats per character)")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
    return True


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
