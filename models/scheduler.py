"""Which tokens the next step computes, and on which pages: plain Python, without JAX.

A sequence is its tokens and one number, how many of them have keys and values on the device:

    0 ...... computed ...... length          length - computed == 1     a decode row
    |  stored  |   to compute  |                               > 1     a prefill chunk

so a new prompt, a prompt whose beginning is stored already, a fork and a sequence that was thrown
out are the same thing at different places. A step takes decode rows first, then one call of prefill
chunks with what is left of the token budget. Where pages run out the sequence that came last gives
its own back and is computed again later (its pages stay findable until they are needed).

`length` counts tokens that were drawn on the device and not read yet: a step can be planned, and
launched, before the tokens of the step before it are known here. A decode row may draw several
tokens in one step, each computed from the one before it.

Source: Yu et al. 2022 (Orca, iteration-level scheduling); Kwon et al. 2023 (vLLM, preemption by
recomputation); Agrawal et al. 2023 (Sarathi, chunked prefill).
"""

from __future__ import annotations

import dataclasses
from collections import abc, deque
from typing import NamedTuple

from jax_flash import BlockManager, OutOfPagesError
from models import sampling

SEEDS = 2**32


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request is continued.

    Attributes:
        max_new_tokens: tokens to draw, at least 1.
        temperature: 0 is greedy; see `sampling.sample`.
        top_k: see `sampling.sample`.
        top_p: see `sampling.sample`.
        seed: in [0, 2**32). Equal seeds draw equal tokens, whatever else runs.
        first_draw: place of the first draw in the seed's stream, to go on with one.
        stop: strings that end the text; they are not part of it.
        stop_tokens: ids that end the text.
        n: independent continuations of the prompt; the i-th has seed `seed + i` (modulo 2**32).
    """

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    first_draw: int = 0
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    n: int = 1

    def __post_init__(self) -> None:
        sampling.check_settings(self.temperature, self.top_k, self.top_p)
        for name, low in (("max_new_tokens", 1), ("first_draw", 0), ("seed", 0), ("n", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} must be an integer, got {value!r}")
            if not low <= value < SEEDS:
                raise ValueError(f"{name} must be in [{low}, 2**32), got {value}")
        if "" in self.stop:
            raise ValueError("stop must hold no empty string: it would end every text at once")

    @property
    def has_filters(self) -> bool:
        """Whether some tokens may not be drawn."""
        return bool(self.top_k) or (self.top_p is not None and self.top_p < 1.0)


@dataclasses.dataclass(eq=False)
class Sequence:
    """One text that is being continued.

    Attributes:
        request: the request that it belongs to.
        choice: which of the request's `n` texts it is.
        tokens: ids known on the host: the prompt and what was read since.
        prompt_length: how many of them the request came with.
        params: how to go on.
        parent: the request's first sequence, whose prompt this one shares once it is stored.
        length: tokens with those that were drawn and not read yet.
        computed: tokens whose keys and values are stored, or will be by a step launched already.
        slot: place of its newest token on the device while it runs, else None.
        finish_reason: why it ended, or None.
    """

    request: int
    choice: int
    tokens: list[int]
    prompt_length: int
    params: SamplingParams
    parent: Sequence | None = None
    length: int = 0
    computed: int = 0
    slot: int | None = None
    finish_reason: str | None = None

    def __post_init__(self) -> None:
        self.length = len(self.tokens)

    @property
    def num_drawn(self) -> int:
        """Tokens drawn so far, read or not."""
        return self.length - self.prompt_length

    @property
    def pending(self) -> int:
        """Tokens to compute before the next one can be drawn; 0 when the last one is drawn."""
        more = self.length - self.prompt_length < self.params.max_new_tokens
        return self.length - self.computed if more else 0

    @property
    def seed(self) -> int:
        """Seed of its draws."""
        return (self.params.seed + self.choice) % SEEDS


class Row(NamedTuple):
    """One sequence in one call.

    Attributes:
        sequence: whose tokens.
        tokens: ids to compute; -1 is the newest one, which is known on the device only.
        start: position of the first.
        draw: which draw of the sequence comes after them; None: its prompt goes on.
        num_draws: tokens drawn in the call, each but the last computed there too.
    """

    sequence: Sequence
    tokens: list[int]
    start: int
    draw: int | None
    num_draws: int = 1


@dataclasses.dataclass(frozen=True)
class Call:
    """Rows that run together.

    Attributes:
        rows: at least one, but in a warm-up.
        shape: `(rows, tokens a row)` that they are padded to.
        has_filters: whether a row has a `top_k` or `top_p`.
        num_draws: the most that a row may draw.
    """

    rows: list[Row]
    shape: tuple[int, int]
    has_filters: bool = False
    num_draws: int = 1


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a step does: copies of pages `(source, target)`, then the calls in order."""

    copies: list[tuple[int, int]]
    calls: list[Call]


class Scheduler:
    """Queues, slots and pages.

    Args:
        blocks: who owns which page.
        batch_sizes: rows of a decode call, ascending; the last is the most that runs at once.
        prefill_shapes: `(rows, tokens)` of a prefill call.
        token_budget: most tokens a step computes, padding included.
        watermark: pages that a new sequence leaves free, so that those that run can grow.
        decode_draws: most tokens that a decode row draws in a step.
    """

    def __init__(
        self,
        blocks: BlockManager,
        batch_sizes: abc.Sequence[int],
        prefill_shapes: abc.Sequence[tuple[int, int]],
        token_budget: int,
        watermark: int,
        decode_draws: int = 1,
    ) -> None:
        smallest = min(rows * tokens for rows, tokens in prefill_shapes)
        if token_budget < batch_sizes[-1] + smallest:
            raise ValueError(
                f"token_budget must be at least {batch_sizes[-1] + smallest}, so that a prompt "
                f"goes on beside {batch_sizes[-1]} decode rows; got {token_budget}"
            )
        self.blocks = blocks
        self.batch_sizes = batch_sizes
        self.prefill_shapes = prefill_shapes
        self.token_budget = token_budget
        self.watermark = watermark
        self.decode_draws = decode_draws
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # by admission
        self.num_preempted = 0
        self.prompt_tokens = 0  # of sequences admitted for the first time
        self.found_tokens = 0  # of those, tokens that were stored already
        self._free_slots = list(range(batch_sizes[-1] - 1, -1, -1))
        self._copies: dict[int, int] = {}  # by target: one that was given back may be taken again

    def add(self, sequence: Sequence) -> None:
        """Puts a sequence at the end of the queue."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it is, and its pages and slot back."""
        if sequence.slot is None:
            self.waiting.remove(sequence)
        else:
            self._release(sequence)

    def plan(self, may_preempt: bool) -> Plan | None:
        """Plans a step and counts its tokens as computed.

        Args:
            may_preempt: whether a sequence may be thrown out for want of pages. Only when all that
                was drawn has been read: its tokens are needed to compute it again.

        Returns:
            The plan, maybe empty; None: there are too few pages, and `may_preempt` is False.
        """
        num_preempted = self.num_preempted
        draws = self._reserve_decodes(may_preempt)
        if draws is None:
            return None
        if self.num_preempted == num_preempted:  # else the same one would come back at once
            self._admit()
        decodes: list[Sequence] = []
        prompts: list[Sequence] = []
        for sequence in self.running:
            if pending := sequence.pending:
                (decodes if pending == 1 else prompts).append(sequence)
        calls = []
        if decodes:
            size = next(size for size in self.batch_sizes if size >= len(decodes))
            rows = [self._advance(one, 1, draws.get(one, 1)) for one in decodes]
            calls.append(_call(rows, (size, 1), self.decode_draws))
        if prompts:
            shape = self._prefill_shape(prompts, self.token_budget - len(decodes))
            rows = [self._advance(one, min(one.pending, shape[1])) for one in prompts[: shape[0]]]
            calls.append(_call(rows, shape))
        copies = [(source, target) for target, source in self._copies.items()]
        self._copies.clear()
        return Plan(copies, calls)

    def _reserve_decodes(self, may_preempt: bool) -> dict[Sequence, int] | None:
        """How many tokens each decode row may draw, the pages reserved; None: too few pages."""
        draws: dict[Sequence, int] = {}
        for sequence in list(self.running):
            count = min(self.decode_draws, sequence.params.max_new_tokens - sequence.num_drawn)
            while sequence.slot is not None and sequence.pending == 1:
                try:
                    self._reserve(sequence, sequence.computed + count)
                    draws[sequence] = count
                    break
                except OutOfPagesError:
                    if count > 1:
                        count = 1
                    elif may_preempt:
                        self._preempt(self.running[-1])
                    else:
                        return None
        return draws

    def _admit(self) -> None:
        """Lets waiting sequences in, in order, while there are slots, pages and tokens left."""
        if not self.waiting or not self._free_slots:
            return
        tokens = sum(sequence.pending for sequence in self.running)
        for sequence in list(self.waiting):
            if not self._free_slots or tokens >= self.token_budget:
                return
            if self._waits_for_parent(sequence):
                continue
            if not self._allocate(sequence):
                return
            self.waiting.remove(sequence)
            self.running.append(sequence)
            sequence.slot = self._free_slots.pop()
            tokens += sequence.pending

    def _waits_for_parent(self, sequence: Sequence) -> bool:
        parent = sequence.parent
        return parent is not None and parent.slot is not None and parent.pending > 1

    def _allocate(self, sequence: Sequence) -> bool:
        """Gives a sequence pages for all its tokens; False, and nothing changed: too few."""
        parent, is_new = sequence.parent, sequence.num_drawn == 0
        if is_new and parent is not None and parent.slot is not None:
            stored = sequence.length - 1  # the last token again, for its logits
            self.blocks.fork(parent, sequence, stored)
        else:
            stored = self.blocks.allocate(sequence, sequence.tokens)
        shared = len(self.blocks.table(sequence))
        needed = self.blocks.pages_for(sequence.length) - shared
        needed += stored < shared * self.blocks.page_size  # a copy of the page it will write to
        spare = self.watermark if self.running else 0
        if needed + spare > self.blocks.num_available:
            self.blocks.free(sequence)
            return False
        sequence.computed = stored
        self._reserve(sequence, sequence.length)
        if is_new:
            self.prompt_tokens += sequence.length
            self.found_tokens += stored
        return True

    def _reserve(self, sequence: Sequence, end: int) -> None:
        for source, target in self.blocks.reserve(sequence, sequence.computed, end):
            self._copies[target] = source

    def _advance(self, sequence: Sequence, count: int, num_draws: int = 1) -> Row:
        start, draw, page_size = sequence.computed, None, self.blocks.page_size
        tokens = sequence.tokens[start : start + count] or [-1]
        is_drawn = start + count == sequence.length
        sequence.computed = end = start + count + num_draws - 1
        # A page is registered with the first token after it: by then all of its own are known.
        if (end - 1) // page_size > (start - 1) // page_size:
            self.blocks.register(sequence, sequence.tokens[:end])
        if is_drawn:
            draw = sequence.num_drawn + sequence.params.first_draw
            sequence.length += num_draws
        return Row(sequence, tokens, start, draw, num_draws)

    def _prefill_shape(self, prompts: list[Sequence], budget: int) -> tuple[int, int]:
        """The shape that gets most of the oldest prompts done; of equal ones the smallest."""

        def useful(shape: tuple[int, int]) -> tuple[int, int]:
            rows, tokens = shape
            done = sum(min(sequence.pending, tokens) for sequence in prompts[:rows])
            return done, -rows * tokens

        fitting = [shape for shape in self.prefill_shapes if shape[0] * shape[1] <= budget]
        return max(fitting, key=useful)

    def _preempt(self, sequence: Sequence) -> None:
        self._release(sequence)
        sequence.computed = 0
        self.waiting.appendleft(sequence)
        self.num_preempted += 1

    def _release(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self.running.remove(sequence)
        self.blocks.free(sequence)
        self._free_slots.append(sequence.slot)
        sequence.slot = None


def _call(rows: list[Row], shape: tuple[int, int], num_draws: int = 1) -> Call:
    has_filters = any(row.sequence.params.has_filters for row in rows)
    return Call(rows, shape, has_filters, num_draws)
