"""What computes a case: our implementation and its peers, all on the same arrays.

An implementation is a function of a :class:`~bench.cases.Case` that gives a function of
``(query, key, value)``, and ``cu_seqlens`` if the case is packed, or raises

- :class:`AbsentError` where its package is not installed or cannot be loaded here;
- :class:`RefusedError` where it has no such call.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax

import jax_flash
from bench.cases import Case
from bench.results import OURS

Array = jax.Array
Attention = Callable[..., Array]

_MAX_LOGITS_BYTES = 8 * 2**30  # fp32, of the dense XLA path


class AbsentError(Exception):
    """This installation does not have the peer; the message says why."""


class RefusedError(Exception):
    """The peer cannot compute the case; the message says why."""


def chosen(text: str, everyone: Sequence[str]) -> list[str]:
    """The peers that ``--peers`` names: "all", "none" or some, separated by commas.

    Raises:
        ValueError: a name that is none of ``everyone``.
    """
    names = {"all": [*everyone], "none": []}.get(text)
    if names is None:
        names = text.split(",")
    if unknown := [name for name in names if name not in everyone]:
        raise ValueError(f"unknown peers {unknown}; there are {[*everyone]}")
    return names


def _load(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except Exception as error:  # a missing library or a version that does not fit, too
        raise AbsentError(f"{type(error).__name__}: {error}") from error


def _dense_only(case: Case, name: str) -> None:
    if case.lengths is not None:
        raise RefusedError(f"{name} has no packed sequences")


def jax_flash_mosaic(case: Case) -> Attention:
    """Ours, on the Hopper kernels."""
    terms = {
        "is_causal": case.is_causal,
        "local_window_size": case.window,
        "implementation": "mosaic",
    }
    if case.lengths is not None:
        return functools.partial(jax_flash.ragged_attention, **terms)
    return functools.partial(jax_flash.dot_product_attention, **terms)


def jax_nn(case: Case, implementation: str) -> Attention:
    """``jax.nn.dot_product_attention``; on XLA where its logits take at most 8 GiB."""
    _dense_only(case, "jax.nn")
    logits_bytes = 4 * case.batch * case.num_q_heads * case.seq_len**2
    if implementation == "xla" and logits_bytes > _MAX_LOGITS_BYTES:
        raise RefusedError(f"its logits would take {logits_bytes / 2**30:.0f} GiB")
    return functools.partial(
        jax.nn.dot_product_attention,
        is_causal=case.is_causal,
        local_window_size=case.window,
        implementation=implementation,
    )


def flash_attention_3(case: Case) -> Attention:
    """FlashAttention-3 from the package dew-flash-attn-cu13."""
    package = _load("dew_flash_attn")
    terms = {"is_causal": case.is_causal, "window_size": case.window or (-1, -1)}
    if case.lengths is None:
        return functools.partial(package.flash_mha, **terms)
    return functools.partial(package.flash_mha_varlen, max_seqlen=max(case.lengths), **terms)


def flash_attention_4(case: Case) -> Attention:
    """FlashAttention-4 from the package fa4-jax."""
    package = _load("fa4_jax")
    _load("cutlass")  # its compiler, which it would ask for at the first call only
    _dense_only(case, "this adapter")
    return functools.partial(package.flash_attn, causal=case.is_causal, window_size=case.window)


def tokamax(case: Case) -> Attention:
    """Tokamax's Mosaic GPU kernel, with the configuration that it picks by itself."""
    package = _load("tokamax")
    _dense_only(case, "tokamax")
    flags = _load("absl.flags").FLAGS
    if not flags.is_parsed():
        flags.mark_as_parsed()  # at the first call it would take our command line for its own
    return functools.partial(
        package.dot_product_attention,
        is_causal=case.is_causal,
        local_window_size=case.window,
        implementation="mosaic",
    )


PEERS: dict[str, Callable[[Case], Attention]] = {
    "fa3": flash_attention_3,
    "fa4": flash_attention_4,
    "tokamax": tokamax,
    "cudnn": functools.partial(jax_nn, implementation="cudnn"),
    "xla": functools.partial(jax_nn, implementation="xla"),
}
IMPLEMENTATIONS = {OURS: jax_flash_mosaic, **PEERS}
