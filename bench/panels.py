"""What figures are made of: the numbers of a run, and lines and bars of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from bench.results import Run
from bench.shakespeare import PUBLISHED_LOSS, Curve
from bench.style import SMALL, look

Runs = Mapping[str, Run]


class StaleError(Exception):
    """A result file does not have what a figure needs; the message says what."""


def numbers(run: Run, mode: str, attribute: str) -> dict[str, dict[str, float]]:
    """{impl: {case: number}} of one mode, but for what must not be believed."""
    found: dict[str, dict[str, float]] = {}
    for row in run.rows:
        value = getattr(row, attribute)
        if row.mode == mode and value is not None and row.is_believed:
            found.setdefault(row.impl, {})[row.case] = value
    return found


def need(found: Mapping[str, Mapping[str, float]], impls: Iterable[str], case: str) -> None:
    """Raises StaleError unless all of these were measured."""
    for impl in impls:
        if case not in found.get(impl, {}):
            raise StaleError(f"it has no figure of {impl!r} for {case!r}")


def _length(tokens: float) -> str:
    """512, 4k, 128k."""
    return f"{tokens / 1024:.0f}k" if tokens >= 1024 else f"{tokens:.0f}"


def plot(
    axes: Any, points: Iterable[tuple[float, float | None]], scale: float = 1.0, **options: Any
) -> list[Any]:
    """A line through the points that have a figure, times ``scale``."""
    seen = [(x, y * scale) for x, y in points if y is not None]
    return axes.plot([x for x, _ in seen], [y for _, y in seen], **options)


def losses(axes: Any, looks: Mapping[Curve, tuple[str, str]], of: str) -> None:
    """Validation loss against "seconds" or "step", a ring around the lowest one.

    What came before the first steps is far above the rest, and not shown.
    """
    for curve, (color, marker) in looks.items():
        x, y = zip(*((getattr(point, of), point.loss) for point in curve.points), strict=True)
        axes.plot(x, y, color=color, marker=marker, ms=4, lw=1.6)
        ring = {"marker": "o", "mfc": "none", "mec": color, "mew": 1.8, "ms": 11, "zorder": 4}
        axes.plot(getattr(curve.best, of), curve.best.loss, ls="", **ring)
    every = [point for curve in looks for point in curve.points]
    later = [point.loss for point in every if point.step > 0] or [point.loss for point in every]
    low, high = min(*later, PUBLISHED_LOSS), max(*later, PUBLISHED_LOSS)
    axes.set(xlim=(0, None), ylim=(low - 0.08 * (high - low), high + 0.08 * (high - low)))


def best_of(curve: Curve) -> str:
    """A run in words."""
    best = curve.best
    return f"{curve.name}: lowest {best.loss:.4f} after {best.seconds:.1f} s, step {best.step}"


def digits(value: float) -> str:
    """Three of them, as in 2.80 or 447; a dash for what is not there."""
    return f"{value:#.3g}".rstrip(".") if value else "–"


def bars(
    axes: Any,
    bars: Mapping[str, tuple[float, str]],
    texts: Iterable[str],
    room: float,
    font_size: float = SMALL + 1,
) -> None:
    """Horizontal bars ``{label: (length, colour)}`` with a text at the end of each.

    Args:
        axes: where.
        bars: from the top, if somebody inverts the vertical axis.
        texts: one for each bar.
        room: for the texts, as a part of the longest bar.
        font_size: of the texts, in points.
    """
    lengths, colors = zip(*bars.values(), strict=True)
    drawn = axes.barh(list(bars), lengths, color=colors)
    behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # hides lines of the grid
    axes.bar_label(drawn, list(texts), padding=3, fontsize=font_size, bbox=behind)
    axes.set_xlim(0, (1 + room) * (max(lengths) or 1.0))
    axes.xaxis.set_major_locator(MaxNLocator(4, prune="upper"))
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)


def handles(impls: Iterable[str]) -> list[Line2D]:
    """Of a legend: a line for each implementation."""
    return [Line2D([], [], **look(impl, i).line) for i, impl in enumerate(impls)]


def lengths_axis(axes: Any, lengths: Sequence[int]) -> None:
    """A logarithmic axis of tokens."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _length(x)))
    axes.set_xticks(lengths[:: 1 + len(lengths) // 6])
    axes.xaxis.set_minor_locator(NullLocator())
