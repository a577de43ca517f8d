"""The named calls that are timed, and how many floating-point operations each of them takes.

A :class:`Case` is what an implementation is asked to compute; what is timed of it, such as the
forward pass alone, is a mode (:data:`FLOPS_OF_MODE`). A case is named as in
``"B4 S4096 H16/16 D128 causal bf16"``: batch, tokens, query and key heads, head dim, mask, dtype.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

# Floating-point operations relative to the forward pass, which has two matrix products: the
# backward pass recomputes one and has four of its own.
FLOPS_OF_MODE = {"fwd": 1.0, "bwd": 2.5, "fwd+bwd": 3.5}

_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclasses.dataclass(frozen=True)
class Case:
    """One self-attention call.

    Attributes:
        batch: sequences of ``seq_len`` tokens; 1 if packed.
        seq_len: tokens of a sequence; of all sequences together if packed.
        num_q_heads: query heads.
        num_kv_heads: key and value heads.
        head_dim: of queries, keys and values.
        is_causal: whether a token sees only those up to its own.
        window: ``(left, right)``, inclusive, or None.
        lengths: tokens of each packed sequence (then arrays have no batch axis), or None.
        dtype: of the inputs.
    """

    batch: int
    seq_len: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    is_causal: bool = False
    window: tuple[int, int] | None = None
    lengths: tuple[int, ...] | None = None
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.lengths is not None and (self.batch, sum(self.lengths)) != (1, self.seq_len):
            raise ValueError(f"{self}: packed sequences have batch 1 and fill seq_len")

    @property
    def name(self) -> str:
        """What result files call it."""
        size = f"B{self.batch} S{self.seq_len}"
        if self.lengths is not None:
            size = f"ragged {len(self.lengths)} documents {self.seq_len} tokens"
        heads = f"H{self.num_q_heads}/{self.num_kv_heads} D{self.head_dim}"
        mask = "causal" if self.is_causal else "full"
        window = "" if self.window is None else f" window {self.window}"
        return f"{size} {heads} {mask}{window} {_SHORT[self.dtype]}"

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Of query, key and value."""
        rows = (self.batch, self.seq_len) if self.lengths is None else (self.seq_len,)
        key = (*rows, self.num_kv_heads, self.head_dim)
        return (*rows, self.num_q_heads, self.head_dim), key, key

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees, of one head and all sequences.

        Exact, diagonal included: for a dense causal call S(S+1)/2 a sequence, where S²/2 is often
        used; that makes TFLOP/s at 1k tokens 0.1 % higher.
        """
        if self.lengths is None:
            return self.batch * self._pairs_of(self.seq_len)
        return sum(self._pairs_of(length) for length in self.lengths)

    def _pairs_of(self, length: int) -> int:
        first, last = self.visible_range(length)
        return int(np.sum(last.astype(np.int64) - first + 1))

    def visible_range(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """The first and the last key that each query of a sequence sees, int32 ``[length]``."""
        row = np.arange(length, dtype=np.int32)
        first, last = np.zeros_like(row), np.full_like(row, length - 1)
        if self.window is not None:
            first = np.maximum(row - self.window[0], 0)
            last = np.minimum(row + self.window[1], length - 1)
        if self.is_causal:
            last = np.minimum(last, row)
        return first, last

    def flops(self, mode: str) -> float:
        """Floating-point operations of the matrix products: ``4 * pairs * heads * head_dim``."""
        forward = 4.0 * self.pairs * self.num_q_heads * self.head_dim
        return forward * FLOPS_OF_MODE[mode]

    @property
    def cu_seqlens(self) -> np.ndarray:
        """Boundaries of the packed sequences, int32 ``[len(lengths) + 1]``."""
        assert self.lengths is not None
        return np.cumsum([0, *self.lengths], dtype=np.int32)

    @property
    def probes(self) -> tuple[tuple[Any, slice], ...]:
        """The sequences on which errors are measured, as (index of the batch or None, tokens).

        The last of a batch; of packed ones the last and the longest.
        """
        if self.lengths is None:
            return ((self.batch - 1, slice(0, self.seq_len)),)
        starts = self.cu_seqlens
        chosen = sorted({len(self.lengths) - 1, int(np.argmax(self.lengths))})
        return tuple((None, slice(int(starts[i]), int(starts[i + 1]))) for i in chosen)


def lognormal_lengths(num_documents: int, tokens: int, sigma: float = 0.8) -> tuple[int, ...]:
    """Document lengths, log-normal with the given sigma, that fill ``tokens`` exactly.

    Always the same ones: largest remainders after scaling, and none is empty.
    """
    drawn = np.random.default_rng(0).lognormal(sigma=sigma, size=num_documents)
    share = drawn / drawn.sum() * (tokens - num_documents)
    lengths = 1 + np.floor(share).astype(int)
    missing = tokens - int(lengths.sum())
    lengths[np.argsort(np.floor(share) - share, kind="stable")[:missing]] += 1
    return tuple(int(length) for length in lengths)


def _grid() -> tuple[Case, ...]:
    """Three head dims with 2048 columns in all, 16k tokens in all; then grouped heads."""
    sizes = ((16, 1024), (4, 4096), (1, 16384))
    heads = ((16, 128), (32, 64), (8, 256))
    plain = [
        Case(batch, seq_len, num_heads, num_heads, head_dim, is_causal)
        for is_causal in (False, True)
        for batch, seq_len in sizes
        for num_heads, head_dim in heads
    ]
    return (*plain, Case(4, 4096, 32, 8, 128, True))


GRID = _grid()
OTHERS = (
    Case(4, 4096, 16, 16, 80, True),
    Case(4, 4096, 16, 16, 96, True),
    Case(4, 4096, 8, 8, 192, True),
    Case(64, 256, 6, 6, 64, True),
    Case(1, 16384, 16, 16, 128, True, window=(1023, 0)),
    Case(1, 65536, 16, 16, 128, True, lengths=lognormal_lengths(64, 65536)),
)

# What ``python -m bench run NAME`` times: the cases, and the modes of each.
SUITES: dict[str, tuple[tuple[Case, ...], tuple[str, ...]]] = {
    "forward": (GRID + OTHERS, ("fwd",)),
    "backward": (GRID + OTHERS, ("fwd+bwd", "bwd")),
}
# Those timed at the power cap too, where ``--sustained`` asks for it.
SUSTAINED = (
    Case(4, 4096, 16, 16, 128, False),
    Case(4, 4096, 16, 16, 128, True),
    Case(1, 16384, 16, 16, 128, False),
    Case(1, 16384, 16, 16, 128, True),
    Case(4, 4096, 32, 32, 64, True),
    Case(4, 4096, 8, 8, 256, True),
)
# Tiny, so that Python's part of a call can be seen.
DISPATCH = Case(1, 128, 1, 1, 64, True)
