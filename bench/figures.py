"""Draws the figures from result files, as PNG and SVG.

A figure whose results are missing, or lack a case that it shows, is an error that names the command
which makes them; the others are drawn all the same.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench import provenance, results
from bench.results import Run

RESULTS = provenance.ROOT / "bench/results"
FIGURES = provenance.ROOT / "bench/figures"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``python -m bench figures``."""
    parser.add_argument("names", nargs="*", help="which figures; all by default")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of result files")
    parser.add_argument("--out", type=Path, default=FIGURES, help="folder of figures")


def run(arguments: argparse.Namespace) -> int:
    """Draws; 0 if all of them could be drawn, 1 if not, 2 if none can be."""
    try:
        from bench import plots, style
    except ModuleNotFoundError as error:
        print(f"{error}; pip install jax-flash[bench] has it", file=sys.stderr)
        return 2
    if unknown := [name for name in arguments.names if name not in plots.FIGURES]:
        print(f"unknown figures {unknown}; there are {[*plots.FIGURES]}", file=sys.stderr)
        return 2
    failures = 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in arguments.names or plots.FIGURES:
        needed, welcome, draw = plots.FIGURES[name]
        try:
            runs = _read(arguments.results, needed)
            runs |= _read(arguments.results, [x for x in welcome if _path(arguments, x).exists()])
            with style.applied():
                style.save(draw(runs), arguments.out / name)
        except (FileNotFoundError, ValueError, plots.StaleError) as error:
            commands = " and ".join(map(command, needed))
            print(f"figure {name}: {error}; {commands} makes it", file=sys.stderr)
            failures += 1
            continue
        print(f"{arguments.out / name}.png and .svg")
    return min(failures, 1)


def command(name: str) -> str:
    """What makes a result file."""
    return f"python -m bench {'profile' if name == 'profile' else f'run {name}'}"


def _path(arguments: argparse.Namespace, name: str) -> Path:
    return arguments.results / f"{name}.json"


def _read(folder: Path, names: list[str] | tuple[str, ...]) -> dict[str, Run]:
    return {name: results.read(folder / f"{name}.json") for name in names}
