"""Compile-time options of the backward kernel, and which suit which problem."""

from __future__ import annotations

import dataclasses
from typing import Any

from pallas_kernels import tiles
from pallas_kernels.config import Problem

GROUPS = 2  # consumer warpgroups that share a tile; dq_warpgroup is one more
_ROWS = tiles.WARPGROUP_ROWS
_REGISTERS = (504, 512)  # of a thread in each of three or four warpgroups together
_CACHE_BYTES = 2**25  # of the L2 cache that queries and their gradients may fill


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardConfig:
    """Compile-time options of the kernel.

    Attributes:
        own_gradients: the layout: one warpgroup has dV and the other dK, of the same keys; or else
            each has keys of its own.
        block_q: queries in a tile: 64, or 128 with own keys.
        parts: own keys: pieces of 64 or 128 queries whose products are issued together and worked
            on one after the other.
        kv_stages: own keys: tiles of K and V in flight.
        q_stages: Q tiles in flight.
        do_stages: dO tiles in flight.
        ds_buffers: tiles of dS' in flight; at least 2 with own keys.
        bias_stages: own keys: tiles of a bias in flight, each of a part's queries; 0 reads it from
            global memory when it is needed.
        dq_columns: columns of dQ that a warpgroup stages at a time; 0 is all it has.
        adds_registers: dQ is added to global memory from registers, in the order in which these
            hold it (:mod:`pallas_kernels.fragments`), not by TMA from shared memory; not of fp32.
        dq_first: own gradients: dQ is made before dV or dK, so that it is added while these are
            made.
        keys_in_registers: own gradients: K and V are register operands.
        dq_warpgroup: own gradients in fp32: a third consumer makes dQ, not the two half of it each;
            and K and V come in fp32, so that those of the next tile have room while this one's
            parts are in registers.
        hands_over_in_ds: own gradients in fp32: P' comes from one consumer to the other where dS'
            will be, not in a buffer of its own; with one buffer of dS'.
        take_turns: own keys: consumers take turns in issuing S' and dP'.
        split_edges: peel masked query tiles into loops of their own, instead of a branch.
        consumer_registers: registers a thread of a consumer.
        producer_registers: registers a thread of the producer.
        dq_registers: registers a thread of the consumer that makes dQ, if there is one.
        head_group: heads worked on at a time, for the L2 cache; 0 is :func:`head_group`'s choice.
        spill_bytes: what ptxas may spill, bytes; more fails the ahead-of-time check.
    """

    own_gradients: bool = False
    block_q: int = 64
    parts: int = 1
    kv_stages: int = 1
    q_stages: int = 2
    do_stages: int = 2
    ds_buffers: int = 2
    bias_stages: int = 0
    dq_columns: int = 0
    adds_registers: bool = False
    dq_first: bool = False
    keys_in_registers: bool = False
    dq_warpgroup: bool = False
    hands_over_in_ds: bool = False
    take_turns: bool = True
    split_edges: bool = True
    consumer_registers: int = 240
    producer_registers: int = 24
    dq_registers: int = 72
    head_group: int = 0
    spill_bytes: int = 0

    def __post_init__(self) -> None:
        if self.block_q not in ((_ROWS,) if self.own_gradients else (_ROWS, 2 * _ROWS)):
            raise ValueError(f"block_q={self.block_q}: 64, or 128 with own keys")
        if self.block_q // self.parts not in (_ROWS, self.block_q):
            raise ValueError(f"parts={self.parts}: of 64 queries, or one")
        if self.kv_stages > 1 and self.own_gradients:
            raise ValueError(f"kv_stages={self.kv_stages}: 1 with own gradients")
        if self.ds_buffers < 2 and not self.own_gradients:
            raise ValueError(
                f"ds_buffers={self.ds_buffers}: with own keys dQ is made after the next dS' is "
                "stored, so that two are needed"
            )
        if self.hands_over_in_ds and (self.ds_buffers > 1 or not self.own_gradients):
            raise ValueError(
                f"hands_over_in_ds: with own gradients and one buffer of dS', not {self.ds_buffers}"
            )
        if self.dq_first and (not self.own_gradients or self.dq_warpgroup or self.hands_over_in_ds):
            raise ValueError(
                "dq_first: with own gradients, two consumers, and P' in a buffer of its own"
            )
        if self.dq_warpgroup and (
            self.hands_over_in_ds or not (self.own_gradients and self.keys_in_registers)
        ):
            raise ValueError(
                "dq_warpgroup: with own gradients, keys_in_registers, and P' in a buffer of its "
                "own, in which dK and dV are staged"
            )
        if self.adds_registers and self.dq_columns:
            raise ValueError(
                f"dq_columns={self.dq_columns}: with adds_registers nothing is staged; leave it 0"
            )
        # setmaxnreg waits for registers that others give back: too large a wish waits for ever.
        registers = _REGISTERS[self.dq_warpgroup]
        others = self.producer_registers + self.dq_warpgroup * self.dq_registers
        if self.consumer_registers * GROUPS + others > registers:
            raise ValueError(
                f"consumer_registers={self.consumer_registers}: {GROUPS} consumers and the "
                f"{others} of other warpgroups want more than the {registers} there are. Lower "
                "one of them."
            )

    @property
    def consumers(self) -> int:
        """Warpgroups beside the producer."""
        return GROUPS + self.dq_warpgroup

    @property
    def block_kv(self) -> int:
        """Keys of a thread block."""
        return _ROWS if self.own_gradients else GROUPS * _ROWS

    @property
    def part_columns(self) -> int:
        """Queries of a part."""
        return self.block_q // self.parts

    @property
    def splits_rows(self) -> bool:
        """Whether the consumers share the rows of dQ, not its columns."""
        return self.block_q > _ROWS


def fills_memory(dtype: Any, head_dim: int, value_dim: int) -> bool:
    """Whether the parts of fp32 tiles fill shared memory.

    Then dropout has no room, nor have gradients of terms that are summed up in the kernel.
    """
    return dtype == "float32" and max(head_dim, value_dim) > 64


def default_config(problem: Problem) -> BackwardConfig:
    """The configuration for a problem: the fastest of those measured (docs/log.md)."""
    widest = max(problem.head_dim, problem.value_dim)
    # A branch spills less, unless only the first tiles are masked.
    split_edges = problem.mask.has_static_ranges and problem.mask.window is None
    ids = problem.mask.q_segments is not None  # compared in the branch
    if fills_memory(problem.dtype, problem.head_dim, problem.value_dim):
        return BackwardConfig(
            own_gradients=True,
            q_stages=1,
            do_stages=1,
            ds_buffers=1,
            dq_columns=16,
            hands_over_in_ds=True,
            split_edges=split_edges,
            spill_bytes=328 + _more_spill_bytes(problem),  # 296 with segments, 452 with a bias
        )
    if problem.parts > 1:
        if not problem.has_terms:
            return BackwardConfig(
                own_gradients=True,
                keys_in_registers=True,
                dq_warpgroup=True,
                dq_columns=32,
                consumer_registers=208,
                split_edges=split_edges,
                spill_bytes=128,
            )
        return BackwardConfig(
            own_gradients=True,
            keys_in_registers=True,
            ds_buffers=1,
            split_edges=split_edges,
            spill_bytes=144 + _more_spill_bytes(problem),
        )
    if widest <= 64:
        spill_bytes = 200 if ids else 128  # LLVM of one JAX or another: up to 32 bytes apart
        bias_stages = _bias_stages(problem, 16 if problem.dropout_rate > 0.0 else 32)
        # What masks compare and dropout draws by takes the room of a second K and V.
        is_lean = problem.mask.has_static_ranges and problem.dropout_rate == 0.0
        return BackwardConfig(
            block_q=128,
            parts=2,
            kv_stages=2 if is_lean and not ids and not bias_stages else 1,
            take_turns=False,
            bias_stages=bias_stages,
            split_edges=split_edges,
            spill_bytes=spill_bytes + _more_spill_bytes(problem),
        )
    if widest <= 128:
        bias_stages = _bias_stages(problem, 16 if problem.dropout_rate > 0.0 else 32)
        spill_bytes = 128 if ids else 48
        if problem.has_bias_tiles:
            spill_bytes = max(spill_bytes, 192)  # causal and grouped 188, full 84
        if widest <= 96:
            spill_bytes = 32 if ids else 8  # 24 with segments and JAX 0.12, else 0 or 8
        return BackwardConfig(
            do_stages=2 if bias_stages else 3,
            bias_stages=bias_stages,
            split_edges=split_edges,
            spill_bytes=spill_bytes + _more_spill_bytes(problem),
        )
    spill_bytes = _more_spill_bytes(problem)
    if problem.bias is not None and problem.has_bias_tiles and widest > 192:
        spill_bytes = max(spill_bytes, 256)  # read from global memory into registers
    if widest <= 192:
        return BackwardConfig(
            own_gradients=True,
            split_edges=split_edges,
            spill_bytes=12 + spill_bytes,  # 8, with segments all
        )
    # Where every query sees all keys, adding from registers is faster; elsewhere it is slower.
    adds_registers = problem.mask.is_trivial
    return BackwardConfig(
        own_gradients=True,
        do_stages=2 if adds_registers else 1,
        ds_buffers=1,
        dq_columns=0 if adds_registers else 64,
        adds_registers=adds_registers,
        dq_first=adds_registers,
        split_edges=split_edges,
        spill_bytes=64 + spill_bytes,
    )


def transposes_bias(problem: Problem, config: BackwardConfig) -> bool:
    """Whether the kernel transposes tiles of a bias as it reads them, which takes 16 bits.

    Otherwise it wants a bias with keys as rows, which takes a pass over all of it.
    """
    if problem.bias is None or not problem.has_bias_tiles:
        return False
    return config.bias_stages > 0 and problem.bias.dtype.itemsize == 2


def _bias_stages(problem: Problem, kibibytes: int) -> int:
    """Tiles of a bias, of 128 keys and 64 queries, that fit into what shared memory is left."""
    if problem.bias is None or not problem.has_bias_tiles:
        return 0
    tile_bytes = GROUPS * _ROWS * _ROWS * problem.bias.dtype.itemsize
    return min(kibibytes * 1024 // tile_bytes, 2)


def _more_spill_bytes(problem: Problem) -> int:
    """What terms and their gradients may spill in addition; a mixture, which is rare, more."""
    kinds = (
        problem.soft_cap is not None,
        problem.dropout_rate > 0.0,
        problem.bias is not None or problem.has_alibi,
        problem.mask.array is not None,
    )
    return (0, 128, 256, 576, 576)[sum(kinds)]


def padded_dims(head_dim: int, value_dim: int, *, is_split: bool = False) -> tuple[int, int]:
    """The next pair of head dims that the kernel has tiles for; ``is_split`` is of fp32."""
    widest = max(head_dim, value_dim)
    if widest <= 64:
        return 64, 64
    if widest <= 128 and head_dim <= 64:
        head_dim = 80 if widest <= 96 else 128  # halves of 32 columns of dQ are not measured
    dims = (64, 80, 96, 128) if widest <= 128 and not is_split else (64, 128, 192, 256)
    head_dim = next(dim for dim in dims if dim >= head_dim)
    # With own keys dV is staged in tiles of dS', which are as wide as those of dQ's shares.
    tile = min(head_dim & -head_dim, _ROWS)
    return head_dim, next(dim for dim in dims if dim >= value_dim and dim % tile == 0)


def dq_shares(problem: Problem, config: BackwardConfig) -> tuple[int, int]:
    """Columns of dQ that each consumer makes: halves, or about that in whole swizzled tiles."""
    size = problem.head_dim
    if config.adds_registers and problem.parts > 1:
        raise ValueError("adds_registers: not of fp32, which stages dK and dV where dQ was")
    if config.splits_rows:
        return size, size
    for option in ("dq_warpgroup", "hands_over_in_ds"):
        if getattr(config, option) and problem.parts == 1:
            raise ValueError(f"{option}: of fp32, not {problem.dtype}")
    if config.dq_warpgroup:
        return size, size
    half = size // GROUPS
    if half % 32 == 0:
        return half, half
    if config.own_gradients:
        raise ValueError(f"head_dim={size}: own gradients want halves of 32, 64, 96 or 128 columns")
    tile = size & -size
    first = -(-half // tile) * tile
    return first, size - first


def head_group(problem: Problem, config: BackwardConfig) -> int:
    """Key heads to work on at a time: few enough for the L2 cache, enough tiles to balance."""
    if config.head_group:
        return config.head_group
    if problem.mask.is_trivial:
        return 1
    num_kv_tiles = -(-problem.kv_len // config.block_kv)
    row_bytes = 2 * (problem.head_dim + problem.value_dim) + 4 * problem.head_dim
    head_bytes = problem.num_q_heads // problem.num_kv_heads * problem.q_len * row_bytes
    # Two tiles a block, but one where a tile of keys has much to read (measured at D = 256).
    tiles_a_block = 1 if config.own_gradients and problem.parts == 1 else 2
    fewest = 8 if 8 * head_bytes <= _CACHE_BYTES else 4
    return max(tiles_a_block * problem.num_blocks // num_kv_tiles, fewest)
