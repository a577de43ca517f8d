"""Measures everything anew on the GPU that is here, then draws the figures and fills README.md.

Each suite runs in a process of its own. One that fails is named at the end and stops nobody; so the
figures and pages are of all that could be measured.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from bench import cases
from bench.provenance import ROOT
from bench.run import MODULES

SUITES = {
    **{name: ("run", name) for name in (*cases.SUITES, *MODULES)},
    "forward": ("run", "forward", "--sustained"),
    "profile": ("profile",),
}
AFTERWARDS = {"figures": ("figures",), "report": ("report", "--readme")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``python -m bench all``."""
    parser.add_argument("suites", nargs="*", help=f"some of {', '.join(SUITES)}; all by default")
    parser.add_argument(
        "--commit", help="recorded as the source's commit, for a copy without its git history"
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs everything; 0 if all of it went well, 1 if not, 2 if nothing could be measured."""
    if unknown := [name for name in arguments.suites if name not in SUITES]:
        print(f"unknown suites {unknown}; there are {[*SUITES]}", file=sys.stderr)
        return 2
    chosen = arguments.suites or [*SUITES]
    commit = ("--commit", arguments.commit) if arguments.commit else ()
    failed = [name for name in chosen if not _succeeds(*SUITES[name], *commit)]
    if failed == chosen:
        print("Nothing was measured: see above.", file=sys.stderr)
        return 2
    failed += [name for name, command in AFTERWARDS.items() if not _succeeds(*command)]
    if failed:
        print(f"failed, in part or as a whole: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def _succeeds(*command: str) -> bool:
    start = time.perf_counter()
    print(f"\n$ python -m bench {' '.join(command)}", flush=True)
    status = subprocess.run([sys.executable, "-m", "bench", *command], cwd=ROOT).returncode
    print(f"status {status} after {time.perf_counter() - start:.0f} s", flush=True)
    return status == 0
