"""Who serves: the engine, and the loop that a Flax user writes; each in a process of its own."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_flash
from bench import timing
from bench.serving import LAUNCHES, Mix, Step
from jax_flash.layers import KVCache
from models import scheduler
from models import step as engine_step
from models.engine import Engine, EngineConfig, SamplingParams
from models.metrics import Metrics
from models.minigpt import MiniGPT

Array = jax.Array
State = tuple[list[KVCache], Array, Array]  # caches, int32 tokens [rows, most], how many there are

_ESTIMATE_US = 500.0  # of a decode step


class _Saturated(Metrics):
    """Keeps what there is while requests wait."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._scheduler = engine.scheduler
        self.running: list[int] = []
        self.waste: list[float] = []

    def step(self, seconds: float, occupancy: float, waste: float | None) -> None:
        """Counts a step."""
        super().step(seconds, occupancy, waste)
        if self._scheduler.waiting and waste is not None:
            self.running.append(len(self._scheduler.running))
            self.waste.append(waste)


def engine(fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Serves the mix with the engine; a child's part.

    Args:
        fields: of a :class:`bench.serving.Mix`.
    """
    mix = Mix(**fields)
    requests, model = mix.requests(), mix.model()
    config = EngineConfig(
        max_batch_size=mix.max_batch_size,
        page_size=mix.page_size,
        num_pages=mix.num_pages,
        max_prefill_tokens=mix.max_prefill_tokens,
        min_prefill_tokens=mix.min_prefill_tokens,
        reuse_prefixes=False,
        max_waiting=len(requests),
        decode_draws=mix.decode_draws,
    )
    server = Engine(model, config)
    start = time.perf_counter()
    server.warm_up(with_filters=False)
    warm_up_s = time.perf_counter() - start
    server.warm_up(with_filters=False)  # the first launches of a program do more
    server.metrics = metrics = _Saturated(server)
    outputs: dict[int, list[Any]] = {}
    start = time.perf_counter()
    for prompt, count in requests:
        greedy = SamplingParams(max_new_tokens=count, temperature=0.0)
        outputs[server.submit(prompt, greedy)] = []
    while server.has_work:
        for output in server.step():
            outputs[output.request].append(output)
    seconds = time.perf_counter() - start
    for one, (_, count) in zip(outputs.values(), requests, strict=True):
        if len(one) != count or one[-1].finish_reason != "length":
            raise RuntimeError(f"{count} tokens were wanted and {len(one)} came: {one[-1:]}")
    numbers = server.snapshot()
    step_ms = 1e3 * numbers["busy_seconds_total"] / numbers["steps_total"]
    yield {
        "tokens": [[output.token for output in one] for one in outputs.values()],
        "seconds": seconds,
        "warm_up_s": warm_up_s,
        "running": float(np.mean(metrics.running)),
        "waste": float(np.mean(metrics.waste)),
        "latencies_s": {
            "first token p50": numbers["time_to_first_token_seconds_p50"],
            "between tokens p50": numbers["inter_token_seconds_p50"],
            "between tokens p99": numbers["inter_token_seconds_p99"],
        },
        "note": (
            f"decode rows on {_chosen(model, mix.max_batch_size, 1)}, prompts on "
            f"{_chosen(model, 1, mix.max_prefill_tokens)}; {numbers['steps_total']} steps of "
            f"{step_ms:.2f} ms, {numbers['preempted_total']} times preempted"
        ),
    }


def loop(fields: dict[str, Any], implementation: Any) -> Iterator[dict[str, Any]]:
    """Serves the mix; a child's part.

    Prompts are padded to a power of two, on the right. The tokens stay on the device until all
    answers of a batch are done, and texts that are done ride along.

    Args:
        fields: of a :class:`bench.serving.Mix`.
        implementation: of ``jax.nn.dot_product_attention``.
    """
    mix = Mix(**fields)
    requests = mix.requests()
    batches = [requests[i : i + mix.rows] for i in range(0, len(requests), mix.rows)]
    of_bucket = {_bucket(mix, batch): batch for batch in batches}
    with mock.patch.object(KVCache, "attend", _attention(implementation)):
        start = time.perf_counter()
        params, programs = _compiled(mix, of_bucket.keys())
        warm_up_s = time.perf_counter() - start
    clock, tokens, held, steps = 0.0, [], 0, 0
    # The first launch of a program does more: not timed.
    for is_timed, batch in (
        *((False, batch) for batch in of_bucket.values()),
        *((True, batch) for batch in batches),
    ):
        start = time.perf_counter()
        prompts = np.zeros((mix.rows, _bucket(mix, batch)), np.int32)
        for row, (prompt, _) in zip(prompts, batch, strict=True):
            row[: len(prompt)] = prompt
        counts = [count for _, count in batch]
        lengths = np.array([len(prompt) for prompt, _ in batch], np.int32)
        state = programs[prompts.shape[1]](params, prompts, lengths)
        for _ in range(max(counts) - 1):
            state = programs[1](params, state)
        drawn = np.asarray(state[1])
        if not is_timed:
            continue
        clock += time.perf_counter() - start
        tokens += [row[:count].tolist() for row, count in zip(drawn, counts, strict=True)]
        steps += max(counts)
        held += sum(
            int(np.minimum(length + np.arange(max(counts)), length + count).sum())
            for length, count in zip(lengths, counts, strict=True)
        )
    yield {
        "tokens": tokens,
        "seconds": clock,
        "warm_up_s": warm_up_s,
        "running": float(mix.rows),
        "waste": 1.0 - held / (steps * mix.rows * mix.context_length),
        "latencies_s": {},
        "note": f"{steps} steps of {1e3 * clock / steps:.2f} ms, prompts among them",
    }


def _bucket(mix: Mix, batch: list[tuple[list[int], int]]) -> int:
    longest = max(len(prompt) for prompt, _ in batch)
    return min(1 << (longest - 1).bit_length(), mix.context_length)


def _attention(implementation: Any) -> Callable[..., Array]:
    """In place of ``KVCache.attend``."""

    def attend(cache: KVCache, query: Array, *_: Any, **__: Any) -> Array:
        length = query.shape[1]
        if length == 1:
            return jax.nn.dot_product_attention(
                query,
                cache.key,
                cache.value,
                key_value_seq_lengths=cache.lengths,
                implementation=implementation,
            )
        return jax.nn.dot_product_attention(  # a prompt, with nothing before it
            query,
            cache.key[:, :length],
            cache.value[:, :length],
            is_causal=True,
            implementation=implementation,
        )

    return attend


def _compiled(mix: Mix, buckets: Iterable[int]) -> tuple[Any, dict[int, Any]]:
    """The parameters, and the programs by tokens of a row: prompts of a bucket, and one."""
    graph, params = nnx.split(mix.model())
    most = max(count for _, count in mix.requests())

    def prefill(params: Any, prompts: Array, lengths: Array) -> State:
        model = nnx.merge(graph, params)
        logits, caches = model(
            prompts,
            caches=model.init_caches(mix.rows, mix.context_length),
            new_lengths=lengths,
            logits_at=lengths - 1,
        )
        tokens = jnp.zeros((mix.rows, most), jnp.int32).at[:, 0].set(_greedy(logits))
        return caches, tokens, jnp.int32(1)

    def step(params: Any, state: State) -> State:
        caches, tokens, count = state
        newest = jax.lax.dynamic_slice_in_dim(tokens, count - 1, 1, axis=1)
        logits, caches = nnx.merge(graph, params)(newest, caches=caches)
        tokens = jax.lax.dynamic_update_slice_in_dim(tokens, _greedy(logits), count, axis=1)
        return caches, tokens, count + 1

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    lowered = {
        n: jax.jit(prefill).lower(params, ints(mix.rows, n), ints(mix.rows)) for n in buckets
    }
    state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), next(iter(lowered.values())).out_info
    )
    lowered[1] = jax.jit(step, donate_argnums=1).lower(params, state)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        compiled = pool.map(lambda program: program.compile(), lowered.values())
        return params, dict(zip(lowered, compiled, strict=True))


def _greedy(logits: Array) -> Array:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def decode_step(fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Times the engine's decode step; a child's part.

    Args:
        fields: of a :class:`bench.serving.Step`.
    """
    step = Step(**fields)
    model, batch = step.model(), step.batch_size
    columns = -(-step.context_length // step.page_size)
    num_pages = 1 + batch * columns
    state = engine_step.init_state(model, batch, num_pages, step.page_size, jnp.dtype(step.dtype))
    graph, params, state = engine_step.place(model, _filled(state))
    greedy = SamplingParams(temperature=0.0)
    rows = []
    for slot in range(batch):
        text = scheduler.Sequence(slot, 0, [0] * step.length, step.length, greedy, slot=slot)
        rows.append(scheduler.Row(text, [-1], step.length, draw=1, num_draws=step.draws))
    tables = 1 + np.random.default_rng(0).permutation(num_pages - 1).reshape(batch, columns)
    call = scheduler.Call(rows, (batch, 1), num_draws=step.draws)
    packed = engine_step.pack(call, list(tables), columns, batch)

    def launch() -> Array:
        nonlocal state
        options = {"num_tokens": 1, "has_filters": False, "num_draws": step.draws}
        state, result = engine_step.run(graph, params, state, packed, **options)
        return result

    if np.any(np.array(launch())[:, 0] < 0):
        raise FloatingPointError("the logits of a decode step are not finite")
    found: dict[str, Any] = {
        "step_us": timing.sustained_us(timing.Call(launch, ()), _ESTIMATE_US) / step.draws,
        "dispatch_us": timing.dispatch_us({"step": timing.Call(launch, ())})["step"] / step.draws,
        "note": f"attention on {_chosen(model, batch, 1)}",
    }
    try:
        found["kernels"] = timing.launched_us(lambda: [launch() for _ in range(LAUNCHES)][-1])
    except Exception as error:  # what was timed already is worth having
        found["kernels"] = f"{type(error).__name__}: {error}"
    yield found


def _filled(state: engine_step.State) -> engine_step.State:
    """With random keys and values."""
    pools, structure = jax.tree.flatten(state.pools)
    keys = jax.random.split(jax.random.key(0), len(pools))
    pools = [jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys, pools, strict=True)]
    return dataclasses.replace(state, pools=structure.unflatten(pools))


def _chosen(model: MiniGPT, num_rows: int, num_tokens: int) -> str:
    """The implementation of a call's attention."""
    config, page_size = model.config, 16
    state = engine_step.init_state(model, num_rows, 2, page_size, jnp.dtype(config.dtype))
    graph, params, state = engine_step.place(model, state)
    columns = -(-config.context_length // page_size)
    packed = np.zeros((num_rows, num_tokens + columns + len(engine_step.FIELDS)), np.int32)
    options = {"num_tokens": num_tokens, "has_filters": False, "num_draws": 1}
    run = functools.partial(engine_step.run.__wrapped__, graph, **options)
    decisions = jax_flash.explain(run, params, state, packed).decisions
    return " and ".join(sorted({repr(decision.chosen) for decision in decisions}))
