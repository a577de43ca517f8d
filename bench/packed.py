"""Times documents of many lengths: packed one after another, padded to the longest, or masked.

The same 64 documents everywhere, 64k tokens in all, and the same gradient that comes in. Arrays are
brought into the form that a way needs before the clock runs. TFLOP/s and tokens per second count
what the documents need, not what is computed for padding.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_flash
from bench import accuracy, peers, results, run, timing
from bench.cases import Case, lognormal_lengths
from bench.results import OURS, Row

Array = jax.Array

NOTE = (
    "kernel time by CUPTI, median of 5 medians of 5 launches, interleaved; padded: one row for "
    "each document, as long as the longest, with the lengths given; mask: one row of all tokens "
    "and a boolean mask, timed after the others. error: relative to fp32, last and longest "
    "document, first and last head."
)
CASE = Case(1, 65536, 16, 16, 128, True, lengths=lognormal_lengths(64, 65536))
MODES = ("fwd", "fwd+bwd")
_ROUND_UP = 128  # of the padded length
_OURS, _PEER = "mosaic", "cudnn"  # implementations


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to compute the case.

    Attributes:
        attend: of arrays in its form: query, key, value and what else it needs.
        arrange: from packed ``[T, H, D]`` to its form.
        restore: back.
        others: its further arguments.
    """

    attend: Callable[..., Array]
    arrange: Callable[[Array], Array]
    restore: Callable[[Array], Array]
    others: tuple[Array, ...] = ()


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """Checks and times every way in both modes."""
    jax.config.update("jax_enable_compilation_cache", False)
    packed = run.inputs(CASE)[:3]
    do = jax.random.normal(jax.random.key(1), CASE.shapes[0], CASE.dtype)
    reference = accuracy.Reference(CASE, packed, do)
    rounds = {"rounds": 2, "iterations": 3} if arguments.quick else {}
    ways = {impl: functools.partial(make, CASE) for impl, make in WAYS.items()}
    made = run.in_threads(ways)
    compiled = run.in_threads(
        {
            (mode, impl): functools.partial(_compile, made[impl], mode, packed, do)
            for mode in MODES
            for impl in WAYS
        }
    )
    for mode in MODES:
        calls: dict[str, timing.Call] = {}
        judged: dict[str, tuple[float, bool]] = {}
        notes: dict[str, str | None] = {}
        for impl in WAYS:
            try:
                calls[impl], notes[impl] = compiled[mode, impl].result()
                judged[impl] = reference.judge(_restored(made[impl].result(), mode, calls[impl]()))
            except Exception as error:  # one that cannot is a line of the table
                calls.pop(impl, None)
                yield results.failure(CASE.name, impl, mode, error)
        # What runs for a tenth of a second heats the chip, and slows down who comes next.
        slow = {impl: calls.pop(impl) for impl in _SLOW if impl in calls}
        times_us = timing.kernel_times_us(calls, **rounds) | timing.kernel_times_us(slow, **rounds)
        for impl, time_us in times_us.items():
            if isinstance(time_us, Exception):
                yield results.failure(CASE.name, impl, mode, time_us)
                continue
            error, is_good = judged[impl]
            yield Row(
                case=CASE.name,
                impl=impl,
                mode=mode,
                time_us=round(time_us, 2),
                tflops=round(CASE.flops(mode) / time_us / 1e6, 1),
                error=float(f"{error:.2g}"),
                note=notes[impl] if is_good else results.INACCURATE,
                amount=round(CASE.seq_len / time_us * 1e6, 1),
                unit="tokens/s",
            )


def _compile(
    made: Future[Way], mode: str, packed: tuple[Array, ...], do: Array
) -> tuple[timing.Call, str | None]:
    """What is timed, and a note about it."""
    way = made.result()
    arrange = jax.jit(way.arrange)
    arrays = tuple(map(arrange, packed))
    if mode == "fwd":
        args: tuple[Array, ...] = (*arrays, *way.others)
        return timing.Call(jax.jit(way.attend).lower(*args).compile(), args), None

    def both(do: Array, q: Array, k: Array, v: Array, *others: Array) -> tuple[Array, ...]:
        out, pullback = jax.vjp(lambda q, k, v: way.attend(q, k, v, *others), q, k, v)
        return out, *pullback(do)

    args = (arrange(do), *arrays, *way.others)
    note = run.gradient_note(both, *args)
    return timing.Call(jax.jit(both).lower(*args).compile(), args), note


def _restored(way: Way, mode: str, arrays: Any) -> dict[str, Array]:
    names = ("out",) if mode == "fwd" else ("out", "dq", "dk", "dv")
    arrays = (arrays,) if mode == "fwd" else arrays
    restore = jax.jit(way.restore)
    return {name: restore(x) for name, x in zip(names, arrays, strict=True)}


def _same(x: Array) -> Array:
    return x


def _packed(make: Callable[[Case], Callable[..., Array]], case: Case) -> Way:
    return Way(make(case), _same, _same, (jnp.asarray(case.cu_seqlens),))


def _padded(attend: Callable[..., Array], case: Case) -> Way:
    """One row for each document; ``attend(q, k, v, lengths)``."""
    assert case.lengths is not None
    lengths = np.asarray(case.lengths, np.int32)
    longest = -(-int(lengths.max()) // _ROUND_UP) * _ROUND_UP
    position = np.arange(longest)
    is_token = position < lengths[:, None]
    source = np.where(is_token, case.cu_seqlens[:-1, None] + position, 0)
    target = np.flatnonzero(is_token)

    def arrange(x: Array) -> Array:
        return jnp.where(is_token[..., None, None], x[source], jnp.zeros((), x.dtype))

    def restore(x: Array) -> Array:
        return x.reshape(-1, *x.shape[2:])[target]

    return Way(attend, arrange, restore, (jnp.asarray(lengths),))


def _ours_padded(q: Array, k: Array, v: Array, lengths: Array) -> Array:
    return jax_flash.dot_product_attention(
        q,
        k,
        v,
        is_causal=True,
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        implementation=_OURS,
    )


def _peer_padded(q: Array, k: Array, v: Array, lengths: Array) -> Array:
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        is_causal=True,
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        implementation=_PEER,
    )


def _masked(case: Case) -> Way:
    """One row of all tokens; a boolean mask says who shares a document and comes before."""
    assert case.lengths is not None

    @jax.jit
    def make_mask() -> Array:
        total = case.seq_len
        document = jnp.repeat(
            jnp.arange(len(case.lengths or ())), np.asarray(case.lengths), total_repeat_length=total
        )
        token = jnp.arange(total)
        return ((document[:, None] == document) & (token[:, None] >= token))[None, None]

    def attend(q: Array, k: Array, v: Array, mask: Array) -> Array:
        return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation=_PEER)

    return Way(attend, lambda x: x[None], lambda x: x[0], (make_mask(),))


WAYS: dict[str, Callable[[Case], Way]] = {
    OURS: functools.partial(_packed, lambda case: peers.IMPLEMENTATIONS[OURS](case)),
    "fa3": functools.partial(_packed, peers.flash_attention_3),
    f"{OURS} padded": functools.partial(_padded, _ours_padded),
    "cudnn padded": functools.partial(_padded, _peer_padded),
    "cudnn mask": _masked,
}
_SLOW = ("cudnn mask",)
