"""Runs the tests on the GPU and writes what they gave to tests/gpu_record.json.

The record holds a hash of every kernel source, so that a test can tell which of them have changed
since they last ran on a GPU. Arguments after ``--`` go to pytest: ``-- -m gpu -n 4``; they are
recorded too, because they say what was left out. tests/conftest.py keeps XLA from searching for the
fastest matrix products, of which our kernels have none. If this is stopped, so are pytest and its
workers, which would go on otherwise and slow down whatever comes next.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from bench import provenance, results
from bench.provenance import ROOT

PATH = ROOT / "tests/gpu_record.json"

# Folders of kernels, and the files there that decide what runs on the GPU.
_KERNELS = ("pallas_kernels", "cuda_ffi")
_SUFFIXES = (".py", ".cu", ".cuh", ".h", ".cc", ".txt")


@dataclasses.dataclass(frozen=True)
class Record:
    """One run of the tests on a GPU.

    Attributes:
        device: such as "NVIDIA H200".
        driver: of NVIDIA.
        jax: version of JAX.
        cuda: version of the CUDA runtime.
        commit: of this repository; ends in "-dirty" if files differed from it.
        date: UTC, ISO 8601.
        arguments: given to pytest.
        passed: tests that passed.
        failed: tests that failed or could not be set up.
        skipped: tests that were skipped, or failed as expected.
        seconds: of the run.
        failures: names of the tests that failed.
        sources: {file: hash of its contents} of the kernels.
    """

    device: str
    driver: str
    jax: str
    cuda: str
    commit: str
    date: str
    arguments: str
    passed: int
    failed: int
    skipped: int
    seconds: float
    failures: list[str]
    sources: dict[str, str]

    def changed(self, sources: dict[str, str]) -> list[str]:
        """The files that are not what they were when the tests ran: changed, new or gone."""
        names = sorted(self.sources.keys() | sources.keys())
        return [name for name in names if self.sources.get(name) != sources.get(name)]

    def age_days(self, now: datetime.datetime) -> float:
        """Days from the run to ``now`` (with a time zone)."""
        return (now - datetime.datetime.fromisoformat(self.date)).total_seconds() / 86400


def hashes(root: Path = ROOT) -> dict[str, str]:
    """{path relative to the root: SHA-256 of its contents} of all kernel sources."""
    paths = sorted(
        path
        for folder in _KERNELS
        for path in (root / folder).rglob("*")
        if path.suffix in _SUFFIXES and "build" not in path.relative_to(root).parts
    )
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in paths
    }


def read(path: Path = PATH) -> Record:
    """Reads a record.

    Raises:
        ValueError: the file is not one; the message says where.
    """
    try:
        content = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    record = results.parse(Record, content, str(path))
    if record.failed != len(record.failures):
        raise ValueError(f"{path}: failed is {record.failed}, but failures has others")
    if datetime.datetime.fromisoformat(record.date).tzinfo is None:
        raise ValueError(f"{path}: date must name its time zone; got {record.date!r}")
    return record


def counts(report: Path) -> dict[str, Any]:
    """passed, failed, skipped, seconds and failures from pytest's report in JUnit's format."""
    suite = ElementTree.parse(report).getroot().find("testsuite")
    if suite is None:
        raise ValueError(f"{report}: pytest wrote no testsuite")
    outcomes: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}
    for test in suite.iter("testcase"):
        kinds = {child.tag for child in test}
        is_failed = bool(kinds & {"failure", "error"})
        outcome = "failed" if is_failed else "skipped" if "skipped" in kinds else "passed"
        outcomes[outcome].append(f"{test.get('classname')}::{test.get('name')}")
    failures = list(dict.fromkeys(outcomes["failed"]))  # a test and its teardown may both fail
    return {
        "passed": len(outcomes["passed"]),
        "failed": len(failures),
        "skipped": len(outcomes["skipped"]),
        "seconds": float(suite.get("time", 0.0)),
        "failures": failures,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``python -m bench record``."""
    parser.add_argument("--out", type=Path, default=PATH, help="where the record goes")
    parser.add_argument(
        "--commit", help="recorded as the source's commit, for a copy without its git history"
    )
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, after --")


def run(arguments: argparse.Namespace) -> int:
    """Runs the tests; pytest's exit status, or 2 if there is no GPU or nothing was run."""
    address = _device()
    if address is None:
        print("python -m bench record needs an NVIDIA GPU; JAX finds none.", file=sys.stderr)
        return 2
    sources = hashes()  # those that the tests will import
    commit = arguments.commit or provenance.commit()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        status = _pytest([f"--junit-xml={report}", *arguments.pytest])
        if not report.exists():
            print(f"pytest gave no report (exit status {status}); no record was written")
            return status or 2
        found = counts(report)
    if not found["passed"] + found["failed"]:
        print("no test ran; no record was written", file=sys.stderr)
        return 2
    record = Record(
        **address,
        commit=commit,
        date=provenance.date(),
        arguments=" ".join(arguments.pytest),
        sources=sources,
        **found,
    )
    arguments.out.write_text(json.dumps(dataclasses.asdict(record), indent=1) + "\n")
    print(f"written: {arguments.out}")
    return status


def _pytest(arguments: list[str]) -> int:
    """Its exit status. At its end or ours nothing that it started goes on, whatever it is doing."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=ROOT,
        env={**os.environ, "JAX_FLASH_TEST_GPU": "1"},
        start_new_session=True,  # a group of its own, which its workers join
    )

    def kill(*_: Any) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    previous = signal.signal(signal.SIGTERM, kill)
    try:
        return process.wait()
    finally:
        kill()
        signal.signal(signal.SIGTERM, previous)


def _device() -> dict[str, str] | None:
    """Asked in a process of its own, so that this one holds no memory of the GPU."""
    code = (
        "import json, jax; from bench import provenance; "
        "print(json.dumps(provenance.device()) if jax.default_backend() == 'gpu' else 'null')"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return json.loads(result.stdout.splitlines()[-1])
