"""Measures the device memory of attention against the length of the sequence.

The mode "fwd" or "value_and_grad" has the peak of a call, its arguments included, as the device's
allocator saw it; the same with " planned" has what XLA planned: arguments, results and temporary
arrays. A length that does not fit is a row whose note is :data:`OUT_OF_MEMORY`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bench import isolated, results
from bench.cases import Case
from bench.results import OURS, Row

NOTE = (
    "fwd, value_and_grad: peak_bytes_in_use of the device, arguments included; one process for "
    "each implementation and mode, lengths ascending; planned: memory_analysis of the executable."
)
ENVIRONMENT = isolated.PARENT_ENVIRONMENT
OUT_OF_MEMORY = "out of memory"
MODES = ("fwd", "value_and_grad")
_TIMEOUT_S = 300.0

CASES = tuple(
    Case(1, length, 16, 16, 128, True) for length in (512, 2048, 8192, 16384, 32768, 65536, 131072)
)


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """Peaks of all implementations, each in a process of its own."""
    wanted = arguments.cases or [""]
    chosen = [case for case in CASES if any(part in case.name for part in wanted)]
    for mode in MODES:
        for impl in IMPLEMENTATIONS:
            yield from _series(impl, mode, chosen)


def _series(impl: str, mode: str, chosen: Sequence[Case]) -> Iterator[Row]:
    left = list(chosen)
    fields = [dataclasses.asdict(case) for case in chosen]
    try:
        for item in isolated.items("bench.memory:peaks", impl, mode, fields, timeout_s=_TIMEOUT_S):
            case = left.pop(0)
            for which, size in (("", item["peak"]), (" planned", item["planned"])):
                if size is None:
                    yield Row(case.name, impl, mode + which, None, note=item["note"])
                else:
                    yield Row(case.name, impl, mode + which, None, amount=float(size), unit="bytes")
    except isolated.DiedError as error:
        for case in left:
            yield results.failure(case.name, impl, mode, error)


def peaks(impl: str, mode: str, fields: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """``{"peak", "planned", "note"}`` of each case, in bytes; runs in a process of its own.

    Args:
        impl: a key of :data:`IMPLEMENTATIONS`.
        mode: one of :data:`MODES`.
        fields: of the cases, in ascending order of memory: the peak of one is that of all so far.
    """
    for case in (Case(**{**field, "window": None, "lengths": None}) for field in fields):
        found: dict[str, Any] = {"peak": None, "planned": None, "note": None}
        try:
            _run(case, impl, mode, found)
        except Exception as error:
            text = results.failure(case.name, impl, mode, error).note
            found["note"] = OUT_OF_MEMORY if "RESOURCE_EXHAUSTED" in str(error) else text
        yield found


def _run(case: Case, impl: str, mode: str, found: dict[str, Any]) -> None:
    import jax
    import jax.numpy as jnp

    from bench import ladder, run

    attention = IMPLEMENTATIONS[impl](case)

    def loss(q: Any, k: Any, v: Any) -> Any:
        return jnp.sum(jnp.square(attention(q, k, v).astype(jnp.float32)))

    function = attention if mode == "fwd" else jax.value_and_grad(loss, argnums=(0, 1, 2))
    structs = jax.eval_shape(lambda: run.inputs(case))
    found["note"] = run.gradient_note(function, *structs)
    lowered = jax.jit(function).lower(*structs)
    # Trying kernels for the matrix products takes time and memory of its own.
    compiled = lowered.compile(compiler_options={"xla_gpu_autotune_level": 0})
    found["planned"] = ladder.allocated_bytes(compiled)
    if found["planned"] > limit_bytes():  # the allocator would wait for memory before it gives up
        found["note"] = OUT_OF_MEMORY
        return
    jax.block_until_ready(compiled(*run.inputs(case)))
    found["peak"] = peak_bytes()


def peak_bytes() -> int:
    """The most device memory that this process has used so far."""
    return _memory_stats()["peak_bytes_in_use"]


def limit_bytes() -> int:
    """The most device memory that this process may use."""
    return _memory_stats()["bytes_limit"]


def _memory_stats() -> dict[str, int]:
    import jax

    return jax.local_devices()[0].memory_stats()


def _naive(case: Case) -> Callable[..., Any]:
    """S = Q K^T, P = softmax(S), O = P V, as in a textbook."""
    import jax
    import jax.numpy as jnp

    def attend(q: Any, k: Any, v: Any) -> Any:
        s = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32)
        s = s * case.head_dim**-0.5
        if case.is_causal:
            s = jnp.where(jnp.tri(case.seq_len, dtype=bool), s, -jnp.inf)
        p = jax.nn.softmax(s, axis=-1).astype(v.dtype)
        return jnp.einsum("bhts,bshd->bthd", p, v)

    return attend


def _of_peers(name: str, case: Case) -> Callable[..., Any]:
    from bench import peers

    return peers.IMPLEMENTATIONS[name](case)


def _xla(case: Case) -> Callable[..., Any]:
    """jax.nn on XLA, however large its logits are."""
    import jax

    return functools.partial(
        jax.nn.dot_product_attention, is_causal=case.is_causal, implementation="xla"
    )


IMPLEMENTATIONS: dict[str, Callable[[Case], Callable[..., Any]]] = {
    OURS: functools.partial(_of_peers, OURS),
    "naive": _naive,
    "xla": _xla,
}
