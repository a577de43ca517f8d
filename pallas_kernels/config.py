"""Compile-time options of the forward kernel, static facts of a launch, and which suit which."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash.mask import Mask
from pallas_kernels import split, tiles

_ROWS = tiles.WARPGROUP_ROWS
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
SPLIT_HEAD_DIMS = (64, 128)  # of fp32
_REGISTERS = 65536  # of a multiprocessor
_NARROW = 2048  # keys of a window
_CACHE_BYTES = 2**25  # of the L2 cache that keys and values may fill


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardConfig:
    """Compile-time options of the kernel.

    Attributes:
        num_warpgroups: consumers, each of 64 query rows.
        block_kv: keys in a tile.
        num_stages: K tiles in flight, and as many V tiles.
        bias_stages: tiles of a bias in flight.
        consumer_registers: registers a thread of a consumer.
        producer_registers: registers a thread of the producer.
        share_out: out is staged in Q's buffer, not in one of its own.
        take_turns: consumers take turns in issuing matrix products.
        early_wait: wait for the next K tile before waiting for P V. ptxas otherwise moves the
            second wait above the softmax, which undoes their overlap; worth it in some cases.
        partial_sums: keep row sums as 8 partial sums a row until the end.
        lazy_growth: m moves only by more than this (log2 units), and rescaling O is skipped by
            warps where no m moved. 0 means always and no branch.
        query_registers: keep Q in registers, not in shared memory.
        opaque_index: index Q through a zero that LLVM cannot see.
        head_group: heads worked on at a time, for the L2 cache; 0 is :func:`head_group`'s choice.
        split_edges: peel masked key tiles into loops of their own, instead of a branch.
        spill_bytes: what ptxas may spill, bytes; more fails the ahead-of-time check.
    """

    num_warpgroups: int = 2
    block_kv: int = 128
    num_stages: int = 2
    bias_stages: int = 2
    consumer_registers: int = 240
    producer_registers: int = 24
    share_out: bool = False
    take_turns: bool = True
    early_wait: bool = False
    partial_sums: bool = True
    lazy_growth: float = 8.0
    query_registers: bool = False
    opaque_index: bool = False
    head_group: int = 0
    split_edges: bool = False
    spill_bytes: int = 0

    def __post_init__(self) -> None:
        # setmaxnreg waits for registers that others give back: too large a wish waits for ever.
        at_launch = _REGISTERS // (128 * (self.num_warpgroups + 1)) // 8 * 8
        wanted = self.num_warpgroups * (self.consumer_registers - at_launch)
        if wanted > at_launch - self.producer_registers:
            raise ValueError(
                f"consumer_registers={self.consumer_registers}: {self.num_warpgroups} consumers "
                f"want {wanted} more than the {at_launch} of the launch, but the producer gives "
                f"back {at_launch - self.producer_registers}. Lower one of the two."
            )
        if self.early_wait and self.num_stages == 1:
            raise ValueError("early_wait: with one stage the next K tile comes only after P V")
        if self.share_out and self.query_registers:
            raise ValueError("share_out: Q's buffer is refilled early with query_registers")

    @property
    def block_q(self) -> int:
        """Query rows of a thread block."""
        return self.num_warpgroups * _ROWS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """Static facts of one launch.

    Attributes:
        batch: B.
        q_len: Tq, before padding.
        kv_len: Tk, before padding.
        num_q_heads: Hq.
        num_kv_heads: Hk.
        head_dim: D, of :data:`HEAD_DIMS`.
        value_dim: Dv, of :data:`HEAD_DIMS`.
        dtype: of q, k, v and out.
        scale: factor of the logits, > 0.
        mask: static part of the mask; its arrays are ShapeDtypeStructs.
        bias: ``[B|1, Hq|1, Tq|1, Tk|1]``, added to the logits; None if there is none.
        has_alibi: whether ALiBi slopes are given.
        has_sinks: whether sinks are given.
        soft_cap: ``c`` of ``c * tanh(x / c)``, or None.
        dropout_rate: probability of dropping, in [0, 1).
        num_blocks: thread blocks to launch at most.
        blocks_meet: whether so many are known to run at the same time, and may wait for each other.
    """

    batch: int
    q_len: int
    kv_len: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    dtype: Any
    scale: float
    mask: Mask
    bias: jax.ShapeDtypeStruct | None = None
    has_alibi: bool = False
    has_sinks: bool = False
    soft_cap: float | None = None
    dropout_rate: float = 0.0
    num_blocks: int = 132
    blocks_meet: bool = False

    @property
    def parts(self) -> int:
        """Of each operand of a matrix product: see :mod:`pallas_kernels.split`."""
        return split.PARTS if self.dtype == jnp.float32 else 1

    @property
    def has_plain_scores(self) -> bool:
        """Whether scores are nothing but products."""
        return self.bias is None and not self.has_alibi and self.soft_cap is None

    @functools.cached_property
    def can_have_empty_rows(self) -> bool:
        """Whether a query may see no key, as far as is known at trace time."""
        if self.bias is not None or not (self.mask.has_static_ranges and self.mask.is_interval):
            return True
        start, end = self.mask.row_ranges(self.q_len, self.kv_len)
        return bool((np.asarray(end) <= np.asarray(start)).any())

    @property
    def has_bias_tiles(self) -> bool:
        """Whether the bias differs from row to row and from key to key."""
        if self.bias is None or self.bias.shape[2] == 1:
            return False
        return self.bias.shape[3] > 1 or self.kv_len == 1

    @property
    def has_terms(self) -> bool:
        """Whether there is anything beside products and intervals of visible keys."""
        extra = self.has_sinks or self.dropout_rate > 0.0 or self.mask.array is not None
        return extra or not self.has_plain_scores

    @property
    def is_wide(self) -> bool:
        """Whether a logit may be any number, also one that log2 units are too large for."""
        return self.bias is not None and self.soft_cap is None

    @property
    def scale_log2(self) -> float:
        """From scores (:meth:`pallas_kernels.terms.Terms.scores`) to logits in log2 units."""
        if self.soft_cap is not None:
            return self.soft_cap * tiles.LOG2_E
        return tiles.LOG2_E * (self.scale if self.has_plain_scores else 1.0)


def default_config(problem: Problem) -> ForwardConfig:
    """The configuration for a problem: the fastest of those measured (docs/log.md)."""
    d, dv = problem.head_dim, problem.value_dim
    mask = problem.mask
    # Terms of each key, or of each score, want registers in all loops.
    crowded = problem.bias is not None or problem.has_alibi or mask.array is not None
    bias_bytes = 0
    if problem.bias is not None and problem.has_bias_tiles:
        bias_bytes = problem.bias.dtype.itemsize
    spill_bytes = _spill_budget(problem)
    if problem.parts > 1:
        # What limits are shared memory and, next to it, registers.
        is_narrow = max(d, dv) <= 64
        query_registers = is_narrow and not crowded
        return ForwardConfig(
            num_warpgroups=2 if is_narrow or not bias_bytes else 1,
            block_kv=64,
            num_stages=2 if is_narrow else 1,
            bias_stages=1 if is_narrow and bias_bytes == 4 else 2,
            query_registers=query_registers,
            opaque_index=not query_registers,
            spill_bytes=spill_bytes,
        )
    if max(d, dv) <= 64:
        if problem.q_len <= 256 and not mask.is_trivial:
            return ForwardConfig(
                block_kv=64,
                num_stages=4,
                query_registers=not crowded,
                take_turns=False,
                spill_bytes=spill_bytes,
            )
        is_short = (problem.q_len <= 1024 and not mask.is_trivial) or problem.q_len <= 2 * _ROWS
        if is_short or crowded or problem.dropout_rate > 0.0:
            return ForwardConfig(query_registers=not crowded, spill_bytes=spill_bytes)
        return ForwardConfig(
            num_warpgroups=3,
            consumer_registers=160,
            producer_registers=32,
            early_wait=not mask.is_trivial,
            spill_bytes=spill_bytes,
        )
    # A narrow window is mostly edges: small tiles cover it with less beside it.
    is_narrow = mask.window is not None and sum(mask.window) < _NARROW
    block_kv = 128 if max(d, dv) <= 128 and not is_narrow and bias_bytes <= 2 else 64
    # What is live in a step: O, S, P and Q.
    query_registers = dv // 2 + block_kv // 2 + block_kv // 4 + d // 4 <= 192 and not crowded
    return ForwardConfig(
        block_kv=block_kv,
        share_out=min(d, dv) == 256 or (bias_bytes > 0 and d >= dv),
        bias_stages=1 if d + dv > 384 and bias_bytes == 4 else 2,
        query_registers=query_registers,
        opaque_index=not query_registers,
        num_stages=3 if is_narrow and max(d, dv) <= 128 else 2,
        early_wait=max(d, dv) > 96 and not is_narrow and (block_kv == 128 or not mask.is_trivial),
        split_edges=is_narrow and mask.array is None,
        spill_bytes=spill_bytes,
    )


def _spill_budget(problem: Problem) -> int:
    """What ptxas may spill: as measured, with some room for the compilers of other versions."""
    mask = problem.mask
    if problem.parts > 1:
        return 96 if problem.value_dim <= 64 else 1024
    present = (
        problem.bias is not None,
        problem.has_alibi,
        problem.soft_cap is not None,
        problem.dropout_rate > 0.0,
        mask.array is not None,
    )
    num_terms = min(sum(present), 2)
    if problem.head_dim + problem.value_dim > 384:
        # Where O is widest `recompute` spills, out of the way of all loops.
        return (272, 336, 512)[num_terms]
    # Loops that branch into a mask spill a few registers, at their edges.
    branches = mask.window is not None or not mask.has_static_ranges or not mask.is_interval
    plain = (96 if problem.value_dim <= 64 else 32) if branches else 0
    return (plain, 200 if branches else 32, 384)[num_terms]


def head_group(problem: Problem, config: ForwardConfig) -> int:
    """Heads to work on at a time: few enough for the L2 cache, enough tiles to balance."""
    if config.head_group:
        return config.head_group
    if problem.mask.is_trivial:
        return 1
    num_q_tiles = -(-problem.q_len // config.block_q)
    kv_bytes = 2 * problem.kv_len * (problem.head_dim + problem.value_dim)
    num_heads = problem.batch * problem.num_q_heads
    if num_heads * kv_bytes <= _CACHE_BYTES:
        return num_heads
    # At most two rounds of tiles: a little more than two would leave the third almost empty.
    balanced = 2 * problem.num_blocks // num_q_tiles
    return max(balanced, 8 if 8 * kv_bytes <= _CACHE_BYTES else 4)
