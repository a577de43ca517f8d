"""Checkpoints: parameters, optimiser state, and a record that says all else, through Orbax.

A run folder holds two: `latest/<step>` with the optimiser's state, to resume from, and
`best/<step>` without it, the parameters of the lowest validation loss, to generate from. A save
writes the new step beside the old one and removes the old one last, so an interrupted save loses
nothing. `python -m models.checkpoint runs/demo demo.safetensors` writes the model of a run to one
file, which can be generated from and served too.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import nnx

from models import weights
from models.data import CharTokenizer
from models.minigpt import MiniGPT, MiniGPTConfig

FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Record:
    """What a checkpoint knows besides arrays. Plain JSON.

    Attributes:
        step: optimiser steps done.
        val_loss: validation loss of these parameters, or the last one measured; None: none yet.
        best_loss: lowest validation loss of the run so far; None: none yet.
        model: the fields of `MiniGPTConfig`.
        train: the fields of `TrainConfig`.
        tokenizer: `CharTokenizer.to_json()`.
        text_sha256: the text trained on.
        format: version of this layout.
    """

    step: int
    val_loss: float | None
    best_loss: float | None
    model: dict[str, Any]
    train: dict[str, Any]
    tokenizer: str
    text_sha256: str
    format: int = FORMAT


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model ready to generate, its tokenizer, and where they came from."""

    model: MiniGPT
    tokenizer: CharTokenizer
    record: Record
    folder: Path


def save(folder: Path, record: Record, params: Any, optimizer: Any = None) -> None:
    """Saves to `folder/<step>` and removes earlier steps; with `optimizer` it can be resumed."""
    items: dict[str, Any] = {
        "params": ocp.args.StandardSave(params),
        "record": ocp.args.JsonSave(dataclasses.asdict(record)),
    }
    if optimizer is not None:
        items["optimizer"] = ocp.args.StandardSave(optimizer)
    with _manager(folder) as manager:
        for later in (step for step in manager.all_steps() if step > record.step):
            manager.delete(later)  # from before a resumption further back
        if record.step not in manager.all_steps():
            manager.save(record.step, args=ocp.args.Composite(**items), force=True)


def load_record(folder: Path) -> Record:
    """The record of the newest step in a checkpoint folder.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: it is of another format.
    """
    step = latest_step(folder)
    if step is None:
        raise FileNotFoundError(f"no checkpoint in {folder}; train one with python -m models.train")
    with _manager(folder) as manager:
        fields = manager.restore(step, args=ocp.args.Composite(record=ocp.args.JsonRestore()))
    if fields["record"].get("format") != FORMAT:
        raise ValueError(f"{folder} has format {fields['record'].get('format')}, not {FORMAT}")
    return Record(**fields["record"])


def load_state(folder: Path, shapes: dict[str, Any]) -> dict[str, Any]:
    """The training state of the newest step: `{"params", "optimizer", "step"}`, shaped as given."""
    record = load_record(folder)
    items = _load_arrays(
        folder, record.step, params=shapes["params"], optimizer=shapes["optimizer"]
    )
    return {**items, "step": jnp.asarray(record.step, jnp.int32)}


def load_model(path: str | Path, dtype: Literal["float32", "bfloat16"] | None = None) -> Loaded:
    """Loads the model of a run folder (its best, else its latest) or of a checkpoint folder.

    The attention implementation is left to choose itself: the one that trained may not decode.

    Args:
        path: a run folder, or its `best` or `latest`, or a file that `export` wrote.
        dtype: what to compute in; None: as trained on a GPU, float32 elsewhere.
    """
    path = Path(path)
    if path.is_file():
        return _load_file(path, dtype)
    if not path.is_dir():
        raise FileNotFoundError(f"no folder {path}; train a model with python -m models.train")
    inside = (path / name for name in ("best", "latest"))
    folder = next((one for one in inside if latest_step(one) is not None), path)
    record = load_record(folder)
    config = _config(record, dtype)
    graph, shapes = nnx.split(nnx.eval_shape(lambda: MiniGPT(config, rngs=nnx.Rngs(0))))
    params = _load_arrays(folder, record.step, params=nnx.to_pure_dict(shapes))["params"]
    tokenizer = CharTokenizer.from_json(record.tokenizer)
    return Loaded(nnx.merge(graph, params), tokenizer, record, folder)


def export(loaded: Loaded, path: str | Path) -> None:
    """Writes a model and its record to one safetensors file, which `load_model` reads."""
    metadata = {"record": json.dumps(dataclasses.asdict(loaded.record))}
    weights.save_tensors(path, weights.parameters_of(loaded.model), metadata)


def _load_file(path: Path, dtype: Any) -> Loaded:
    tensors, metadata = weights.load_tensors(path)
    if "record" not in metadata:
        raise ValueError(f"{path} has no record of a run: python -m models.checkpoint writes one")
    record = Record(**json.loads(metadata["record"]))
    if record.format != FORMAT:
        raise ValueError(f"{path} has format {record.format}, not {FORMAT}")
    model = weights.build(_config(record, dtype), tensors)
    return Loaded(model, CharTokenizer.from_json(record.tokenizer), record, path)


def _config(record: Record, dtype: Any) -> MiniGPTConfig:
    config = MiniGPTConfig.from_dict(record.model)
    if dtype is None and jax.default_backend() != "gpu":
        dtype = "float32"
    return dataclasses.replace(config, dtype=dtype or config.dtype, implementation=None)


def latest_step(folder: Path) -> int | None:
    """The newest complete step in a checkpoint folder, or None."""
    if not folder.is_dir():
        return None
    with _manager(folder) as manager:
        return manager.latest_step()


def _load_arrays(folder: Path, step: int, **shapes: Any) -> dict[str, Any]:
    """Items of `folder/<step>` by name, on the default device wherever they were saved from."""
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def place(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device)

    items = {
        name: ocp.args.StandardRestore(jax.tree.map(place, tree)) for name, tree in shapes.items()
    }
    with _manager(folder) as manager:
        restored = manager.restore(step, args=ocp.args.Composite(**items))
    return {name: restored[name] for name in shapes}


def _manager(folder: Path) -> ocp.CheckpointManager:
    options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False)
    return ocp.CheckpointManager(folder.resolve(), options=options)


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes a run's model to a file; returns the exit code: 0, or 2 for a bad argument."""
    parser = argparse.ArgumentParser(
        prog="python -m models.checkpoint",
        description="Write the model of a run to one safetensors file.",
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", type=Path, help="run folder")
    parser.add_argument("out", type=Path, help="the file")
    options = parser.parse_args(arguments)
    try:
        export(load_model(options.checkpoint), options.out)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
