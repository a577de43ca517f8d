"""Trains MiniGPT on Shakespeare's characters and writes down its curve.

``python -m models.train --preset shakespeare-char`` runs as anybody would run it, in a process of
its own and from nothing compiled: as it is (the layout of GPT-2, the settings of nanoGPT), with the
layout of today, and as it is but with a schedule of 1000 steps. The losses come from the run's own
log.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import isolated, results
from bench.provenance import ROOT
from bench.results import OURS, Row
from models import data

NOTE = (
    "python -m models.train --preset shakespeare-char in a process of its own, no compilation "
    "cache, its clock from the process's start: imports, compilation, validations and checkpoints "
    "are in it. validation: the loss on 40 batches of 64 windows of 256 characters, evenly spaced "
    "over the last tenth of the text; training: the mean of the 10 steps before, with dropout. "
    "step: of the compiled program, its start and the validations left out. command: all of it, "
    "with a text written at the end."
)
ENVIRONMENT = isolated.PARENT_ENVIRONMENT
PRESET = "shakespeare-char"
PUBLISHED_LOSS = 1.4697  # validation loss of nanoGPT (Karpathy, 2022) for this model and text
RUNS: dict[str, tuple[str, ...]] = {
    f"MiniGPT {PRESET}, GPT-2 style": (),
    f"MiniGPT {PRESET}, modern options": (
        *("--norm", "rmsnorm", "--mlp", "swiglu", "--position", "rope"),
        *("--dropout-rate", "0.3", "--weight-decay", "2.0"),
    ),
    f"MiniGPT {PRESET}, GPT-2 style in 1000 steps": ("--steps", "1000"),
}
VALIDATION, TRAINING = "validation", "training"  # modes
_UNIT = "nats a character"
_IMPLEMENTATION = OURS.partition(".")[2]
_QUICK = ("--stop-at", "250")
_STEP = ", step "  # between the run and the step in a case's name
_TIMEOUT_S = 100.0
_LENGTH_OF_END = 250  # of what a run that failed printed


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """All runs, one after another; of each the losses, the speed and the whole command."""
    wanted = arguments.cases or [""]
    for case, options in RUNS.items():
        if any(part in case for part in wanted):
            yield from _run(case, (*options, *(_QUICK if arguments.quick else ())))


def _run(case: str, options: tuple[str, ...]) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        began = time.time()
        try:
            text = _text()
            began = time.time()
            _train(out, ("--data", str(text), *options))
        except (OSError, ValueError, subprocess.SubprocessError, isolated.DiedError) as error:
            end = results.failure(case, OURS, "command", error)
        else:
            end = Row(case, OURS, "command", round((time.time() - began) * 1e6, 1))
        log = out / "log.jsonl"
        if log.exists():  # whatever happened later
            yield from rows_of(case, log, began)
    yield end


def _text() -> Path:
    """Where the text is; if it must be downloaded, that is before the clock runs.

    Raises:
        ValueError: only another text can be had.
        OSError: the file that was named cannot be read.
    """
    text = data.load_text()
    if text.name != data.NAME:
        raise ValueError(
            f"the text is {text.source}, not {data.NAME}, and losses on it cannot be compared; "
            f"{data.ENVIRONMENT_VARIABLE}=PATH names a file of it"
        )
    return Path(text.source).resolve()


def _train(out: Path, options: tuple[str, ...]) -> None:
    """Runs the command to its end."""
    here = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "models.train", "--preset", PRESET, "--out", str(out)),
            *("--implementation", _IMPLEMENTATION, *options),
        ],
        cwd=ROOT,
        env={**here, "JAX_ENABLE_COMPILATION_CACHE": "false"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_TIMEOUT_S,
    )
    if done.returncode != 0:
        end = done.stdout[-_LENGTH_OF_END:]
        raise isolated.DiedError(f"it ended with status {done.returncode}: {end}")


def rows_of(case: str, log: Path, began: float) -> Iterator[Row]:
    """What a run's log says.

    Args:
        case: the run's name.
        log: its log.jsonl, as :class:`models.report.Log` writes it.
        began: when the process was started, in seconds as ``time.time`` counts.
    """
    rows: list[dict[str, Any]] = [json.loads(line) for line in log.read_text().splitlines()]
    if not rows:  # it ended before it began
        return
    # The log counts from the import of models; when that was, the time of its last row tells.
    late_s = log.stat().st_mtime - rows[-1]["elapsed_s"] - began
    settings = rows[0]["run"]["settings"]
    training = speed = None
    for row in rows:
        training, speed = row.get("train_loss", training), row.get("tokens_per_second", speed)
        if "val_loss" not in row:
            continue
        at = f"{case}{_STEP}{row['step']}"
        time_us = round((row["elapsed_s"] + late_s) * 1e6, -4)  # the log counts hundredths
        for mode, loss in ((VALIDATION, row["val_loss"]), (TRAINING, training)):
            if loss is not None:
                yield Row(at, OURS, mode, time_us, amount=round(loss, 5), unit=_UNIT)
    if speed:
        time_us = round(settings["batch_size"] * settings["context_length"] / speed * 1e6, 1)
        note = f"{rows[0]['run']['parameters']:,} parameters"
        yield Row(case, OURS, "step", time_us, note=note, amount=float(speed), unit="tokens/s")


@dataclasses.dataclass(frozen=True)
class Point:
    """One validation: after how many steps and seconds, its loss, and that of training then."""

    step: int
    seconds: float
    loss: float
    training_loss: float | None


@dataclasses.dataclass(frozen=True)
class Curve:
    """A run's validations, in order.

    Attributes:
        name: of the run, such as "GPT-2 style".
        points: at least one.
        steps_per_second: of the compiled program; None if the run ended before it was known.
    """

    name: str
    points: tuple[Point, ...]
    steps_per_second: float | None

    @property
    def best(self) -> Point:
        """The first one of the lowest loss."""
        return min(self.points, key=lambda point: point.loss)

    def reaches(self, loss: float) -> Point | None:
        """The first one that has this loss or a lower one."""
        return next((point for point in self.points if point.loss <= loss), None)


def curves(run: results.Run) -> list[Curve]:
    """Those of a result file, in its order."""
    points: dict[str, list[Point]] = {}
    steps_us: dict[str, float] = {}
    training = {row.case: row.amount for row in run.rows if row.mode == TRAINING}
    for row in run.rows:
        case, _, step = row.case.partition(_STEP)
        if row.mode == VALIDATION and row.time_us is not None and row.amount is not None and step:
            point = Point(int(step), row.time_us / 1e6, row.amount, training.get(row.case))
            points.setdefault(case, []).append(point)
        elif row.mode == "step" and row.time_us is not None:
            steps_us[case] = row.time_us
    return [
        Curve(
            case.partition(", ")[2],
            tuple(found),
            1e6 / steps_us[case] if case in steps_us else None,
        )
        for case, found in points.items()
    ]
