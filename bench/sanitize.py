"""Runs small calls of every kernel under NVIDIA's compute-sanitizer, on the GPU that is here.

XLA's compiler crashes under the tool. So a first process without it fills a compilation cache, from
which those under it take their programs; arrays come from NumPy, for which nothing is compiled.
initcheck is not among the tools: it does not see what TMA writes, and reports whoever reads it.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from bench.profile import find_tool
from bench.provenance import ROOT

TOOLS = ("memcheck", "racecheck")
_PLACES = ("/usr/local/cuda*/bin/compute-sanitizer",)
_SUMMARY = re.compile(r"^=+ ((?:ERROR|RACECHECK) SUMMARY: (\d+) .*)$", re.MULTILINE)
_TIMEOUT_S = 580.0


@dataclasses.dataclass(frozen=True)
class Call:
    """One program: its function and arrays."""

    function: Callable[..., Any]
    args: tuple[Any, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``python -m bench sanitize``."""
    parser.add_argument("--cases", nargs="+", default=[""], help="only names with one of these")
    parser.add_argument("--tools", nargs="+", default=TOOLS, help="of compute-sanitizer")


def run(arguments: argparse.Namespace) -> int:
    """Prints each tool's summary; 0 if none found anything, 1 if one did, 2 if nothing ran."""
    sanitizer = find_tool("compute-sanitizer", _PLACES)
    if sanitizer is None:
        print(
            f"python -m bench sanitize needs compute-sanitizer, which is neither on the path nor "
            f"in {' or '.join(_PLACES)}: install NVIDIA's CUDA toolkit.",
            file=sys.stderr,
        )
        return 2
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    from bench.run import has_gpu

    if not has_gpu():
        return 2
    chosen = [name for name in calls() if any(part in name for part in arguments.cases)]
    print(f"{len(chosen)} calls: {'; '.join(chosen)}", flush=True)
    if not chosen:
        return 2
    with tempfile.TemporaryDirectory() as cache:
        if (status := _ran((), chosen, cache)[0]) != 0:
            print(f"without a tool the calls end with status {status}", file=sys.stderr)
            return 2
        found = [_is_clean(sanitizer, tool, chosen, cache) for tool in arguments.tools]
    return int(not all(found))


def _is_clean(sanitizer: str, tool: str, names: list[str], cache: str) -> bool:
    """Whether a tool ran to its end and found nothing."""
    status, printed = _ran((sanitizer, "--tool", tool, "--print-limit", "20"), names, cache)
    summaries = _SUMMARY.findall(printed)
    is_clean = status == 0 and bool(summaries) and all(int(count) == 0 for _, count in summaries)
    if not is_clean:
        print(printed)
    said = "; ".join(text for text, _ in summaries) or "no summary"
    print(f"{tool}: status {status}, {said}", flush=True)
    return is_clean


def _ran(tool: tuple[str, ...], names: list[str], cache: str) -> tuple[int, str]:
    """Status and output of the calls in a process of their own, under a tool if one is given."""
    environment = {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0",
    }
    result = subprocess.run(
        [*tool, sys.executable, "-m", "bench.sanitize", *names],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_TIMEOUT_S,
    )
    return result.returncode, result.stdout


# What runs under the tool.


def calls(dense: str = "mosaic", cached: str = "cuda") -> dict[str, Call]:
    """All calls by name, on an implementation of gradients and one of caches."""
    return {
        **{f"gradients, {name}": call for name, call in _dense_calls(dense)},
        **{f"decode, {name}": call for name, call in _cache_calls(cached)},
    }


def _normal(seed: int, *shape: int, dtype: str = "bfloat16") -> np.ndarray:
    import jax.numpy as jnp

    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(jnp.dtype(dtype))


def _dense_calls(implementation: str) -> Iterator[tuple[str, Call]]:
    """Forward and backward; each has what makes its kernels different from the others'."""
    import jax

    import jax_flash

    blocks = np.kron(np.eye(3, dtype=bool), np.ones((100, 100), bool))[None, None]
    ids = np.repeat(np.arange(3, dtype=np.int32), 100)[None]
    lengths = {
        "query_seq_lengths": np.int32([300, 0]),
        "key_value_seq_lengths": np.int32([170, 300]),
    }
    segments = {"query_segment_ids": ids, "key_value_segment_ids": ids + 1}
    cases: dict[str, tuple[int, int, dict[str, Any]]] = {
        "grouped heads, causal": (1, 128, {"is_causal": True}),
        "window": (2, 128, {"local_window_size": (70, 0), "is_causal": True}),
        "lengths, queries without keys": (2, 64, lengths),
        "segments, queries without keys": (2, 128, segments),
        "causal, queries without keys": (2, 192, {"is_causal": True, "q_offset": -100}),
        "D80": (2, 80, {}),
        "D256": (2, 256, {}),
        "D256, lengths": (2, 256, lengths),
        "mask of blocks": (2, 128, {"mask": blocks}),
        "bias with gradient": (2, 128, {"bias": _normal(5, 1, 2, 300, 300)}),
        "dropout, segments": (2, 64, {**segments, "dropout_rate": 0.1}),
        "fp32": (2, 64, {"is_causal": True}),
        "fp32, lengths": (2, 128, lengths),
    }

    def gradients(
        q: Any, k: Any, v: Any, do: Any, terms: dict[str, Any], **static: Any
    ) -> tuple[Any, ...]:
        if "dropout_rate" in static:
            terms = {**terms, "dropout_rng": jax.random.key(0)}
        of_bias = {"bias": terms["bias"]} if "bias" in terms else {}

        def attend(q: Any, k: Any, v: Any, of_bias: Any) -> Any:
            return jax_flash.dot_product_attention(
                q, k, v, **{**terms, **of_bias, **static}, implementation=implementation
            )

        out, pullback = jax.vjp(attend, q, k, v, of_bias)
        return out, *pullback(do)

    for name, (num_kv_heads, head_dim, keywords) in cases.items():
        dtype = "float32" if name.startswith("fp32") else "bfloat16"
        q, do = (_normal(seed, 2, 300, 2, head_dim, dtype=dtype) for seed in (0, 3))
        k, v = (_normal(seed, 2, 300, num_kv_heads, head_dim, dtype=dtype) for seed in (1, 2))
        arrays = {name: x for name, x in keywords.items() if isinstance(x, np.ndarray)}
        static = {name: x for name, x in keywords.items() if name not in arrays}
        function = functools.partial(gradients, **static)
        if arrays.keys() & segments.keys():
            q, k, v, do = (x[:1] for x in (q, k, v, do))
        yield name, Call(function, (q, k, v, do, arrays))


def _cache_calls(implementation: str) -> Iterator[tuple[str, Call]]:
    """Each way to split the keys, and to copy them; one call that appends."""
    import jax_flash

    def paged(
        batch: int, page_size: int, q_len: int, head_dim: int = 128, dtype: str = "bfloat16"
    ) -> Call:
        slots = 64 if batch > 100 else 512
        pages = slots // page_size
        query = _normal(0, batch, q_len, 8, head_dim)
        pools = [_normal(x, batch * pages, 2, page_size, head_dim, dtype=dtype) for x in (1, 2)]
        tables = np.random.default_rng(3).permutation(batch * pages).astype(np.int32)
        tables = tables.reshape(batch, pages)
        lengths = np.random.default_rng(4).integers(0, slots + 1, batch).astype(np.int32)
        lengths[0] = 0
        attend = functools.partial(jax_flash.paged_attention, implementation=implementation)
        wide = np.pad(tables, ((0, 0), (0, 8192 // page_size)), constant_values=-1)  # may be long
        return Call(attend, (query, *pools, wide if batch > 2 else tables, lengths))

    yield "cluster, pages of 16", paged(2, 16, 1)
    yield "cluster, pages of 1, 4 tokens", paged(2, 1, 4)
    yield "cluster, D256", paged(2, 16, 1, head_dim=256)
    yield "ranges, pages of 64", paged(40, 64, 1)
    yield "ranges, 8 tokens, fp8", paged(40, 16, 8, dtype="float8_e4m3fn")
    yield "small ranges, pages of 16", paged(400, 16, 1)
    yield "small ranges, pages of 1", paged(400, 1, 1)
    pools = [_normal(seed, 32, 2, 16, 128) for seed in (5, 6)]
    new = [_normal(seed, 40, 2, 128) for seed in (7, 8)]
    slots = np.random.default_rng(9).permutation(512)[:40].astype(np.int32)
    yield "append", Call(jax_flash.append_kv, (*pools, *new, np.where(slots % 5 == 0, -1, slots)))


def main() -> None:
    """Runs the calls that are named, each once."""
    import jax

    known = calls()
    for name in sys.argv[1:]:
        args = jax.device_put(known[name].args)
        jax.block_until_ready(jax.jit(known[name].function)(*args))


if __name__ == "__main__":
    main()
