"""The two layouts of the backward kernel: see :mod:`pallas_kernels.backward`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.backward_body import FIRST_TURN, Kernel, KeyTile, Tile, remainder
from pallas_kernels.backward_config import GROUPS
from pallas_kernels.backward_tiles import ROWS, Step

Array = jax.Array
Ref = Any


class OwnKeys(Kernel):
    """Each consumer has 64 keys of its own."""

    def accumulator_shapes(self) -> dict[str, tuple[int, int]]:
        """Shapes of the accumulators, by name."""
        config, problem = self.config, self.problem
        scores = (ROWS, config.part_columns)
        return {
            "s_acc": scores,
            "dp_acc": scores,
            "dq_acc": (ROWS, self.shares[0]),
            "dq_rest_acc": (ROWS, self.shares[1]),
            "dk_acc": (ROWS, problem.head_dim),
            "dv_acc": (ROWS, problem.value_dim),
        }

    def begin(self) -> None:
        """Before the first tile: what is empty."""
        for slot in range(self.config.ds_buffers):
            self.arrive("ds_empty", slot)
        pl.when(self.warpgroup == 1)(self.pass_turn)

    def end(self, turns: Any) -> None:
        """After the last tile: waits for what others have given back."""
        for ahead in range(self.config.ds_buffers):
            self.wait("ds_empty", remainder(turns + ahead, self.config.ds_buffers))
        pl.when(self.warpgroup == 0)(self.await_turn)  # which the other has given at last

    def await_turn(self) -> None:
        """Waits until the other consumer has its scores."""
        if self.config.take_turns:
            self.ops.pace_wait(FIRST_TURN + self.warpgroup, 128 * GROUPS)

    def pass_turn(self) -> None:
        """Lets the other consumer issue its products."""
        if self.config.take_turns:
            self.ops.pace_arrive(FIRST_TURN + 1 - self.warpgroup, 128 * GROUPS)

    def own_keys(self, name: str, *index: Any) -> Ref:
        """This warpgroup's part of keys, values or dS'."""
        return self.refs[name].at[*index, pl.ds(self.warpgroup * ROWS, ROWS)]

    def first_key(self, key: Any) -> Any:
        """This warpgroup's first key of a tile that begins at ``key``."""
        return key + self.warpgroup * ROWS

    def clean_keys(self, kv_slot: Any) -> None:
        """Cleans this warpgroup's part of the keys."""
        self.clean(self.own_keys("k_s", kv_slot))

    def work(self, tile: Tile, turns: Any, at: KeyTile) -> None:
        """All of one key tile."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last tile's dk and dv

        def walk(dk_acc: Ref, dv_acc: Ref) -> tuple[Array, Array]:
            step = functools.partial(self.step, dk_acc, dv_acc)
            self.for_each_step_and_late(tile, turns, at, step, self.no_sums())
            load = self.ops.load_accumulator
            return load(dk_acc, wait=None), load(dv_acc, wait=None)

        dk, dv = self.accumulate(walk, ("dk_acc", "dv_acc"))
        self.arrive("kv_empty", at.kv_slot)  # the next keys come while these gradients go
        self.meet()  # the other consumer has read dS' for its part of dQ
        self.store_gradients({"dk": dk * self.problem.scale, "dv": dv * self.value_scale}, at)

    def store_gradients(self, gradients: dict[str, Array], at: KeyTile) -> None:
        """Begins to write rows of dk and dv, 64 columns at a time, staged where dS' was."""
        places = list(np.ndindex(self.config.ds_buffers, self.config.block_q // ROWS))
        pieces = [
            (name, first)
            for name, gradient in gradients.items()
            for first in range(0, gradient.shape[1] // ROWS * ROWS, ROWS)
        ]
        for number, (name, first) in enumerate(pieces):
            if number and number % len(places) == 0:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            staging = self.own_keys("ds_s", *places[number % len(places)])
            piece = gradients[name][:, first : first + ROWS]
            self.store(name, piece, staging, at, self.first_key(at.key), first)
        for name, gradient in gradients.items():
            if f"{name}_rest_s" in self.refs:
                first = gradient.shape[1] // ROWS * ROWS
                staging = self.refs[f"{name}_rest_s"].at[self.warpgroup]
                piece = gradient[:, first:]
                self.store(name, piece, staging, at, self.first_key(at.key), first)

    def load_bias(self, step: Step, part: int) -> Array:
        """The bias of this warpgroup's keys and the queries of a part."""
        slot = self.bias_slot(step.turn, part)
        self.wait("bias_full", slot)
        if self.transposes_bias:
            keys = pl.ds(pl.multiple_of(self.warpgroup * ROWS, ROWS), ROWS)
            tile = self.refs["bias_s"].at[slot, :, keys].transpose((1, 0))
        else:
            tile = self.own_keys("bias_s", slot)
        bias = self.ops.load_shared_tile(tile)
        self.ops.fence_reads()
        self.arrive("bias_empty", slot)
        return bias

    def step(
        self,
        dk_acc: Ref,
        dv_acc: Ref,
        step: Step,
        before: Step,
        sums: tuple[Array, ...],
    ) -> tuple[Array, ...]:
        """One query tile; dQ of the step before is made now."""
        refs, config, ops = self.refs, self.config, self.ops
        zero = ops.opaque_zero()
        q_slot, do_slot, ds_slot = self.slots(step.turn, zero)
        kv_slot = self.kv_slot(step, zero)
        parts, width = config.parts, config.part_columns
        spans = [pl.ds(part * width, width) for part in range(parts)]
        key = self.first_key(step.key)

        def gradients(*accs: Ref) -> tuple[list[Array], tuple[Array, ...]]:
            s_accs, dp_accs = accs[:parts], accs[parts:]

            def issue_dp(part: int) -> None:
                acc, do = dp_accs[part], refs["do_s"].at[do_slot, spans[part]]
                ops.matmul(acc, self.own_keys("v_s", kv_slot), do, transpose_b=True)

            self.wait("q_full", q_slot)
            self.await_turn()
            for part, span in enumerate(spans):
                q = refs["q_s"].at[q_slot, span]
                ops.matmul(s_accs[part], self.own_keys("k_s", kv_slot), q, transpose_b=True)
                if part == 0:
                    self.wait("do_full", do_slot)
                    issue_dp(0)
            result, total = [], sums
            for part, span in enumerate(spans):
                # Later products: dP' of this part; then S' of the next, or dV of the one before.
                lse = ops.load_shared_columns(refs["lse_s"].at[q_slot, span])
                row = step.row + part * width
                given = self.given(step, row, key, (ROWS, width), (q_slot, span))
                # One of 16 bits while the products are made; one of 32 would cost registers.
                if self.transposes_bias:
                    given = given._replace(bias=self.load_bias(step, part))
                s = ops.load_accumulator(s_accs[part], wait=parts)
                if part == 0:
                    self.pass_turn()
                    self.wait("ds_empty", ds_slot)
                if self.bias_stages and not self.transposes_bias:
                    given = given._replace(bias=self.load_bias(step, part))
                p = self.probabilities(step, s, lse, given, row, key)
                p16 = p.kept.astype(self.problem.dtype)
                delta = ops.load_shared_columns(refs["delta_s"].at[do_slot, span])
                dp = ops.load_accumulator(dp_accs[part], wait=parts - 1)
                ds = self.score_gradients(step, p.slopes, dp, delta)
                total = self.add_to_sums(total, ds, step, row, key)
                ds16 = ds.astype(self.problem.dtype)
                if parts > 1:
                    self.add_to_bias(ds, step, row, key)
                if part + 1 < parts:
                    issue_dp(part + 1)  # in the registers of this part's
                ops.matmul_registers(dv_acc, p16, refs["do_s"].at[do_slot, span])
                if parts == 1:  # while dV is made, which with parts would cost registers
                    self.add_to_bias(ds, step, row, key)
                for column in range(0, width, ROWS):
                    place = ds_slot, (part * width + column) // ROWS
                    self.own_keys("ds_s", *place)[...] = ds16[:, column : column + ROWS]
                result.append(ds16)
            return result, total

        every_ds, sums = self.accumulate(gradients, ("s_acc", "dp_acc"), parts)
        plgpu.commit_smem()
        self.arrive("ds_full", ds_slot)
        for span, ds in zip(spans, every_ds, strict=True):
            ops.matmul_registers(dk_acc, ds, refs["q_s"].at[q_slot, span])

        def release() -> None:
            self.arrive("do_empty", do_slot)
            self.arrive("q_empty", q_slot)

        self.make_dq_if_any(before, zero, release)
        return sums


class OwnGradients(Kernel):
    """One consumer makes P' and dV of the 64 keys, the other dS' and dK, and both half of dQ.

    Or a third one makes dQ.
    """

    def run(self) -> None:
        """What this warpgroup does."""
        super().run()
        if not self.config.dq_warpgroup:
            return

        @pl.when(self.warpgroup == GROUPS)
        def _() -> None:
            plgpu.set_max_registers(self.config.dq_registers, action="decrease")
            self.arrive("kv_empty")
            for slot in range(self.config.ds_buffers):
                self.arrive("ds_empty", slot)
            self.for_each_tile(self.consume_ds)
            plgpu.wait_smem_to_gmem(0)

    def consume(self, tile: Tile, kv_slot: Any, turns: Any) -> Any:
        """Works on one key tile; returns the steps made."""
        if not self.config.dq_warpgroup:
            return super().consume(tile, kv_slot, turns)
        # Each waits for K and V when it loads them.
        self.work(tile, turns, self.place(tile, kv_slot))
        return turns + self.num_steps(tile)

    def consume_ds(self, tile: Tile, kv_slot: Any, turns: Any) -> Any:
        """Makes dQ of one key tile; returns the steps made."""

        def step(step: Step, carry: Any) -> Any:
            self.make_dq(step, self.ops.opaque_zero())
            return carry

        self.wait("kv_full")
        self.for_each_step(tile, turns, self.place(tile, kv_slot), step)
        self.arrive("kv_empty")
        return turns + self.num_steps(tile)

    def first_key(self, key: Any) -> Any:
        """This warpgroup's first key of a tile that begins at ``key``."""
        return key

    def accumulator_shapes(self) -> dict[str, tuple[int, int]]:
        """Shapes of the accumulators, by name."""
        scores = (ROWS, self.config.block_q)
        return {
            "s_acc": scores,
            "dp_acc": scores,
            "dq_acc": (ROWS, self.shares[0]),
            "dk_acc": (ROWS, self.problem.head_dim),
            "dv_acc": (ROWS, self.problem.value_dim),
        }

    def begin(self) -> None:
        """Before the first tile: what is empty."""
        pl.when(self.warpgroup == 1)(lambda: self.arrive("p_empty"))
        if self.config.dq_warpgroup:
            self.arrive("k_empty")
            pl.when(self.warpgroup == 1)(lambda: self.arrive("v_empty"))
        else:

            @pl.when(self.warpgroup == 0)
            def _() -> None:
                for slot in range(self.config.ds_buffers):
                    self.arrive("ds_empty", slot)

    def end(self, turns: Any) -> None:
        """After the last tile: waits for what others have given back."""
        pl.when(self.warpgroup == 0)(lambda: self.wait("p_empty"))

        @pl.when(self.warpgroup == 1)
        def _() -> None:
            for ahead in range(self.config.ds_buffers):
                self.wait("ds_empty", remainder(turns + ahead, self.config.ds_buffers))
            if self.config.dq_warpgroup:
                self.wait("kv_empty")

    def clean_keys(self, kv_slot: Any) -> None:
        """Cleans this warpgroup's part of the keys."""
        self.clean(self.refs["k_s"].at[kv_slot, ..., self.half(self.problem.head_dim)])
        self.meet()

    def work(self, tile: Tile, turns: Any, at: KeyTile) -> None:
        """All of one key tile."""

        def store_in_turn(x: str, gradient: Array) -> None:
            """Where P' is handed over: dV when dS' has been made of the last, dK after dV."""
            free, full = ("p_empty", "p_full") if x == "v" else ("p_full", "p_empty")
            self.wait(free)
            self.store(f"d{x}", gradient, self.refs["p_s"], at, at.key)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self.arrive(full)

        def store(x: str, gradient: Array) -> None:
            if self.config.dq_warpgroup:
                return store_in_turn(x, gradient)
            self.arrive("kv_empty")  # the next keys come while these gradients go
            slot = self.slots(turns + self.num_steps(tile), self.ops.opaque_zero())[2]
            free, staging = ("p_empty", 0), self.refs.get("p_s")
            if x == "k":
                free, staging = ("ds_empty", slot), self.refs["ds_s"].at[slot, 0]
            if self.problem.parts > 1:  # these hold parts, which gradients do not come in
                staging = self.refs["dq_s"].at[self.warpgroup]
            self.wait(*free)
            width = staging.shape[1]
            for first in range(0, gradient.shape[1], width):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                piece = gradient[:, first : first + width]
                self.store(f"d{x}", piece, staging, at, at.key, first)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self.arrive(*free)

        def make_dv() -> None:
            keys = self.load_resident("k")

            def walk(acc: Ref) -> Array:
                step = functools.partial(self.value_step, acc, keys)

                def alone(own: Step, carry: Any) -> Any:
                    return None, step(own, None, carry[1])

                if self.config.dq_warpgroup:
                    self.for_each_step(tile, turns, at, alone)
                else:
                    self.for_each_step_and_late(tile, turns, at, step)
                return self.ops.load_accumulator(acc, wait=None)

            store("v", self.accumulate(walk, ("dv_acc",)) * self.value_scale)

        def make_dk() -> None:
            if self.config.dq_warpgroup:
                keys = self.load_resident("k")
                self.wait("kv_empty")
                self.ops.store_operand(self.refs["k_s"].at[0], keys)
                plgpu.commit_smem()
                self.arrive("kv_full")
            values = self.load_resident("v")

            def walk(acc: Ref) -> Array:
                def step(step: Step, carry: Any) -> Any:
                    return None, self.key_step(acc, values, step, carry[1])

                self.for_each_step(tile, turns, at, step, sums=self.no_sums())
                return self.ops.load_accumulator(acc, wait=None)

            store("k", self.accumulate(walk, ("dk_acc",)) * self.problem.scale)

        lax.cond(self.warpgroup == 0, make_dv, make_dk)

    def load_resident(self, name: str) -> Any:
        """Keys or values as operands in registers; None if products are to read shared memory."""
        if not self.config.keys_in_registers:
            return None
        if not self.config.dq_warpgroup:
            return self.ops.load_operand(self.refs[f"{name}_s"].at[0])
        self.wait(f"{name}_full")
        value = self.ops.load_tile(self.refs[f"{name}_wide_s"])
        self.arrive(f"{name}_empty")
        finite = jnp.where(jnp.abs(value) < jnp.inf, value, 0.0)
        first, *others = self.ops.operand(finite, self.problem.dtype)
        if name == "v" or not (self.edges.masked or self.has_visits):  # otherwise: see clean_keys
            first, *_ = self.ops.operand(value, self.problem.dtype)
        return first, *others

    def multiply(self, acc: Ref, resident: Any, name: str, zero: Any, other: Ref) -> None:
        """Issues the product of keys or values and a tile of Q or dO, transposed."""
        if resident is None:
            self.ops.matmul(acc, self.refs[name].at[zero], other, transpose_b=True)
        else:
            self.ops.matmul_registers(acc, resident, other, transpose_b=True)

    def value_step(
        self, dv_acc: Ref, keys: Any, step: Step, before: Step | None, sums: tuple[()]
    ) -> tuple[()]:
        """Makes P', hands it over, and adds to dV; dQ of the step before is made now.

        So it never waits for the dS' of the same step. The other warpgroup has the sums. Where a
        third one makes dQ, there is no step ``before``.
        """
        refs, ops = self.refs, self.ops
        zero = ops.opaque_zero()
        q_slot, do_slot, _ = self.slots(step.turn, zero)

        def probabilities(s_acc: Ref) -> tuple[Array, Array]:
            self.wait("q_full", q_slot)
            q = refs["q_s"].at[q_slot]
            self.multiply(s_acc, keys, "k_s", zero, q)
            lse = ops.load_shared_columns(refs["lse_s"].at[q_slot])
            shape = (ROWS, self.config.block_q)
            given = self.given(step, step.row, step.key, shape, (q_slot,))
            s = ops.load_accumulator(s_acc, wait=0)
            reads_later = "q_segments_s" in refs
            if not reads_later:
                self.arrive("q_empty", q_slot)
            p = self.probabilities(step, s, lse, given, step.row, step.key)
            if reads_later:
                ops.fence_reads()
                self.arrive("q_empty", q_slot)
            kept = p.kept.astype(self.problem.dtype)
            return kept, kept if p.slopes is p.kept else p.slopes.astype(self.problem.dtype)

        p, slopes = self.accumulate(probabilities, ("s_acc",))
        release = functools.partial(self.arrive, "do_empty", do_slot)

        def hand_over() -> None:
            self.wait("p_empty")
            refs["p_s"][...] = slopes
            self.arrive("p_full")

        if before is None:  # as soon as can be: a warp may have to wait before it issues products
            hand_over()
        self.wait("do_full", do_slot)

        def add_values(target: Ref) -> None:
            kept = ops.operand(p, p.dtype)

            def issue() -> None:
                ops.matmul_registers(target, kept, refs["do_s"].at[do_slot])

            if self.config.dq_first:
                hand_over()
                self.make_dq_if_any(before, zero, release, issue)
                return
            issue()
            if before is None:
                ops.wait_matmuls(0)
                release()
                return
            make_dq = functools.partial(self.make_dq_if_any, before, zero)
            if self.config.hands_over_in_ds:
                make_dq(release)  # of the dS' in the place of which P' will be
                self.wait("p_empty")
                handed = kept if slopes is p else ops.operand(slopes, p.dtype)
                ops.store_operand(refs["ds_s"].at[zero, 0], handed)
                self.arrive("p_full")
                return
            hand_over()
            make_dq(release)

        self.with_partial_sum(add_values, dv_acc)
        return sums

    def key_step(
        self, dk_acc: Ref, values: Any, step: Step, sums: tuple[Array, ...]
    ) -> tuple[Array, ...]:
        """Makes dS', hands it over, and adds to dK and to sums over queries."""
        refs, ops = self.refs, self.ops
        zero = ops.opaque_zero()
        q_slot, do_slot, ds_slot = self.slots(step.turn, zero)

        def gradients(dp_acc: Ref) -> tuple[Array, tuple[Array, ...]]:
            self.wait("do_full", do_slot)
            do = refs["do_s"].at[do_slot]
            self.multiply(dp_acc, values, "v_s", zero, do)
            delta = ops.load_shared_columns(refs["delta_s"].at[do_slot])
            dp = ops.load_accumulator(dp_acc, wait=0)
            ops.fence_reads()
            self.arrive("do_empty", do_slot)
            self.wait("p_full")
            if self.config.hands_over_in_ds:
                p = ops.load_wide(refs["ds_s"].at[ds_slot, 0])
            else:
                p = ops.load_shared_tile(refs["p_s"]).astype(jnp.float32)
                self.arrive("p_empty")
            ds = self.score_gradients(step, p, dp, delta)
            total = self.add_to_sums(sums, ds, step, step.row, step.key)
            self.add_to_bias(ds, step, step.row, step.key)
            return ops.operand(ds, self.problem.dtype), total

        ds, total = self.accumulate(gradients, ("dp_acc",))
        self.wait("ds_empty", ds_slot)
        ops.store_operand(refs["ds_s"].at[ds_slot, 0], ds)
        plgpu.commit_smem()
        self.arrive("ds_full", ds_slot)
        self.wait("q_full", q_slot)

        def add_queries(target: Ref) -> None:
            def issue() -> None:
                ops.matmul_registers(target, ds, refs["q_s"].at[q_slot])

            if self.config.dq_first:
                dq = self.query_gradients(ds_slot, zero, issue, in_flight=1)
                self.add_to_dq(dq, step)
                ops.wait_matmuls(0)
                self.arrive("q_empty", q_slot)
                return
            issue()
            if self.config.dq_warpgroup:
                ops.wait_matmuls(0)
                self.arrive("q_empty", q_slot)
                return
            dq = self.query_gradients(ds_slot, zero)
            if self.config.hands_over_in_ds:
                self.arrive("p_empty")
            self.arrive("q_empty", q_slot)
            self.add_to_dq(dq, step)

        self.with_partial_sum(add_queries, dk_acc)
        return total
