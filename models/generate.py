"""Generating text: `python -m models.generate "ROMEO:"`.

The window. A model sees at most `context_length` tokens, and learned positions are absolute, so a
full window cannot slide by one: every cached key would need another position. The rule, cached or
not, is

    a prompt longer than the context    keeps its last `context_length` tokens
    a window that outgrows the context  keeps its last `context_length // 2`, at new positions

so a cache is rebuilt once per half context, and both paths see the same windows and say the same.
"""

from __future__ import annotations

import argparse
import functools
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models import sampling
from models.checkpoint import Loaded, load_model
from models.data import CharTokenizer
from models.minigpt import MiniGPT

RUNS = Path("runs")


def generate_tokens(
    model: MiniGPT,
    tokens: Sequence[int],
    max_new_tokens: int,
    key: jax.Array,
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
        key: `jax.random` key. Token i is drawn with `fold_in(key, i)`, cached or not.
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
    settings: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    logits = jax.ShapeDtypeStruct((config.vocab_size,), jnp.float32)
    jax.eval_shape(functools.partial(sampling.sample, **settings), key, logits)
    settings = {name: _as_setting(value) for name, value in settings.items()}
    return _generate(model, tokens, max_new_tokens, key, settings, use_cache)


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
    new = generate_tokens(model, tokens, max_new_tokens, jax.random.key(seed), **options)
    return (tokenizer.decode([token]) for token in new)


def _generate(
    model: MiniGPT,
    tokens: list[int],
    max_new_tokens: int,
    key: jax.Array,
    settings: dict[str, Any],
    use_cache: bool,
) -> Iterator[int]:
    context = model.config.context_length
    graph, params = nnx.split(model)
    window = tokens[-context:]
    caches = None
    for index in range(max_new_tokens):
        if len(window) > context:
            window = window[-max(context // 2, 1) :]
            caches = None
        if caches is not None:
            newest = jnp.asarray([window[-1:]], jnp.int32)
            logits, caches = _decode(graph, params, newest, caches)
        else:
            padded = np.zeros((1, context), np.int32)
            padded[0, : len(window)] = window
            prefill = _prefill if use_cache else _forward
            logits, caches = prefill(graph, params, padded, np.asarray([len(window)], np.int32))
        token = int(_draw(jax.random.fold_in(key, index), logits, **settings))
        if token < 0:
            raise FloatingPointError("the model's logits are not finite: its parameters are broken")
        window.append(token)
        yield token


@functools.partial(jax.jit, static_argnames="graph")
def _forward(graph: Any, params: Any, tokens: jax.Array, length: jax.Array) -> tuple[Any, Any]:
    """Logits `[V]` after the first `length` of the padded tokens `[1, T]`, and no cache."""
    logits = nnx.merge(graph, params)(tokens)
    return logits[0, length[0] - 1], None


@functools.partial(jax.jit, static_argnames="graph")
def _prefill(graph: Any, params: Any, tokens: jax.Array, length: jax.Array) -> tuple[Any, Any]:
    """`_forward`, and caches that hold those tokens."""
    model = nnx.merge(graph, params)
    logits, caches = model(tokens, caches=model.init_caches(1), new_lengths=length)
    return logits[0, length[0] - 1], caches


@functools.partial(jax.jit, static_argnames="graph", donate_argnames="caches")
def _decode(graph: Any, params: Any, token: jax.Array, caches: Any) -> tuple[Any, Any]:
    """Logits `[V]` after one more token `[1, 1]`, and the caches with it, updated in place."""
    logits, caches = nnx.merge(graph, params)(token, caches=caches)
    return logits[0, -1], caches


_draw = jax.jit(sampling.sample)


def _as_setting(value: float | None) -> np.ndarray | None:
    """Traced rather than static, so that a new temperature does not compile again."""
    if value is None:
        return None
    return np.asarray(value, np.int32 if isinstance(value, int) else np.float32)


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
