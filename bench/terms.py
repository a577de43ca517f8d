"""Times what each mask and term costs beside the same call without it, and what others take.

A row's case is the call and the term, as in ``"B4 S4096 H16/16 D128 full bf16, sinks"``; the term
"nothing" is the plain call. Peers get the term in the form that they have: ALiBi as a bias. One
plain call is in fp32, beside XLA with its highest precision.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_flash
from bench import accuracy, peers, results, run, timing
from bench.cases import Case
from bench.results import OURS, Row

Array = jax.Array

NOTE = (
    "kernel time by CUPTI, median of 3 medians of 4 launches, interleaved. error: relative to "
    "plain JAX in fp32, in fp32 to fp64, the largest of all arrays; peers are not judged. TFLOP/s "
    "count the products of the plain call, hidden or not."
)
CASE = Case(4, 4096, 16, 16, 128)
FP32_CASE = Case(4, 1024, 8, 8, 64, dtype="float32")
MODES = ("fwd", "fwd+bwd")
_TIMING = {"rounds": 3, "iterations": 4}
_TOLERANCE = 1e-2  # of the norm; plain attention in bf16 is at 3e-3
_FP32_FACTOR = 2.0  # times the error of plain JAX in fp32, of each array
_BLOCK = 128  # of the block-structured mask
_IMPLEMENTATION = "mosaic"
_PEERS = ("cudnn", "xla", "tokamax")
_REFERENCE = "reference"  # among the implementations of a part


@dataclasses.dataclass(frozen=True)
class Term:
    """One term of the call.

    Attributes:
        ours: keywords of :func:`jax_flash.dot_product_attention`.
        peer: likewise of ``jax.nn`` and tokamax; None if they have no such term.
        tokamax: of tokamax alone.
        wanted: those of ``ours`` that get a gradient, besides query, key and value.
    """

    ours: dict[str, Any]
    peer: dict[str, Any] | None = None
    tokamax: dict[str, Any] | None = None
    wanted: tuple[str, ...] = ()


def terms(case: Case) -> dict[str, Term]:
    """All terms, by name."""
    batch, length, heads = case.batch, case.seq_len, case.num_q_heads

    def normal(seed: int, *shape: int) -> Array:
        return jax.random.normal(jax.random.key(seed), shape, jnp.float32)

    slopes = jnp.asarray(2.0 ** -(8.0 * np.arange(1, heads + 1) / heads), jnp.float32)
    token = jnp.arange(length)
    alibi = (slopes[:, None, None] * (token - token[:, None])).astype(case.dtype)[None]
    bias = normal(5, 1, heads, length, length).astype(case.dtype)
    lengths = jnp.linspace(length, length // 2, batch).astype(jnp.int32)
    padding = token < lengths[:, None, None, None]
    blocks = np.random.default_rng(0).random((-(-length // _BLOCK),) * 2) < 0.25
    blocks = np.kron(blocks, np.ones((_BLOCK, _BLOCK), bool))[None, None, :length, :length]
    dropout = {"dropout_rate": 0.1, "dropout_rng": jax.random.key(3)}
    masks = {"mask of padding": padding, "mask of blocks, 25 % true": jnp.asarray(blocks)}
    return {
        "nothing": Term({}, {}),
        "sinks": Term({"sinks": normal(4, heads)}),
        "ALiBi": Term({"alibi_slopes": slopes}, {"bias": alibi}),
        "soft cap": Term({"logits_soft_cap": 30.0}, tokamax={"logits_soft_cap": 30.0}),
        **{name: Term({"mask": mask}, {"mask": mask}) for name, mask in masks.items()},
        "dropout": Term(dropout),
        "bias": Term({"bias": bias}, {"bias": bias}),
        "bias with gradient": Term({"bias": bias}, {"bias": bias}, wanted=("bias",)),
    }


@dataclasses.dataclass(frozen=True, eq=False)
class _Part:
    """One term in one mode: the rows that are timed in turns.

    Attributes:
        name: of the rows' case.
        case: the call.
        term: what it has besides.
        mode: of :data:`MODES`.
        arrays: query, key, value, and the keywords that get a gradient too.
        do: the gradient that comes in.
    """

    name: str
    case: Case
    term: Term
    mode: str
    arrays: tuple[Any, ...]
    do: Array


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """Compiles everything, then checks ours and times all, one term after another."""
    jax.config.update("jax_enable_compilation_cache", False)
    start = time.perf_counter()
    impls = (OURS, *peers.chosen(arguments.peers, _PEERS))
    if "tokamax" in impls:
        with contextlib.suppress(peers.AbsentError):  # a line of the table, below
            peers.tokamax(CASE)  # loads it, which threads had better not do at once
    parts = [
        part
        for case, of_case in ((CASE, terms(CASE)), (FP32_CASE, {"nothing": Term({}, {})}))
        for part in _parts(case, of_case)
        if any(text in part.name for text in arguments.cases or [""])
    ]
    tasks: dict[tuple[_Part, str], Callable[[], Any]] = {}
    for part in parts:
        for impl, (attend, keywords) in _ways(part.case, part.term).items():
            if impl in impls:
                facts = (attend, keywords, part.mode, part.arrays, part.do)
                tasks[part, impl] = functools.partial(_call, *facts)
        facts = (part.term, part.mode, part.arrays, part.do)
        tasks[part, _REFERENCE] = functools.partial(_compile_reference, *facts)
    done = run.in_threads(tasks)
    print(f"compiled {len(tasks)} programs in {time.perf_counter() - start:.0f} s", flush=True)
    rounds = {"rounds": 2, "iterations": 3} if arguments.quick else _TIMING
    for part in parts:
        yield from _measure(part, {impl: x for (of, impl), x in done.items() if of is part}, rounds)


def _parts(case: Case, of_case: dict[str, Term]) -> Iterator[_Part]:
    """The terms of a call, each in the modes where it says something."""
    query, key, value = run.inputs(case)
    do = jax.random.normal(jax.random.key(1), case.shapes[0], case.dtype)
    for name, term in of_case.items():
        arrays = (query, key, value, {x: term.ours[x] for x in term.wanted})
        for mode in MODES[1:] if term.wanted else MODES:
            yield _Part(f"{case.name}, {name}", case, term, mode, arrays, do)


def _measure(
    part: _Part, done: dict[str, concurrent.futures.Future[Any]], rounds: dict[str, int]
) -> Iterator[Row]:
    """Checks ours and times everything that computes the part."""
    reference = done.pop(_REFERENCE)
    calls: dict[str, timing.Call] = {}
    judged: dict[str, tuple[float, bool]] = {}
    notes: dict[str, str | None] = {}
    for impl, future in done.items():
        try:
            call, notes[impl] = future.result()
            got = jax.block_until_ready(call())
            if impl == OURS:
                judged[impl] = _judge(reference.result(), got)
            calls[impl] = call
        except Exception as error:  # one that cannot is a line of the table
            yield results.failure(part.name, impl, part.mode, error)
    for impl, time_us in timing.kernel_times_us(calls, **rounds).items():
        if isinstance(time_us, Exception):
            yield results.failure(part.name, impl, part.mode, time_us)
            continue
        error, is_good = judged.get(impl, (None, True))
        yield Row(
            case=part.name,
            impl=impl,
            mode=part.mode,
            time_us=round(time_us, 2),
            tflops=round(part.case.flops(part.mode) / time_us / 1e6, 1),
            error=None if error is None else float(f"{error:.2g}"),
            note=notes[impl] if is_good else results.INACCURATE,
        )


def _ways(case: Case, term: Term) -> dict[str, tuple[Callable[..., Array], dict[str, Any]]]:
    """Who computes it, with which keywords."""
    ours = functools.partial(jax_flash.dot_product_attention, implementation=_IMPLEMENTATION)
    ways: dict[str, tuple[Callable[..., Array], dict[str, Any]]] = {OURS: (ours, term.ours)}
    if case.dtype == "float32":  # of which other kernels have none
        assert term.peer is not None
        ways["xla"] = (_in_full_precision(peers.IMPLEMENTATIONS["xla"](case)), term.peer)
        return ways
    if term.peer is not None:
        for name in ("cudnn", "xla"):
            ways[name] = (peers.IMPLEMENTATIONS[name](case), term.peer)
    keywords = term.tokamax if term.peer is None else term.peer
    if keywords is not None:
        ways["tokamax"] = (functools.partial(_tokamax, case), keywords)
    return ways


def _tokamax(case: Case, *arrays: Array, **keywords: Any) -> Array:
    return peers.tokamax(case)(*arrays, **keywords)


def _in_full_precision(attend: Callable[..., Array]) -> Callable[..., Array]:
    """The same without TF32, in which XLA would multiply."""

    def call(*arrays: Array, **keywords: Any) -> Array:
        with jax.default_matmul_precision("highest"):
            return attend(*arrays, **keywords)

    return call


def _call(
    attend: Callable[..., Array],
    keywords: dict[str, Any],
    mode: str,
    arrays: tuple[Any, ...],
    do: Array,
    *,
    dtype: str | None = None,
) -> tuple[timing.Call, str | None]:
    """What is timed, and a note about it.

    ``arrays`` are query, key, value and the keywords that get a gradient too. With a ``dtype`` it
    is a reference, which is not timed: they and ``do`` are cast to it first.
    """
    fixed = {name: x for name, x in keywords.items() if name not in arrays[3]}
    traced = {name: x for name, x in fixed.items() if isinstance(x, jax.Array)}
    static = {name: x for name, x in fixed.items() if name not in traced}

    def cast(tree: Any) -> Any:
        return tree if dtype is None else jax.tree.map(lambda x: x.astype(dtype), tree)

    def attend_to(q: Array, k: Array, v: Array, wanted: Any, traced: Any) -> Array:
        return attend(q, k, v, **wanted, **traced, **static)

    def forward(arrays: Any, traced: Any) -> Array:
        return attend_to(*cast(arrays), traced)

    def both(do: Array, arrays: Any, traced: Any) -> Any:
        out, pullback = jax.vjp(lambda *arrays: attend_to(*arrays, traced), *cast(arrays))
        return out, *pullback(cast(do))

    function, args = (forward, (arrays, traced)) if mode == "fwd" else (both, (do, arrays, traced))
    lowered = jax.jit(function).lower(*args)
    if dtype is not None:
        return timing.Call(lowered.compile(accuracy.RUN_ONCE), args), None
    note = None if mode == "fwd" else run.gradient_note(function, *args)
    return timing.Call(lowered.compile(), args), note


def _compile_reference(
    term: Term, mode: str, arrays: tuple[Any, ...], do: Array
) -> tuple[timing.Call, timing.Call | None]:
    """What is right, and what plain JAX gives in the same precision if that is fp32."""

    def plain(implementation: str, dtype: str) -> timing.Call:
        attend = functools.partial(jax_flash.dot_product_attention, implementation=implementation)
        return _call(attend, term.ours, mode, arrays, do, dtype=dtype)[0]

    if do.dtype != jnp.float32:
        return plain("chunked", "float32"), None
    with jax.enable_x64(True):
        right = plain("chunked", "float64")
    return right, plain("xla", "float32")


def _judge(reference: tuple[timing.Call, timing.Call | None], got: Any) -> tuple[float, bool]:
    """The largest relative error of ours, in the Euclidean norm, and whether it will do."""
    right, plain = reference

    def errors(got: Any) -> list[float]:
        return list(map(float, jax.tree.leaves(jax.tree.map(_distance, got, want))))

    with jax.enable_x64(True):  # or what is fp64 would be cut
        want = right()
        found = errors(got)
        if plain is None:
            return max(found), max(found) <= _TOLERANCE
        pairs = zip(found, errors(plain()), strict=True)
        return max(found), all(error <= _FP32_FACTOR * of_plain for error, of_plain in pairs)


@jax.jit
def _distance(x: Array, want: Array) -> Array:
    x = x.astype(want.dtype)
    return jnp.linalg.norm((x - want).ravel()) / jnp.linalg.norm(want.ravel())
