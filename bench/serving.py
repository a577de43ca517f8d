"""Serves a mix of requests with the engine and with a plain loop, and takes a decode step apart.

The loop is what a Flax user writes first: contiguous caches of the longest text there may be, as
many rows as the memory has room for, requests in order of arrival, each batch until its longest
answer is done. Its attention is that of ``jax.nn``. The engine has the same model and as much
memory for its pages.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from bench import isolated, results
from bench.results import Row

NOTE = (
    "Parameters in fp32, random, twice their initial size so that a token depends on all before "
    "it; computed in bf16; greedy; all requests are there from the beginning; compiled before. "
    "serve: wall-clock time from the first request to the last token. running, waste: while "
    "requests wait, the texts that run at once and the part of their pages' slots that holds no "
    "token; of the loop its rows, and the part of their slots that holds no token that was asked "
    "for, over all steps. step: wall-clock time of a decode step in a loop of 1.2 s that never "
    "waits; kernels: times of its kernels by CUPTI, added up; dispatch: the host's time to launch "
    "it; each an equal part of a launch, which draws several tokens (EngineConfig.decode_draws). "
    "One process for each."
)
ENVIRONMENT = isolated.PARENT_ENVIRONMENT
ENGINE = "jax_flash engine"
LOOP = "flax loop"
# The first one's tokens are those that the others' are compared with.
IMPLEMENTATIONS = (f"{LOOP} xla", ENGINE, f"{LOOP} cudnn")
_SCALE = 2.0  # of the parameters: enough for another context to mean another token
LAUNCHES = 5  # that are taken apart together
_SHOWN = 10  # kernels that a note names
_TIMEOUT_S = 300.0

Tokens = list[list[int]]  # of each request


@dataclasses.dataclass(frozen=True)
class Shape:
    """A MiniGPT with learned positions."""

    title: str
    context_length: int
    num_layers: int
    num_heads: int
    head_dim: int
    vocab_size: int
    dtype: str = "bfloat16"
    page_size: int = 16

    @property
    def _sizes(self) -> str:
        dtype = self.dtype.replace("bfloat", "bf").replace("float", "fp")
        heads = f"H{self.num_heads}/{self.num_heads} D{self.head_dim}"
        return f"{heads} L{self.num_layers} {dtype}"

    def model(self) -> Any:
        """Random, always the same."""
        import jax
        from flax import nnx

        from models.minigpt import MiniGPT, MiniGPTConfig

        config = MiniGPTConfig(
            vocab_size=self.vocab_size,
            context_length=self.context_length,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            width=self.num_heads * self.head_dim,
            dtype=self.dtype,  # type: ignore[arg-type]
        )
        graph, params = nnx.split(MiniGPT(config, rngs=nnx.Rngs(0)))
        return nnx.merge(graph, jax.tree.map(lambda x: _SCALE * x, params))


@dataclasses.dataclass(frozen=True)
class Mix(Shape):
    """Requests of log-normal lengths, and the memory that serves them.

    Attributes:
        num_requests: a multiple of ``rows``.
        prompt_median: tokens; likewise ``output_median``.
        prompt_sigma: of the logarithm; likewise ``output_sigma``.
        shortest: the fewest tokens of a prompt and of an output.
        longest_prompt: tokens; likewise ``longest_output``.
        rows: contiguous caches of ``context_length`` tokens, whose memory the engine's pages have.
        max_batch_size: see :class:`models.engine.EngineConfig`; likewise the other three.
    """

    num_requests: int = 256
    prompt_median: float = 160.0
    prompt_sigma: float = 0.8
    output_median: float = 96.0
    output_sigma: float = 0.7
    shortest: int = 32
    longest_prompt: int = 1024
    longest_output: int = 512
    rows: int = 16
    max_batch_size: int = 128
    max_prefill_tokens: int = 2048
    min_prefill_tokens: int = 128
    decode_draws: int = 2

    @property
    def name(self) -> str:
        """What result files call it."""
        return f"{self.title} {self.num_requests} requests S{self.context_length} {self._sizes}"

    @property
    def num_pages(self) -> int:
        """Of the engine, the reserved one among them: the tokens of all rows."""
        return self.rows * self.context_length // self.page_size

    def requests(self) -> list[tuple[list[int], int]]:
        """A prompt and how many tokens are asked for, of each request; always the same."""
        rng = np.random.default_rng(0)

        def lengths(median: float, sigma: float, longest: int) -> list[int]:
            drawn = np.rint(rng.lognormal(np.log(median), sigma, self.num_requests))
            return np.clip(drawn, self.shortest, longest).astype(int).tolist()

        prompts = lengths(self.prompt_median, self.prompt_sigma, self.longest_prompt)
        outputs = lengths(self.output_median, self.output_sigma, self.longest_output)
        return [
            (rng.integers(0, self.vocab_size, length).tolist(), count)
            for length, count in zip(prompts, outputs, strict=True)
        ]


@dataclasses.dataclass(frozen=True)
class Step(Shape):
    """A decode step of ``batch_size`` texts that have ``length`` tokens each.

    It is one of ``draws`` that are launched together (see :class:`models.engine.EngineConfig`).
    """

    batch_size: int = 64
    length: int = 200
    draws: int = 8

    @property
    def name(self) -> str:
        """What result files call it."""
        return f"{self.title} decode B{self.batch_size} S{self.length} {self._sizes}"


STEPS = (Step("MiniGPT", 256, 6, 6, 64, 65),)
# 50257 tokens, padded as nanoGPT does; positions for the longest prompt and its longest answer.
MIXES = (Mix("GPT-2 124M", 1536, 12, 12, 64, 50304),)


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """The step, then the mix by every implementation, each in a process of its own."""
    wanted = arguments.cases or [""]
    for step in STEPS:
        if any(part in step.name for part in wanted):
            yield from _step_rows(step)
    for mix in MIXES:
        expected: list[Tokens] = []
        for impl in IMPLEMENTATIONS:
            if any(part in mix.name for part in wanted):
                yield from _serving_rows(mix, impl, expected)


def _child(case: Step | Mix, mode: str, impl: str, target: str, *rest: Any) -> dict[str, Any]:
    """What a function yields in a process of its own; or the row that says why it did not."""
    try:
        (found,) = isolated.items(target, dataclasses.asdict(case), *rest, timeout_s=_TIMEOUT_S)
    except (isolated.DiedError, ValueError) as error:
        return {"failure": results.failure(case.name, impl, mode, error)}
    return found


def _step_rows(step: Step) -> Iterator[Row]:
    found = _child(step, "step", ENGINE, "bench.servers:decode_step")
    if "failure" in found:
        yield found["failure"]
        return
    step_us, host_us = round(found["step_us"], 1), round(found["dispatch_us"], 1)
    yield Row(step.name, ENGINE, "step", step_us, note=found["note"])
    yield Row(step.name, ENGINE, "dispatch", host_us)
    if isinstance(found["kernels"], str):
        yield Row(step.name, ENGINE, "kernels", None, note=found["kernels"])
        return
    times_us, counts, steps = Counter[str](), Counter[str](), LAUNCHES * step.draws
    for kernel, time_us in found["kernels"]:
        name = re.sub(r"(_\d+)+$", "", kernel)
        times_us[name] += time_us / steps
        counts[name] += 1
    total_us = sum(times_us.values())
    parts = [
        f"{name[:48]} {time_us:.1f} µs ({counts[name] / steps:g})"
        for name, time_us in times_us.most_common(_SHOWN)
    ]
    note = f"{100 * total_us / step_us:.0f} % of a step; {', '.join(parts)}"
    if len(times_us) > _SHOWN:
        note += f", {len(times_us) - _SHOWN} others"
    yield Row(step.name, ENGINE, "kernels", round(total_us, 1), note=note)


def _serving_rows(mix: Mix, impl: str, expected: list[Tokens]) -> Iterator[Row]:
    target, *rest = (
        ("bench.servers:engine",)
        if impl == ENGINE
        else ("bench.servers:loop", impl.removeprefix(f"{LOOP} "))
    )
    found = _child(mix, "serve", impl, target, *rest)
    if "failure" in found:
        yield found["failure"]
        return
    tokens, note = found["tokens"], f"compiled in {found['warm_up_s']:.0f} s; {found['note']}"
    if expected:
        note += f"; as {IMPLEMENTATIONS[0]}: {_agreement(tokens, expected[0])}"
    elif impl == IMPLEMENTATIONS[0]:
        expected.append(tokens)
        prompts, outputs = zip(*((len(x), count) for x, count in mix.requests()), strict=True)
        note += f"; prompts of {np.mean(prompts):.1f} and outputs of {np.mean(outputs):.1f} tokens"
        note += " in the mean"
    seconds = found["seconds"]
    rate = round(sum(map(len, tokens)) / seconds, 1)
    time_us = round(seconds * 1e6, 1)
    yield Row(mix.name, impl, "serve", time_us, note=note, amount=rate, unit="tokens/s")
    for mode, amount, unit in (("running", 1.0, "texts"), ("waste", 100.0, "%")):
        amount = round(amount * found[mode], 2)
        yield Row(mix.name, impl, mode, None, amount=amount, unit=unit)
    for mode, time_s in found["latencies_s"].items():
        yield Row(mix.name, impl, mode, round(time_s * 1e6, 1))


def _agreement(tokens: Tokens, expected: Tokens) -> str:
    """How far two implementations draw the same; in bf16 two right ones part at some token."""
    pairs = list(zip(tokens, expected, strict=True))
    equal = [
        sum(
            1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*pair, strict=True))
        )
        for pair in pairs
    ]
    first = 100 * np.mean([count > 0 for count in equal])
    whole = 100 * np.mean([count == len(one) for count, one in zip(equal, tokens, strict=True)])
    share = 100 * sum(equal) / sum(map(len, tokens))
    return (
        f"{first:.1f} % of the first tokens, {share:.1f} % of all before the first other one, "
        f"{whole:.1f} % of the whole texts"
    )
