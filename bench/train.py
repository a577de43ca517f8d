"""Times whole training steps of a GPT: ours, and the same model on ``jax.nn``'s attention.

A step is the forward and backward pass, clipping and AdamW, jitted as ``python -m models.train``
does it; tokens are random, and there is no dropout, which ``jax.nn`` does not have.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

from bench import isolated, memory, results
from bench.results import OURS, Row

NOTE = (
    "step: wall-clock time of a dispatch of 10 steps, by 10, median of 12 dispatches after 3; "
    "memory: peak_bytes_in_use of the device; one process for each model and implementation. "
    "error: of the mean loss of the first 10 steps, relative to that with xla."
)
ENVIRONMENT = isolated.PARENT_ENVIRONMENT
# xla first: the others' losses are compared with its.
IMPLEMENTATIONS = ("xla", "cudnn", OURS)
_STEPS = 10
_DISPATCHES, _NOT_COUNTED = 12, 3
_TIMEOUT_S = 300.0


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model and a batch."""

    title: str
    batch_size: int
    context_length: int
    num_heads: int
    head_dim: int
    num_layers: int
    vocab_size: int

    @property
    def name(self) -> str:
        """What result files call it."""
        size = f"B{self.batch_size} S{self.context_length}"
        heads = f"H{self.num_heads}/{self.num_heads} D{self.head_dim}"
        return f"{self.title} {size} {heads} L{self.num_layers} causal bf16"


SHAPES = (
    Shape("MiniGPT", 64, 256, 6, 64, 6, 65),
    Shape("GPT-2 124M", 16, 1024, 12, 64, 12, 50304),  # 50257 tokens, padded as nanoGPT does
)


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """Steps of all shapes and implementations, each in a process of its own."""
    wanted = arguments.cases or [""]
    for shape in SHAPES:
        losses: dict[str, float] = {}
        for impl in IMPLEMENTATIONS:
            if any(part in shape.name for part in wanted):
                yield from _rows(shape, impl, losses)


def _rows(shape: Shape, impl: str, losses: dict[str, float]) -> Iterator[Row]:
    fields = dataclasses.asdict(shape)
    try:
        (found,) = isolated.items("bench.train:steps", fields, impl, timeout_s=_TIMEOUT_S)
    except (isolated.DiedError, ValueError) as error:
        yield results.failure(shape.name, impl, "step", error)
        return
    losses[impl] = found["loss"]
    error, expected = None, losses.get("xla")
    if impl != "xla" and expected is not None:
        error = float(f"{abs(found['loss'] / expected - 1.0):.2g}")
    tokens = shape.batch_size * shape.context_length
    yield Row(
        shape.name,
        impl,
        "step",
        round(found["step_us"], 1),
        error=error,
        note=found["note"],
        amount=round(tokens / found["step_us"] * 1e6, 1),
        unit="tokens/s",
    )
    peak = float(found["peak_bytes"])
    yield Row(shape.name, impl, "memory", None, note=found["note"], amount=peak, unit="bytes")


def steps(fields: dict[str, Any], impl: str) -> Iterator[dict[str, Any]]:
    """Trains, and yields one ``{"step_us", "peak_bytes", "loss", "note"}``; a child's part."""
    import jax

    import jax_flash.layers
    from bench import run
    from models.settings import TrainConfig
    from models.trainer import Trainer

    shape = Shape(**fields)
    config = TrainConfig(
        context_length=shape.context_length,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        width=shape.num_heads * shape.head_dim,
        batch_size=shape.batch_size,
        learning_rate=6e-4,
        min_learning_rate=6e-5,
        steps_per_dispatch=_STEPS,
        num_devices=1,
        implementation="mosaic",
    )
    model = config.model(shape.vocab_size, "bfloat16")
    batches = jax.random.randint(
        jax.random.key(0),
        (_STEPS, shape.batch_size, shape.context_length + 1),
        0,
        shape.vocab_size,
        "int32",
    )
    attention = jax_flash.dot_product_attention if impl == OURS else _jax_nn(impl)
    with mock.patch.object(jax_flash.layers.api, "dot_product_attention", attention):
        trainer = Trainer(config, model)
        structs = trainer.state_shapes, batches, jax.numpy.int32(_STEPS)
        note = run.gradient_note(trainer.train.__wrapped__, *structs)
        state = trainer.new_state()
        times, losses = [], []
        for _ in range(_NOT_COUNTED + _DISPATCHES):
            start = time.perf_counter()
            state, loss = trainer.train(state, batches, jax.numpy.int32(_STEPS))
            losses.append(float(loss))
            times.append(time.perf_counter() - start)
    step_us = statistics.median(times[_NOT_COUNTED:]) / _STEPS * 1e6
    peak_bytes = memory.peak_bytes()
    yield {"step_us": step_us, "peak_bytes": peak_bytes, "loss": losses[0], "note": note}


def _jax_nn(implementation: str) -> Any:
    import jax

    def attention(query: Any, key: Any, value: Any, **terms: Any) -> Any:
        assert terms.pop("dropout_rate") == 0.0
        return jax.nn.dot_product_attention(
            query, key, value, is_causal=terms["is_causal"], implementation=implementation
        )

    return attention
