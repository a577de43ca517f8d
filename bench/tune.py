"""Measures the tuning table that ships: the fastest configuration of every named dense case.

``--from-results`` measures nothing: it records the kernels' default configurations with the times
that a file of ``python -m bench run`` has for them, which needs no GPU.

Everybody else measures the calls of their own with ``jax-flash tune``.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

from bench import cases, provenance, results
from bench.cases import Case

_MOSAIC = "mosaic"
_TABLES = provenance.ROOT / "jax_flash/tuning_tables"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``python -m bench tune``."""
    parser.add_argument(
        "--cases", nargs="+", default=[""], metavar="TEXT", help="only cases whose name has one"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="try nothing new after; a case")
    parser.add_argument("--timeout", type=float, default=60.0, help="s, for each configuration")
    parser.add_argument("--table", type=Path, help="the table that ships for the device by default")
    parser.add_argument("--from-results", type=Path, metavar="FILE", help="see above")
    parser.add_argument("--commit", help="of a copy without its git history")


def run(arguments: argparse.Namespace) -> int:
    """Writes the table; the exit status is 1 if a case could not be measured."""
    dense = [case for case in cases.GRID + cases.OTHERS if case.lengths is None]
    chosen = [case for case in dense if any(part in case.name for part in arguments.cases)]
    if arguments.from_results:
        device, entries = from_results(arguments.from_results, chosen)
        write(arguments.table, device, entries)
        return 0
    import jax_flash
    from jax_flash import measure, tuner

    # This process holds a context on the GPU too; the memory is for the one that measures.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    failures = 0
    about = tuner.provenance(jax_flash.__version__)
    about |= {"commit": arguments.commit or provenance.commit()}
    for case in chosen:
        print(f"\n{case.name}", flush=True)
        decision = _decision(case)
        try:
            outcome = tuner.tune(
                tuner.tunable(decision.spec, decision.device),
                decision.spec,
                seconds=arguments.seconds,
                timeout_s=arguments.timeout,
                log=lambda line: print(line, flush=True),
            )
        except measure.TuningError as error:
            print(error, file=sys.stderr)
            failures += 1
            continue
        print(outcome)
        entry = outcome.entry(tuner.source(_MOSAIC), about)
        write(arguments.table, decision.device.name, [entry])
    return min(failures, 1)


def write(path: Path | None, device: str, entries: list[Any]) -> None:
    """Adds entries to a table, by default the one that ships for the device."""
    from jax_flash import tuning

    path = path or _TABLES / tuning.file_name(device)
    tuning.write(path, device, entries)
    print(f"{len(entries)} written to {path}")


def from_results(path: Path, chosen: list[Case]) -> tuple[str, list[Any]]:
    """Device, and an entry with the default configuration for each case that a file has a time of.

    Args:
        path: a result file.
        chosen: the cases to look for.
    """
    from jax_flash import tuner, tuning

    run = results.read(path)
    times = run.times("fwd")
    meta = {name: x for name, x in dataclasses.asdict(run.meta).items() if isinstance(x, str)}
    about = {name: meta[name] for name in ("driver", "jax", "cuda", "commit", "date")}
    about["method"] = f"default configuration, timed by python -m bench run ({path.name})"
    entries = []
    for case in chosen:
        time_us = times.get(case.name, {}).get(results.OURS)
        if time_us is None:
            print(f"{path.name} has no time of {case.name}")
            continue
        choice = tuner.posed(_MOSAIC, _decision(case).spec)
        entries.append(
            tuning.Entry(
                key=choice.key,
                config=dataclasses.asdict(choice.default),
                time_us=time_us,
                source=provenance.UNKNOWN,  # a result file has only the commit
                provenance=about,
            )
        )
    return run.meta.device, entries


def _decision(case: Case) -> Any:
    """What :func:`jax_flash.explain` says about a case."""
    import jax

    import jax_flash
    from bench import peers

    arrays = [jax.ShapeDtypeStruct(shape, case.dtype) for shape in case.shapes]
    return jax_flash.explain(peers.jax_flash_mosaic(case), *arrays).decisions[0]
