"""Who else decodes: on a contiguous cache, on pages, and FlashInfer in a process of its own."""

from __future__ import annotations

import functools
import importlib
import json
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bench import peers
from bench.provenance import ROOT

Array = jax.Array

_FLASHINFER_S = 90  # it compiles its kernels at first use


def chosen(text: str) -> list[str]:
    """The peers that ``--peers`` names; see :func:`bench.peers.chosen`."""
    return peers.chosen(text, [*PEERS, "flashinfer"])


def _jax_nn(query: Array, cache: dict[str, Array], implementation: str) -> Array:
    return jax.nn.dot_product_attention(
        query,
        cache["key"],
        cache["value"],
        key_value_seq_lengths=cache["kv_lens"],
        implementation=implementation,
    )


def _flash_attention_3(query: Array, cache: dict[str, Array]) -> Array:
    """Its forward over whole sequences: the package has neither its cache nor its split keys."""
    package = importlib.import_module("dew_flash_attn")
    return package.flash_mha(query, cache["key"], cache["value"])


def _pallas(query: Array, cache: dict[str, Array]) -> Array:
    """JAX's own kernel, with the options that it has by itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        module = importlib.import_module("jax.experimental.pallas.ops.gpu.paged_attention")
    scaled = query[:, 0] * query.shape[-1] ** -0.5
    out = module.paged_attention(
        scaled, cache["key"], cache["value"], cache["block_tables"], cache["kv_lens"]
    )
    return out[:, None]


PEERS = {
    "cudnn": functools.partial(_jax_nn, implementation="cudnn"),
    "fa3": _flash_attention_3,
    "pallas page16": _pallas,
    "xla": functools.partial(_jax_nn, implementation="xla"),
}
SLOW = ("fa3", "pallas page16", "xla")  # timed once, with a warm cache


def attend(name: str, query: Array, cache: Any) -> Array:
    """``[B, Tq, Hq, D]`` by a peer."""
    return PEERS[name](query, cache)


def cache_of(name: str, pages: dict[str, Array]) -> dict[str, Array]:
    """The cache of a peer, with the keys and values of the pages of equally long sequences."""
    keys = ("key_pages", "value_pages")
    if name == "pallas page16":
        key, value = (jnp.swapaxes(pages[x], 0, 1) for x in keys)
        tables = {"block_tables": pages["block_tables"]}
    else:
        tables = {}
        key, value = (_contiguous(pages[x], pages["block_tables"]) for x in keys)
    return {"key": key, "value": value, "kv_lens": pages["kv_lens"], **tables}


@jax.jit
def _contiguous(pool: Array, tables: Array) -> Array:
    """``[B, S, Hk, D]`` from ``[P, Hk, page_size, D]``."""
    rows = jnp.swapaxes(pool[tables], 2, 3)
    return rows.reshape(rows.shape[0], -1, *rows.shape[3:])


def flashinfer(
    names: Sequence[str], sizes: Sequence[tuple[int, int]]
) -> Iterator[tuple[str, int, float | None, str | None]]:
    """FlashInfer's tensor-core decode, of plain cases: name, page size, time in µs, note."""
    command = [sys.executable, "-c", _FLASHINFER, json.dumps(list(sizes))]
    note = None
    lines: list[str] = []
    try:
        result = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=_FLASHINFER_S, check=False
        )
        lines = [line for line in result.stdout.splitlines() if line.startswith("[")]
        if result.returncode:
            note = (result.stderr.strip().splitlines() or ["it failed"])[-1][:300]
    except subprocess.TimeoutExpired as error:
        note = f"it took more than {_FLASHINFER_S} s"
        stdout = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        lines = [line for line in stdout.splitlines() if line.startswith("[")]
    for line in lines:
        index, page_size, time_us = json.loads(line)
        yield names[index], page_size, time_us, None
    if note is not None:
        yield "all cases", 16, None, note


# Times of graph nodes; the host plan, which copies the lengths from the device, is not counted.
_FLASHINFER = """
import json, sys
import torch, flashinfer
for index, (batch, length) in enumerate(json.loads(sys.argv[1])):
    for page in (16, 64):
        count = -(-length // page)
        pools = torch.randn(2, batch * count, 8, page, 128, device="cuda", dtype=torch.bfloat16)
        query = torch.randn(batch, 32, 128, device="cuda", dtype=torch.bfloat16)
        indices = torch.randperm(batch * count, device="cuda", dtype=torch.int32)
        indptr = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * count
        last = torch.full((batch,), length - (count - 1) * page, device="cuda", dtype=torch.int32)
        room = torch.zeros(256 << 20, device="cuda", dtype=torch.uint8)
        call = flashinfer.BatchDecodeWithPagedKVCacheWrapper(room, "HND", use_tensor_cores=True)
        call.plan(indptr, indices, last, 32, 8, 128, page, q_data_type=torch.bfloat16)
        run = lambda: call.run(query, (pools[0], pools[1]))
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(16):
                run()
        times = []
        for _ in range(7):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / 16 * 1e3)
        print(json.dumps([index, page, round(sorted(times)[3], 2)]), flush=True)
        del pools
"""
