"""Weights as safetensors, and GPT-2's.

A file is 8 bytes (the length of what follows, little-endian), JSON that names each tensor's dtype,
shape and place, then the bytes. Ours have names like "blocks.0.mlp.up.kernel". The weights of GPT-2
are read in the layout of Hugging Face's checkpoints.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.minigpt import MiniGPT, MiniGPTConfig

DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8,
    "BOOL": np.bool_,
}  # fmt: skip
NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
MOST_HEADER_BYTES = 100_000_000
ALIGNMENT = 8

# GPT-2's names within a block, and ours. Its Conv1D matrices are [in, out], as Flax's kernels are.
GPT2_BLOCK = {
    "ln_1.weight": "norm_attention.scale",
    "ln_1.bias": "norm_attention.bias",
    "attn.c_attn.weight": "attention.qkv.kernel",
    "attn.c_attn.bias": "attention.qkv.bias",
    "attn.c_proj.weight": "attention.out.kernel",
    "attn.c_proj.bias": "attention.out.bias",
    "ln_2.weight": "norm_mlp.scale",
    "ln_2.bias": "norm_mlp.bias",
    "mlp.c_fc.weight": "mlp.up.kernel",
    "mlp.c_fc.bias": "mlp.up.bias",
    "mlp.c_proj.weight": "mlp.down.kernel",
    "mlp.c_proj.bias": "mlp.down.bias",
}
GPT2_REST = {
    "wte.weight": "token_embedding",
    "wpe.weight": "position_embedding",
    "ln_f.weight": "norm.scale",
    "ln_f.bias": "norm.bias",
}
# Causal masks that old checkpoints carry, and the output projection, which is the embedding.
GPT2_IGNORED = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)|lm_head\.weight")
GPT2_HEAD_DIM = 64


def save_tensors(
    path: str | Path, tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes a safetensors file.

    Raises:
        TypeError: a dtype that the format does not have.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    arrays, start = [], 0
    for name, tensor in sorted(tensors.items()):
        array = np.ascontiguousarray(tensor)
        if array.dtype not in NAMES:
            raise TypeError(f"{name} has dtype {array.dtype}, which safetensors does not have")
        end = start + array.nbytes
        shape = list(np.shape(tensor))
        header[name] = {"dtype": NAMES[array.dtype], "shape": shape, "data_offsets": [start, end]}
        arrays.append(array)
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with Path(path).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays:
            file.write(array.tobytes())


def load_tensors(path: str | Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Reads a safetensors file: its tensors, which stay on disk until they are used, and metadata.

    Raises:
        ValueError: it is damaged or is no such file.
    """
    path = Path(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(size - 8, MOST_HEADER_BYTES):
            raise ValueError(f"{path} is not a safetensors file: its header would not fit in it")
        try:
            header = json.loads(file.read(length))
            metadata = header.pop("__metadata__", {})
            facts = {name: _fact(entry) for name, entry in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} has a damaged header: {error!r}") from error
    start, tensors = 8 + length, {}
    for name, (dtype, shape, begin, end) in facts.items():
        count = int(np.prod(shape, dtype=np.int64))
        if not 0 <= begin <= end <= size - start or end - begin != count * dtype.itemsize:
            raise ValueError(f"{path}: {name} does not have the bytes that its shape {shape} needs")
        if count == 0:
            tensors[name] = np.zeros(shape, dtype)
        else:
            tensors[name] = np.memmap(path, dtype, "r", start + begin, tuple(shape))
    return tensors, metadata


def _fact(entry: Any) -> tuple[np.dtype, list[int], int, int]:
    begin, end = entry["data_offsets"]
    shape = entry["shape"]
    if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
        raise ValueError(f"sizes must be whole numbers, got {entry}")
    return np.dtype(DTYPES[entry["dtype"]]), shape, begin, end


def parameters_of(model: MiniGPT) -> dict[str, np.ndarray]:
    """A model's parameters by name."""
    return dict(_flat(nnx.to_pure_dict(nnx.state(model, nnx.Param))))


def _flat(tree: Mapping[Any, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found = []
    for key, value in tree.items():
        name = f"{prefix}{key}"
        is_leaf = not isinstance(value, Mapping)
        found += [(name, np.asarray(value))] if is_leaf else _flat(value, f"{name}.")
    return found


def build(config: MiniGPTConfig, tensors: Mapping[str, Any]) -> MiniGPT:
    """A model from parameters by name.

    Raises:
        ValueError: names or shapes that are not the model's.
    """
    graph, shapes = nnx.split(nnx.eval_shape(lambda: MiniGPT(config, rngs=nnx.Rngs(0))))
    left = dict(tensors)

    def fill(tree: Mapping[Any, Any], prefix: str) -> dict[Any, Any]:
        return {
            key: fill(value, f"{prefix}{key}.")
            if isinstance(value, Mapping)
            else take(f"{prefix}{key}", value)
            for key, value in tree.items()
        }

    def take(name: str, like: Any) -> Any:
        if name not in left:
            raise ValueError(f"there is no tensor {name!r}, which this model has")
        tensor = left.pop(name)
        if tensor.shape != like.shape:
            raise ValueError(f"{name} has shape {tensor.shape}, and the model's is {like.shape}")
        return jnp.asarray(np.asarray(tensor)).astype(like.dtype)

    params = fill(nnx.to_pure_dict(shapes), "")
    if left:
        raise ValueError(f"the model has no place for {sorted(left)}")
    return nnx.merge(graph, params)


def from_gpt2(
    tensors: Mapping[str, Any],
    *,
    num_heads: int | None = None,
    dtype: Any = "float32",
    implementation: Any = None,
) -> MiniGPT:
    """A model from the tensors of a GPT-2 checkpoint.

    Args:
        tensors: by Hugging Face's names, with or without "transformer."; from `load_tensors`.
        num_heads: None: heads of 64 channels, as all sizes of GPT-2 have.
        dtype: see `MiniGPTConfig`.
        implementation: likewise.

    Raises:
        ValueError: it is no such checkpoint; the message names the tensor.
    """
    ours: dict[str, Any] = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("transformer.")
        block = re.fullmatch(r"h\.(\d+)\.(.+)", name)
        if block and block[2] in GPT2_BLOCK:
            ours[f"blocks.{block[1]}.{GPT2_BLOCK[block[2]]}"] = tensor
        elif name in GPT2_REST:
            ours[GPT2_REST[name]] = tensor
        elif not GPT2_IGNORED.fullmatch(name):
            raise ValueError(f"GPT-2 has no tensor {name!r}")
    for name in ("token_embedding", "position_embedding"):
        if name not in ours:
            raise ValueError(f"there is no tensor for {name}: this is no GPT-2 checkpoint")
    vocab_size, width = ours["token_embedding"].shape
    config = MiniGPTConfig(
        vocab_size=vocab_size,
        context_length=ours["position_embedding"].shape[0],
        num_layers=len({name.split(".")[1] for name in ours if name.startswith("blocks.")}),
        num_heads=num_heads or max(width // GPT2_HEAD_DIM, 1),
        width=width,
        dtype=dtype,
        implementation=implementation,
    )
    return build(config, ours)
