"""A serving engine: many texts at once from one model and one paged cache.

    submit -> queue -> [plan -> launch -> read the step before] ... -> outputs

`models.scheduler` plans a step, `models.step` computes it, and this file runs the loop. The host
plans and launches step n + 1 before it reads the tokens of step n, so its work hides behind the
device's. A text that a token of step n ends has computed the tokens of one step too many by then,
which are dropped.

All shapes come from a fixed list, compiled by `warm_up` or at first use; each twice, for draws
with filters and without.

Example:
    >>> engine = Engine(model, EngineConfig(max_batch_size=8), tokenizer)
    >>> for output in engine.stream(tokens, SamplingParams(max_new_tokens=100)):
    ...     print(output.text, end="")
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash import BlockManager
from models import scheduler as scheduling
from models import step
from models.metrics import Metrics
from models.minigpt import MiniGPT
from models.scheduler import Call, SamplingParams, Scheduler
from models.text_stream import TextStream

__all__ = ["Completion", "Engine", "EngineConfig", "Output", "QueueFullError", "SamplingParams"]

_COMPILER_THREADS = 8


class Decoder(Protocol):
    """The half of a tokenizer that the engine needs."""

    def decode(self, ids: Any) -> str:
        """The text of token ids."""
        ...


class QueueFullError(RuntimeError):
    """As many requests wait as may."""


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """The sizes of an engine; all are static shapes or limits.

    Attributes:
        max_batch_size: texts that run at once.
        page_size: tokens of a page.
        num_pages: of each layer's pool, page 0 included; None: what `max_batch_size` texts of
            `max_length` need at most.
        max_length: most tokens of a text whose keys are stored; None: the model's context. The last
            token drawn is not stored: a text may be one longer.
        max_prefill_tokens: most prompt tokens a step computes, a power of two.
        min_prefill_tokens: fewest that a prefill call is padded to, a power of two.
        reuse_prefixes: whether equal beginnings of texts share pages.
        watermark: share of the pages that a new text leaves free while others run.
        max_waiting: texts that may wait; more are refused.
        decode_draws: tokens that a text may draw in one step. With more than 1 the host has less to
            do, which a small model on a fast GPU needs; they are read all at once, and those behind
            the one that ends a text were for nothing.
        cache_dtype: of keys and values; None: what the model computes in.
    """

    max_batch_size: int = 16
    page_size: int = 16
    num_pages: int | None = None
    max_length: int | None = None
    max_prefill_tokens: int = 256
    min_prefill_tokens: int = 16
    reuse_prefixes: bool = True
    watermark: float = 0.02
    max_waiting: int = 256
    decode_draws: int = 1
    cache_dtype: Any = None

    def __post_init__(self) -> None:
        positive = ("max_batch_size", "page_size", "min_prefill_tokens", "max_waiting")
        for name in (*positive, "decode_draws"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_prefill_tokens < self.min_prefill_tokens:
            raise ValueError(
                f"max_prefill_tokens ({self.max_prefill_tokens}) must be at least "
                f"min_prefill_tokens ({self.min_prefill_tokens})"
            )
        for name in ("min_prefill_tokens", "max_prefill_tokens"):
            if getattr(self, name).bit_count() != 1:
                raise ValueError(f"{name} must be a power of two, got {getattr(self, name)}")
        if not 0.0 <= self.watermark < 1.0:
            raise ValueError(f"watermark must be in [0, 1), got {self.watermark}")

    @property
    def batch_sizes(self) -> list[int]:
        """Rows of the decode calls: powers of two, and the largest."""
        powers = itertools.takewhile(lambda n: n < self.max_batch_size, _powers_of_two(1))
        return [*powers, self.max_batch_size]

    @property
    def prefill_shapes(self) -> list[tuple[int, int]]:
        """`(rows, tokens)`: one row of each power of two, and the largest call in more rows."""
        most = self.max_prefill_tokens
        tokens = itertools.takewhile(lambda n: n <= most, _powers_of_two(self.min_prefill_tokens))
        shapes = [(rows, n) for n in tokens for rows in {1, most // n}]
        return sorted(shape for shape in shapes if shape[0] <= self.max_batch_size)


class Output(NamedTuple):
    """One token of one text.

    Attributes:
        request: what `submit` returned.
        choice: which of the request's texts.
        token: its id.
        text: what can be shown now; "" where nothing can, or without a tokenizer.
        logprob: of the token under the model, before temperature and filters.
        finish_reason: "stop", "length" or "error" (the logits are not finite; the token is -1) with
            the last output of a text, else None.
    """

    request: int
    choice: int
    token: int
    text: str
    logprob: float
    finish_reason: str | None


@dataclasses.dataclass
class Completion:
    """A text from beginning to end: its outputs put together."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    logprobs: list[float] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None

    def add(self, output: Output) -> None:
        """Appends an output."""
        self.tokens.append(output.token)
        self.text += output.text
        self.logprobs.append(output.logprob)
        self.finish_reason = output.finish_reason


@dataclasses.dataclass
class _Text:
    """A sequence, and what became of it on the host."""

    sequence: scheduling.Sequence
    stream: TextStream | None
    submitted_s: float
    last_token_s: float | None = None


@dataclasses.dataclass(frozen=True)
class _Launched:
    call: Call
    result: jax.Array  # int32 [draws, 2, rows]


class Engine:
    """Serves texts of one model. Not thread-safe: one thread submits, cancels and steps.

    Args:
        model: the model.
        config: the sizes.
        tokenizer: for text and stop strings; None: token ids only.

    Raises:
        ValueError: sizes that do not fit the model or each other.
    """

    def __init__(
        self, model: MiniGPT, config: EngineConfig | None = None, tokenizer: Decoder | None = None
    ) -> None:
        self.config = config = config or EngineConfig()
        self.model_config = model.config
        self.max_length = config.max_length or model.config.context_length
        if model.config.position == "learned" and self.max_length > model.config.context_length:
            raise ValueError(
                f"max_length ({self.max_length}) must be at most context_length "
                f"({model.config.context_length}) with learned positions"
            )
        self.max_pages = -(-self.max_length // config.page_size)
        num_pages = config.num_pages or 1 + config.max_batch_size * self.max_pages
        self.blocks = BlockManager(
            num_pages, config.page_size, reuse_prefixes=config.reuse_prefixes
        )
        self.scheduler = Scheduler(
            self.blocks,
            config.batch_sizes,
            config.prefill_shapes,
            config.max_batch_size + config.max_prefill_tokens,
            int(config.watermark * num_pages),
            config.decode_draws,
        )
        self.metrics = Metrics()
        self.compiled: set[tuple[tuple[int, int], bool]] = set()
        self._tokenizer = tokenizer
        dtype = jnp.dtype(config.cache_dtype or model.config.dtype)
        state = step.init_state(model, config.max_batch_size, num_pages, config.page_size, dtype)
        self._graph, self._params, self._state = step.place(model, state)
        self._texts: dict[scheduling.Sequence, _Text] = {}
        self._requests: dict[int, list[scheduling.Sequence]] = {}
        self._in_flight: list[_Launched] = []
        self._next_request = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._texts or self._in_flight)

    def warm_up(self, *, with_filters: bool = True) -> None:
        """Compiles every program, several at a time, and runs each on nothing.

        Args:
            with_filters: False leaves out those that draw with a `top_k` or `top_p`.
        """
        draws = self.config.decode_draws
        shapes = [((rows, 1), draws) for rows in self.config.batch_sizes]
        shapes += [(shape, 1) for shape in self.config.prefill_shapes]
        calls = [
            Call([], shape, has_filters, num_draws)
            for shape, num_draws in shapes
            for has_filters in ((False, True) if with_filters else (False,))
        ]
        # Traced one after another, under the caller's settings; JAX finds them when they are run.
        lowered = [step.run.lower(*self._arguments(call), **_options(call)) for call in calls]
        with concurrent.futures.ThreadPoolExecutor(_COMPILER_THREADS) as pool:
            list(pool.map(lambda program: program.compile(), lowered))
        for call in calls:
            self._launch(call)
        self._copy_pages([(0, 0)])
        jax.block_until_ready(self._state)

    def submit(self, tokens: Sequence[int], params: SamplingParams | None = None) -> int:
        """Queues a prompt.

        Args:
            tokens: ids, at least one.
            params: how to go on.

        Returns:
            The request's number.

        Raises:
            ValueError: ids out of range, a text that could never fit, or stop strings without a
                tokenizer.
            QueueFullError: too many texts wait already; try again later.
        """
        params = params or SamplingParams()
        tokens = [int(token) for token in tokens]
        self._check(tokens, params)
        if len(self.scheduler.waiting) + params.n > self.config.max_waiting:
            raise QueueFullError(
                f"{len(self.scheduler.waiting)} texts wait, and max_waiting is "
                f"{self.config.max_waiting}: try again later"
            )
        request, self._next_request = self._next_request, self._next_request + 1
        now, parent = self.metrics.clock(), None
        self._requests[request] = []
        for choice in range(params.n):
            sequence = scheduling.Sequence(
                request, choice, list(tokens), len(tokens), params, parent
            )
            parent = parent or sequence
            stream = None
            if self._tokenizer is not None:
                stream = TextStream(self._tokenizer.decode, params.stop)
            self._texts[sequence] = _Text(sequence, stream, now)
            self._requests[request].append(sequence)
            self.scheduler.add(sequence)
        self.metrics.submitted += 1
        return request

    def cancel(self, request: int) -> None:
        """Ends a request at once, without another output; one that has ended already is left."""
        for sequence in list(self._requests.get(request, ())):
            self._finish(sequence, "cancelled")

    def step(self) -> list[Output]:
        """Launches the next step and reads the one before it.

        Returns:
            The tokens that were read, of no particular request.
        """
        start = self.metrics.clock()
        outputs: list[Output] = []
        plan = self.scheduler.plan(may_preempt=not self._in_flight)
        if plan is None:  # too few pages: what is in flight may end texts, and must be known
            outputs = self._read()
            plan = self.scheduler.plan(may_preempt=True)
        assert plan is not None
        if plan.copies:
            self._copy_pages(plan.copies)
        launched = [self._launch(call) for call in plan.calls]
        outputs += self._read()
        self._in_flight = launched
        self._measure(start)
        return outputs

    def stream(
        self, tokens: Sequence[int], params: SamplingParams | None = None
    ) -> Iterator[Output]:
        """Submits a prompt now and yields its outputs; closing the iterator cancels it.

        Other requests go on meanwhile, but their outputs are lost: for one text at a time.
        """
        request = self.submit(tokens, params)
        return self._stream(request)

    def _stream(self, request: int) -> Iterator[Output]:
        try:
            while request in self._requests:
                yield from (output for output in self.step() if output.request == request)
        finally:
            self.cancel(request)

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | None = None
    ) -> list[list[Completion]]:
        """Continues many prompts.

        Args:
            prompts: token ids; they wait here while the queue is full.
            params: how, for all of them.

        Returns:
            The `n` completions of each prompt.
        """
        params = params or SamplingParams()
        for prompt in prompts:
            self._check([int(token) for token in prompt], params)
        completions = [[Completion() for _ in range(params.n)] for _ in prompts]
        place: dict[int, int] = {}
        left = list(enumerate(prompts))[::-1]
        while left or self.has_work:
            while left and len(self.scheduler.waiting) + params.n <= self.config.max_waiting:
                index, prompt = left.pop()
                place[self.submit(prompt, params)] = index
            for output in self.step():
                if output.request in place:
                    completions[place[output.request]][output.choice].add(output)
        return completions

    def snapshot(self) -> dict[str, float]:
        """What the engine measured, and its state now, by name."""
        found, seen = self.scheduler.found_tokens, self.scheduler.prompt_tokens
        return {
            **self.metrics.snapshot(),
            "prompt_tokens_total": seen,
            "prefix_hit_tokens_total": found,
            "preempted_total": self.scheduler.num_preempted,
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
            "pages_owned": self.blocks.num_owned,
            "pages": self.blocks.num_pages - 1,
            "compiled_programs": len(self.compiled),
        }

    def _check(self, tokens: list[int], params: SamplingParams) -> None:
        vocab_size = self.model_config.vocab_size
        if not tokens:
            raise ValueError("tokens must hold at least one id")
        for token in tokens:
            if not 0 <= token < vocab_size:
                raise ValueError(f"token id {token} is outside [0, vocab_size = {vocab_size})")
        if params.stop and self._tokenizer is None:
            raise ValueError("stop strings need a tokenizer: give the engine one, or stop_tokens")
        stored = len(tokens) + params.max_new_tokens - 1  # the last one drawn is not stored
        if stored > self.max_length:
            raise ValueError(
                f"{len(tokens)} prompt tokens and max_new_tokens = {params.max_new_tokens} need "
                f"{stored} positions, and max_length is {self.max_length}: shorten one of them"
            )
        if self.blocks.pages_for(stored) > self.blocks.num_pages - 1:
            raise ValueError(
                f"the text needs {self.blocks.pages_for(stored)} pages and there are "
                f"{self.blocks.num_pages - 1}: shorten it, or give the engine more"
            )
        if params.n > self.config.max_waiting:
            raise ValueError(
                f"n ({params.n}) must be at most max_waiting ({self.config.max_waiting})"
            )

    def _arguments(self, call: Call) -> tuple[Any, ...]:
        tables = [self.blocks.table(row.sequence) for row in call.rows]
        packed = step.pack(call, tables, self.max_pages, self.config.max_batch_size)
        return self._graph, self._params, self._state, packed

    def _launch(self, call: Call) -> _Launched:
        self._state, result = step.run(*self._arguments(call), **_options(call))
        self.compiled.add((call.shape, call.has_filters))
        result.copy_to_host_async()
        return _Launched(call, result)

    def _copy_pages(self, copies: list[tuple[int, int]]) -> None:
        # A step copies at most one page for each text that it admits or goes on with.
        pairs = np.zeros((2 * self.config.max_batch_size, 2), np.int32)
        pairs[: len(copies)] = copies
        self._state = step.copy_pages(self._state, pairs)

    def _read(self) -> list[Output]:
        """Waits for what is in flight and deals its tokens out."""
        outputs = []
        for launched in self._in_flight:
            draws = np.asarray(launched.result)
            now, logprobs = self.metrics.clock(), draws[:, 1].view(np.float32)
            for index, drawn in enumerate(
                zip(draws[:, 0].tolist(), logprobs.tolist(), strict=True)
            ):
                for row, token, logprob in zip(launched.call.rows, *drawn, strict=False):
                    # None: it ended, or was cancelled, meanwhile.
                    text = self._texts.get(row.sequence)
                    if row.draw is not None and index < row.num_draws and text is not None:
                        outputs.append(self._take(text, token, logprob, now))
        self._in_flight = []
        return outputs

    def _take(self, text: _Text, token: int, logprob: float, now: float) -> Output:
        sequence, params = text.sequence, text.sequence.params
        self.metrics.token(now, text.submitted_s, text.last_token_s)
        text.last_token_s = now
        piece, reason = "", None
        if token < 0:
            reason = "error"
        else:
            sequence.tokens.append(token)
            if token in params.stop_tokens:
                reason = "stop"
            elif text.stream is not None:
                piece = text.stream.push(token)
                if text.stream.stopped:
                    reason = "stop"
            if reason is None and len(sequence.tokens) == (
                sequence.prompt_length + params.max_new_tokens
            ):
                reason = "length"
        if reason is not None:
            if text.stream is not None:
                piece += text.stream.flush()
            self._finish(sequence, reason)
        return Output(sequence.request, sequence.choice, token, piece, logprob, reason)

    def _finish(self, sequence: scheduling.Sequence, reason: str) -> None:
        sequence.finish_reason = reason
        self.scheduler.remove(sequence)
        del self._texts[sequence]
        siblings = self._requests[sequence.request]
        siblings.remove(sequence)
        if not siblings:
            del self._requests[sequence.request]
        self.metrics.finish(reason)

    def _measure(self, start: float) -> None:
        owned = self.blocks.num_owned
        slots = owned * self.config.page_size
        empty = sum(
            len(self.blocks.table(one)) * self.config.page_size - one.computed
            for one in self.scheduler.running
        )
        waste = empty / slots if slots else None
        self.metrics.step(self.metrics.clock() - start, owned / (self.blocks.num_pages - 1), waste)


def _options(call: Call) -> dict[str, Any]:
    return {
        "num_tokens": call.shape[1],
        "has_filters": call.has_filters,
        "num_draws": call.num_draws,
    }


def _powers_of_two(first: int) -> Iterator[int]:
    return (first << shift for shift in itertools.count())
