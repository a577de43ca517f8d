"""Times a suite of named cases on a GPU: ours and every peer, same arrays, same process.

Prints a table, and writes a result file if all cases were run or ``--out`` names one. A case's
results are checked against fp32 before they are timed; what is less accurate than twice plain
attention in low precision is marked in ``note``. A peer that is not installed is listed as absent.

Suites that measure something else than these calls are modules of their own (:data:`MODULES`). Each
offers ``measure(arguments) -> Iterator[Row]``, and may offer ``NOTE``, for the file's meta, and
``ENVIRONMENT``, variables that must be set before JAX looks for a device.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import importlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import cases, provenance, results
from bench.cases import Case
from bench.results import OURS, Row

_COMPILER_THREADS = 8
_REFERENCE = "reference"  # among the implementations of a case
_OUR_PACKAGE = OURS.partition(".")[0]

# The suites that are modules of their own.
MODULES = {
    name: f"bench.{name}"
    for name in ("decode", "ladder", "memory", "packed", "serving", "shakespeare", "terms", "train")
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``python -m bench run``."""
    parser.add_argument("suite", choices=[*cases.SUITES, *MODULES], help="what to time")
    parser.add_argument(
        "--cases", nargs="+", metavar="TEXT", help="only cases whose name contains one of these"
    )
    parser.add_argument(
        "--peers", default="all", help='"all", "none" or some, such as fa3,cudnn (ours always runs)'
    )
    parser.add_argument("--out", type=Path, help="result file; bench/results/SUITE.json by default")
    parser.add_argument(
        "--quick", action="store_true", help="fewer launches, and nothing about Python"
    )
    parser.add_argument(
        "--sustained", action="store_true", help="some cases in loops of 1.2 s at the power limit"
    )
    parser.add_argument(
        "--commit", help="recorded as the source's commit, for a copy without its git history"
    )


def run(arguments: argparse.Namespace) -> int:
    """Times the suite; 0 if ours computed every case rightly, 1 if not, 2 if nothing ran."""
    if arguments.suite in MODULES:
        return _run_module(importlib.import_module(MODULES[arguments.suite]), arguments)
    from bench import peers

    chosen, modes = cases.SUITES[arguments.suite]
    wanted = arguments.cases or [""]
    chosen = tuple(case for case in chosen if any(part in case.name for part in wanted))
    try:
        names = peers.chosen(arguments.peers, list(peers.PEERS))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if not chosen:
        print(f"no case of {arguments.suite!r} has {wanted} in its name", file=sys.stderr)
        return 2
    if not has_gpu():
        return 2
    timed = _Suite(chosen, modes, [OURS, *names], arguments)
    save, out = _saving(arguments)
    timed.run(save)
    return _report(timed.result, {"grid": {case.name for case in cases.GRID}}, out)


def _run_module(module: Any, arguments: argparse.Namespace) -> int:
    """Runs a suite that is a module of its own; saves and prints after every row."""
    os.environ.update(getattr(module, "ENVIRONMENT", {}))
    if not has_gpu():
        return 2
    start = time.perf_counter()
    save, out = _saving(arguments)
    meta = ceilings(make_meta(arguments, getattr(module, "NOTE", None)))
    rows: list[Row] = []
    for row in module.measure(arguments):
        rows.append(row)
        print(_line(row, meta.matmul_tflops), flush=True)
        save(results.Run(meta, tuple(rows)))
    print(f"measured after {time.perf_counter() - start:.0f} s")
    if not rows:
        print(f"{arguments.suite!r} measured nothing; do --cases fit?", file=sys.stderr)
        return 2
    return _report(results.Run(meta, tuple(rows)), {}, out)


def has_gpu() -> bool:
    """Whether JAX runs on a GPU; if not, says so."""
    import jax

    if jax.default_backend() == "gpu":
        return True
    print(
        f"python -m bench run needs an NVIDIA GPU; JAX finds only {jax.devices()}. "
        "python -m bench aot compiles the kernels without one.",
        file=sys.stderr,
    )
    return False


def in_threads[K, T](tasks: Mapping[K, Callable[[], T]]) -> dict[K, concurrent.futures.Future[T]]:
    """Runs all tasks and waits; a future holds what its task gave, or raises what it raised.

    For compilation: XLA compiles without Python's lock, and its autotuning, which runs on the GPU,
    is over when something is timed.
    """
    with concurrent.futures.ThreadPoolExecutor(_COMPILER_THREADS) as pool:
        return {key: pool.submit(task) for key, task in tasks.items()}


def _saving(arguments: argparse.Namespace) -> tuple[Callable[[results.Run], None], Path | None]:
    """What saves a run, and where: nowhere if only part of the suite is measured."""
    out = arguments.out
    if out is None and not arguments.cases and not arguments.quick:
        out = provenance.ROOT / f"bench/results/{arguments.suite}.json"
    return functools.partial(results.write, out) if out else lambda _: None, out


def make_meta(arguments: argparse.Namespace, note: str | None) -> results.Meta:
    """Where and when this is, but for the ceilings."""
    return results.Meta(
        **provenance.device(),
        commit=arguments.commit or provenance.commit(),
        date=provenance.date(),
        matmul_tflops=None,
        read_gbps=None,
        note=note,
    )


def ceilings(meta: results.Meta) -> results.Meta:
    """Measures them and prints what is known of the machine."""
    from bench import roofline

    matmul, read = round(roofline.matmul_tflops(), 1), round(roofline.read_gbps(), 1)
    print(
        f"{meta.device}, driver {meta.driver}, jax {meta.jax}, CUDA {meta.cuda}, commit "
        f"{meta.commit}: matrix products {matmul} TFLOP/s, reads {read} GB/s",
        flush=True,
    )
    return dataclasses.replace(meta, matmul_tflops=matmul, read_gbps=read)


def _report(found: results.Run, groups: dict[str, set[str]], out: Path | None) -> int:
    """Prints the tables; 1 if ours has no figure somewhere, or an inaccurate one."""
    for mode in found.modes:
        print(f"\n{mode}\n{results.table(found, mode, groups=groups)}")
    if out:
        print(f"\nwritten: {out}")
    ours = [row for row in found.rows if row.impl.startswith(_OUR_PACKAGE)]
    return int(any(not (row.has_figure and row.is_believed) for row in ours))


@dataclasses.dataclass
class _Program:
    """One implementation of one case: its executables, and what is run."""

    case: Case
    impl: str
    compiled: dict[str, Any]
    note: str | None = None


class _Suite:
    """The run: compiles everything, then checks and times case after case."""

    def __init__(
        self,
        chosen: Sequence[Case],
        modes: Sequence[str],
        impls: Sequence[str],
        arguments: argparse.Namespace,
    ) -> None:
        self._cases, self._modes, self._impls = chosen, modes, list(impls)
        self._arguments = arguments
        self._timing = {"rounds": 2, "iterations": 3} if arguments.quick else {}
        self._meta = make_meta(
            arguments,
            "short: kernel time by CUPTI, median of "
            f"{self._timing.get('rounds', 5)} medians of {self._timing.get('iterations', 5)} "
            "launches, implementations interleaved; sustained: wall-clock time of a 1.2 s loop. "
            "error: relative to fp32, last sequence, first and last key head.",
        )
        self.rows: list[Row] = []

    @property
    def result(self) -> results.Run:
        """All that was measured so far."""
        return results.Run(self._meta, tuple(self.rows))

    def run(self, save: Callable[[results.Run], None]) -> None:
        """Measures everything; ``save`` is called after every case."""
        import jax

        jax.config.update("jax_enable_compilation_cache", False)
        start = time.perf_counter()
        self._leave_out_absent()
        self._meta = ceilings(self._meta)
        if not self._arguments.quick:
            self._measure_python()
        print(f"{time.perf_counter() - start:.0f} s so far; compiling", flush=True)
        tasks: dict[tuple[Case, str], Callable[[], Any]] = {
            (case, impl): functools.partial(self._compile, case, impl)
            for case in self._cases
            for impl in self._impls
        }
        for case in self._cases:
            tasks[case, _REFERENCE] = functools.partial(self._reference, case)
        done = in_threads(tasks)
        print(f"compiled and referenced after {time.perf_counter() - start:.0f} s", flush=True)
        for case in self._cases:
            printed = len(self.rows)
            programs = {impl: done.pop((case, impl)) for impl in self._impls}
            self._measure(case, programs, done.pop((case, _REFERENCE)).result())
            for row in self.rows[printed:]:
                print(_line(row, self._meta.matmul_tflops), flush=True)
            save(self.result)
        print(f"measured after {time.perf_counter() - start:.0f} s")

    def _leave_out_absent(self) -> None:
        from bench import peers

        for impl in tuple(self._impls):
            try:
                peers.IMPLEMENTATIONS[impl](cases.DISPATCH)
            except peers.AbsentError as error:
                self._impls.remove(impl)
                self._meta.absent[impl] = str(error)
                print(f"absent: {impl}: {error}")
            except peers.RefusedError:
                pass  # this case, perhaps not others

    def _measure_python(self) -> None:
        """What Python adds to a call of a compiled function, then what a compilation takes.

        In this order, so that modules which are loaded at first use are there for the second.
        """
        import jax

        from bench import peers, timing

        calls, functions = {}, {}
        for impl in self._impls:
            try:
                function = peers.IMPLEMENTATIONS[impl](cases.DISPATCH)
                args = inputs(cases.DISPATCH)
                jitted = jax.jit(function)
                jax.block_until_ready(jitted(*args))
                calls[impl], functions[impl] = timing.Call(jitted, args), function
            except Exception as error:
                self._fail(cases.DISPATCH, impl, "dispatch", error)
        for impl, time_us in timing.dispatch_us(calls).items():
            self._add(cases.DISPATCH, impl, "dispatch", time_us)
        case = self._cases[0]
        structs = jax.eval_shape(lambda: inputs(case))
        for impl in functions:
            try:
                taken = timing.compile_time(peers.IMPLEMENTATIONS[impl](case), structs)
            except Exception as error:
                self._fail(case, impl, "compile", error)
                continue
            note = f"trace {taken.trace_s:.2f} s, lower {taken.lower_s:.2f} s, compile "
            self._add(case, impl, "compile", taken.total_s * 1e6, note + f"{taken.compile_s:.2f} s")
        for row in self.rows:
            print(_line(row, self._meta.matmul_tflops), flush=True)

    def _compile(self, case: Case, impl: str) -> _Program:
        from bench import peers

        function = peers.IMPLEMENTATIONS[impl](case)
        return _Program(case, impl, *_compiled(case, function, self._modes))

    def _reference(self, case: Case) -> Any:
        from bench import accuracy

        return accuracy.Reference(case, inputs(case), self._do(case))

    def _do(self, case: Case) -> Any:
        """The gradient that comes in; None if only forward passes are timed."""
        return None if self._modes == ("fwd",) else _random(case.shapes[0], case.dtype, seed=1)

    def _measure(
        self,
        case: Case,
        programs: Mapping[str, concurrent.futures.Future[_Program]],
        reference: Any,
    ) -> None:
        """Checks and times one case."""
        from bench import timing

        args, do = inputs(case), self._do(case)
        calls: dict[str, dict[str, timing.Call]] = {mode: {} for mode in self._modes}
        judged: dict[tuple[str, str], tuple[float, bool]] = {}
        notes: dict[str, str | None] = {}
        for impl, future in programs.items():
            try:
                program = future.result()
                notes[impl] = program.note
                for mode, call in _calls(program, args, do).items():
                    judged[impl, mode] = reference.judge(_named(mode, call()))
                    calls[mode][impl] = call
            except Exception as error:  # one that cannot is a line of the table
                for mode in self._modes:
                    calls[mode].pop(impl, None)
                    self._fail(case, impl, mode, error)
        for mode in self._modes:
            for impl, time_us in timing.kernel_times_us(calls[mode], **self._timing).items():
                if isinstance(time_us, Exception):
                    self._fail(case, impl, mode, time_us)
                    continue
                error, is_good = judged[impl, mode]
                note = notes[impl] if is_good else results.INACCURATE
                self._add(case, impl, mode, time_us, note, error)
                if self._arguments.sustained and case in cases.SUSTAINED:
                    sustained = timing.sustained_us(calls[mode][impl], time_us)
                    self._add(case, impl, f"{mode} sustained", sustained, note, error)

    def _add(
        self,
        case: Case,
        impl: str,
        mode: str,
        time_us: float,
        note: str | None = None,
        error: float | None = None,
    ) -> None:
        part = mode.removesuffix(" sustained")
        has_flops = part in cases.FLOPS_OF_MODE
        self.rows.append(
            Row(
                case=case.name,
                impl=impl,
                mode=mode,
                time_us=round(time_us, 2),
                tflops=round(case.flops(part) / time_us / 1e6, 1) if has_flops else None,
                error=None if error is None else float(f"{error:.2g}"),
                note=note,
            )
        )

    def _fail(self, case: Case, impl: str, mode: str, error: Exception) -> None:
        self.rows.append(results.failure(case.name, impl, mode, error))


def _line(row: Row, ceiling: float | None) -> str:
    time_us = "–" if row.time_us is None else f"{row.time_us:.1f}"
    figure = "" if row.amount is None else row.figure
    if row.tflops is not None:
        part = "" if ceiling is None else f" ({100 * row.tflops / ceiling:.0f} %)"
        figure = f"{row.tflops:.0f} TFLOP/s{part}"
    error = "" if row.error is None else f"error {row.error:.1e}"
    return (
        f"{row.case:<56} {row.impl:<17} {row.mode:<17} {time_us:>10} µs {figure:>18} {error} "
        f"{row.note or ''}"
    )


def _random(shape: tuple[int, ...], dtype: str, seed: int) -> Any:
    import jax

    return jax.random.normal(jax.random.key(seed), shape, dtype)


def inputs(case: Case) -> tuple[Any, ...]:
    """Random query, key and value, and ``cu_seqlens`` if the case is packed."""
    import jax.numpy as jnp

    arrays = tuple(_random(shape, case.dtype, 2 + i) for i, shape in enumerate(case.shapes))
    return arrays if case.lengths is None else (*arrays, jnp.asarray(case.cu_seqlens))


def _compiled(
    case: Case, attention: Callable[..., Any], modes: Sequence[str]
) -> tuple[dict[str, Any], str | None]:
    """Executables for the modes, and a note about them.

    "fwd" is a function of the inputs; "fwd+bwd" of the inputs and do. "residuals" gives the output
    and the pullback, which "bwd" takes with do: jitted like this, what a gradient needs is kept in
    memory between the two as it is in a model.
    """
    import jax

    structs = jax.eval_shape(lambda: inputs(case))
    do = structs[0]
    if modes == ("fwd",):
        return {"fwd": jax.jit(attention).lower(*structs).compile()}, None

    def with_pullback(q: Any, k: Any, v: Any, *rest: Any) -> Any:
        return jax.vjp(lambda q, k, v: attention(q, k, v, *rest), q, k, v)

    def both(do: Any, *args: Any) -> Any:
        out, pullback = with_pullback(*args)
        return out, *pullback(do)

    residuals = jax.jit(with_pullback).lower(*structs)
    _, pullback = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), residuals.out_info)
    backward = jax.jit(lambda pullback, do: pullback(do)).lower(pullback, do)
    return {
        "fwd+bwd": jax.jit(both).lower(do, *structs).compile(),
        "residuals": residuals.compile(),
        "bwd": backward.compile(),
    }, gradient_note(both, do, *structs)


def gradient_note(function: Callable[..., Any], *structs: Any) -> str | None:
    """Who computes our gradient, where it is not the implementation that was asked for."""
    import jax_flash

    for decision in jax_flash.explain(function, *structs).decisions:
        if decision.is_gradient:
            return f"the gradient is computed by {decision.chosen!r}"
    return None


def _calls(program: _Program, args: tuple[Any, ...], do: Any) -> dict[str, Any]:
    """{mode: what is timed}."""
    from bench import timing

    compiled = program.compiled
    if do is None:
        return {"fwd": timing.Call(compiled["fwd"], args)}
    _, pullback = compiled["residuals"](*args)
    return {
        "fwd+bwd": timing.Call(compiled["fwd+bwd"], (do, *args)),
        "bwd": timing.Call(compiled["bwd"], (pullback, do)),
    }


def _named(mode: str, arrays: Any) -> dict[str, Any]:
    names = {"fwd": ("out",), "bwd": ("dq", "dk", "dv"), "fwd+bwd": ("out", "dq", "dk", "dv")}
    return dict(zip(names[mode], (arrays,) if mode == "fwd" else arrays, strict=True))
