"""What both layouts of the backward kernel share: producer, walk over tiles, dQ.

The algorithm is described in :mod:`pallas_kernels.backward`, the algebra of a tile is in
:mod:`pallas_kernels.backward_tiles`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import schedule as schedules
from pallas_kernels.backward_config import (
    GROUPS,
    BackwardConfig,
    dq_shares,
    transposes_bias,
)
from pallas_kernels.backward_scratch import query_swizzles, row_vectors
from pallas_kernels.backward_tiles import (
    ALL_ROWS,
    ROWS,
    Step,
    Tiles,
    choose,
    key_vectors,
)
from pallas_kernels.config import Problem
from pallas_kernels.fragments import COLUMNS
from pallas_kernels.ops import Ops, loop_between

Array = jax.Array
Ref = Any

_MEETING = 5  # the first named barrier that is not Mosaic's
FIRST_TURN = 6  # and a warpgroup's turn: one for each consumer


class Tile(NamedTuple):
    """One row of the schedule: a key tile, and query tiles ``[lo, hi)`` with their full part.

    Where a boolean mask decides, ``hi`` is instead how many steps the key tile has.
    """

    kv_tile: Any
    head: Any
    lo: Any
    full_lo: Any
    full_hi: Any
    hi: Any


class KeyTile(NamedTuple):
    """Where a key tile is: its batch element, dQ's place for that, its head and first key.

    ``kv_slot`` is where in the ring of K and V it is.
    """

    batch: Any
    slab: Any
    head: Any
    key: Any
    kv_slot: Any


class Kernel(Tiles):
    """The kernel's body; one instance a trace, holding static facts and references."""

    def __init__(
        self,
        problem: Problem,
        config: BackwardConfig,
        ops: Ops,
        edges: schedules.QueryEdges,
        refs: dict[str, Ref],
        writes_bias: bool = False,
    ):
        super().__init__(problem, ops, edges, refs, writes_bias)
        self.config = config
        self.bias_stages = config.bias_stages if "bias_s" in refs else 0
        self.transposes_bias = transposes_bias(problem, config)
        # Barriers of tiles that have come, of which rows may have to be zeroed: the array in which
        # they are, and how many of tiles that are ready come before them.
        self.raw = {"q_raw": ("q_full", config.q_stages), "do_raw": ("do_full", config.do_stages)}
        self.has_blank: Any = 0  # or 1: whether queries have no gradient, as the producer finds
        self.shares = dq_shares(problem, config)
        self.group = problem.num_q_heads // problem.num_kv_heads
        self.slabs = refs["dq"].shape[0] // problem.batch

    def run(self) -> None:
        """What this warpgroup does."""
        config = self.config

        @pl.when(self.warpgroup < GROUPS)
        def _() -> None:
            plgpu.set_max_registers(config.consumer_registers, action="increase")
            for slot in range(0 if config.dq_warpgroup else config.kv_stages):
                self.arrive("kv_empty", slot)
            for slot in range(config.q_stages):
                self.arrive("q_empty", slot)
            for slot in range(config.do_stages):
                self.arrive("do_empty", slot)
            for slot in range(self.bias_stages):
                self.arrive("bias_empty", slot)
            self.begin()
            self.end(self.for_each_tile(self.consume)[0])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(self.warpgroup == config.consumers)
        def _() -> None:
            plgpu.set_max_registers(config.producer_registers, action="decrease")
            if "has_blank" in self.refs:
                self.has_blank = self.refs["has_blank"][0]
            turns, kv_turns = self.for_each_tile(self.produce)
            for name in ("k", "v") if config.dq_warpgroup else ("kv",):
                for ahead in range(config.kv_stages):
                    self.wait(f"{name}_empty", remainder(kv_turns + ahead, config.kv_stages))
            for ahead in range(config.q_stages):
                self.wait("q_empty", remainder(turns + ahead, config.q_stages))
            for ahead in range(config.do_stages):
                self.wait("do_empty", remainder(turns + ahead, config.do_stages))
            for ahead in range(self.bias_stages):
                self.wait("bias_empty", self.bias_slot(turns, ahead))

    # What consumers and producer share.

    def arrive(self, name: str, slot: Any = 0) -> None:
        """Arrives at a barrier."""
        plgpu.barrier_arrive(self.refs[name].at[slot])

    def wait(self, name: str, slot: Any = 0) -> None:
        """Waits for a barrier."""
        if name in self.raw:
            name, ready = self.raw[name]
            slot = slot + ready
        plgpu.barrier_wait(self.refs[name].at[slot])

    def for_each_tile(self, process: Callable[[Tile, Any, Any], Any]) -> tuple[Any, Any]:
        """Runs ``turns = process(tile, kv_slot, turns)`` on this block's tiles.

        A tile is read one ahead: a read of global memory would delay each.

        Returns:
            The steps made, which are the turns, and the tiles done.
        """
        table = self.refs["schedule"]
        block = lax.axis_index("block")

        def read(place: Any) -> Tile:
            return Tile(*(table[block, place, word] for word in range(len(Tile._fields))))

        def body(place: Any, carry: Any) -> Any:
            turns, kv_turns, tile = carry
            following = read(place + 1)
            slot = remainder(kv_turns, self.config.kv_stages)
            turns, kv_turns = lax.cond(
                tile.kv_tile >= 0,
                lambda: (process(tile, slot, turns), kv_turns + 1),
                lambda: (turns, kv_turns),
            )
            return turns, kv_turns, following

        carry = (jnp.int32(0), jnp.int32(0), read(0))
        return lax.fori_loop(0, table.shape[1] - 1, body, carry)[:2]

    def batch_and_head(self, tile: Tile) -> tuple[Any, Any]:
        """Batch element and key head of a tile."""
        num_heads = jnp.int32(self.problem.num_kv_heads)
        return lax.div(tile.head, num_heads), lax.rem(tile.head, num_heads)

    def for_each_query_head(self, process: Callable[[Any, Any], Any], carry: Any = None) -> Any:
        """Runs ``carry = process(g, carry)`` for each query head of a key head."""
        if self.group == 1:
            return process(jnp.int32(0), carry)
        return lax.fori_loop(0, self.group, process, carry)

    # Producer.

    def produce(self, tile: Tile, kv_slot: Any, turns: Any) -> Any:
        """Loads what one key tile needs; returns the steps made."""
        refs, config = self.refs, self.config
        batch, kv_head = self.batch_and_head(tile)
        of_rows = row_vectors(self.problem)

        def load(x: str, slot: Any, at: tuple[Any, ...], row: Any) -> None:
            """A tile of Q or dO, and vectors with an entry for each of its rows."""
            batch, head = at
            self.wait(f"{x}_empty", slot)
            span = pl.ds(row, config.block_q)
            # Where rows have to be zeroed consumers must not see that the copies are there.
            name, ready = self.raw[f"{x}_raw"]
            full = refs[name].at[slot + self.has_blank * ready]
            self.ops.copy_operand(refs[x], (batch, span, head), refs[f"{x}_s"].at[slot], full)
            for name in of_rows[x]:
                at = () if name == "q_segments" else (head,)
                source = self.of_batch(name, batch).at[*at, span]
                plgpu.copy_gmem_to_smem(source, refs[f"{name}_s"].at[slot], full)

        def zero_and_hand_over(q_slot: Any, do_slot: Any) -> None:
            """Zeroes rows of Q and dO that have no gradient, which may hold anything."""
            slots = {"q": q_slot, "do": do_slot}
            for x, slot in slots.items():
                self.wait(f"{x}_raw", slot)
            for x, slot in slots.items():
                lse, swizzle = refs["lse_s"].at[q_slot], query_swizzles(self.problem, config)[x]
                self.ops.zero_blank_rows(refs[f"{x}_s"].at[slot], lse, swizzle)
            plgpu.commit_smem()
            for x, slot in slots.items():
                for _ in range(self.problem.parts + len(of_rows[x])):  # as if they were copies
                    self.arrive(f"{x}_full", slot)

        keys = pl.ds(tile.kv_tile * config.block_kv, config.block_kv)
        if not config.dq_warpgroup:
            self.wait("kv_empty", kv_slot)
        for x in ("k", "v"):
            if config.dq_warpgroup:
                self.wait(f"{x}_empty")
                source = refs[x].at[batch, keys, kv_head]
                plgpu.copy_gmem_to_smem(source, refs[f"{x}_wide_s"], refs[f"{x}_full"].at[0])
                continue
            target, full = refs[f"{x}_s"].at[kv_slot], refs[f"{x}_full"].at[kv_slot]
            self.ops.copy_operand(refs[x], (batch, keys, kv_head), target, full)
        for place, name in enumerate(key_vectors(self.problem) if "of_keys_s" in refs else ()):
            source, target = self.of_batch(name, batch).at[keys], refs["of_keys_s"]
            full = refs["k_full"].at[kv_slot]
            plgpu.copy_gmem_to_smem(source, target.at[kv_slot, place], full)

        def await_first_of_bias(head: Any, row: Any, seen: Any) -> Any:
            """Waits for a tile's rows. So many have been ``seen`` already; returns how many now."""
            needed = row + config.block_q

            def look() -> Any:
                rows = refs["dbias_rows"].at[head, tile.kv_tile]
                first, second = (
                    self.ops.await_value(rows.at[pl.ds(group, 1)], needed)
                    for group in range(GROUPS)
                )
                return jnp.minimum(first, second)

            is_there = self.is_first_of_bias(batch) | (seen >= needed)
            return lax.cond(is_there, lambda: seen, look)

        def load_tile(turn: Any, at: tuple[Any, ...], row: Any, seen: Any) -> Any:
            if "dbias_rows" in refs:
                seen = await_first_of_bias(at[1], row, seen)
            # A bias is read at the start of a step, Q until the end of it: so its place is free
            # sooner, unless a step has several parts.
            if config.parts == 1:
                load_bias(turn, at, row)
            slots = remainder(turn, config.q_stages), remainder(turn, config.do_stages)
            load("q", slots[0], at, row)
            load("do", slots[1], at, row)
            if "has_blank" in refs:
                pl.when(self.has_blank > 0)(lambda: zero_and_hand_over(*slots))
            if config.parts > 1:
                load_bias(turn, at, row)
            return seen

        def load_bias(turn: Any, at: tuple[Any, ...], row: Any) -> None:
            for part in range(config.parts if self.bias_stages else 0):
                slot = self.bias_slot(turn, part)
                self.wait("bias_empty", slot)
                queries = pl.ds(row + part * config.part_columns, config.part_columns)
                place = (queries, keys) if self.transposes_bias else (keys, queries)
                source, full = self.terms.of("bias", *at).at[place], refs["bias_full"]
                plgpu.copy_gmem_to_smem(source, refs["bias_s"].at[slot], full.at[slot])

        def load_head(g: Any, turns: Any) -> Any:
            at = batch, kv_head * self.group + g
            if self.has_visits:

                def visit(turn: Any, row: Any, _: Any, seen: Any) -> Any:
                    return load_tile(turn, at, row, seen)

                return self.for_each_visit(tile, *at, turns, visit, jnp.int32(0))[0]
            count = tile.hi - tile.lo

            def load_next(i: Any, seen: Any) -> Any:
                row = (tile.lo + i) * config.block_q
                return load_tile(turns + g * count + i, at, row, seen)

            lax.fori_loop(0, count, load_next, jnp.int32(0))
            return turns

        self.for_each_query_head(load_head, turns)
        return turns + self.num_steps(tile)

    def bias_slot(self, turn: Any, part: int) -> Any:
        """Place of a step's part in the ring of the bias."""
        return remainder(turn * self.config.parts + part, self.bias_stages)

    def num_steps(self, tile: Tile) -> Any:
        """How many steps a key tile has."""
        return tile.hi if self.has_visits else self.group * (tile.hi - tile.lo)

    def for_each_visit(
        self,
        tile: Tile,
        batch: Any,
        head: Any,
        turn: Any,
        process: Callable[[Any, Any, Any, Any], Any],
        carry: Any,
    ) -> tuple[Any, Any]:
        """Runs ``carry = process(turn, row, masked, carry)`` on the query tiles of a list.

        Each entry is read one ahead, like the schedule's.

        Returns:
            The turn after the last, and the carry.
        """
        visits, num_heads = self.refs["visits"], self.problem.batch * self.problem.num_q_heads
        place = batch * self.problem.num_q_heads + head
        place = schedules.row_of(place, visits.shape[0], num_heads), tile.kv_tile
        count = visits[*place, 0]

        def step(i: Any, carry: Any) -> Any:
            entry, carry = carry
            following = visits[*place, i + 2]
            row = lax.shift_right_logical(entry, 1) * self.config.block_q
            return following, process(turn + i, row, (entry & 1) == 1, carry)

        carry = lax.fori_loop(0, count, step, (visits[*place, 1], carry))[1]
        return turn + count, carry

    # Consumers.

    def consume(self, tile: Tile, kv_slot: Any, turns: Any) -> Any:
        """Works on one key tile; returns the steps made."""
        at = self.place(tile, kv_slot)
        self.wait("k_full", kv_slot)
        self.wait("v_full", kv_slot)
        if self.problem.bias is not None or self.has_visits:
            self.clean_keys(kv_slot)
        elif self.edges.masked:
            has_masked = (tile.lo < tile.full_lo) | (tile.full_hi < tile.hi)
            pl.when(has_masked)(lambda: self.clean_keys(kv_slot))
        self.work(tile, turns, at)
        return turns + self.num_steps(tile)

    def place(self, tile: Tile, kv_slot: Any) -> KeyTile:
        """Where a key tile is."""
        batch, kv_head = self.batch_and_head(tile)
        key = tile.kv_tile * self.config.block_kv
        return KeyTile(batch, self.slab(tile, batch), kv_head, key, kv_slot)

    def slab(self, tile: Tile, batch: Any) -> Any:
        """Where dQ keeps its sum for a key tile of a batch element."""
        if self.slabs == 1:
            return batch
        return lax.rem(tile.kv_tile, jnp.int32(self.slabs)) * self.problem.batch + batch

    def for_each_step(
        self,
        tile: Tile,
        turns: Any,
        at: KeyTile,
        process: Callable[[Step, Any], Any],
        carry: Any = None,
        sums: tuple[Array, ...] = (),
    ) -> Any:
        """Runs ``carry, sums = process(step, (carry, sums))`` on all tiles of all query heads.

        Each head begins with the given ``sums``, and writes its own.
        """

        def step_of(turn: Any, head: Any, row: Any, masked: Any) -> Step:
            where = head, row, at.key, at.kv_slot
            return Step(turn, at.batch, at.slab, *where, masked)

        def visit_head(g: Any, carry: Any) -> Any:
            first, carry = carry
            head = at.head * self.group + g

            def visit(turn: Any, row: Any, masked: Any, carry: Any) -> Any:
                return process(step_of(turn, head, row, masked), carry)

            following, (carry, total) = self.for_each_visit(
                tile, at.batch, head, first, visit, (carry, sums)
            )
            self.store_sums(total, at.batch, head, self.first_key(at.key))
            return following, carry

        if self.has_visits:
            return self.for_each_query_head(visit_head, (turns, carry))[1]

        def walk_head(g: Any, carry: Any) -> Any:
            head = at.head * self.group + g

            def step(i: Any, masked: Any, carry: Any) -> Any:
                turn = turns + g * (tile.hi - tile.lo) + i - tile.lo
                row = i * self.config.block_q
                return process(step_of(turn, head, row, masked), carry)

            carry, total = self.for_each_query_tile(tile, step, (carry, sums))
            self.store_sums(total, at.batch, head, self.first_key(at.key))
            choose(
                self.is_first_of_bias(at.batch),
                lambda: self.publish_bias(head, at.key, ALL_ROWS),
                lambda: None,
            )
            return carry

        return self.for_each_query_head(walk_head, carry)

    def for_each_step_and_late(
        self,
        tile: Tile,
        turns: Any,
        at: KeyTile,
        process: Callable[[Step, Step, tuple[Array, ...]], tuple[Array, ...]],
        sums: tuple[Array, ...] = (),
    ) -> None:
        """Likewise ``sums = process(step, before, sums)``, and at last makes the last step's dQ.

        ``before`` is the step before, whose dQ ``process`` makes; its row is -1 if there is none.
        """

        def before(turn: Any, row: Any, head: Any) -> Step:
            return Step(turn - 1, at.batch, at.slab, head, row, at.key, at.kv_slot, False)

        def step(step: Step, carry: Any) -> Any:
            late, sums = carry
            return (step.row, step.head), process(step, before(step.turn, *late), sums)

        none = jnp.int32(-1), jnp.int32(0)
        late = self.for_each_step(tile, turns, at, step, none, sums)
        last = before(turns + self.num_steps(tile), *late)
        pl.when(last.row >= 0)(lambda: self.make_dq(last, self.ops.opaque_zero()))

    def for_each_query_tile(
        self, tile: Tile, step: Callable[[Any, Any, Any], Any], carry: Any
    ) -> Any:
        """Runs ``carry = step(i, masked, carry)``: in one loop, or in one for each kind of tile."""

        def loop(first: Any, last: Any, masked: Any, carry: Any) -> Any:
            return loop_between(first, last, lambda i, carry: step(i, masked, carry), carry)

        if not self.edges.masked:
            return loop(tile.lo, tile.hi, False, carry)
        if self.config.split_edges:
            if self.edges.leading:
                carry = loop(tile.lo, tile.full_lo, True, carry)
            carry = loop(tile.full_lo, tile.full_hi, False, carry)
            if self.edges.trailing:
                carry = loop(tile.full_hi, tile.hi, True, carry)
            return carry

        def branch(i: Any, carry: Any) -> Any:
            return step(i, (i < tile.full_lo) | (i >= tile.full_hi), carry)

        return loop_between(tile.lo, tile.hi, branch, carry)

    def accumulate(self, body: Callable[..., Any], names: Sequence[str], parts: int = 1) -> Any:
        """Runs ``body`` with fresh accumulators of this warpgroup, ``parts`` of each name."""
        shapes = self.accumulator_shapes()
        backings = [
            self.refs[name].at[self.warpgroup * parts + part] if name in self.refs else None
            for name in names
            for part in range(parts)
        ]
        every_shape = [shapes[name] for name in names for _ in range(parts)]
        return self.ops.with_accumulators(body, every_shape, backings)

    def with_partial_sum(self, body: Callable[[Ref], None], acc: Ref) -> None:
        """Runs ``body(target)``: see :meth:`pallas_kernels.ops.Ops.with_partial_sum`."""
        backing = self.refs.get("part_acc")
        if backing is not None:
            backing = backing.at[self.warpgroup, :, pl.ds(0, acc.shape[1])]
        self.ops.with_partial_sum(body, acc, backing)

    def accumulator_shapes(self) -> dict[str, tuple[int, int]]:
        """Shapes of the accumulators, by name."""
        raise NotImplementedError

    def clean_keys(self, kv_slot: Any) -> None:
        """Cleans this warpgroup's part of the keys."""
        raise NotImplementedError

    def first_key(self, key: Any) -> Any:
        """This warpgroup's first key of a tile that begins at ``key``."""
        raise NotImplementedError

    def work(self, tile: Tile, turns: Any, at: KeyTile) -> None:
        """All of one key tile."""
        raise NotImplementedError

    def begin(self) -> None:
        """Before the first tile: what is empty."""

    def end(self, turns: Any) -> None:
        """After the last tile: waits for what others have given back."""

    def slots(self, turn: Any, zero: Any) -> tuple[Any, Any, Any]:
        """Places of a step in the rings of Q, dO and dS'."""
        config = self.config
        rings = (config.q_stages, config.do_stages, config.ds_buffers)
        # A constant place would let LLVM hoist wgmma descriptors: see opaque_zero.
        q_slot, do_slot, ds_slot = (remainder(turn, n) if n > 1 else zero for n in rings)
        return q_slot, do_slot, ds_slot

    def kv_slot(self, step: Step, zero: Any) -> Any:
        """Place of a step's key tile in the ring of K and V; likewise no constant."""
        return step.kv_slot + zero if self.config.kv_stages > 1 else zero

    def meet(self) -> None:
        """Waits for the other consumer; each then sees what the other wrote to shared memory."""
        self.ops.exchange(_MEETING, 128 * GROUPS, self.refs.get("meeting"))

    def clean(self, ref: Ref) -> None:
        """Zeroes what is NaN or inf in an operand in shared memory."""
        tile = ref if self.problem.parts == 1 else ref.at[0]  # the other parts are finite
        value = self.ops.load_tile(tile).astype(jnp.float32)
        tile[...] = jnp.where(jnp.abs(value) < jnp.inf, value, 0.0).astype(tile.dtype)
        plgpu.commit_smem()

    def add_to_dq(self, dq: Array, step: Step, share: int | None = None) -> None:
        """Adds this warpgroup's part of dQ of a step to global memory."""
        row, column = step.row, 0
        if self.problem.parts > 1:  # of other types XLA scales dQ as it converts it
            dq = dq * self.problem.scale
        if share is not None:
            column = share * self.shares[0]
        elif self.config.splits_rows:
            row = row + self.warpgroup * ROWS
        elif not self.config.dq_warpgroup:
            column = self.warpgroup * (self.problem.head_dim // GROUPS)
        if self.config.adds_registers:
            chunks = pl.ds(lax.div(jnp.int32(column), COLUMNS), dq.shape[1] // COLUMNS)
            at = step.slab, step.head, lax.div(row, ROWS), chunks
            self.ops.add_fragment(self.refs["dq"].at[at], dq)
            return
        staging = self.refs["dq_rest_s" if share else "dq_s"]
        staging = staging.at[self.warpgroup if staging.shape[0] > 1 else 0]
        width = self.config.dq_columns or dq.shape[1]
        for first in range(0, dq.shape[1], width):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            staging[...] = dq[:, first : first + width]
            plgpu.commit_smem()
            at = step.slab, pl.ds(row, ROWS), step.head, pl.ds(column + first, width)
            self.ops.reduce_store(staging, self.refs["dq"].at[at])

    def query_gradients(
        self,
        ds_slot: Any,
        kv_slot: Any,
        meanwhile: Callable[[], None] = lambda: None,
        share: int | None = None,
        in_flight: int = 0,
    ) -> Array:
        """This warpgroup's part of dS'^T K; all products before it are done when it is there.

        Args:
            ds_slot: of dS'.
            kv_slot: of K.
            meanwhile: run once the product is issued.
            share: whose share it is, where they are unequal and so known at trace time.
            in_flight: how many products ``meanwhile`` issues that may take longer.
        """

        def product(dq_acc: Ref) -> Array:
            splits_rows = self.config.splits_rows
            ds = self.refs["ds_s"].at[ds_slot, self.warpgroup if splits_rows else 0]
            k = self.refs["k_s"].at[kv_slot]
            if share is not None:
                k = k.at[..., pl.ds(share * self.shares[0], self.shares[share])]
            elif not (splits_rows or self.config.dq_warpgroup):
                k = k.at[..., self.half(self.problem.head_dim)]
            self.ops.matmul_transposed(dq_acc, ds, k)
            meanwhile()
            return self.ops.load_accumulator(dq_acc, wait=in_flight)

        return self.accumulate(product, ("dq_rest_acc" if share else "dq_acc",))

    def make_dq(
        self,
        step: Step,
        zero: Any,
        release: Callable[[], None] | None = None,
        issue: Callable[[], None] | None = None,
    ) -> None:
        """Makes dQ of a step.

        Args:
            step: the step.
            zero: an opaque one.
            release: run when the products before are done; or after ``issue``, when that one is.
            issue: issues one more product, which is made while dQ is added.
        """
        ds_slot = self.slots(step.turn, zero)[2]

        def release_all() -> None:
            if release is not None:
                self.ops.wait_matmuls(1)
                release()

        def make(share: int | None = None) -> None:
            place = ds_slot, self.kv_slot(step, zero)
            if issue is None:
                dq = self.query_gradients(*place, release_all, share)
            else:
                dq = self.query_gradients(*place, issue, share, in_flight=1)
            self.arrive("ds_empty", ds_slot)
            self.add_to_dq(dq, step, share)
            if issue is not None and release is not None:
                self.ops.wait_matmuls(0)
                release()

        self.wait("ds_full", ds_slot)
        if self.shares[0] == self.shares[1]:
            make()
        else:
            lax.cond(self.warpgroup == 0, lambda: make(0), lambda: make(1))

    def make_dq_if_any(
        self,
        step: Step,
        zero: Any,
        release: Callable[[], None],
        issue: Callable[[], None] | None = None,
    ) -> None:
        """Likewise, but there may be no such step."""

        def make_none() -> None:
            if issue is not None:
                issue()
            self.ops.wait_matmuls(0)
            release()

        lax.cond(step.row >= 0, lambda: self.make_dq(step, zero, release, issue), make_none)

    def half(self, size: int) -> Any:
        """This warpgroup's half of an axis."""
        return pl.ds(pl.multiple_of(self.warpgroup * (size // GROUPS), 32), size // GROUPS)

    def store(
        self, name: str, gradient: Array, staging: Ref, at: KeyTile, key: Any, column: int = 0
    ) -> None:
        """Begins to write some columns of rows of dk or dv."""
        staging[...] = gradient.astype(self.problem.dtype)
        plgpu.commit_smem()
        keys, columns = (
            pl.ds(first, n) for first, n in zip((key, column), gradient.shape, strict=True)
        )
        plgpu.copy_smem_to_gmem(staging, self.refs[name].at[at.batch, keys, at.head, columns])


def remainder(turn: Any, count: int) -> Any:
    """``turn % count`` of an int32 scalar."""
    return lax.rem(turn, jnp.int32(count)) if count > 1 else 0
