"""The suite ``decode``: new tokens against a key/value cache, an append, and a step of 32 layers.

Pages lie in random order. What is read is checked against fp32 before it is timed, as everywhere.
Peers that read no pages get the same keys and values in a contiguous cache.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_flash
from bench import decode_peers, results, timing
from bench.results import Row
from cuda_ffi.backend import fixed_splits

Array = jax.Array
Attend = Callable[[Array, Any], Array]  # query [B, Tq, Hq, D] and a cache to out

ENVIRONMENT = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # FlashInfer's process needs memory too
NOTE = (
    "decode: the kernels' times by CUPTI, added up; program: wall-clock time of a program of "
    "dependent calls by their number, with all that surrounds a call. warm: one cache; cold: "
    "copies of it that exceed L2 together, in turn. error: relative to fp32, last sequence, first "
    "and last key head."
)

OURS = "jax_flash.cuda"
_Q_HEADS, _KV_HEADS, _HEAD_DIM = 32, 8, 128
_COLD_BYTES = 160e6  # more than twice the L2 of any GPU that these kernels were made for
_LARGE_BYTES = 150e6  # beyond this L2 holds too little of a cache to matter
_CALLS = 16  # of a program
_LAYERS = 32
_APPENDED = 64  # tokens


@dataclasses.dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        lengths: tokens of each sequence.
        q_len: new tokens of each.
        cache_dtype: of keys and values; queries are bf16.
        page_sizes: those that are timed.
        has_peers: whether peers are timed too.
        has_unsplit: whether our kernels are timed without splitting the keys too.
    """

    lengths: tuple[int, ...]
    q_len: int = 1
    cache_dtype: str = "bfloat16"
    page_sizes: tuple[int, ...] = (16, 64)
    has_peers: bool = False
    has_unsplit: bool = False

    @property
    def name(self) -> str:
        """What result files call it."""
        longest, others = max(self.lengths), len(self.lengths) - 1
        is_uniform = min(self.lengths) == longest
        size = f"S{longest}" if is_uniform else f"S{longest}+{others}x{min(self.lengths)}"
        new = "" if self.q_len == 1 else f" q{self.q_len}"
        dtype = "bf16" if self.cache_dtype == "bfloat16" else "fp8 cache"
        return f"B{len(self.lengths)} {size}{new} H{_Q_HEADS}/{_KV_HEADS} D{_HEAD_DIM} {dtype}"

    @property
    def cache_bytes(self) -> int:
        """Of the keys and values that are read."""
        return 2 * sum(self.lengths) * _KV_HEADS * _HEAD_DIM * jnp.dtype(self.cache_dtype).itemsize


def _uniform(batch: int, length: int, **facts: Any) -> Case:
    return Case((length,) * batch, **facts)


_SIZES = ((1, 1024), (1, 8192), (1, 65536), (8, 8192), (64, 1024), (64, 4096), (64, 16384))
_WITH_PAGES_OF_ONE = ((1, 8192), (64, 4096))
PLAIN = tuple(
    _uniform(
        *size,
        has_peers=True,
        has_unsplit=size[0] in (1, 64),
        page_sizes=(16, 64, 1) if size in _WITH_PAGES_OF_ONE else (16, 64),
    )
    for size in _SIZES
)
CONTEXTS = tuple(_uniform(1, n, page_sizes=(16,), has_unsplit=True) for n in (256, 2048, 16384))
SKEWED = Case(63 * (1024,) + (131072,), page_sizes=(16,))  # errors are those of the last one
EQUAL = _uniform(64, sum(SKEWED.lengths) // 64, page_sizes=(16,))  # of the same bytes
EIGHT_BIT = tuple(_uniform(*size, cache_dtype="float8_e4m3fn", page_sizes=(16,)) for size in _SIZES)
SPECULATIVE = tuple(_uniform(*size, q_len=8, page_sizes=(16,)) for size in ((1, 8192), (64, 4096)))
# Those whose sequences are cut into equal ranges.
PLANNED = (PLAIN[6], SKEWED)
STEPS = (_uniform(1, 1024), _uniform(64, 1024))
CASES = (*PLAIN, SKEWED, EQUAL, *SPECULATIVE, *CONTEXTS, *EIGHT_BIT)


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """Times all of it; rows come as soon as they are known."""
    wanted = arguments.cases or [""]

    def is_chosen(name: str) -> bool:
        return any(part in name for part in wanted)

    peers = decode_peers.chosen(arguments.peers)
    found: list[Row] = []
    for name, rows in (("append", _measure_append), ("step", _measure_steps)):
        if is_chosen(name):
            for row in rows():
                found.append(row)
                yield row
    for case in CASES:
        if is_chosen(case.name):
            for row in _measure_case(case, peers, is_quick=arguments.quick):
                found.append(row)
                yield row
    if "flashinfer" in peers:
        sizes = [size for case, size in zip(PLAIN, _SIZES, strict=True) if is_chosen(case.name)]
        names = [f"B{b} S{s} H{_Q_HEADS}/{_KV_HEADS} D{_HEAD_DIM} bf16" for b, s in sizes]
        for name, size, time_us, note in decode_peers.flashinfer(names, sizes):
            row = Row(name, f"flashinfer page{size}", "program warm", time_us, note=note)
            found.append(row)
            yield row
    print("\n" + "\n".join(summary(found)))


@dataclasses.dataclass(frozen=True)
class _Program:
    """One implementation on one case."""

    attend: Attend
    query: Array
    cache: Any
    reference: _Reference

    def once(self) -> timing.Call:
        args = (self.query, self.cache)
        return timing.Call(jax.jit(self.attend).lower(*args).compile(), args)

    def chain(self, count: int, caches: Sequence[Any]) -> timing.Call:
        """A program of ``count`` calls; each one's query is the result of the one before."""

        def run(query: Array, caches: Sequence[Any]) -> Array:
            for index in range(count):
                query = self.attend(query, caches[index % len(caches)])
            return query

        args = (self.query, caches)
        return timing.Call(jax.jit(run).lower(*args).compile(), args)


def _measure_case(case: Case, peers: Sequence[str], *, is_quick: bool) -> Iterator[Row]:
    """Ours at every page size, and on the first of these pools of both, plans, and the peers."""
    rounds = {"rounds": 2, "iterations": 3} if is_quick else {}
    programs: dict[str, _Program] = {}
    for page_size in case.page_sizes:
        pages = paged_cache(case, page_size)
        query = _random((len(case.lengths), case.q_len, _Q_HEADS, _HEAD_DIM), 1, "bfloat16")
        reference = _Reference(case, query, pages)
        ours = f"{OURS} page{page_size}"
        programs[ours] = _Program(_ours, query, pages, reference)
        if page_size != case.page_sizes[0]:
            continue
        if case.has_peers:
            programs[f"{ours} fused"] = _Program(_ours, query, _fused(pages), reference)
            for name in peers:
                if name in decode_peers.PEERS:
                    peer = functools.partial(decode_peers.attend, name)
                    cache = decode_peers.cache_of(name, pages)
                    programs[name] = _Program(peer, query, cache, reference)
        if case.has_unsplit:
            unsplit = functools.partial(_ours_split, 1)
            programs[f"{ours} unsplit"] = _Program(unsplit, query, pages, reference)
        if case in PLANNED:
            programs[f"{ours} plan"] = _Program(_ours_planned, query, pages, reference)
    good: dict[str, tuple[float, str | None]] = {}
    once: dict[str, timing.Call] = {}
    for impl, program in list(programs.items()):
        try:
            once[impl] = program.once()
            error, is_good = program.reference.judge(once[impl]())
            good[impl] = error, None if is_good else results.INACCURATE
        except Exception as error:  # one that cannot is a line of the table
            once.pop(impl, None)
            del programs[impl]
            yield results.failure(case.name, impl, "decode warm", error)

    def row(impl: str, mode: str, time_us: float | Exception) -> Row:
        if isinstance(time_us, Exception):
            return results.failure(case.name, impl, mode, time_us)
        error, note = good[impl]
        return Row(
            case.name,
            impl,
            mode,
            round(time_us, 2),
            gbps=round(case.cache_bytes / time_us / 1e3, 1),
            error=float(f"{error:.2g}"),
            note=note,
        )

    # By the wall first: CUPTI, once attached, slows launches down.
    copies = math.ceil(_COLD_BYTES / case.cache_bytes) if case.cache_bytes < _LARGE_BYTES else 1
    cold: dict[str, timing.Call] = {}
    for impl, program in programs.items():
        if impl in decode_peers.SLOW:
            continue
        mode = "program warm"
        try:
            chain = program.chain(_CALLS, [program.cache])
            yield row(impl, mode, _wall_us(chain, _CALLS))
            if copies > 1:
                mode = "program cold"
                caches = [program.cache, *(_copy(program.cache) for _ in range(copies - 1))]
                cold[impl] = program.chain(copies, caches)
                yield row(impl, mode, _wall_us(cold[impl], copies))
        except Exception as error:
            yield results.failure(case.name, impl, mode, error)
    warm = timing.kernel_times_us(once, **rounds)
    for impl, time_us in warm.items():
        yield row(impl, "decode warm", time_us)
    for impl, time_us in timing.kernel_times_us(cold, **rounds).items():
        is_time = isinstance(time_us, float)
        yield row(impl, "decode cold", time_us / copies if is_time else time_us)
    _detach()


def _detach() -> None:
    """Takes CUPTI off the process, so that what is next timed by the wall runs without it."""
    from jax.experimental.mosaic.gpu import profiler

    profiler.Cupti(finalize=True).measure(jax.jit(lambda x: x + 1))(jnp.zeros(()))


def _ours(query: Array, cache: dict[str, Array]) -> Array:
    return jax_flash.paged_attention(query, **cache, implementation="cuda")


def _ours_split(count: int, query: Array, cache: dict[str, Array]) -> Array:
    """So many blocks for each sequence and key/value head."""
    with fixed_splits(count):
        return _ours(query, cache)


def _ours_planned(query: Array, cache: dict[str, Array]) -> Array:
    """With a plan, which a program of several calls makes once."""
    plan = jax_flash.decode_plan(cache["kv_lens"], num_new_tokens=query.shape[1])
    return jax_flash.paged_attention(query, **cache, plan=plan, implementation="cuda")


@jax.jit
def _fused(pages: dict[str, Any]) -> dict[str, Any]:
    """The same cache with keys and values in one pool."""
    both = jnp.stack([pages["key_pages"], pages["value_pages"]], axis=1)
    return pages | {"key_pages": both, "value_pages": None}


def _copy(cache: Any) -> Any:
    return jax.tree.map(lambda x: jnp.array(x, copy=True), cache)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _random(shape: tuple[int, ...], seed: int, dtype: str) -> Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16).astype(dtype)


def paged_cache(case: Case, page_size: int) -> dict[str, Array]:
    """The arguments of :func:`jax_flash.paged_attention` but the query.

    Pages are in random order; entries of a table past its sequence's length are -1.
    """
    counts = [-(-length // page_size) for length in case.lengths]
    order = np.random.default_rng(0).permutation(sum(counts)).astype(np.int32)
    tables = np.full((len(counts), max(counts)), -1, np.int32)
    first = 0
    for row, count in zip(tables, counts, strict=True):
        row[:count] = order[first : first + count]
        first += count
    shape = (sum(counts), _KV_HEADS, page_size, _HEAD_DIM)
    return {
        "key_pages": _random(shape, 2, case.cache_dtype),
        "value_pages": _random(shape, 3, case.cache_dtype),
        "block_tables": jnp.asarray(tables),
        "kv_lens": jnp.asarray(case.lengths, jnp.int32),
    }


class _Reference:
    """What is right, and how wrong plain attention in low precision is."""

    def __init__(self, case: Case, query: Array, cache: dict[str, Array]) -> None:
        length = case.lengths[-1]
        heads, group = (0, _KV_HEADS - 1), _Q_HEADS // _KV_HEADS
        self._rows = np.concatenate([np.arange(h * group, (h + 1) * group) for h in heads])
        q = query[-1][:, self._rows].reshape(case.q_len, len(heads), group, _HEAD_DIM)
        row = cache["block_tables"][-1]
        pages = row[: -(-length // cache["key_pages"].shape[2])]
        k, v = (
            cache[name][pages][:, heads, :].swapaxes(1, 2).reshape(-1, len(heads), _HEAD_DIM)
            for name in ("key_pages", "value_pages")
        )
        right, low = (_dense(q, k[:length], v[:length], x) for x in ("float32", "bfloat16"))
        self._right = right.astype(np.float64)
        self._plain_error = self._error(low)

    def _error(self, x: np.ndarray) -> float:
        difference = np.linalg.norm(x.astype(np.float64) - self._right)
        return float(difference / np.linalg.norm(self._right))

    def judge(self, out: Array) -> tuple[float, bool]:
        """The error of ``[B, Tq, Hq, D]``, and if it will do.

        Raises:
            FloatingPointError: a number that is not finite.
        """
        probe = np.asarray(out[-1].astype(jnp.float32))[:, self._rows]
        if not np.isfinite(probe).all():
            raise FloatingPointError("results that are not finite")
        error = self._error(probe.reshape(self._right.shape))
        return error, error <= 2.0 * self._plain_error


@functools.partial(jax.jit, static_argnums=3)
def _dense_scores(q: Array, k: Array, v: Array, dtype: str) -> Array:
    """Causal attention of the last tokens: q ``[Tq, H, G, D]``, k and v ``[S, H, D]``."""
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    highest = jax.lax.Precision.HIGHEST
    x = jnp.einsum("thgd,shd->thgs", q * q.shape[-1] ** -0.5, k, precision=highest)
    ends = k.shape[0] - q.shape[0] + jnp.arange(q.shape[0])
    is_seen = jnp.arange(k.shape[0]) <= ends[:, None, None, None]
    x = jnp.where(is_seen, x.astype(jnp.float32), -jnp.inf)
    p = jax.nn.softmax(x, axis=-1).astype(dtype)
    return jnp.einsum("thgs,shd->thgd", p, v, precision=highest).astype(jnp.float32)


def _dense(q: Array, k: Array, v: Array, dtype: str) -> np.ndarray:
    return np.asarray(_dense_scores(q, k, v, dtype))


def _wall_us(call: timing.Call, calls: int, *, repeats: int = 5) -> float:
    """Wall-clock time of one of the program's calls, from programs that are enqueued in a row."""
    jax.block_until_ready(call())
    start = time.perf_counter()
    jax.block_until_ready(call())
    # Long enough for the first launch, which nothing hides, not to count.
    count = max(2, math.ceil(40e-3 / (time.perf_counter() - start)))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(count):
            result = call()
        jax.block_until_ready(result)
        times.append(time.perf_counter() - start)
    return statistics.median(times) / count / calls * 1e6


def _measure_append() -> Iterator[Row]:
    """Tokens of as many sequences, into pages of 16; a program of appends to one pool."""
    tokens, page_size = _APPENDED, 16
    name = f"append {tokens} tokens H{_KV_HEADS} D{_HEAD_DIM} page{page_size} bf16"
    try:
        pool = _random((tokens * 64, _KV_HEADS, page_size, _HEAD_DIM), 2, "bfloat16")
        new = _random((tokens, _KV_HEADS, _HEAD_DIM), 3, "bfloat16")
        slots = jnp.arange(tokens, dtype=jnp.int32) * 64 * page_size + 5
        pools = jax.jit(jax_flash.append_kv)(pool, pool, new, new, slots)
        right = pool.at[jnp.arange(tokens) * 64, :, 5].set(new)
        is_right = all(bool(jnp.array_equal(x, right)) for x in pools)

        def run(pools: tuple[Array, Array], new: Array, slots: Array) -> tuple[Array, Array]:
            for _ in range(_CALLS):
                pools = jax_flash.append_kv(*pools, new, new, slots)
            return pools

        step = jax.jit(run, donate_argnums=0)
        pools = jax.block_until_ready(step(pools, new, slots))
        count, times = 50, []
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(count):
                pools = step(pools, new, slots)
            jax.block_until_ready(pools)
            times.append(time.perf_counter() - start)
        time_us = statistics.median(times) / count / _CALLS * 1e6
        note = None if is_right else results.INACCURATE
        yield Row(name, OURS, "program warm", round(time_us, 2), note=note)
    except Exception as error:
        yield results.failure(name, OURS, "program warm", error)


def _measure_steps() -> Iterator[Row]:
    """A decode step's append and attention, 32 layers with pools of their own in one program."""
    for case in STEPS:
        name = f"step of {_LAYERS} layers, append and attention, {case.name}"
        try:
            yield Row(name, f"{OURS} page16", "step", round(_step_us(case), 1))
        except Exception as error:
            yield results.failure(name, f"{OURS} page16", "step", error)


def _step_us(case: Case) -> float:
    batch, page_size = len(case.lengths), 16
    cache = paged_cache(case, page_size)
    tables, lens = cache["block_tables"], cache["kv_lens"]
    pools = [(_copy(cache["key_pages"]), _copy(cache["value_pages"])) for _ in range(_LAYERS)]
    query = _random((batch, 1, _Q_HEADS, _HEAD_DIM), 1, "bfloat16")

    def step(pools: Any, query: Array, tables: Array, lens: Array) -> Any:
        last = lens - 1
        pages = jnp.take_along_axis(tables, last[:, None] // page_size, axis=1)[:, 0]
        slots = pages * page_size + last % page_size
        grown = []
        for pair in pools:
            new = query[:, 0, :_KV_HEADS]
            grown.append(jax_flash.append_kv(*pair, new, new, slots))
            query = jax_flash.paged_attention(
                query, *grown[-1], tables, lens, implementation="cuda"
            )
        return grown, query

    compiled = jax.jit(step, donate_argnums=0)
    pools, out = jax.block_until_ready(compiled(pools, query, tables, lens))
    if not bool(jnp.isfinite(out).all()):
        raise FloatingPointError("results that are not finite")
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(5):
            pools, out = compiled(pools, query, tables, lens)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - start) / 5)
    return statistics.median(times) * 1e6


def summary(rows: Sequence[Row]) -> list[str]:
    """How ours stands beside cuDNN and against itself, a line for each comparison.

    Of "decode" (kernels) and "program" (all that surrounds them) the shorter time counts, for
    everybody: both are at least what the kernels take.
    """
    times: dict[tuple[str, str, str], float] = {}
    for row in rows:
        temperature = row.mode.rpartition(" ")[2]
        key = (row.case, row.impl, temperature)
        if row.time_us is not None:
            times[key] = min(row.time_us, times.get(key, math.inf))
    lines = []
    for page_size in (16, 64):
        ours, ratios = f"{OURS} page{page_size}", []
        for case in PLAIN:
            pair = [times.get((case.name, impl, "warm")) for impl in ("cudnn", ours)]
            if None not in pair:
                ratios.append(pair[0] / pair[1])  # type: ignore[operator]
                lines.append(f"cuDNN / {ours}: {ratios[-1]:.3f}  {case.name}")
        if ratios:
            mean = results.geometric_mean(ratios)
            lines.append(f"cuDNN / {ours}: {mean:.3f}  geometric mean of {len(ratios)}")
    ours = f"{OURS} page16"
    pairs = [("skewed / equal lengths", SKEWED, ours, EQUAL, ours)]
    by_size = {case.lengths: case for case in PLAIN}
    for case in EIGHT_BIT:
        pairs.append(("bf16 / fp8 cache", by_size[case.lengths], ours, case, ours))
    for case in SPECULATIVE:
        pairs.append(("8 new tokens / 1", case, ours, by_size[case.lengths], ours))
    for case in PLAIN:
        pairs.append(("page 1 / page 64", case, f"{OURS} page1", case, f"{OURS} page64"))
    for what, first, first_impl, second, second_impl in pairs:
        pair = [
            times.get((case.name, impl, "warm"))
            for case, impl in ((first, first_impl), (second, second_impl))
        ]
        if None not in pair:
            lines.append(f"{what}: {pair[0] / pair[1]:.3f}  {first.name}")  # type: ignore[operator]
    for case in PLAIN:
        for page_size in (16, 64):
            cold = times.get((case.name, f"{OURS} page{page_size}", "cold"))
            if cold is not None:
                limit = 6.5 + case.cache_bytes / 4.2e6
                lines.append(f"cold, page {page_size}: {cold:.1f} of {limit:.1f} µs  {case.name}")
    return lines
