"""How the figures look: colours that differ for everybody, sizes that survive half width."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from bench.results import Meta

WIDTH = 7.0  # inches; shown at half of that, text of SMALL points is 4.5 points high
SMALL = 9.0

_PARAMETERS = {
    "font.size": 11,
    "axes.titlesize": 11,
    "axes.labelsize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "legend.frameon": False,
    "legend.fontsize": 10.5,
    "legend.handlelength": 1.6,
    "legend.columnspacing": 1.2,
    "lines.linewidth": 1.8,
    "lines.markersize": 6,
    "svg.hashsalt": "jax_flash",  # the same file for the same results
    "savefig.dpi": 200,
}

# Okabe and Ito's colours, told apart with any colour vision; markers differ as well.
BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
YELLOW, SKY, GREY, BLACK = "#E69F00", "#56B4E9", "#888888", "#000000"


@dataclasses.dataclass(frozen=True)
class Look:
    """Of one implementation: its name in legends, colour, marker and line."""

    label: str
    color: str
    marker: str
    linestyle: str = "-"

    @property
    def line(self) -> dict[str, Any]:
        """Keywords of ``Axes.plot``."""
        return dataclasses.asdict(self)


LOOKS = {
    "jax_flash.mosaic": Look("jax_flash", BLUE, "o"),
    "jax_flash.cuda page16": Look("jax_flash, pages of 16", BLUE, "o"),
    "jax_flash.cuda page64": Look("jax_flash, pages of 64", SKY, "s"),
    "jax_flash.cuda page16 unsplit": Look("jax_flash, keys not split", BLUE, "x", ":"),
    "fa3": Look("FlashAttention-3", ORANGE, "s"),
    "fa4": Look("FlashAttention-4", YELLOW, "P"),
    "tokamax": Look("Tokamax", GREEN, "^"),
    "cudnn": Look("cuDNN", PURPLE, "D"),
    "xla": Look("XLA", GREY, "v"),
    "naive": Look("naive", BLACK, "x", "--"),
    "flashinfer page16": Look("FlashInfer, pages of 16", ORANGE, "s"),
}
_OTHERS = (YELLOW, GREEN, PURPLE, GREY, SKY)


def look(impl: str, position: int = 0) -> Look:
    """Of an implementation; one that has no colour of its own gets one by its position."""
    return LOOKS.get(impl) or Look(impl, _OTHERS[position % len(_OTHERS)], "dPX*h"[position % 5])


def in_order(impls: Iterable[str]) -> list[str]:
    """Each once; those that have a colour of their own first, in the order above."""
    found = list(dict.fromkeys(impls))
    known = [impl for impl in LOOKS if impl in found]
    return known + [impl for impl in found if impl not in known]


def applied() -> AbstractContextManager[None]:
    """In this context figures are drawn and written."""
    return mpl.rc_context(_PARAMETERS)


def subplots(rows: int, columns: int, height: float, **options: Any) -> tuple[Figure, Any]:
    """A figure and its axes, always as an array ``[rows, columns]``."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def finish(
    figure: Figure,
    title: str,
    metas: Sequence[Meta],
    handles: Sequence[Any] = (),
    columns: int | None = None,
    names: Sequence[str] = (),
) -> None:
    """Title, a legend above all axes, and a footer that says where the numbers come from."""
    figure.legend(
        handles=handles,
        title=title,
        title_fontproperties={"weight": "bold", "size": 12},
        alignment="left",
        loc="outside upper left",
        ncols=columns or (len(handles) if len(handles) < 5 else 3),
        borderpad=0.1,
    )
    figure.supxlabel(
        "\n".join(footers(metas, names)), fontsize=SMALL, color="#444444", x=0.01, ha="left"
    )


def footers(metas: Sequence[Meta], names: Sequence[str] = ()) -> list[str]:
    """A line for each run, the same run once; different ones have their names, if there are any."""
    lines = [
        f"{meta.device}, JAX {meta.jax}, CUDA {meta.cuda}, commit {meta.commit}, {meta.date[:10]}"
        for meta in metas
    ]
    if names and len(set(lines)) > 1:
        return [f"{name}: {line}" for name, line in zip(names, lines, strict=True)]
    return list(dict.fromkeys(lines))


def save(figure: Figure, stem: Any) -> None:
    """Writes ``stem.png`` and ``stem.svg``; the footer is in both as a description too."""
    about = {"Description": figure.get_supxlabel()}
    figure.savefig(f"{stem}.png", metadata={"Software": None, **about})
    figure.savefig(f"{stem}.svg", metadata={"Date": None, "Creator": None, **about})
