"""Generating text: `python -m models.generate "ROMEO:"`.

The window. A model sees at most `context_length` tokens, and learned positions are absolute, so a
full window cannot slide by one: every cached key would need another position. The rule, cached or
not, is

    a prompt longer than the context    keeps its last `context_length` tokens
    a window that outgrows the context  keeps its last `context_length // 2`, at new positions

so keys and values are computed again once per half context. The serving engine (`models.engine`)
does the work, here for one text; `--no-cache` is the plain loop of full passes that it must equal.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models import sampling
from models.checkpoint import Loaded, load_model
from models.data import CharTokenizer
from models.engine import Engine, EngineConfig, SamplingParams
from models.minigpt import MiniGPT

RUNS = Path("runs")


def generate_tokens(
    model: MiniGPT,
    tokens: Sequence[int],
    max_new_tokens: int,
    seed: int = 0,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    use_cache: bool = True,
) -> Iterator[int]:
    """Yields new token ids one at a time.

    Args:
        model: the model.
        tokens: ids of the prompt, at least one; only its last `context_length` are seen.
        max_new_tokens: how many to generate; 0 yields none.
        seed: in [0, 2**32). Token i is drawn with `fold_in(key(seed), i)`, cached or not.
        temperature: see `sampling.sample`.
        top_k: see `sampling.sample`.
        top_p: see `sampling.sample`.
        use_cache: False runs the whole window for every token: slow, the same text.

    Raises:
        ValueError, TypeError: at the call, not at the first token, if an argument is out of range.
        FloatingPointError: the logits are not finite.
    """
    config = model.config
    tokens = [int(token) for token in tokens]
    if not tokens:
        raise ValueError("tokens must hold at least one id; start an empty prompt with a newline")
    for token in tokens:
        if not 0 <= token < config.vocab_size:
            raise ValueError(f"token id {token} is outside [0, vocab_size = {config.vocab_size})")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be at least 0, got {max_new_tokens}")
    params = SamplingParams(1, temperature, top_k, top_p, seed)
    continuation = _cached if use_cache else _uncached
    return _generate(continuation(model, params), tokens, max_new_tokens, config.context_length)


def generate_text(
    model: MiniGPT,
    tokenizer: CharTokenizer,
    prompt: str,
    max_new_tokens: int,
    seed: int = 0,
    **options: Any,
) -> Iterator[str]:
    """`generate_tokens` in characters. An empty prompt starts from `tokenizer.start_token`."""
    tokens = tokenizer.encode(prompt).tolist() or [tokenizer.start_token]
    new = generate_tokens(model, tokens, max_new_tokens, seed, **options)
    return (tokenizer.decode([token]) for token in new)


# How a window of at most `context_length` tokens goes on: (window, tokens to draw, draws so far).
Continuation = Callable[[list[int], int, int], Iterator[int]]


def _generate(
    continuation: Continuation, tokens: list[int], max_new_tokens: int, context: int
) -> Iterator[int]:
    window, drawn = tokens[-context:], 0
    while drawn < max_new_tokens:
        if len(window) > context:
            window = window[-max(context // 2, 1) :]
        count = min(max_new_tokens - drawn, context + 1 - len(window))
        for token in continuation(window, count, drawn):
            if token < 0:
                raise FloatingPointError(
                    "the model's logits are not finite: its parameters are broken"
                )
            window = [*window, token]
            drawn += 1
            yield token


def _cached(model: MiniGPT, params: SamplingParams) -> Continuation:
    """By the serving engine, for one text at a time."""
    prefill = 1 << (model.config.context_length - 1).bit_length()  # one shape for every window
    config = EngineConfig(
        max_batch_size=1,
        max_prefill_tokens=prefill,
        min_prefill_tokens=prefill,
        reuse_prefixes=False,
        max_waiting=1,
    )
    engine = Engine(model, config)

    def go_on(window: list[int], count: int, drawn: int) -> Iterator[int]:
        here = dataclasses.replace(params, max_new_tokens=count, first_draw=drawn)
        return (output.token for output in engine.stream(window, here))

    return go_on


def _uncached(model: MiniGPT, params: SamplingParams) -> Continuation:
    """By a full pass over the window for every token."""
    graph, parameters = nnx.split(model)
    settings = {
        "temperature": jnp.asarray([params.temperature], jnp.float32),
        "top_k": jnp.asarray([min(params.top_k or 0, model.config.vocab_size)], jnp.int32),
        "top_p": jnp.asarray([1.0 if params.top_p is None else params.top_p], jnp.float32),
    }

    def go_on(window: list[int], count: int, drawn: int) -> Iterator[int]:
        padded = np.zeros((1, model.config.context_length), np.int32)
        for index in range(drawn, drawn + count):
            padded[0, : len(window)] = window
            length = np.asarray([len(window)], np.int32)
            seed, place = np.asarray([params.seed], np.uint32), np.asarray([index], np.int32)
            token = int(_pass(graph, parameters, padded, length, seed, place, settings)[0])
            window = [*window, token]
            yield token

    return go_on


@functools.partial(jax.jit, static_argnames="graph")
def _pass(
    graph: Any,
    params: Any,
    tokens: jax.Array,
    length: jax.Array,
    seed: jax.Array,
    index: jax.Array,
    settings: dict[str, jax.Array],
) -> jax.Array:
    """Draws the token after the first `length` of the padded tokens `[1, T]`: int32 `[1]`."""
    logits = nnx.merge(graph, params)(tokens, logits_at=length - 1)
    return sampling.sample_rows(seed, index, logits, **settings)


def newest_run(runs: Path = RUNS) -> Path:
    """The run folder under `runs` that was saved to last."""
    saved = [*runs.glob("*/best"), *runs.glob("*/latest")]
    if not saved:
        raise FileNotFoundError(
            f"no run in {runs}/; train a model with python -m models.train, or name the folder of "
            "one with --checkpoint"
        )
    return max(saved, key=lambda folder: folder.stat().st_mtime).parent


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m models.generate",
        description="Continue a prompt with a trained MiniGPT, character by character.",
        allow_abbrev=False,
    )
    parser.add_argument("prompt", nargs="?", default="", help="default: empty, that is a newline")
    parser.add_argument("--checkpoint", type=Path, help="run folder; default: the newest in runs/")
    parser.add_argument("--max-new-tokens", type=int, default=500)
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is greedy")
    parser.add_argument("--top-k", type=int, help="draw from the k most likely characters")
    parser.add_argument("--top-p", type=float, help="draw from those that together hold p")
    parser.add_argument("--seed", type=int, default=0, help="the same seed draws the same text")
    parser.add_argument("--no-cache", action="store_true", help="recompute the window each time")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code: 0, 2 for a bad argument, 130 for Ctrl-C."""
    options = make_parser().parse_args(arguments)
    try:
        loaded = load_model(options.checkpoint or newest_run())
        pieces = generate_text(
            loaded.model,
            loaded.tokenizer,
            options.prompt,
            options.max_new_tokens,
            options.seed,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            use_cache=not options.no_cache,
        )
    except (ValueError, TypeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(_describe(loaded), file=sys.stderr)
    try:
        sys.stdout.write(options.prompt)
        for piece in pieces:
            sys.stdout.write(piece)
            sys.stdout.flush()
        print()
    except KeyboardInterrupt:
        print()
        return 128 + signal.SIGINT
    except BrokenPipeError:  # `| head`: the reader has had enough; keep the exit from complaining
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _describe(loaded: Loaded) -> str:
    loss = loaded.record.val_loss
    measured = "" if loss is None else f", validation loss {loss:.3f}"
    return f"[{loaded.folder}: step {loaded.record.step}{measured}]"


if __name__ == "__main__":
    sys.exit(main())
