"""Forward attention for Hopper: out and log-sum-exp in one pass over keys and values.

For each tile of query rows, over key tiles j from last to first (Dao et al. 2022, FlashAttention,
algorithm 1; Shah et al. 2024, FlashAttention-3, algorithm 2):

    S = Q K_j^T                       fp32 accumulator in registers
    m' = max(m, rowmax(S) * c)        c = scale * log2(e); m in log2 units
    P = exp2(S * c - m')              l = l * exp2(m - m') + rowsum(P)
    O = O * exp2(m - m') + P V_j      P in fp16/bf16 as a register operand
    out = O / l                       lse = (m + log2 l) / log2(e)

A thread block is `num_warpgroups` consumer warpgroups of 64 query rows and one producer:

    producer   waits until Q is empty, loads Q (TMA); for each key tile waits until a slot of the
               ring is empty, loads K; likewise V, and before it the bias of the next key tile. Runs
               ahead of the consumers, also into the next query tile.
    consumer   S(0), softmax(0); then for each further key tile i: issue S(i) = Q K_i^T, rescale O,
               issue O += P(i-1) V(i-1), wait for S(i), release K, softmax(i) while P V runs, wait,
               release V. At the end O += P V, write out and lse.

The consumers take turns in issuing matrix products (a named barrier), so that one works on its
softmax while another occupies the tensor cores.

Key tiles: the schedule (:mod:`pallas_kernels.schedule`) lists for each query tile the range to
load, for each warpgroup the part of it to visit, and inside that the part that needs no mask. In
the rest, columns are compared with the first and last visible key of each row.

Constraints: fp16 or bf16, or fp32 as three parts of bf16 (:mod:`pallas_kernels.split`); D and Dv of
:data:`~pallas_kernels.config.HEAD_DIMS`, in fp32 of ``SPLIT_HEAD_DIMS``; lengths are multiples of 8
(a tiled TMA copy needs that; the wrapper pads, the true lengths are in the problem). Missing rows
of K and V are read as zeros, surplus rows of out are not written, lse has whole tiles.

Bad values: hidden scores are replaced, so that a NaN in K harms nobody. A hidden row of V that
shares a tile with visible ones is multiplied by 0, where NaN and inf survive: rows of O that end up
with one are computed again, key by key (:mod:`pallas_kernels.recompute`).

Test:  python -m pytest tests/test_pallas_forward.py     Compile without a GPU:  python -m bench aot
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_flash.mask import Mask
from pallas_kernels import recompute, tiles
from pallas_kernels import schedule as schedules
from pallas_kernels.config import ForwardConfig, Problem, default_config, head_group
from pallas_kernels.forward_tiles import KeyTiles, QueryTile, ScoreTiles
from pallas_kernels.ops import Ops, packed_bits
from pallas_kernels.split import split, split_in_one
from pallas_kernels.terms import Arrays
from pallas_kernels.terms import inputs as term_inputs

Array = jax.Array
Ref = Any

_FIRST_NAMED_BARRIER = 5  # lower ones belong to Mosaic
_ROWS = tiles.WARPGROUP_ROWS


def scratch_tree(problem: Problem, config: ForwardConfig, ops: Ops) -> dict[str, Any]:
    """Shared memory and barriers, by name."""
    groups, stages = config.num_warpgroups, config.num_stages
    dtype = problem.dtype
    bias: dict[str, Any] = {}
    if problem.bias is not None and problem.has_bias_tiles:
        count = config.bias_stages
        shape = (count, groups, _ROWS, config.block_kv)
        bias = {
            "bias_s": tiles.buffer(shape, problem.bias.dtype),
            "bias_full": plgpu.Barrier(num_arrivals=groups, num_barriers=count),
            "bias_empty": plgpu.Barrier(num_arrivals=groups, num_barriers=count),
        }
    query_parts = 1 if _splits_queries(problem, config) else problem.parts
    query_buffer = tiles.operand_buffer if query_parts == problem.parts else tiles.buffer
    tree = {
        "q_s": query_buffer((groups, _ROWS, problem.head_dim), dtype),
        "k_s": tiles.operand_buffer((stages, config.block_kv, problem.head_dim), dtype),
        "v_s": tiles.operand_buffer((stages, config.block_kv, problem.value_dim), dtype),
        "o_s": None
        if config.share_out
        else tiles.buffer((groups, _ROWS, _staged_columns(problem)), dtype),
        "lse_s": plgpu.SMEM((groups, _ROWS), jnp.float32),
        "q_full": plgpu.Barrier(num_arrivals=groups * query_parts, num_barriers=1),
        "q_empty": plgpu.Barrier(num_arrivals=groups, num_barriers=1),
        "k_full": plgpu.Barrier(num_arrivals=problem.parts, num_barriers=stages),
        "k_empty": plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
        "v_full": plgpu.Barrier(num_arrivals=problem.parts, num_barriers=stages),
        "v_empty": plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
        **bias,
        "s_acc": ops.accumulator_scratch(groups, (_ROWS, config.block_kv)),
        "o_acc": ops.accumulator_scratch(groups, (_ROWS, problem.value_dim)),
        "part_acc": ops.accumulator_scratch(groups, (_ROWS, problem.value_dim))
        if problem.parts > 1
        else None,
    }
    return {name: item for name, item in tree.items() if item is not None}


def _splits_queries(problem: Problem, config: ForwardConfig) -> bool:
    """Whether each query tile is split where it stays: in registers; otherwise before, by XLA."""
    return problem.parts > 1 and config.query_registers


def _staged_columns(problem: Problem) -> int:
    """Columns of out that a warpgroup stages at a time: fp32 has no room for all."""
    return problem.value_dim if problem.parts == 1 else min(problem.value_dim, 64)


class _Kernel(ScoreTiles):
    """The kernel's body; one instance a trace, holding static facts and references."""

    def __init__(
        self,
        problem: Problem,
        config: ForwardConfig,
        ops: Ops,
        edges: schedules.Edges,
        refs: dict[str, Ref],
    ):
        super().__init__(problem, ops, refs)
        self.config = config
        self.edges = edges
        self.warpgroup = lax.axis_index("warpgroup")
        own = ops.warpgroup_in_register()
        following = jnp.where(own == config.num_warpgroups - 1, 0, own + 1)
        self.turn = _FIRST_NAMED_BARRIER + own
        self.next_turn = _FIRST_NAMED_BARRIER + following

    def run(self) -> None:
        config = self.config
        consumers = config.num_warpgroups

        @pl.when(self.warpgroup < consumers)
        def _() -> None:
            plgpu.set_max_registers(config.consumer_registers, action="increase")
            for x, stages in self.rings.items():
                for slot in range(stages):
                    self.arrive(f"{x}_empty", slot)
            self.arrive("q_empty")
            if config.take_turns:
                pl.when(self.warpgroup == consumers - 1)(self.pass_turn)  # to the first
            _, bad_turns = self.for_each_tile(self.consume, (jnp.int32(0), jnp.int32(0)))
            if config.take_turns:  # what the last consumer gave the first
                pl.when(self.warpgroup == 0)(self.await_turn)
            plgpu.wait_smem_to_gmem(0)

            @pl.when(self.any_of_warpgroup(bad_turns))
            def _() -> None:
                self.for_each_tile(self.mend, bad_turns)
                plgpu.wait_smem_to_gmem(0)

        @pl.when(self.warpgroup == consumers)
        def _() -> None:
            plgpu.set_max_registers(config.producer_registers, action="decrease")
            steps = self.for_each_tile(self.produce, jnp.int32(0))
            for x, stages in self.rings.items():
                for ahead in range(stages):
                    self.wait(f"{x}_empty", self.slot(steps + ahead, x))
            self.wait("q_empty")

    # What consumers and producer share.

    def arrive(self, name: str, slot: Any = 0) -> None:
        plgpu.barrier_arrive(self.refs[name].at[slot])

    def wait(self, name: str, slot: Any = 0) -> None:
        plgpu.barrier_wait(self.refs[name].at[slot])

    @property
    def rings(self) -> dict[str, int]:
        """What comes with each key tile, and how many tiles of it there is room for.

        In the order in which it is needed, and given back by who does not need it.
        """
        config = self.config
        rings = {"bias": config.bias_stages} if "bias_s" in self.refs else {}
        return rings | {"k": config.num_stages, "v": config.num_stages}

    def slot(self, step: Any, ring: str = "k") -> Any:
        return lax.rem(step, jnp.int32(self.rings[ring]))

    def for_each_tile(self, process: Callable[[Any, tuple[Any, ...], Any], Any], state: Any) -> Any:
        """Runs ``state = process(turn, words, state)`` on this block's tiles.

        Words are read one tile ahead: a read of global memory would delay every tile.
        """
        table = self.refs["schedule"]
        block = lax.axis_index("block")
        own = 3 + 2 * jnp.minimum(self.warpgroup, self.config.num_warpgroups - 1)

        def read(turn: Any) -> tuple[Any, ...]:
            return tuple(table[block, turn, word] for word in (0, 1, 2, own, own + 1))

        def body(turn: Any, carry: Any) -> Any:
            state, words = carry
            following = read(turn + 1)
            state = lax.cond(words[0] >= 0, lambda: process(turn, words, state), lambda: state)
            return state, following

        return lax.fori_loop(0, table.shape[1] - 1, body, (state, read(0)))[0]

    def batch_and_head(self, words: tuple[Any, ...]) -> tuple[Any, Any]:
        num_heads = jnp.int32(self.problem.num_q_heads)
        return lax.div(words[1], num_heads), lax.rem(words[1], num_heads)

    def key_tiles(self, words: tuple[Any, ...], *word_pairs: Any) -> KeyTiles:
        """Those of packed words of the schedule."""
        visits = None
        if "visits" in self.refs:
            table = self.refs["visits"]
            num_heads = self.problem.batch * self.problem.num_q_heads
            visits = table.at[schedules.row_of(words[1], table.shape[0], num_heads), words[0]]
        first, *full = (_unpack(word) for word in word_pairs)
        return KeyTiles(*first, *(full[0] if full else first), visits)

    def row(self, words: tuple[Any, ...]) -> Any:
        return words[0] * self.config.block_q + self.warpgroup * _ROWS

    def kv_head(self, head: Any) -> Any:
        return lax.div(head, jnp.int32(self.problem.num_q_heads // self.problem.num_kv_heads))

    # Producer.

    def produce(self, _: Any, words: tuple[Any, ...], steps: Any) -> Any:
        refs, config = self.refs, self.config
        batch, head = self.batch_and_head(words)
        kv_head = self.kv_head(head)
        tiles_to_load = self.key_tiles(words, words[2])

        def keys_of(i: Any) -> Any:
            return pl.ds(tiles_to_load.visit(i)[0] * config.block_kv, config.block_kv)

        def load_bias(i: Any) -> None:
            slot, keys = self.slot(steps + i, "bias"), keys_of(i)
            self.wait("bias_empty", slot)
            of_head = self.terms.of("bias", batch, head)
            for group in range(config.num_warpgroups):
                rows = pl.ds(words[0] * config.block_q + group * _ROWS, _ROWS)
                target, full = refs["bias_s"].at[slot, group], refs["bias_full"].at[slot]
                plgpu.copy_gmem_to_smem(of_head.at[rows, keys], target, full)

        def load_bias_if_any(i: Any) -> None:
            if "bias" in self.rings:
                pl.when(i < tiles_to_load.count)(lambda: load_bias(i))

        load_bias_if_any(0)
        self.wait("q_empty")
        for group in range(config.num_warpgroups):
            row = words[0] * config.block_q + group * _ROWS
            at = batch, pl.ds(row, _ROWS), head
            target, full = refs["q_s"].at[group], refs["q_full"].at[0]
            if _splits_queries(self.problem, config):
                plgpu.copy_gmem_to_smem(refs["q"].at[at], target, full)
            else:
                self.copy("q", at, target, full)

        def load(i: Any, _: None) -> None:
            slot, keys = self.slot(steps + i), keys_of(i)
            for x in ("k", "v"):
                if x == "v":
                    # A step begins with its bias, at the time when V's place becomes free: asked
                    # for after V, it would come late. So it is asked for a step ahead.
                    load_bias_if_any(i + 1)
                self.wait(f"{x}_empty", slot)
                at = batch, keys, kv_head
                self.copy(x, at, refs[f"{x}_s"].at[slot], refs[f"{x}_full"].at[slot])

        lax.fori_loop(0, tiles_to_load.count, load, None)
        return steps + tiles_to_load.count

    def copy(self, name: str, at: tuple[Any, ...], target: Ref, full: Ref) -> None:
        """Begins to load a tile of an operand."""
        source = self.refs[name if self.problem.parts == 1 else f"{name}_parts"]
        self.ops.copy_operand(source, at, target, full)

    # Consumers.

    def await_turn(self) -> None:
        if self.config.take_turns:
            self.ops.pace_wait(self.turn, 256)

    def pass_turn(self) -> None:
        if self.config.take_turns:
            self.ops.pace_arrive(self.next_turn, 256)

    def consume(self, turn: Any, words: tuple[Any, ...], state: tuple[Any, Any]) -> tuple[Any, Any]:
        """Its state: key tiles loaded so far, and as bits the turns (modulo 32) to mend."""
        steps, bad_turns = state
        lo, hi = _unpack(words[2])
        own = self.key_tiles(words, words[3], words[4])

        def work() -> Any:
            first = hi - own.hi if self.edges.skips_first else 0
            if self.edges.skips_first:
                self.sit_out(steps, first)
            return self.compute(words, own, steps + first, own.lo - lo)

        if self.edges.idles:
            found = lax.cond(
                self.row(words) < self.problem.q_len, work, lambda: self.idle(steps, hi - lo)
            )
        else:
            found = work()
        return steps + hi - lo, bad_turns | jnp.where(found, _bit(turn), 0)

    def sit_out(self, steps: Any, count: Any) -> None:
        """Lets key tiles pass that other warpgroups visit."""

        def body(i: Any, _: None) -> None:
            for x in self.rings:
                slot = self.slot(steps + i, x)
                self.wait(f"{x}_full", slot)
                self.arrive(f"{x}_empty", slot)
            self.await_turn()
            self.pass_turn()

        lax.fori_loop(0, count, body, None)

    def idle(self, steps: Any, count: Any) -> Any:
        """Lets a query tile pass in which this warpgroup has no rows."""
        self.wait("q_full")
        self.arrive("q_empty")
        self.await_turn()  # for the last product, which belongs to no key tile
        self.pass_turn()
        self.sit_out(steps, count)
        return jnp.bool_(False)

    def compute(self, words: tuple[Any, ...], own: KeyTiles, steps: Any, rest: Any) -> Any:
        """This warpgroup's rows of one query tile.

        Returns whether this warp's rows of out may have to be mended.

        Args:
            words: of the schedule.
            own: key tiles to visit.
            steps: key tiles loaded before the first of them.
            rest: how many are loaded after the last of them.
        """
        config, ops, problem = self.config, self.ops, self.problem
        tile = self.query_tile(*self.batch_and_head(words), self.row(words))
        attend = functools.partial(self.attend, own, steps, tile)
        self.wait("q_full")
        o, stats = ops.with_accumulator(attend, (_ROWS, problem.value_dim), self.backing("o_acc"))
        if self.edges.skips_last:
            self.sit_out(steps + own.count, rest)
        sink = self.terms.scalar("sinks", *tile.place) if problem.has_sinks else None
        inverse, lse = tiles.finish(stats, self.row_shift(tile), sink, wide=problem.is_wide)
        o = o * lax.broadcast_in_dim(inverse * self.kept_scale, o.shape, [0])
        self.store(o, lse, *tile.place, tile.row)
        if config.share_out:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self.arrive("q_empty")
        # Where lse is NaN already, a query or a key is to blame: there is nothing to mend.
        is_known = lax.broadcast_in_dim(lse != lse, o.shape, [0])
        return ops.any_nonfinite(jnp.where(is_known, 0.0, o))

    def store(self, o: Array, lse: Array, batch: Any, head: Any, row: Any) -> None:
        """Begins to write this warpgroup's rows."""
        refs, group = self.refs, self.warpgroup
        rows = pl.ds(row, _ROWS)
        staging = refs["q_s" if self.config.share_out else "o_s"].at[group]
        width = _staged_columns(self.problem)
        for first in range(0, o.shape[1], width):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            staging[...] = o[:, first : first + width].astype(self.problem.dtype)
            if first == 0:
                refs["lse_s"][group] = lse
            plgpu.commit_smem()
            target = refs["out"].at[batch, rows, head]
            if width < o.shape[1]:
                target = target.at[:, pl.ds(first, width)]
            plgpu.copy_smem_to_gmem(staging, target, commit_group=False)
            if first == 0:
                target = refs["lse"].at[batch, head, rows]
                plgpu.copy_smem_to_gmem(refs["lse_s"].at[group], target, commit_group=False)
            plgpu.commit_smem_to_gmem_group()

    def mend(self, turn: Any, words: tuple[Any, ...], bad_turns: Any) -> Any:
        """Writes out again if it got a NaN or inf: it may come from a value that is hidden.

        Apart from all tiles' work and after it, because code beside the loop over keys costs that
        loop its registers, although it never runs.
        """
        refs, ops, problem = self.refs, self.ops, self.problem
        own_lo, own_hi = _unpack(words[3])

        @pl.when(self.any_of_warpgroup(bad_turns & _bit(turn)))
        def _() -> None:
            tile = self.query_tile(*self.batch_and_head(words), self.row(words))
            batch, head, kv_head = *tile.place, self.kv_head(tile.head)
            operands = recompute.Operands(
                q=refs["q"].at[batch, :, head],
                k=refs["k"].at[batch, :, kv_head],
                v=refs["v"].at[batch, :, kv_head],
            )
            keys = own_lo * self.config.block_kv, own_hi * self.config.block_kv
            if "visits" in refs:
                keys = jnp.int32(0), jnp.int32(problem.kv_len)
            keys = keys[0], jnp.minimum(keys[1], problem.kv_len)
            lse = ops.load_rows(refs["lse"].at[batch, head, pl.ds(tile.row, _ROWS)])
            shift = self.row_shift(tile)
            m = (lse if shift is None else lse - shift) * (1.0 if problem.is_wide else tiles.LOG2_E)

            def weights(products: Array, column: Any) -> tuple[Array, Array]:
                columns, bias = self.of_keys(tile, column, recompute.KEYS), None
                if "bias" in self.rings:
                    keys = pl.ds(column, recompute.KEYS)
                    bias = ops.gather_rows(
                        self.terms.of("bias", *tile.place).at[:, keys], tile.row, _ROWS
                    )
                s = self.terms.scores(products, tile.terms, columns, bias)
                s = self.hide(tile, s, column)
                exponent = tiles.exponent(s, m, problem.scale_log2, wide=problem.is_wide)
                p = jnp.exp2(exponent) * self.kept_scale
                return self.drop(tile, p, column), s != -jnp.inf

            o = recompute.recompute(ops, operands, tile.row, keys, weights)
            # What is left has been seen: such a row is NaN in all its columns.
            taint = (o - o).sum(axis=1)
            o = o + lax.broadcast_in_dim(taint, o.shape, [0])
            self.store(o, lse + taint, *tile.place, tile.row)

        return bad_turns

    def any_of_warpgroup(self, bits: Any) -> Any:
        first = _FIRST_NAMED_BARRIER + self.config.num_warpgroups  # past those of the turns
        return self.ops.any_of_warpgroup(bits != 0, first + self.warpgroup)

    def backing(self, name: str) -> Ref:
        return self.refs[name].at[self.warpgroup] if name in self.refs else None

    def attend(
        self, own: KeyTiles, steps: Any, tile: QueryTile, o_acc: Ref
    ) -> tuple[Array, tiles.RowStats]:
        """All key tiles of this warpgroup's rows; returns O before division, and statistics."""
        refs, config, ops = self.refs, self.config, self.ops
        count = own.count
        softmax = functools.partial(
            tiles.softmax_step,
            scale_log2=self.problem.scale_log2,
            lazy_growth=config.lazy_growth,
            wide=self.problem.is_wide,
            exp2=ops.exp2,
        )
        score_shape = (_ROWS, config.block_kv)

        query = refs["q_s"].at[self.warpgroup]
        in_registers = None
        if config.query_registers:
            if _splits_queries(self.problem, config):
                in_registers = ops.operand(ops.load_tile(query), self.problem.dtype)
            else:
                in_registers = ops.load_operand(query)
            self.arrive("q_empty")

        def scores(s_acc: Ref, slot: Any) -> None:
            k = refs["k_s"].at[slot]
            if in_registers is not None:
                ops.matmul_registers(s_acc, in_registers, k, transpose_b=True)
            elif config.opaque_index:
                opaque = refs["q_s"].at[self.warpgroup + ops.opaque_zero()]
                ops.matmul(s_acc, opaque, k, transpose_b=True)
            else:
                ops.matmul(s_acc, query, k, transpose_b=True)

        def await_key(i: Any) -> None:
            pl.when(i < count)(lambda: self.wait("k_full", self.slot(steps + i)))

        def first_scores(s_acc: Ref) -> Array:
            scores(s_acc, self.slot(steps))
            self.pass_turn()
            return ops.load_accumulator(s_acc, wait=0)

        def visit(i: Any) -> tuple[Any, Any, Array | None, Array | None]:
            """First key, whether a mask is needed, terms of the keys, bias."""
            block, needs_mask = own.visit(i)
            column = block * config.block_kv
            columns, bias = self.of_keys(tile, column, config.block_kv), None
            if "bias" in self.rings:
                slot = self.slot(steps + i, "bias")
                self.wait("bias_full", slot)
                bias = ops.load_shared_tile(refs["bias_s"].at[slot, self.warpgroup])
                ops.fence_reads()
                self.arrive("bias_empty", slot)
            return column, needs_mask, columns, bias

        column, _, columns, bias = visit(0)
        self.wait("k_full", self.slot(steps))
        self.await_turn()
        s = ops.with_accumulator(first_scores, score_shape, self.backing("s_acc"))
        self.arrive("k_empty", self.slot(steps))
        s = self.terms.scores(s, tile.terms, columns, bias)
        if self.edges.masked:
            s = self.hide(tile, s, column)
        stats = tiles.first_stats(
            ops, _ROWS, partial_sums=config.partial_sums, wide=self.problem.is_wide
        )
        p, stats, _ = softmax(s, stats)
        p = self.drop(tile, p, column)
        alpha = ops.full_rows(_ROWS, 1.0)
        if config.early_wait:
            await_key(1)

        def step(i: Any, carry: Any, *, masked: bool | None) -> Any:
            """Key tile ``i``; masked None means that a branch decides."""
            visit_tile = functools.partial(add_values, i, carry, masked)
            return ops.with_partial_sum(visit_tile, o_acc, self.backing("part_acc"))

        def add_values(i: Any, carry: Any, masked: bool | None, target: Ref) -> Any:
            p, stats, alpha = carry
            key_slot, value_slot = self.slot(steps + i), self.slot(steps + i - 1)
            column, needs_mask, columns, bias = visit(i)
            if not config.early_wait:
                self.wait("k_full", key_slot)
            self.await_turn()

            def products(s_acc: Ref) -> Array:
                scores(s_acc, key_slot)
                ops.rescale(o_acc, alpha, skip_ones=config.lazy_growth > 0)
                self.wait("v_full", value_slot)
                ops.matmul_registers(target, p, refs["v_s"].at[value_slot])
                self.pass_turn()
                return ops.load_accumulator(s_acc, wait=1)

            s = ops.with_accumulator(products, score_shape, self.backing("s_acc"))
            self.arrive("k_empty", key_slot)
            s = self.terms.scores(s, tile.terms, columns, bias)
            if masked is None:
                s = lax.cond(needs_mask, lambda: self.hide(tile, s, column), lambda: s)
            elif masked:
                s = self.hide(tile, s, column)
            p, stats, alpha = softmax(s, stats)
            p = self.drop(tile, p, column)
            if config.early_wait:
                await_key(i + 1)
            ops.wait_matmuls(0)
            self.arrive("v_empty", value_slot)
            return ops.operand(p, self.problem.dtype), stats, alpha

        carry = (ops.operand(p, self.problem.dtype), stats, alpha)
        p, stats, alpha = self.loop_over_keys(step, carry, own)
        if not (config.share_out or config.query_registers):
            self.arrive("q_empty")
        value_slot = self.slot(steps + count - 1)
        ops.rescale(o_acc, alpha, skip_ones=config.lazy_growth > 0)
        self.wait("v_full", value_slot)

        def add_last_values(target: Ref) -> None:
            self.await_turn()
            ops.matmul_registers(target, p, refs["v_s"].at[value_slot])
            self.pass_turn()

        ops.with_partial_sum(add_last_values, o_acc, self.backing("part_acc"))
        o = ops.load_accumulator(o_acc, wait=0)
        self.arrive("v_empty", value_slot)
        return o, stats

    def loop_over_keys(self, step: Callable[..., Any], carry: Any, own: KeyTiles) -> Any:
        """Key tiles 1, 2, ...: in one loop, or in one for each kind of tile."""
        leading, trailing = self.edges.leading, self.edges.trailing
        if leading <= 1 and trailing == 0:
            return lax.fori_loop(1, own.count, functools.partial(step, masked=False), carry)
        if not self.config.split_edges:
            return lax.fori_loop(1, own.count, functools.partial(step, masked=None), carry)
        first_full = jnp.maximum(own.hi - own.full_hi, 1)
        past_full = jnp.maximum(own.hi - own.full_lo, first_full)
        if leading > 1:
            carry = lax.fori_loop(1, first_full, functools.partial(step, masked=True), carry)
        carry = lax.fori_loop(first_full, past_full, functools.partial(step, masked=False), carry)
        if trailing > 0:
            carry = lax.fori_loop(past_full, own.count, functools.partial(step, masked=True), carry)
        return carry


def _bit(turn: Any) -> Any:
    return lax.shift_left(jnp.int32(1), turn & jnp.int32(31))


def _unpack(word: Any) -> tuple[Any, Any]:
    """The low and the high half."""
    return word & jnp.int32(0xFFFF), lax.shift_right_logical(word, jnp.int32(16))


def attention_forward(
    problem: Problem,
    q: Array,
    k: Array,
    v: Array,
    mask: Mask,
    arrays: Arrays | None = None,
    *,
    config: ForwardConfig | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[Array, Array]:
    """Launches the kernel.

    Args:
        problem: static facts.
        q: ``[B, Tq', Hq, D]`` with Tq' = Tq rounded up to a multiple of 8.
        k: ``[B, Tk', Hk, D]``, Tk' likewise.
        v: ``[B, Tk', Hk, Dv]``.
        mask: with its arrays.
        arrays: of the terms; None if there are none.
        config: compile-time options; None takes :func:`default_config`.
        interpret: run in interpret mode, on a CPU.

    Returns:
        out ``[B, Tq', Hq, Dv]``; lse fp32 ``[B, Hq, Tq'']``, rows past Tq undefined.
    """
    config = config or default_config(problem)
    ops = Ops(interpret, problem.parts)
    lengths = problem.q_len, problem.kv_len
    tiling = _ROWS, config.num_warpgroups, config.block_kv
    inputs: dict[str, Array | tuple[Array, ...]] = {}
    if mask.array is None:
        ranges, edges = schedules.find_ranges(mask, *lengths, *tiling)
    else:
        inputs["visits"], ranges, edges = schedules.find_visits(
            mask, problem.batch, problem.num_q_heads, *lengths, *tiling
        )
        of_columns = jnp.broadcast_to(mask.array, (*mask.array.shape[:3], problem.kv_len))
        inputs["mask_bits"] = packed_bits(of_columns)
    num_q_tiles = ranges.lo.shape[1]
    num_blocks = min(problem.num_blocks, problem.batch * problem.num_q_heads * num_q_tiles)
    # What all batch elements read is best read by them at about the same time.
    is_shared = problem.bias is not None and problem.bias.shape[0] == 1
    table = schedules.make(
        ranges,
        problem.batch,
        problem.num_q_heads,
        num_blocks,
        head_group(problem, config),
        batch_first=is_shared,
    )
    inputs["schedule"] = jnp.asarray(table)
    surplus = num_q_tiles * config.block_q - problem.q_len
    if not mask.has_static_ranges:
        for name, rows in zip(
            ("row_start", "row_end"), mask.row_ranges(problem.q_len, problem.kv_len), strict=True
        ):
            inputs[name] = jnp.pad(jnp.asarray(rows), ((0, 0), (0, surplus)))
    if mask.q_segments is not None and mask.kv_segments is not None:
        inputs["q_segments"] = jnp.pad(mask.q_segments, ((0, 0), (0, surplus)))
        kv_surplus = -problem.kv_len % config.block_kv
        inputs["kv_segments"] = jnp.pad(mask.kv_segments, ((0, 0), (0, kv_surplus)))
    padded_len = num_q_tiles * config.block_q
    whole_tiles = -(-problem.kv_len // config.block_kv) * config.block_kv
    inputs |= term_inputs(problem, mask, arrays or Arrays(), padded_len, whole_tiles)
    inputs |= {"q": q, "k": k, "v": v}
    if problem.parts > 1:
        # A bias leaves no registers for more TMA descriptors.
        make = split if problem.bias is None else split_in_one
        inputs |= {"k_parts": make(k), "v_parts": make(v)}
        if not _splits_queries(problem, config):
            inputs["q_parts"] = make(q)
    outputs = {
        "out": jax.ShapeDtypeStruct((*q.shape[:3], problem.value_dim), problem.dtype),
        "lse": jax.ShapeDtypeStruct((problem.batch, problem.num_q_heads, padded_len), jnp.float32),
    }

    def body(*refs: Ref, **scratch: Ref) -> None:
        named = dict(zip((*inputs, *outputs), refs, strict=True))
        _Kernel(problem, config, ops, edges, named | scratch).run()

    kernel = plgpu.kernel(
        body,
        out_type=list(outputs.values()),
        scratch_types=scratch_tree(problem, config, ops),
        grid=(num_blocks,),
        grid_names=("block",),
        num_threads=config.num_warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="jax_flash_forward",
        interpret=interpret or False,
        compiler_params=plgpu.CompilerParams(
            approx_math=problem.parts == 1,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )
    out, lse = kernel(*inputs.values())
    return out, lse
