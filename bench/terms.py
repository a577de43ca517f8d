"""Times what each mask and term costs beside the same call without it, and what others take.

A row's case is the call and the term, as in ``"B4 S4096 H16/16 D128 full bf16, sinks"``; the term
"nothing" is the plain call. Peers get the term in the form that they have: ALiBi as a bias.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_flash
from bench import peers, results, run, timing
from bench.cases import Case
from bench.results import OURS, Row

Array = jax.Array

NOTE = (
    "kernel time by CUPTI, median of 3 medians of 4 launches, interleaved. error: relative to "
    "plain JAX in fp32, the largest of all arrays; peers are not judged. TFLOP/s count the "
    "products of the plain call, hidden or not."
)
CASE = Case(4, 4096, 16, 16, 128)
MODES = ("fwd", "fwd+bwd")
_TIMING = {"rounds": 3, "iterations": 4}
_TOLERANCE = 1e-2  # of the norm; plain attention in bf16 is at 3e-3
_BLOCK = 128  # of the block-structured mask
_IMPLEMENTATION = "mosaic"


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


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """Checks ours and times everything, one term after another."""
    jax.config.update("jax_enable_compilation_cache", False)
    rounds = {"rounds": 2, "iterations": 3} if arguments.quick else _TIMING
    query, key, value = run.inputs(CASE)
    do = jax.random.normal(jax.random.key(1), CASE.shapes[0], CASE.dtype)
    for name, term in terms(CASE).items():
        case = f"{CASE.name}, {name}"
        if not any(part in case for part in arguments.cases or [""]):
            continue
        for mode in MODES[1:] if term.wanted else MODES:
            calls: dict[str, timing.Call] = {}
            errors: dict[str, float] = {}
            notes: dict[str, str | None] = {}
            for impl, (attend, keywords) in _ways(term).items():
                if impl != OURS and arguments.peers not in ("all", impl):
                    continue
                try:
                    arrays = (query, key, value, {x: keywords[x] for x in term.wanted})
                    call, notes[impl] = _call(attend, keywords, mode, arrays, do)
                    jax.block_until_ready(call())
                    if impl == OURS:
                        errors[impl] = _error(term, mode, arrays, do, call())
                    calls[impl] = call
                except Exception as error:  # one that cannot is a line of the table
                    yield results.failure(case, impl, mode, error)
            for impl, time_us in timing.kernel_times_us(calls, **rounds).items():
                if isinstance(time_us, Exception):
                    yield results.failure(case, impl, mode, time_us)
                    continue
                error = errors.get(impl)
                is_good = error is None or error <= _TOLERANCE
                yield Row(
                    case=case,
                    impl=impl,
                    mode=mode,
                    time_us=round(time_us, 2),
                    tflops=round(CASE.flops(mode) / time_us / 1e6, 1),
                    error=None if error is None else float(f"{error:.2g}"),
                    note=notes[impl] if is_good else results.INACCURATE,
                )


def _ways(term: Term) -> dict[str, tuple[Callable[..., Array], dict[str, Any]]]:
    """Who computes it, with which keywords."""
    ours = functools.partial(jax_flash.dot_product_attention, implementation=_IMPLEMENTATION)
    ways: dict[str, tuple[Callable[..., Array], dict[str, Any]]] = {OURS: (ours, term.ours)}
    if term.peer is not None:
        for name in ("cudnn", "xla"):
            ways[name] = (peers.IMPLEMENTATIONS[name](CASE), term.peer)
    keywords = term.tokamax if term.peer is None else term.peer
    if keywords is not None:
        ways["tokamax"] = (_tokamax, keywords)
    return ways


def _tokamax(*arrays: Array, **keywords: Any) -> Array:
    return peers.tokamax(CASE)(*arrays, **keywords)


def _call(
    attend: Callable[..., Array],
    keywords: dict[str, Any],
    mode: str,
    arrays: tuple[Any, ...],
    do: Array,
) -> tuple[timing.Call, str | None]:
    """What is timed, and a note about it.

    ``arrays`` are query, key, value and the keywords that get a gradient too.
    """
    fixed = {name: x for name, x in keywords.items() if name not in arrays[3]}
    traced = {name: x for name, x in fixed.items() if isinstance(x, jax.Array)}
    static = {name: x for name, x in fixed.items() if name not in traced}

    def forward(q: Array, k: Array, v: Array, wanted: Any, traced: Any) -> Array:
        return attend(q, k, v, **wanted, **traced, **static)

    def both(do: Array, arrays: Any, traced: Any) -> Any:
        out, pullback = jax.vjp(lambda *arrays: forward(*arrays, traced), *arrays)
        return out, *pullback(do)

    if mode == "fwd":
        args: tuple[Any, ...] = (*arrays, traced)
        return timing.Call(jax.jit(forward).lower(*args).compile(), args), None
    args = (do, arrays, traced)
    note = run.gradient_note(both, *args)
    return timing.Call(jax.jit(both).lower(*args).compile(), args), note


def _error(term: Term, mode: str, arrays: tuple[Any, ...], do: Array, got: Any) -> float:
    """The largest relative error of ours, in the Euclidean norm."""
    plain = functools.partial(jax_flash.dot_product_attention, implementation="chunked")
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), (arrays, do))
    call, _ = _call(plain, term.ours, mode, *wide)

    @jax.jit
    def distance(x: Array, want: Array) -> Array:
        x, want = x.astype(jnp.float32), want.astype(jnp.float32)
        return jnp.linalg.norm((x - want).ravel()) / jnp.linalg.norm(want.ravel())

    return max(map(float, jax.tree.leaves(jax.tree.map(distance, got, call()))))
