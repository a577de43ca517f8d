"""What a training run is told: its fields, the presets, and the command line made from them."""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

from models.minigpt import MiniGPTConfig

# A resumed run may change how it trains, not the shape of what it trains.
MODEL_FIELDS = (
    "context_length",
    "num_layers",
    "num_heads",
    "width",
    "num_kv_heads",
    "norm",
    "mlp",
    "position",
    "dropout_rate",
    "tie_weights",
    "use_bias",
    "implementation",
)
SHAPE_FIELDS = tuple(set(MODEL_FIELDS) - {"dropout_rate", "implementation"})


def _field(default: Any, description: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": description})


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Everything that determines a training run, besides the text. The defaults are `demo`."""

    out: str = _field("runs/demo", "run folder")
    data: str | None = _field(None, "UTF-8 text to train on; default: tinyshakespeare")
    seed: int = _field(1337, "seeds the initialisation, the batches and dropout")

    context_length: int = _field(64, "tokens the model sees at once")
    num_layers: int = _field(3, "blocks")
    num_heads: int = _field(4, "attention heads")
    width: int = _field(128, "channels")
    num_kv_heads: int | None = _field(None, "key/value heads; default: as many as heads")
    norm: Literal["layernorm", "rmsnorm"] = _field("layernorm", "normalisation")
    mlp: Literal["gelu", "swiglu"] = _field("gelu", "feed-forward layer")
    position: Literal["learned", "rope"] = _field("learned", "how the model knows positions")
    dropout_rate: float = _field(0.0, "dropout probability")
    tie_weights: bool = _field(True, "use the token embedding as output projection too")
    use_bias: bool = _field(True, "biases in linear layers and norms")
    dtype: Literal["auto", "float32", "bfloat16"] = _field(
        "auto", "what to compute in; auto: bfloat16 on a GPU, float32 elsewhere"
    )
    implementation: str | tuple[str, ...] | None = _field(
        None, "attention implementation, or several separated by commas, tried in order"
    )

    steps: int = _field(1000, "optimiser steps of the whole schedule")
    stop_at: int | None = _field(None, "stop at this step of the schedule; --resume goes on")
    batch_size: int = _field(16, "windows per step")
    learning_rate: float = _field(4e-3, "peak of the schedule")
    min_learning_rate: float = _field(2e-4, "end of the cosine decay")
    warmup_steps: int = _field(100, "linear warm-up, never more than a tenth of the steps")
    beta1: float = _field(0.9, "Adam's decay of the first moment")
    beta2: float = _field(0.99, "Adam's decay of the second moment")
    weight_decay: float = _field(0.1, "AdamW's, on matrices only")
    clip_norm: float = _field(1.0, "largest global norm of the gradient")

    eval_interval: int = _field(250, "steps between validations, each of which saves")
    eval_batches: int = _field(40, "validation batches, the same ones each time")
    steps_per_dispatch: int = _field(10, "steps per call into the compiled program")
    num_devices: int | None = _field(
        None, "devices that share each batch; default: as many GPUs as divide it"
    )

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "eval_interval", "eval_batches", "steps_per_dispatch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("seed", "warmup_steps", "min_learning_rate", "weight_decay"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("learning_rate", "clip_norm"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"min_learning_rate ({self.min_learning_rate}) must not exceed learning_rate "
                f"({self.learning_rate})"
            )
        if self.num_devices is not None and (
            self.num_devices < 1 or self.batch_size % self.num_devices
        ):
            raise ValueError(
                f"num_devices must divide batch_size ({self.batch_size}), got {self.num_devices}"
            )
        if self.stop_at is not None and not 1 <= self.stop_at <= self.steps:
            raise ValueError(f"stop_at must be in [1, steps = {self.steps}], got {self.stop_at}")
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise ValueError(f"dtype must be auto, float32 or bfloat16, got {self.dtype!r}")
        self.model(vocab_size=1, dtype="float32")  # its own checks

    def model(self, vocab_size: int, dtype: Literal["float32", "bfloat16"]) -> MiniGPTConfig:
        """The model's part of the settings."""
        fields = {name: getattr(self, name) for name in MODEL_FIELDS}
        return MiniGPTConfig(vocab_size=vocab_size, dtype=dtype, **fields)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> TrainConfig:
        """The inverse of `dataclasses.asdict`, also after a trip through JSON."""
        fields = dict(fields)
        if isinstance(fields.get("implementation"), list):
            fields["implementation"] = tuple(fields["implementation"])
        return cls(**fields)


PRESETS = {
    # Minutes on two CPU cores.
    "demo": TrainConfig(),
    # The character model of nanoGPT (Karpathy, 2022), for 2000 of its 5000 steps and with ten times
    # its weight decay. Without them it learns the text by heart (docs/log.md).
    "shakespeare-char": TrainConfig(
        out="runs/shakespeare-char",
        context_length=256,
        num_layers=6,
        num_heads=6,
        width=384,
        dropout_rate=0.2,
        steps=2000,
        batch_size=64,
        learning_rate=1e-3,
        min_learning_rate=1e-4,
        weight_decay=1.0,
    ),
}


def make_parser() -> argparse.ArgumentParser:
    """A parser with `--preset`, `--resume` and one option per field of `TrainConfig`."""
    parser = argparse.ArgumentParser(
        prog="python -m models.train",
        description="Train a MiniGPT on characters. Ctrl-C saves; --resume goes on from there.",
        argument_default=argparse.SUPPRESS,  # so that only what was typed overrides the preset
        allow_abbrev=False,
    )
    parser.add_argument("--preset", choices=sorted(PRESETS), default="demo")
    parser.add_argument(
        "--resume", action="store_true", default=False, help="go on from the run folder's latest"
    )
    hints = typing.get_type_hints(TrainConfig)
    for field in dataclasses.fields(TrainConfig):
        flags = ["--" + field.name.replace("_", "-")]
        if field.name == "context_length":
            flags.append("--context")
        options: dict[str, Any] = {"help": field.metadata["help"]}
        kind = _without_none(hints[field.name])
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif typing.get_origin(kind) is Literal:
            options["choices"] = typing.get_args(kind)
        elif field.name == "implementation":
            options["type"] = _names
        else:
            options["type"] = kind
        parser.add_argument(*flags, **options)
    return parser


def override_resumed(config: TrainConfig, typed: Mapping[str, Any]) -> TrainConfig:
    """A checkpoint's settings with the options that were typed; its model's shape is fixed.

    `stop_at` is not inherited: it said where to stop then.
    """
    for name in SHAPE_FIELDS:
        if name in typed and typed[name] != getattr(config, name):
            raise ValueError(
                f"--{name.replace('_', '-')} is {getattr(config, name)!r} in the checkpoint and "
                f"cannot become {typed[name]!r}; leave it out, or start a new run with --out"
            )
    return dataclasses.replace(config, **{"stop_at": None, **typed})


def _without_none(hint: Any) -> Any:
    if isinstance(hint, types.UnionType):
        return next(kind for kind in typing.get_args(hint) if kind is not type(None))
    return hint


def _names(text: str) -> str | tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    return names[0] if len(names) == 1 else names
