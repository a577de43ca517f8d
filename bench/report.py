"""Puts measured numbers into pages: fills the placeholders of a template from result files.

``python -m bench report`` prints docs/technical_report.md with its numbers; ``--readme`` writes the
block of README.md that holds figures, from bench/readme.md.jinja. A page is a Jinja template in
which

    {% call(forward) measured("forward") %} ... {% endcall %}

is shown if bench/results/forward.json is there; if not, the page says which command makes it. Here
``forward("fwd")`` is one mode of the file (:class:`View`) and ``forward.meta`` its origin. A case,
implementation or mode that the file does not have is an error: no number is ever typed by hand.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from bench import cases, figures, provenance, results, shakespeare
from bench.results import OURS, Row, Run
from bench.run import MODULES

ROOT = provenance.ROOT
PAGE = ROOT / "docs/technical_report.md"
README = ROOT / "README.md"
README_TEMPLATE = ROOT / "bench/readme.md.jinja"
README_BEGIN, README_END = "<!-- python -m bench report --readme -->\n", "<!-- end of results -->\n"
GPU_RECORD = ROOT / "tests/gpu_record.json"
KNOWN = {*cases.SUITES, *MODULES, "profile"}  # the result files that a command makes
_OUT_OF_MEMORY = "out of memory"
_DTYPE = " bf16"  # of nearly all cases: left out of tables


class ReportError(Exception):
    """A page asks for what no result file has; the message says what."""


@dataclasses.dataclass(frozen=True)
class View:
    """One mode of a result file.

    Attributes:
        name: of the file.
        mode: such as "fwd".
        run: the file's contents.
    """

    name: str
    mode: str
    run: Run

    @functools.cached_property
    def rows(self) -> dict[tuple[str, str], Row]:
        """By case and implementation, in the file's order."""
        return {(row.case, row.impl): row for row in self.run.rows if row.mode == self.mode}

    @property
    def cases(self) -> tuple[str, ...]:
        """In the file's order."""
        return tuple(dict.fromkeys(case for case, _ in self.rows))

    @property
    def impls(self) -> tuple[str, ...]:
        """Ours first, then in the file's order."""
        names = dict.fromkeys(impl for _, impl in self.rows)
        return tuple(sorted(names, key=lambda impl: impl != OURS))

    @property
    def inaccurate(self) -> tuple[tuple[str, str], ...]:
        """Case and implementation of each result that must not be believed."""
        return tuple(key for key, row in self.rows.items() if not row.is_believed)

    def has(self, cases: Collection[str]) -> bool:
        """Whether any of these cases is there."""
        return not set(cases).isdisjoint(self.cases)

    def get(self, of: str, case: str, impl: str = OURS) -> float | None:
        """Like :meth:`value`; None if there is no such number."""
        row = self.rows.get((case, impl))
        return getattr(row, of) if row is not None and row.is_believed else None

    def value(self, of: str, case: str, impl: str = OURS) -> float:
        """A number of one row.

        Args:
            of: "time_us", "tflops", "gbps", "error" or "amount".
            case: its name.
            impl: who was measured.

        Raises:
            ReportError: there is no such row, or it has no such number.
        """
        if (value := self.get(of, case, impl)) is not None:
            return value
        if (case, impl) not in self.rows:
            raise ReportError(f"{self._where} has no row of {impl!r} for {case!r}")
        note = self.rows[case, impl].note
        raise ReportError(f"{self._where}: {impl!r} for {case!r} has no {of}: {note}")

    time_us = functools.partialmethod(value, "time_us")
    tflops = functools.partialmethod(value, "tflops")
    gbps = functools.partialmethod(value, "gbps")
    error = functools.partialmethod(value, "error")
    amount = functools.partialmethod(value, "amount")

    def share(self, case: str, impl: str = OURS) -> float:
        """TFLOP/s as a percentage of the matrix product of the same run."""
        if self.run.meta.matmul_tflops is None:
            raise ReportError(f"{self._where} has no ceiling")
        return 100.0 * self.tflops(case, impl) / self.run.meta.matmul_tflops

    def ratios(
        self, peer: str, ours: str = OURS, cases: Collection[str] | None = None
    ) -> dict[str, float]:
        """How many times as fast ours is, by case; only cases in which both were timed.

        Args:
            peer: an implementation, or "best peer" for the fastest of each case.
            ours: what is compared with it.
            cases: names of those to take; all by default.
        """
        found = {}
        for case, taken in self.run.times(self.mode).items():
            others = [taken[x] for x in taken if x != ours and peer in (x, "best peer")]
            if ours in taken and others and (cases is None or case in cases):
                found[case] = min(others) / taken[ours]
        return found

    def mean(self, *args: Any, **options: Any) -> float:
        """The geometric mean of :meth:`ratios`."""
        return self._summary(results.geometric_mean, *args, **options)

    def worst(self, *args: Any, **options: Any) -> float:
        """The smallest of :meth:`ratios`."""
        return self._summary(min, *args, **options)

    def best(self, *args: Any, **options: Any) -> float:
        """The largest of :meth:`ratios`."""
        return self._summary(max, *args, **options)

    def _summary(
        self, summarise: Callable[[Any], float], peer: str, ours: str = OURS, **options: Any
    ) -> float:
        if ratios := [*self.ratios(peer, ours, **options).values()]:
            return summarise(ratios)
        raise ReportError(f"{self._where} has no case of both {ours!r} and {peer!r}")

    def table(
        self,
        of: str | None = None,
        *,
        digits: int = 0,
        scale: float = 1.0,
        cases: Collection[str] | None = None,
        impls: Collection[str] | None = None,
        by: str = "case",
        summary: bool = False,
    ) -> str:
        """A Markdown table.

        Args:
            of: which number (see :meth:`value`); None is what result files call the row's figure.
            digits: after the point.
            scale: what numbers are multiplied by.
            cases: names; all by default.
            impls: all by default.
            by: what has a row of its own, "case" or "impl" (these in the file's order).
            summary: whether the last rows have the geometric mean and the worst of how many times
                as fast ours is.
        """
        columns = [x for x in self.impls if impls is None or x in impls]
        measured = {case for case, impl in self.rows if impl in columns}
        chosen = [x for x in self.cases if x in measured and (cases is None or x in cases)]
        if not chosen or not columns:
            raise ReportError(f"{self._where} has nothing of {cases} and {impls}")

        def cell(case: str, impl: str) -> str:
            row = self.rows.get((case, impl))
            if row is None:
                return ""
            if not row.is_believed and of != "error":
                return results.WRONG
            value = None if of is None else getattr(row, of)
            if value is not None:
                text = f"{value:.1e}" if of == "error" else f"{value * scale:.{digits}f}"
            elif of is None and row.has_figure:
                text = row.figure
            else:
                return _OUT_OF_MEMORY if row.note == _OUT_OF_MEMORY else "–"
            return text if row.is_believed else f"{text} {results.WRONG}"

        if by == "impl":
            lines = [["", *map(_short, chosen)]]
            in_order = [impl for impl in dict.fromkeys(x for _, x in self.rows) if impl in columns]
            lines += [[impl, *(cell(case, impl) for case in chosen)] for impl in in_order]
            return _markdown(lines)
        lines = [["", *columns]]
        lines += [[_short(case), *(cell(case, impl) for impl in columns)] for case in chosen]
        if summary:
            ratios = [[*self.ratios(x, columns[0], chosen).values()] for x in columns[1:]]
            for title, summarise in (("geometric mean", results.geometric_mean), ("worst", min)):
                cells = [f"{summarise(x):.3f} ×" if x else "–" for x in ratios]
                lines.append([f"ours against it: {title}", "", *cells])
        return _markdown(lines)

    @property
    def _where(self) -> str:
        return f"bench/results/{self.name}.json, mode {self.mode!r},"


@dataclasses.dataclass(frozen=True)
class Results:
    """One result file, as a page sees it."""

    name: str
    run: Run

    @property
    def meta(self) -> results.Meta:
        """Where, when and with what it was measured."""
        return self.run.meta

    @property
    def origin(self) -> str:
        """The same in words, and how it was measured."""
        meta = self.meta
        text = (
            f"{meta.device}, driver {meta.driver}, jax {meta.jax}, CUDA {meta.cuda}, commit "
            f"{meta.commit}, {meta.date}"
        )
        if meta.matmul_tflops is not None and meta.read_gbps is not None:
            text += f"; matrix product {meta.matmul_tflops:.0f} TFLOP/s, reads "
            text += f"{meta.read_gbps:.0f} GB/s"
        return f"{text} (`bench/results/{self.name}.json`). {meta.note or ''}".strip()

    @property
    def modes(self) -> tuple[str, ...]:
        """Those that rows have."""
        return self.run.modes

    @property
    def curves(self) -> list[shakespeare.Curve]:
        """Of training runs."""
        return shakespeare.curves(self.run)

    @property
    def counters(self) -> str:
        """A table of hardware counters: a row for each kernel, a column for each mode."""
        units = {row.mode: row.unit or "µs" for row in self.run.rows if row.has_figure}
        cells = {
            (row.impl, row.mode): row.time_us if row.amount is None else row.amount
            for row in self.run.rows
        }
        lines = [["", *(f"{mode}, {unit}" for mode, unit in units.items())]]
        for impl in dict.fromkeys(row.impl for row in self.run.rows):
            values = [cells.get((impl, mode)) for mode in units]
            lines.append(
                [impl.removeprefix("ladder_"), *("–" if x is None else f"{x:.4g}" for x in values)]
            )
        return _markdown(lines)

    def when(self, *modes: str, caller: Callable[..., str]) -> str:
        """A block about modes, as :func:`_measured` has for files; for runs that were cut short."""
        if missing := [mode for mode in modes if mode not in self.modes]:
            return f"> **Not in this run:** {' and '.join(missing)}.\n"
        return caller(*map(self, modes))

    def shorter(self, *modes: str) -> View:
        """Of each case and implementation the row of that mode which took the least time."""
        taken: dict[tuple[str, str], Row] = {}
        for mode in modes:
            for key, row in self(mode).rows.items():
                if key not in taken or (row.time_us or math.inf) < (taken[key].time_us or math.inf):
                    taken[key] = row
        title = f"the shorter of {' and '.join(modes)}"
        rows = tuple(dataclasses.replace(row, mode=title) for row in taken.values())
        return View(self.name, title, Run(self.meta, rows))

    def __call__(self, mode: str) -> View:
        """One mode.

        Raises:
            ReportError: no row has it.
        """
        if mode not in self.modes:
            raise ReportError(
                f"bench/results/{self.name}.json has no mode {mode!r}, only {self.modes}"
            )
        return View(self.name, mode, self.run)


def _markdown(lines: list[list[str]]) -> str:
    """A table whose numbers stand to the right.

    Pandoc takes the widths of columns from the rule: words of the head may be broken, cells not.
    """
    words = [[max(cell.split(), key=len, default="") for cell in lines[0]], *lines[1:]]
    widths = [max(map(len, column)) + 1 for column in zip(*words, strict=True)]
    first, *others = widths
    rule = [f":{'-' * first}", *(f"{'-' * width}:" for width in others)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], rule, *lines[1:]))


def _fixed(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _scientific(value: float | None) -> str:
    return "–" if value is None else f"{value:.1e}"


def _short(case: str) -> str:
    return case.replace(_DTYPE, "")


def _containing(names: Collection[str], part: str) -> list[str]:
    return [name for name in names if part in name]


def fill(text: str, folder: Path = figures.RESULTS) -> str:
    """The page with its numbers.

    Args:
        text: a Jinja template in Markdown.
        folder: of result files.

    Raises:
        ReportError: an unknown case, implementation, mode or file name.
        jinja2.TemplateError: the template is wrong, or names something that is not there.
    """
    import jinja2

    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, keep_trailing_newline=True, trim_blocks=True,
        lstrip_blocks=True, autoescape=False,
    )  # fmt: skip
    environment.filters |= {
        "fixed": _fixed, "scientific": _scientific, "short": _short, "containing": _containing
    }  # fmt: skip
    environment.globals |= {
        "measured": functools.partial(_measured, folder),
        "figure": _figure,
        "grid": [case.name for case in cases.GRID],
        "others": [case.name for case in cases.OTHERS],
        "published_loss": shakespeare.PUBLISHED_LOSS,
        "gpu": json.loads(GPU_RECORD.read_text()),
    }
    return environment.from_string(text).render()


def _measured(
    folder: Path, *names: str, caller: Callable[..., str], otherwise: str | None = None
) -> str:
    """The block if all files are there; else ``otherwise``, or what is missing and who makes it."""
    paths = {name: folder / f"{name}.json" for name in names}
    if missing := [name for name in names if not paths[name].exists()]:
        if not KNOWN.issuperset(missing):
            raise ReportError(f"no command makes all of {missing}; there are {sorted(KNOWN)}")
        if otherwise is not None:
            return otherwise
        commands = " and ".join(f"`{figures.command(name)}`" for name in missing)
        return f"> **Not measured yet.** {commands} makes the numbers of this part.\n"
    return caller(*(Results(name, results.read(path)) for name, path in paths.items()))


def _figure(name: str, caption: str) -> str:
    """An image, or which command draws it."""
    path = figures.FIGURES / f"{name}.png"
    if not path.exists():
        return f"> **Not drawn yet.** `python -m bench figures {name}` makes this figure.\n"
    return f"![{caption}](../{path.relative_to(ROOT)})\n"


def readme_block() -> str:
    """What belongs between the marks of README.md."""
    return fill(README_TEMPLATE.read_text())


def with_block(readme: str, block: str) -> str:
    """README.md with another block."""
    before, begin, rest = readme.partition(README_BEGIN)
    _, end, after = rest.partition(README_END)
    if not begin or not end:
        raise ReportError(f"README.md must have the lines {README_BEGIN!r} and {README_END!r}")
    return before + begin + block + end + after


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``python -m bench report``."""
    parser.add_argument("--readme", action="store_true", help="write README.md's block of results")


def run(arguments: argparse.Namespace) -> int:
    """Prints the report, or writes README.md; 2 if a number is not there."""
    try:
        if arguments.readme:
            README.write_text(with_block(README.read_text(), readme_block()))
        else:
            print(fill(PAGE.read_text()))
    except (ReportError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0
