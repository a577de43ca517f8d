"""The primitives that the kernels use, each with a meaning in JAX's GPU interpret mode.

On a GPU these are ``wgmma`` with accumulators in registers, named barriers, a warp vote and two
lines of PTX. Interpret mode (CPU, with race detection) knows none of them in the forms needed, and
its own ``wgmma`` is invisible to the race detector. There, an accumulator is a private piece of
shared memory and a matrix product reads its operands like any other code, so that the control flow
around them, which is where races hide, is the one that runs on the GPU:

| here | GPU | interpret mode |
|---|---|---|
| accumulator | registers (``plgpu.ACC``) | rows of an fp32 SMEM scratch buffer |
| matmul, matmul_registers | asynchronous ``wgmma`` | reads, a dot, and an async-proxy fence |
| wait_matmuls | ``wgmma.wait_group`` | nothing: the product is already there |
| named barriers | ``bar.sync``, ``bar.arrive`` | nothing: they set the pace, never guard data |

An *operand* of a matrix product is an array of 16 bits, or the three bf16 parts of an fp32 array
(:mod:`pallas_kernels.split`): in memory a leading axis, in registers a tuple. A product of operands
is then six of their parts.

Not modelled, so only a GPU can test: layouts, swizzles, wait counts and register pressure.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_flash import mask
from pallas_kernels import fragments, registers
from pallas_kernels import split as splitting

Array = jax.Array
Ref = Any

TILE, ROWS, COLUMNS = registers.TILE, registers.ROWS, registers.COLUMNS


def loop_between(first: Any, last: Any, body: Callable[[Any, Any], Any], carry: Any) -> Any:
    """``lax.fori_loop``, also where the bounds were read inside ``shard_map``.

    There ``check_vma`` says that they vary over mesh axes, and finds that an index which begins as
    one does not stay so. One that begins at 0 has no such trouble, but costs a register.
    """
    if not jax.typeof(first).manual_axis_type.varying:
        return lax.fori_loop(first, last, body, carry)
    return lax.fori_loop(0, last - first, lambda i, carry: body(first + i, carry), carry)


@dataclasses.dataclass(frozen=True)
class Ops:
    """The primitives, for a GPU or for interpret mode.

    Attributes:
        interpret: parameters of interpret mode, or None for a GPU.
        parts: of each operand of a matrix product: 1, or 3 of fp32.
    """

    interpret: plgpu.InterpretGPUParams | None = None
    parts: int = 1

    def accumulator_scratch(self, num_warpgroups: int, shape: tuple[int, int]) -> Any:
        """What to allocate for one accumulator of each warpgroup: nothing on a GPU."""
        if self.interpret is None:
            return None
        return plgpu.SMEM((num_warpgroups, *shape), jnp.float32)

    def with_accumulator(
        self, body: Callable[[Ref], Any], shape: tuple[int, int], backing: Ref
    ) -> Any:
        """Runs ``body(acc)`` with a zeroed fp32 accumulator; ``backing`` is its scratch, if any."""
        if self.interpret is None:
            return pl.run_scoped(body, plgpu.ACC(shape, jnp.float32))
        backing[...] = jnp.zeros(shape, jnp.float32)
        return body(backing)

    def matmul(self, acc: Ref, a: Ref, b: Ref, *, transpose_b: bool = False) -> None:
        """Issues ``acc += a @ b`` (or ``a @ b.T``); both operands in shared memory."""
        for x, y in self._factors(a, b):
            if self.interpret is None:
                plgpu.wgmma(acc, x, y.transpose((1, 0)) if transpose_b else y)
            else:
                self._dot(acc, x[...], y[...].T if transpose_b else y[...])

    def matmul_registers(
        self, acc: Ref, a: Array | tuple[Array, ...], b: Ref, *, transpose_b: bool = False
    ) -> None:
        """Issues ``acc += a @ b`` (or ``a @ b.T``) with ``a`` in registers (layout TILE)."""
        for x, y in self._factors(a, b):
            if self.interpret is None:
                plgpu.wgmma(acc, x, y.transpose((1, 0)) if transpose_b else y)
            else:
                self._dot(acc, x, y[...].T if transpose_b else y[...])

    def _factors(self, a: Any, b: Ref) -> list[tuple[Any, Ref]]:
        """Of each product of parts that a product of operands consists of."""
        if self.parts == 1:
            return [(a, b)]
        in_registers = isinstance(a, tuple)
        return [(a[i] if in_registers else a.at[i], b.at[j]) for i, j in splitting.PRODUCTS]

    @property
    def _products(self) -> int:
        """How many of parts are one of operands."""
        return 1 if self.parts == 1 else len(splitting.PRODUCTS)

    def operand(self, x: Array, dtype: Any) -> Array | tuple[Array, ...]:
        """An fp32 TILE as an operand in registers; rounded to ``dtype``, if that is not fp32."""
        if self.parts == 1:
            return x.astype(dtype)
        upper_halves = registers.upper_halves if self.interpret is None else splitting.upper_halves
        parts = []
        for _ in range(self.parts):
            part, x = upper_halves(x)
            parts.append(part)
        return tuple(parts)

    def load_operand(self, ref: Ref) -> Array | tuple[Array, ...]:
        """An operand in shared memory as one in registers; see :meth:`load_tile`."""
        if self.parts == 1:
            return self.load_tile(ref)
        return tuple(self.load_tile(ref.at[part]) for part in range(self.parts))

    def store_operand(self, ref: Ref, x: Array | tuple[Array, ...]) -> None:
        """Writes an operand to shared memory."""
        if isinstance(x, tuple):
            for i, part in enumerate(x):
                ref.at[i][...] = part
        else:
            ref[...] = x

    def load_wide(self, ref: Ref) -> Array:
        """An operand in shared memory in fp32, as the exact sum of its parts."""
        if self.parts == 1:
            return self.load_shared_tile(ref).astype(jnp.float32)
        tiles = [self.load_shared_tile(ref.at[part]) for part in range(self.parts)]
        return functools.reduce(jnp.add, (tile.astype(jnp.float32) for tile in reversed(tiles)))

    def copy_operand(
        self, source: Ref | tuple[Ref, ...], at: tuple[Any, ...], target: Ref, barrier: Ref
    ) -> None:
        """Begins to copy an operand ``source[at]`` from global memory; arrives once for each part.

        Args:
            source: an array, or its parts, stacked or not.
            at: index of the array.
            target: in shared memory.
            barrier: arrives there.
        """
        if self.parts == 1:
            plgpu.copy_gmem_to_smem(source.at[at], target, barrier)
            return
        for part in range(self.parts):
            of_part = source[part].at[at] if isinstance(source, tuple) else source.at[(part, *at)]
            plgpu.copy_gmem_to_smem(of_part, target.at[part], barrier)

    def with_partial_sum(self, body: Callable[[Ref], Any], acc: Ref, backing: Ref) -> Any:
        """Runs ``body(target)``, whose products into ``target`` are added to ``acc`` in fp32.

        With operands of 16 bits ``target`` is ``acc``. With parts it is a fresh accumulator, whose
        ``backing`` is its scratch, because tensor cores round a long sum worse than adders do.
        """
        if self.parts == 1:
            return body(acc)

        def run(target: Ref) -> Any:
            result = body(target)
            acc[...] = self.load_accumulator(acc, wait=None) + self.load_accumulator(target, wait=0)
            return result

        return self.with_accumulator(run, acc.shape, backing)

    def load_tile(self, ref: Ref) -> Array:
        """Shared memory as an array in the layout of a TILE; TMA may then write there again."""
        value = plgpu.load(ref, layout=TILE) if self.interpret is None else ref[...]
        plgpu.commit_smem()
        return value

    def _dot(self, acc: Ref, a: Array, b: Array) -> None:
        product = jnp.dot(a, b, preferred_element_type=jnp.float32)
        acc[...] = acc[...] + product
        plgpu.commit_smem()  # wgmma reads through the async proxy, as the next TMA write does

    def load_accumulator(self, acc: Ref, *, wait: int | None) -> Array:
        """Reads an accumulator once at most ``wait`` later products are in flight."""
        if self.interpret is None:
            wait_n = None if wait is None else wait * self._products
            return plgpu.wgmma_accumulator_load(acc, wait_n=wait_n)
        return acc[...]

    def wait_matmuls(self, count: int) -> None:
        """Waits until at most ``count`` issued products are in flight."""
        if self.interpret is None:
            plgpu.wgmma_wait(count * self._products)

    def rescale(self, acc: Ref, factor: Array, *, skip_ones: bool = False) -> None:
        """``acc *= factor[:, None]``; no product that writes ``acc`` may be in flight.

        Args:
            acc: fp32 accumulator ``[m, n]``.
            factor: fp32 ``[m]`` (layout ROWS).
            skip_ones: branch around the work in warps whose factors are all exactly 1.
        """
        if self.interpret is not None:
            acc[...] = acc[...] * factor[:, None]
            return
        value = plgpu.wgmma_accumulator_load(acc, wait_n=None)
        if skip_ones:
            acc[...] = registers.scale_unless_ones(value, factor)
        else:
            acc[...] = value * lax.broadcast_in_dim(factor, value.shape, [0])

    def load_rows(self, ref: Ref) -> Array:
        """A vector in global memory with one entry a row of a TILE."""
        if self.interpret is None:
            return plgpu.load(ref, layout=ROWS, optimized=False)
        return ref[...]

    def load_columns(self, ref: Ref) -> Array:
        """A vector in global memory with one entry a column of a TILE."""
        if self.interpret is None:
            return plgpu.load(ref, layout=COLUMNS, optimized=False)
        return ref[...]

    def gather_rows(self, ref: Ref, first: Any, count: int) -> Array:
        """Rows ``first + r`` of ``[n, columns]`` in global memory as a TILE; past the end the last.

        For the rare path only: 4 bytes a load.
        """
        if self.interpret is None:
            return registers.gather_rows(ref, jnp.asarray(first, jnp.int32), count)
        size = min(count, ref.shape[0])
        start = jnp.minimum(first, ref.shape[0] - size)
        rows = jnp.minimum(jnp.arange(count) + (first - start), size - 1)
        return jnp.take(ref[pl.ds(start, size)], rows, axis=0)

    def float_iota(self, size: int, layout: Any) -> Array:
        """fp32 ``[size]`` counting up, one entry a row (ROWS) or a column (COLUMNS) of a TILE."""
        if self.interpret is not None:
            return lax.iota(jnp.float32, size)
        if layout is not COLUMNS:
            index = plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout)
            return index.astype(jnp.float32)
        # Eight columns are converted, the others are sums: few instructions, few registers.
        first = plgpu.broadcasted_iota(jnp.int32, (8,), 0, layout=layout).astype(jnp.float32)
        return registers.counted_on(first, size)

    def store_transposed(self, ref: Ref, x: Array) -> None:
        """Writes an fp32 TILE ``[64, n]`` to shared memory ``[n, 64]``, without bank conflicts."""
        if self.interpret is None:
            registers.store_transposed(ref, x)
        else:
            ref[...] = x.T

    def widen(self, x: Array) -> Array:
        """A TILE of 16 or 32 bits in fp32."""
        if self.interpret is None and x.dtype == jnp.bfloat16:
            return registers.widen(x)
        return x.astype(jnp.float32)

    def exp2(self, x: Array) -> Array:
        """2 to the power of an fp32 TILE, by one instruction; 0 for what is subnormal."""
        if self.interpret is None and self.parts > 1:
            return registers.exp2(x)
        return jnp.exp2(x)  # compiled with approximate functions, which makes it the same

    def probability(self, exponent: Array) -> Array:
        """``min(exp2(exponent), 1)`` of an fp32 TILE, and 0 for NaN: one instruction after exp2."""
        p = self.exp2(exponent)
        if self.interpret is None:
            return registers.saturate(p)
        return jnp.where(p <= 1.0, p, jnp.where(p > 1.0, 1.0, 0.0))

    def tanh(self, x: Array) -> Array:
        """The hyperbolic tangent of an fp32 TILE; on a GPU to 2**-11, by one instruction.

        With parts it is as exact as fp32.
        """
        is_exact = self.interpret is not None or self.parts > 1
        return jnp.tanh(x) if is_exact else registers.tanh(x)

    def hide_by_bits(self, s: Array, words: Ref, row: Any, column: Any) -> Array:
        """A TILE of scores with -inf where the bit of :func:`packed_bits` is 0.

        Args:
            s: fp32 ``[m, n]``.
            words: int32 ``[rows | 1, 4 * blocks]`` in global memory.
            row: of ``words``, of the tile's first row; later ones past the end are the last.
            column: of the mask, of the tile's first column: a multiple of 8; the tile must not
                cross a multiple of 128.
        """
        if self.interpret is None:
            return registers.hide_by_bits(
                s, words, *(jnp.asarray(x, jnp.int32) for x in (row, column))
            )
        last = words.shape[0] - 1
        rows = jnp.minimum(row + jnp.arange(s.shape[0]), last)
        word = jnp.take(words[...], rows, axis=0)
        columns = column + jnp.arange(s.shape[1])
        chosen = jnp.take(word, columns // 128 * 4 + columns % 8 // 2, axis=1)
        bit = lax.shift_right_logical(chosen, (columns % 128 // 8 * 2 + columns % 2)[None]) & 1
        return jnp.where(bit == 1, s, -jnp.inf)

    def drop(
        self,
        x: Array,
        row_keys: Array,
        key: Any,
        seed: Any,
        threshold: int,
        *,
        keys_axis: int,
        negate: bool = False,
    ) -> Array:
        """A TILE of probabilities, those that dropout drops 0: see ``jax_flash.mask``.

        Args:
            x: fp32 ``[m, n]``, at least 0.
            row_keys: int32, one entry a query: COLUMNS if the keys are rows, else ROWS. The tile's
                first query is a multiple of 16.
            key: index of the tile's first key: a multiple of 16.
            seed: int32 scalar, the batch element's second seed.
            threshold: of :func:`jax_flash.mask.dropout_threshold`.
            keys_axis: which axis of ``x`` has the keys.
            negate: make what is dropped negative instead.
        """
        if self.interpret is None:
            start = seed + lax.div(key, 2) * np.uint32(mask.DROPOUT_GOLDEN).astype(np.int32)
            return registers.drop(x, row_keys, start, threshold, keys_axis, negate)
        rows, keys = jnp.arange(row_keys.size), key + jnp.arange(x.shape[keys_axis])
        row_keys, seed = (lax.bitcast_convert_type(x, jnp.uint32) for x in (row_keys, seed))
        bits = mask.dropout_bits(row_keys[:, None], seed, rows[:, None], keys[None])
        keep = bits >= np.uint32(threshold)
        return jnp.where(keep if keys_axis == 1 else keep.T, x, -x if negate else 0.0)

    def any_nonfinite(self, x: Array) -> Array:
        """Whether this warp (in interpret mode: this warpgroup) holds a NaN or inf of an fp32 TILE.

        The answer may differ between warps: see :meth:`any_of_warpgroup`.
        """
        if self.interpret is None:
            return registers.any_nonfinite(x)
        return ~jnp.isfinite(x).all()

    def zero_blank_rows(self, ref: Ref, lse: Ref, swizzle: int) -> None:
        """Zeroes rows of an operand in shared memory, all threads of a warpgroup some of each.

        Args:
            ref: ``[64|128, columns]``, of fp32 ``[parts, ...]``.
            lse: fp32, +inf where a row is to be zeroed.
            swizzle: of ``ref``, in bytes.
        """
        for part in [ref] if self.parts == 1 else [ref.at[i] for i in range(self.parts)]:
            if self.interpret is None:
                registers.zero_blank_rows(part, lse, swizzle)
            else:
                is_blank = jnp.isposinf(lse[...])[:, None]
                part[...] = jnp.where(is_blank, jnp.zeros((), part.dtype), part[...])

    def any_of_warpgroup(self, condition: Array, barrier: Any) -> Array:
        """Whether a scalar condition holds in any warp of this warpgroup; waits for all of them."""
        return (
            condition
            if self.interpret is not None
            else registers.any_of_warpgroup(condition, barrier)
        )

    def iota(self, shape: tuple[int, ...], axis: int) -> Array:
        """int32 index along ``axis``; one axis means one entry a row of a TILE."""
        layout = ROWS if len(shape) == 1 else TILE
        if self.interpret is None:
            return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)
        return lax.broadcasted_iota(jnp.int32, shape, axis)

    def full_rows(self, size: int, value: float) -> Array:
        """fp32 ``[size]`` with one entry a row of a TILE."""
        return self._with_layout(jnp.full((size,), value, jnp.float32), ROWS)

    def full_tile(self, shape: tuple[int, int], value: float) -> Array:
        """fp32 array in the layout of a TILE."""
        return self._with_layout(jnp.full(shape, value, jnp.float32), TILE)

    def _with_layout(self, x: Array, layout: Any) -> Array:
        return plgpu.layout_cast(x, layout) if self.interpret is None else x

    def opaque_zero(self) -> Array:
        """An int32 zero that the compiler cannot see through.

        Indexing a loop-invariant operand through it, inside the loop, keeps LLVM from hoisting that
        operand's wgmma descriptors out of the loop, where they fill registers and spill.
        """
        if self.interpret is not None:
            return jnp.int32(0)
        return registers.opaque_zero()

    def warpgroup_in_register(self) -> Array:
        """This warpgroup's index, for the numbers of named barriers: it stays in a register.

        ptxas computes what it knows to be uniform, or to be cheap, anew where it is used: also
        right before a barrier, on whose way nothing should stand. It does not repeat a shuffle.
        """
        return (
            lax.axis_index("warpgroup") if self.interpret is not None else registers.own_warpgroup()
        )

    def pace_wait(self, barrier: int | Array, num_threads: int) -> None:
        """``bar.sync``: waits for a named barrier that only sets the pace."""
        if self.interpret is None:
            registers.named_barrier("sync", barrier, num_threads)

    def pace_arrive(self, barrier: int | Array, num_threads: int) -> None:
        """``bar.arrive``: arrives at a named barrier without waiting."""
        if self.interpret is None:
            registers.named_barrier("arrive", barrier, num_threads)

    def with_accumulators(
        self, body: Callable[..., Any], shapes: Sequence[tuple[int, int]], backings: Sequence[Ref]
    ) -> Any:
        """Runs ``body(*accs)`` with several accumulators; see :meth:`with_accumulator`."""
        if self.interpret is None:
            return pl.run_scoped(body, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))
        for shape, backing in zip(shapes, backings, strict=True):
            backing[...] = jnp.zeros(shape, jnp.float32)
        return body(*backings)

    def matmul_transposed(self, acc: Ref, a: Ref, b: Ref) -> None:
        """Issues ``acc += a.T @ b``; both operands in shared memory."""
        for x, y in self._factors(a, b):
            if self.interpret is None:
                plgpu.wgmma(acc, x.transpose((1, 0)), y)
            else:
                self._dot(acc, x[...].T, y[...])

    def load_shared_columns(self, ref: Ref) -> Array:
        """A vector in shared memory with one entry a column of a TILE."""
        if self.interpret is None:
            return plgpu.load(ref, layout=COLUMNS)
        return ref[...]

    def load_shared_tile(self, ref: Ref) -> Array:
        """A TILE in shared memory; before TMA may write there again: :meth:`fence_reads`."""
        return plgpu.load(ref, layout=TILE) if self.interpret is None else ref[...]

    def column_iota(self, size: int) -> Array:
        """int32 ``[size]`` counting up, one entry a column of a TILE."""
        if self.interpret is None:
            return plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=COLUMNS)
        return lax.iota(jnp.int32, size)

    def reduce_store(self, source: Ref, target: Ref) -> None:
        """Issues ``target += source`` from shared to global memory, atomic for each element."""
        if self.interpret is None:
            plgpu.copy_smem_to_gmem(source, target, reduction_op="add")
        else:
            target[...] = target[...] + source[...]
            plgpu.commit_smem()

    def add_fragment(self, target: Ref, x: Array) -> None:
        """``target += x`` in global memory, atomic for each element, from registers.

        Args:
            target: fp32 ``[columns / 8, 512]``, in the order of :mod:`pallas_kernels.fragments`.
            x: fp32 TILE ``[64, columns]``.
        """
        if self.interpret is None:
            registers.add_fragment(target, x)
        else:
            target[...] = target[...] + fragments.from_tile(x)

    def write_transposed(self, target: Ref, x: Array) -> None:
        """Writes a TILE ``[64, n]`` of 16 or 32 bits to global memory ``[n, 64]``."""
        if self.interpret is None:
            registers.write_transposed(target, x)
        else:
            target[...] = x.T

    def publish(self, ref: Ref, value: Any) -> None:
        """Writes an int32 to ``ref`` ``[1]`` in global memory, for other thread blocks to see.

        They then see all that this warpgroup has written, if it has waited for what TMA writes.
        """
        if self.interpret is None:
            registers.publish(ref, jnp.asarray(value, jnp.int32))
        else:
            ref[...] = jnp.full(ref.shape, value, jnp.int32)

    def await_value(self, ref: Ref, value: Any) -> Any:
        """Waits until another thread block has published ``value`` or more; returns what it has.

        Both must run at the same time. If the other never comes the kernel fails, after tens of
        seconds. Nothing to wait for in interpret mode, where blocks run one after another.
        """
        value = jnp.asarray(value, jnp.int32)
        return registers.await_value(ref, value) if self.interpret is None else value

    def fence_reads(self) -> None:
        """Lets TMA write where this thread has read, once it has arrived at a barrier."""
        if self.interpret is None:
            registers.proxy_fence()
        else:
            plgpu.commit_smem()

    def exchange(self, barrier: int, num_threads: int, backing: Ref | None) -> None:
        """Waits for the other warpgroups; then all see what each has written to shared memory.

        Args:
            barrier: a named barrier.
            num_threads: of all warpgroups that meet there.
            backing: an mbarrier that stands for it in interpret mode.
        """
        if self.interpret is None:
            registers.proxy_fence()
            registers.named_barrier("sync", barrier, num_threads)
        else:
            plgpu.commit_smem()
            plgpu.barrier_arrive(backing)
            plgpu.barrier_wait(backing)


def packed_bits(visible: Array) -> Array:
    """Booleans ``[..., rows, columns]`` as int32 words ``[..., rows, 4 * blocks of 128 columns]``.

    The word ``4 b + t`` has the columns ``128 b + 8 k + 2 t + e`` as its bits ``2 k + e``: those
    that thread ``t`` of four holds of a row of a TILE. Columns past the end are False.
    """
    *lead, rows, columns = visible.shape
    surplus = [(0, 0)] * (len(lead) + 1) + [(0, -columns % 128)]
    eights = jnp.pad(visible, surplus).reshape(*lead, rows, -1, 8).astype(jnp.uint8)
    # In two passes, of which the first is over the mask: all reads are of neighbours. And no sums:
    # XLA would give each of these few bits to a thread of its own.
    octets = lax.optimization_barrier(_joined(eights[..., i] << i for i in range(8)))
    octets = octets.reshape(*lead, rows, -1, 16, 1).astype(jnp.uint32)
    pairs = octets >> jnp.arange(0, 8, 2, dtype=jnp.uint32) & 3
    words = _joined(pairs[..., k, :] << 2 * k for k in range(16))
    return lax.bitcast_convert_type(words, jnp.int32).reshape(*lead, rows, -1)


def packed_rows(visible: Array) -> Array:
    """Booleans ``[..., rows, columns]`` as int32 words ``[..., 4 * blocks of 128 rows, columns]``.

    :func:`packed_bits` of the transpose, transposed, by one pass that reads neighbours.
    """
    *lead, rows, columns = visible.shape
    surplus = [(0, 0)] * len(lead) + [(0, -rows % 128), (0, 0)]
    bits = jnp.pad(visible, surplus).reshape(*lead, -1, 16, 4, 2, columns).astype(jnp.uint32)
    words = _joined(
        bits[..., k, :, e, :] << 2 * k + e for k, e in itertools.product(range(16), range(2))
    )
    return lax.bitcast_convert_type(words, jnp.int32).reshape(*lead, -1, columns)


def _joined(bits: Iterable[Array]) -> Array:
    return functools.reduce(jnp.bitwise_or, bits)
