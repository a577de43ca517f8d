"""The one shape of result files: written, validated when read, and printed as a table.

``{"meta": {...}, "rows": [...]}`` as :class:`Meta` and :class:`Row` say. One file holds one run:
ours and every peer, in one process.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import types
import typing
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

OURS = "jax_flash.mosaic"
_EXPLANATION_LENGTH = 300
# The note of a row that must not be believed.
INACCURATE = "less accurate than twice plain attention in low precision"
WRONG = "(!)"  # what tables show of it: a wrong result has no speed


@dataclasses.dataclass(frozen=True)
class Meta:
    """Where, when and with what a file was measured.

    Attributes:
        device: such as "NVIDIA H200".
        driver: of NVIDIA.
        jax: version of JAX.
        cuda: version of the CUDA runtime.
        commit: of this repository; ends in "-dirty" if files differed from it.
        date: UTC, ISO 8601.
        matmul_tflops: the ceiling of matrix products in the same run, bf16.
        read_gbps: the ceiling of reads from memory in the same run.
        note: anything else that a reader must know.
        absent: the peers that were asked for and were not there, and why.
    """

    device: str
    driver: str
    jax: str
    cuda: str
    commit: str
    date: str
    matmul_tflops: float | None
    read_gbps: float | None
    note: str | None = None
    absent: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Row:
    """One timing.

    Attributes:
        case: what was computed (:attr:`bench.cases.Case.name`).
        impl: who computed it, such as "jax_flash.mosaic" or "fa3".
        mode: which part: "fwd", "bwd", "fwd+bwd", each also with " sustained"; "compile",
            "dispatch".
        time_us: of one call; where there is neither it nor ``amount``, ``note`` says why.
        tflops: floating-point operations of the matrix products by time.
        gbps: bytes that must be moved by time, where that is the limit.
        error: relative to an fp32 computation (:mod:`bench.accuracy`).
        note: anything else.
        amount: a figure that is no time, such as peak memory; in ``unit``.
        unit: of ``amount``: "bytes", "tokens/s", ...
    """

    case: str
    impl: str
    mode: str
    time_us: float | None
    tflops: float | None = None
    gbps: float | None = None
    error: float | None = None
    note: str | None = None
    amount: float | None = None
    unit: str | None = None

    @property
    def has_figure(self) -> bool:
        """Whether anything was measured."""
        return self.time_us is not None or self.amount is not None

    @property
    def is_believed(self) -> bool:
        """Whether its figures may be shown and compared."""
        return self.note != INACCURATE

    @property
    def figure(self) -> str:
        """What a table shows: the amount, TFLOP/s, or the time where there is neither."""
        if not self.is_believed:
            return WRONG
        if self.amount is not None:
            if self.unit == "bytes":
                return f"{self.amount / 2**30:.3f} GiB"
            return f"{self.amount:.4g} {self.unit}"
        if self.tflops is not None:
            return f"{self.tflops:.{0 if self.tflops >= 10 else 1}f}"
        return "–" if self.time_us is None else f"{self.time_us:.1f} µs"


@dataclasses.dataclass(frozen=True)
class Run:
    """The contents of one result file."""

    meta: Meta
    rows: tuple[Row, ...]

    @property
    def modes(self) -> tuple[str, ...]:
        """Those that rows have, in the file's order."""
        return tuple(dict.fromkeys(row.mode for row in self.rows))

    def times(self, mode: str) -> dict[str, dict[str, float]]:
        """{case: {impl: time_us}} of one mode, in the file's order, of all that can be compared.

        What was not timed and what must not be believed are left out.
        """
        table: dict[str, dict[str, float]] = {}
        for row in self.rows:
            if row.mode == mode and row.time_us is not None and row.is_believed:
                table.setdefault(row.case, {})[row.impl] = row.time_us
        return table


def failure(case: str, impl: str, mode: str, error: Exception) -> Row:
    """The row of what could not be measured."""
    text = f"{type(error).__name__}: {error}".replace("\n", " ")[:_EXPLANATION_LENGTH]
    return Row(case, impl, mode, None, note=text)


def write(path: Path | str, run: Run) -> None:
    """Writes a file whole or not at all; what it holds can be read again."""
    content = dataclasses.asdict(run)
    _run_of(content, str(path))
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    scratch.write_text(json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    scratch.replace(path)


def read(path: Path | str) -> Run:
    """Reads a file.

    Raises:
        ValueError: the file is not of the one shape; the message says where.
    """
    try:
        content = json.loads(Path(path).read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    return _run_of(content, str(path))


def _run_of(content: Any, where: str) -> Run:
    if not isinstance(content, dict) or content.keys() != {"meta", "rows"}:
        raise ValueError(f"{where}: must be an object with the keys meta and rows only")
    if not isinstance(content["rows"], list | tuple):
        raise ValueError(f"{where}: rows must be a list")
    meta = parse(Meta, content["meta"], f"{where}: meta")
    rows = tuple(
        parse(Row, row, f"{where}: rows[{index}]") for index, row in enumerate(content["rows"])
    )
    keys = [(row.case, row.impl, row.mode) for row in rows]
    if len(set(keys)) != len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"{where}: rows holds {twice} twice; one file holds one run")
    for row in rows:
        if (row.amount is None) != (row.unit is None):
            raise ValueError(f"{where}: {row} must have amount and unit, or neither")
        if not row.has_figure and row.note is None:
            raise ValueError(f"{where}: {row} has no time_us or amount, and no note that says why")
    return Run(meta, rows)


def parse[T](kind: type[T], content: Any, where: str) -> T:
    """An instance of a dataclass from an object of JSON.

    Raises:
        ValueError: a key missing, unknown or of the wrong type; a number that is not finite or,
            but for an error, not positive.
    """
    if not isinstance(content, dict):
        raise ValueError(f"{where} must be an object; got {content!r}")
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if unknown := content.keys() - fields.keys():
        raise ValueError(f"{where} has unknown keys {sorted(unknown)}; known are {list(fields)}")
    hints = typing.get_type_hints(kind)
    for name, field in fields.items():
        if name not in content:
            if field.default is dataclasses.MISSING and field.default_factory is (
                dataclasses.MISSING
            ):
                raise ValueError(f"{where} has no key {name!r}")
            continue
        value = content[name]
        if not _is_a(value, hints[name]):
            raise ValueError(f"{where}: {name} must be {field.type}; got {value!r}")
        if isinstance(value, float) and not (math.isfinite(value) and value >= 0.0):
            raise ValueError(f"{where}: {name} must be finite and not negative; got {value!r}")
    return kind(**content)


def _is_a(value: Any, hint: Any) -> bool:
    if isinstance(hint, types.UnionType):
        return any(_is_a(value, choice) for choice in hint.__args__)
    if hint is float:  # JSON writes 1.0 and 1 alike; a bool is no number
        return isinstance(value, float | int) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if typing.get_origin(hint) is dict:
        of_key, of_value = typing.get_args(hint)
        return isinstance(value, dict) and all(
            _is_a(x, of_key) and _is_a(y, of_value) for x, y in value.items()
        )
    if typing.get_origin(hint) is list:
        (of_item,) = typing.get_args(hint)
        return isinstance(value, list) and all(_is_a(x, of_item) for x in value)
    return isinstance(value, hint)


def geometric_mean(ratios: Sequence[float]) -> float:
    """Of positive numbers, at least one."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def table(
    run: Run, mode: str, *, ours: str = OURS, groups: dict[str, Collection[str]] | None = None
) -> str:
    """A Markdown table of one mode: a row for each case, a column for each implementation.

    A cell has :attr:`Row.figure` and, for a peer in :meth:`Run.times`, how many times as fast ours
    is.
    The rows at the end are geometric means of those ratios and the worst ones, over all cases and
    over each of ``groups`` ({name: cases}); the column "best peer" compares with the fastest of
    each case.
    """
    times = run.times(mode)
    shown = [row for row in run.rows if row.mode == mode and row.has_figure]
    figures = {(row.case, row.impl): row.figure for row in shown}
    cases = list(dict.fromkeys(row.case for row in shown))
    impls = list(dict.fromkeys(row.impl for row in shown))
    peers = [impl for impl in impls if impl != ours]
    columns = ([ours] if ours in impls else []) + peers

    def cell(case: str, impl: str) -> str:
        text = figures.get((case, impl), "–")
        row = times.get(case, {})
        if impl == ours or impl not in row or ours not in row:
            return text
        return f"{text} ({row[impl] / row[ours]:.2f}×)"

    def ratio(case: str, peer: str | None) -> float | None:
        row = times.get(case, {})
        others = [t for impl, t in row.items() if impl != ours and peer in (None, impl)]
        return min(others) / row[ours] if ours in row and others else None

    lines = [["case", *columns, "best peer"]]
    for case in cases:
        best = ratio(case, None)
        cells = [cell(case, impl) for impl in columns]
        lines.append([case, *cells, "–" if best is None else f"{best:.2f}×"])
    for group, members in {"all cases": tuple(cases), **(groups or {})}.items():
        ratios = {
            peer: [x for case in cases if case in members and (x := ratio(case, peer)) is not None]
            for peer in (*peers, None)
        }
        if len(max(ratios.values(), key=len)) < 2:
            continue
        for name, summary in (("geometric mean", geometric_mean), ("worst", min)):
            cells = [f"{summary(x):.3f}×" if x else "–" for x in ratios.values()]
            blank = [""] if ours in columns else []
            lines.append([f"{name}, {group}", *blank, *cells])
    return markdown(lines)


def markdown(lines: list[list[str]]) -> str:
    """A table; the first line is its head."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    rows = ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([rows[0], rule, *rows[1:]])
