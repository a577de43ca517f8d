"""Profiles the steps of the ladder and the product's kernels with NVIDIA Nsight Compute.

Writes a result file whose rows are hardware counters: ``impl`` is the kernel, ``mode`` the counter
(:data:`COUNTERS`). Clocks are left as they are (``--clock-control none``), as in every timing here;
caches are emptied before each pass. A kernel is run again for each group of counters, alone.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import glob
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import provenance, results
from bench.cases import Case
from bench.results import Row

CASE = Case(4, 4096, 16, 16, 128, True)
NOTE = (
    "counters by Nsight Compute, clocks as they are, caches emptied before each pass; one launch "
    "of each kernel after 20 matrix products of 8192 x 8192"
)
_DECODE_CASE = "decode B64 L4096 H32/8 D128 bf16 page16"
_OF_DECODE = ("decode_kernel", "combine_kernel")
_KERNELS = "ladder_|jax_flash_|" + "|".join(_OF_DECODE)
_SUFFIX = "_mosaic_gpu_kernel"
_TIMEOUT_S = 550.0
_PLACES = ("/usr/local/cuda*/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu")


@dataclasses.dataclass(frozen=True)
class Counter:
    """A hardware counter.

    Attributes:
        metric: what Nsight Compute calls it.
        unit: of the rows.
        factor: from the base unit (seconds, bytes, cycles, counts, percent) to ``unit``.
    """

    metric: str
    unit: str
    factor: float = 1.0


COUNTERS = {
    "time": Counter("gpu__time_duration.sum", "µs", 1e6),
    "tensor pipe": Counter(
        "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active", "%"
    ),
    "DRAM": Counter("dram__bytes.sum.per_second", "GB/s", 1e-9),
    "L2": Counter("lts__t_bytes.sum.per_second", "GB/s", 1e-9),
    "bank conflicts": Counter("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum", "conflicts"),
    "shared memory": Counter("l1tex__data_pipe_lsu_wavefronts_mem_shared.sum", "wavefronts"),
    "occupancy": Counter("sm__warps_active.avg.pct_of_peak_sustained_active", "%"),
    "registers": Counter("launch__registers_per_thread", "a thread"),
    # A sector has 32 bytes.
    "spills": Counter("l1tex__t_sectors_pipe_lsu_mem_local_op_st.sum", "MB", 32e-6),
    "clock": Counter("sm__cycles_elapsed.avg.per_second", "GHz", 1e-9),
}

# What Nsight Compute prints for a unit, in base units; both its older and its newer words.
_TIMES = {"nsecond": 1e-9, "ns": 1e-9, "usecond": 1e-6, "us": 1e-6, "msecond": 1e-3, "ms": 1e-3}
_PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_UNITS = {
    **{"": 1.0, "%": 1.0, "sector": 1.0, "register/thread": 1.0, "second": 1.0, "s": 1.0},
    **{"cycle/nsecond": 1e9, "cycle/usecond": 1e6, "cycle/second": 1.0},
    **_TIMES,
    **{f"{prefix}byte/{word}": x for prefix, x in _PREFIXES.items() for word in ("second", "s")},
    **{f"{prefix}hz": x for prefix, x in _PREFIXES.items()},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``python -m bench profile``."""
    parser.add_argument("--ncu", type=Path, help="Nsight Compute; looked for by default")
    parser.add_argument("--out", type=Path, default=provenance.ROOT / "bench/results/profile.json")
    parser.add_argument(
        "--commit", help="recorded as the source's commit, for a copy without its git history"
    )


def run(arguments: argparse.Namespace) -> int:
    """Profiles; 0 if every kernel was counted, 1 if some were not, 2 if nothing ran."""
    ncu = str(arguments.ncu) if arguments.ncu else find_tool("ncu", _PLACES)
    if ncu is None or shutil.which(ncu) is None:
        print(
            f"python -m bench profile needs Nsight Compute: {ncu or 'ncu'} is neither on the path "
            f"nor in {' or '.join(_PLACES)}. Install it (package nsight-compute of NVIDIA) or name "
            "it with --ncu.",
            file=sys.stderr,
        )
        return 2
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # the profiled process needs memory
    from bench import run as timed

    if not timed.has_gpu():
        return 2
    meta = timed.ceilings(timed.make_meta(arguments, NOTE))
    try:
        text = _profile(ncu)
        rows = tuple(rows_of(parse(text)))
    except (ValueError, subprocess.SubprocessError) as error:
        print(f"Nsight Compute gave no counters: {error}", file=sys.stderr)
        return 2
    found = results.Run(meta, rows)
    results.write(arguments.out, found)
    print(f"{table(found)}\n\nwritten: {arguments.out}")
    missing = sorted(expected_kernels() - {row.impl for row in rows})
    if missing:
        print(f"not profiled: {', '.join(missing)}", file=sys.stderr)
    return int(bool(missing))


def find_tool(name: str, places: Sequence[str]) -> str | None:
    """A tool of NVIDIA's on the path or where its packages put it, the newest first."""
    if shutil.which(name):
        return name
    return next((path for place in places for path in sorted(glob.glob(place))[::-1]), None)


def expected_kernels() -> set[str]:
    """Kernels without which the file is not whole; those of the decode path need a compiler."""
    from pallas_kernels import ladder

    first, *others = (stage.kernel_name for stage in ladder.STAGES.values())
    parts = {f"{first}_{part}" for part in ("scores", "softmax", "values")}
    return parts | {*others, "jax_flash_forward", "jax_flash_backward"}


def command(ncu: str, metrics: Sequence[str]) -> list[str]:
    """What is run: Nsight Compute around this module's other half."""
    return [
        ncu,
        *("--csv", "--page", "raw", "--print-units", "base", "--print-kernel-base", "function"),
        *("--clock-control", "none", "--kernel-name", f"regex:{_KERNELS}"),
        *("--metrics", ",".join(metrics)),
        *(sys.executable, "-m", "bench.profile"),
    ]


def _profile(ncu: str) -> str:
    """What Nsight Compute prints, without the metrics that it says it does not know."""
    environment = {
        **os.environ,
        # Kernels in a graph would be profiled as a whole.
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer=",
    }
    metrics = [counter.metric for counter in COUNTERS.values()]
    while True:
        result = subprocess.run(
            command(ncu, metrics),
            cwd=provenance.ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
        print(result.stderr, end="", file=sys.stderr)
        if result.returncode == 0:
            return result.stdout
        lines = (result.stdout + result.stderr).splitlines()
        said = " ".join([x for x in lines if x.startswith("==ERROR==")] or lines[-5:])
        unknown = [metric for metric in metrics if metric in said]
        if not unknown or unknown == metrics:
            raise ValueError(f"it ended with status {result.returncode}: {said}")
        print(f"without {', '.join(unknown)}: {said}", file=sys.stderr)
        metrics = [metric for metric in metrics if metric not in unknown]


def parse(text: str) -> list[dict[str, Any]]:
    """Kernel launches from what ``ncu --csv --page raw`` prints.

    Args:
        text: lines of Nsight Compute (``==``) and of the program, then the table: a line of names,
            one of units, and one for each launch.

    Returns:
        For each launch ``{"kernel": name, counter: value in its unit}``; a counter that this
        device does not have is left out.

    Raises:
        ValueError: there is no table, or a unit that is not known.
    """
    lines = text.splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if first is None:
        raise ValueError(f"no table in {text[-500:]!r}")
    table = [line for line in csv.reader(lines[first:]) if len(line) > 1]
    names, units, *launches = table
    columns = {name: i for i, name in enumerate(names)}
    found = []
    for launch in launches:
        item: dict[str, Any] = {"kernel": launch[columns["Kernel Name"]].removesuffix(_SUFFIX)}
        for name, counter in COUNTERS.items():
            column = columns.get(counter.metric)
            value = "" if column is None else launch[column].replace(",", "")
            if value in ("", "n/a", "nan"):
                continue
            unit = units[columns[counter.metric]]
            if unit not in _UNITS:
                raise ValueError(f"{counter.metric} is in {unit!r}, which is none of {[*_UNITS]}")
            item[name] = float(value) * _UNITS[unit] * counter.factor
        found.append(item)
    return found


def rows_of(launches: Sequence[dict[str, Any]]) -> Iterator[Row]:
    """A row for each counter of each kernel, of its first launch."""
    seen = set()
    for launch in launches:
        kernel = launch["kernel"]
        if kernel in seen:
            continue
        seen.add(kernel)
        case = _DECODE_CASE if kernel in _OF_DECODE else CASE.name
        for name, counter in COUNTERS.items():
            if name not in launch:
                yield Row(case, kernel, name, None, note=f"no {counter.metric} on this device")
            elif name == "time":
                yield Row(case, kernel, name, round(launch[name], 2))
            else:
                amount = float(f"{launch[name]:.6g}")
                yield Row(case, kernel, name, None, amount=amount, unit=counter.unit)


def table(found: results.Run) -> str:
    """A Markdown table: a row for each kernel, a column for each counter."""
    cells = {(row.impl, row.mode): row.figure for row in found.rows}
    kernels = list(dict.fromkeys(row.impl for row in found.rows))
    lines = [["kernel", *COUNTERS]]
    lines += [[kernel, *(cells[kernel, name] for name in COUNTERS)] for kernel in kernels]
    return results.markdown(lines)


# What runs under Nsight Compute.


def main() -> None:
    """Launches each kernel once, the chip warm."""
    import jax
    import jax.numpy as jnp

    from bench import ladder, run

    a = jax.random.normal(jax.random.key(0), (8192, 8192), jnp.bfloat16)
    warm = jax.jit(lambda a: a @ a).lower(a).compile()
    args = run.inputs(CASE)
    for number in range(1, 8):
        compiled = jax.jit(ladder.attention(CASE, number)).lower(*args).compile()
        _launch_warm(warm, a, compiled, *args)
    ours = ladder.attention(CASE, 7)

    def gradient(q: Any, k: Any, v: Any, do: Any) -> Any:
        return jax.vjp(ours, q, k, v)[1](do)

    _launch_warm(warm, a, jax.jit(gradient).lower(*args, args[0]).compile(), *args, args[0])
    try:
        _launch_warm(warm, a, *_decode())
    except NotImplementedError as error:  # its kernels are not compiled here
        print(f"not profiled: decode: {error}", file=sys.stderr)


def _launch_warm(warm: Any, a: Any, compiled: Any, *args: Any) -> None:
    import jax

    for _ in range(20):
        warm(a)
    jax.block_until_ready(compiled(*args))


def _decode() -> tuple[Any, ...]:
    """A compiled call of the CUDA decode kernels, and its arguments; pages in random order."""
    import jax
    import jax.numpy as jnp

    import jax_flash

    batch, context, page_size = 64, 4096, 16
    num_pages = batch * context // page_size
    keys = jax.random.split(jax.random.key(0), 4)
    query = jax.random.normal(keys[0], (batch, 1, 32, 128), jnp.bfloat16)
    pages = [
        jax.random.normal(key, (num_pages, 8, page_size, 128), jnp.bfloat16) for key in keys[1:3]
    ]
    tables = jax.random.permutation(keys[3], num_pages).reshape(batch, -1).astype(jnp.int32)
    args = (query, *pages, tables, jnp.full(batch, context, jnp.int32))

    def attend(*args: Any) -> Any:
        return jax_flash.paged_attention(*args, implementation="cuda")

    return jax.jit(attend).lower(*args).compile(), *args


if __name__ == "__main__":
    main()
