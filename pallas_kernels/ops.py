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

Not modelled, so only a GPU can test: layouts, swizzles, wait counts and register pressure.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_flash import mask

Array = jax.Array
Ref = Any

TILE = plgpu.Layout.WGMMA  # a [64 * n, 8 * m] array over the 128 threads of a warpgroup
ROWS = TILE.reduce(1)  # one value a row of TILE, held by the four threads that share the row
COLUMNS = TILE.reduce(0)  # one value a column of TILE, held by all threads that share the column


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
    """

    interpret: plgpu.InterpretGPUParams | None = None

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
        if self.interpret is None:
            plgpu.wgmma(acc, a, b.transpose((1, 0)) if transpose_b else b)
        else:
            self._dot(acc, a[...], b[...].T if transpose_b else b[...])

    def matmul_registers(self, acc: Ref, a: Array, b: Ref, *, transpose_b: bool = False) -> None:
        """Issues ``acc += a @ b`` (or ``a @ b.T``) with ``a`` in registers (layout TILE)."""
        if self.interpret is None:
            plgpu.wgmma(acc, a, b.transpose((1, 0)) if transpose_b else b)
        else:
            self._dot(acc, a, b[...].T if transpose_b else b[...])

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
            return plgpu.wgmma_accumulator_load(acc, wait_n=wait)
        return acc[...]

    def wait_matmuls(self, count: int) -> None:
        """Waits until at most ``count`` issued products are in flight."""
        if self.interpret is None:
            plgpu.wgmma_wait(count)

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
            acc[...] = _scale_unless_ones(value, factor)
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
            return _gather_rows(ref, jnp.asarray(first, jnp.int32), count)
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
        return _counted_on(first, size)

    def reciprocal(self, x: Array) -> Array:
        """``1 / x`` of an fp32 TILE, to 1 ulp; 0 for inf."""
        return 1.0 / x if self.interpret is not None else _reciprocal(x)

    def hide_by_bits(self, s: Array, words: Ref, row: Any, column: Any) -> Array:
        """A TILE of scores with -inf where the bit of :func:`packed_bits` is 0.

        Args:
            s: fp32 ``[m, n]``.
            words: int32 ``[rows | 1, 4 * blocks]`` in global memory.
            row: of ``words``, of the tile's first row; later ones past the end are the last.
            column: of the mask, of the tile's first column: a multiple of 8; the tile must not cross
                a multiple of 128.
        """
        if self.interpret is None:
            return _hide_by_bits(s, words, *(jnp.asarray(x, jnp.int32) for x in (row, column)))
        last = words.shape[0] - 1
        rows = jnp.minimum(row + jnp.arange(s.shape[0]), last)
        word = jnp.take(words[...], rows, axis=0)
        columns = column + jnp.arange(s.shape[1])
        chosen = jnp.take(word, columns // 128 * 4 + columns % 8 // 2, axis=1)
        bit = lax.shift_right_logical(chosen, (columns % 128 // 8 * 2 + columns % 2)[None]) & 1
        return jnp.where(bit == 1, s, -jnp.inf)

    def drop(
        self, x: Array, row_keys: Array, key: Any, seed: Any, threshold: int, *, keys_axis: int
    ) -> Array:
        """A TILE of probabilities, those that dropout drops negated: see ``jax_flash.mask``.

        Args:
            x: fp32 ``[m, n]``, at least 0.
            row_keys: int32, one entry a query: COLUMNS if the keys are rows, else ROWS.
            key: index of the tile's first key: a multiple of 16.
            seed: int32 scalar, the batch element's second seed.
            threshold: of :func:`jax_flash.mask.dropout_threshold`.
            keys_axis: which axis of ``x`` has the keys.
        """
        if self.interpret is None:
            start = seed + lax.div(key, 2) * np.uint32(mask.DROPOUT_GOLDEN).astype(np.int32)
            return _drop(x, row_keys, start, threshold, keys_axis)
        keys = key + jnp.arange(x.shape[keys_axis])
        seeds = lax.bitcast_convert_type(seed, jnp.uint32)
        queries = lax.bitcast_convert_type(row_keys, jnp.uint32)
        keep = mask.dropout_bits(queries[:, None], seeds, keys[None]) >= np.uint32(threshold)
        return jnp.where(keep if keys_axis == 1 else keep.T, x, -x)

    def any_nonfinite(self, x: Array) -> Array:
        """Whether this warp (in interpret mode: this warpgroup) holds a NaN or inf of an fp32 TILE.

        The answer may differ between warps: see :meth:`any_of_warpgroup`.
        """
        if self.interpret is None:
            return _any_nonfinite(x)
        return ~jnp.isfinite(x).all()

    def any_of_warpgroup(self, condition: Array, barrier: Any) -> Array:
        """Whether a scalar condition holds in any warp of this warpgroup; waits for all of them."""
        return condition if self.interpret is not None else _any_of_warpgroup(condition, barrier)

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
        return _opaque_zero()

    def warpgroup_in_register(self) -> Array:
        """This warpgroup's index, for the numbers of named barriers: it stays in a register.

        ptxas computes what it knows to be uniform, or to be cheap, anew where it is used: also
        right before a barrier, on whose way nothing should stand. It does not repeat a shuffle.
        """
        return lax.axis_index("warpgroup") if self.interpret is not None else _own_warpgroup()

    def pace_wait(self, barrier: int | Array, num_threads: int) -> None:
        """``bar.sync``: waits for a named barrier that only sets the pace."""
        if self.interpret is None:
            _named_barrier("sync", barrier, num_threads)

    def pace_arrive(self, barrier: int | Array, num_threads: int) -> None:
        """``bar.arrive``: arrives at a named barrier without waiting."""
        if self.interpret is None:
            _named_barrier("arrive", barrier, num_threads)

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
        if self.interpret is None:
            plgpu.wgmma(acc, a.transpose((1, 0)), b)
        else:
            self._dot(acc, a[...].T, b[...])

    def load_shared_columns(self, ref: Ref) -> Array:
        """A vector in shared memory with one entry a column of a TILE."""
        if self.interpret is None:
            return plgpu.load(ref, layout=COLUMNS)
        return ref[...]

    def load_shared_tile(self, ref: Ref) -> Array:
        """A TILE in shared memory that only generic reads and writes touch."""
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

    def exchange(self, barrier: int, num_threads: int, backing: Ref | None) -> None:
        """Waits for the other warpgroups; then all see what each has written to shared memory.

        Args:
            barrier: a named barrier.
            num_threads: of all warpgroups that meet there.
            backing: an mbarrier that stands for it in interpret mode.
        """
        if self.interpret is None:
            _proxy_fence()
            _named_barrier("sync", barrier, num_threads)
        else:
            plgpu.commit_smem()
            plgpu.barrier_arrive(backing)
            plgpu.barrier_wait(backing)


def _named_barrier(operation: str, barrier: int | Array, num_threads: int) -> None:
    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT,))
    def emit(_: Any, barrier: Any) -> None:
        mgpu.utils.inline_ptx(
            f"bar.{operation} $0, {num_threads};", barrier.registers[()], has_side_effects=True
        )

    emit(jnp.int32(barrier) if isinstance(barrier, int) else barrier)


def _proxy_fence() -> None:
    """Orders this thread's writes to shared memory before later reads by wgmma and TMA."""

    @plgpu.inline_mgpu()
    def emit(_: Any) -> None:
        mgpu.utils.inline_ptx("fence.proxy.async.shared::cta;", has_side_effects=True)

    emit()


def _opaque_zero() -> Array:
    from jaxlib.mlir import ir

    @plgpu.inline_mgpu(return_type=plgpu.ShapeDtypeStruct((), jnp.int32, plgpu.Layout.WG_SPLAT(())))
    def emit(_: Any) -> Any:
        value = mgpu.utils.inline_ptx(
            "mov.u32 $0, 0;",
            result_types=ir.IntegerType.get_signless(32),
            has_side_effects=True,
        )
        return mgpu.FragmentedArray.splat(value, (), is_signed=True)

    return emit()


def _own_warpgroup() -> Array:
    from jaxlib.mlir import ir

    @plgpu.inline_mgpu(return_type=plgpu.ShapeDtypeStruct((), jnp.int32, plgpu.Layout.WG_SPLAT(())))
    def emit(_: Any) -> Any:
        # Each lane asks itself: of a constant lane, ptxas would know that all get the same.
        value = mgpu.utils.inline_ptx(
            "{ .reg .u32 lane, group; mov.u32 group, %tid.x; shr.u32 group, group, 7; "
            "mov.u32 lane, %laneid; shfl.sync.idx.b32 $0, group, lane, 31, 0xffffffff; }",
            result_types=ir.IntegerType.get_signless(32),
            has_side_effects=True,
        )
        return mgpu.FragmentedArray.splat(value, (), is_signed=True)

    return emit()


def _gather_rows(ref: Ref, first: Array, count: int) -> Array:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, vector

    last, columns = ref.shape[0] - 1, ref.shape[1]
    shape = (count, columns)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT),
        return_type=plgpu.ShapeDtypeStruct(shape, ref.dtype, TILE),
    )
    def emit(_: Any, ref: Any, first: Any) -> Any:
        layout = TILE.to_mgpu()
        index = ir.IndexType.get()
        pair = ir.VectorType.get((layout.vector_length,), ir.MemRefType(ref.type).element_type)
        offset = arith.index_cast(index, first.registers[()])
        last_row = arith.constant(index, last)
        registers = np.empty(layout.registers_shape(shape), dtype=object)
        for place, (row, column) in zip(
            np.ndindex(registers.shape), layout.thread_idxs(shape), strict=True
        ):
            row = arith.minsi(arith.addi(row, offset), last_row)
            registers[place] = vector.load(pair, ref, [row, column])
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return emit(ref, first)


def packed_bits(visible: Array) -> Array:
    """Booleans ``[..., rows, columns]`` as int32 words ``[..., rows, 4 * blocks of 128 columns]``.

    The word ``4 b + t`` has the columns ``128 b + 8 k + 2 t + e`` as its bits ``2 k + e``: those
    that thread ``t`` of four holds of a row of a TILE. Columns past the end are False.
    """
    *lead, rows, columns = visible.shape
    surplus = [(0, 0)] * (len(lead) + 1) + [(0, -columns % 128)]
    bits = jnp.pad(visible, surplus).reshape(*lead, rows, -1, 16, 4, 2)
    bits = jnp.swapaxes(bits, -3, -2).reshape(*lead, rows, -1, 4, 32).astype(jnp.uint32)
    words = (bits << jnp.arange(32, dtype=jnp.uint32)).sum(axis=-1, dtype=jnp.uint32)
    return lax.bitcast_convert_type(words, jnp.int32).reshape(*lead, rows, -1)


def _counted_on(first: Array, size: int) -> Array:
    from jaxlib.mlir.dialects import arith

    @plgpu.inline_mgpu(
        arg_types=(COLUMNS,), return_type=plgpu.ShapeDtypeStruct((size,), jnp.float32, COLUMNS)
    )
    def emit(_: Any, first: Any) -> Any:
        (eight,) = first.registers.flat
        registers = np.empty(first.layout.registers_shape((size,)), dtype=object)
        for step, place in enumerate(np.ndindex(registers.shape)):
            registers[place] = arith.addf(eight, _splat(eight.type, 8.0 * step))
        return mgpu.FragmentedArray(_registers=registers, _layout=first.layout, _is_signed=None)

    return emit(first)


def _splat(vector_type: Any, value: float) -> Any:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith

    element = ir.FloatAttr.get(ir.VectorType(vector_type).element_type, value)
    return arith.constant(vector_type, ir.DenseElementsAttr.get_splat(vector_type, element))


def _each_element(x: Any, function: Callable[[Any, tuple[int, ...], int], Any]) -> Any:
    """A FragmentedArray of vector registers with ``function(element, register, place in it)``."""
    from jaxlib.mlir.dialects import vector

    registers = np.empty_like(x.registers)
    for place in np.ndindex(registers.shape):
        result = x.registers[place]
        for i in range(x.layout.vector_length):
            element = vector.extract(result, dynamic_position=[], static_position=[i])
            changed = function(element, place, i)
            result = vector.insert(changed, result, dynamic_position=[], static_position=[i])
        registers[place] = result
    return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)


def _reciprocal(x: Array) -> Array:
    from jaxlib.mlir import ir

    @plgpu.inline_mgpu(
        arg_types=(TILE,), return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, TILE)
    )
    def emit(_: Any, x: Any) -> Any:
        def approximate(element: Any, *_: Any) -> Any:
            return mgpu.utils.inline_ptx(
                "rcp.approx.ftz.f32 $0, $1;", element, result_types=ir.F32Type.get()
            )

        return _each_element(x, approximate)

    return emit(x)


# In the registers of a TILE, [m / 64, n / 8, 1, 1, 2, ...]: which axis counts eight columns, and
# which is 1 for the rows 8 further down.
_COLUMNS_AXIS, _HALF_AXIS = 1, 4


def _hide_by_bits(s: Array, words: Ref, row: Array, column: Array) -> Array:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, memref

    num_rows = words.shape[0]

    @plgpu.inline_mgpu(
        arg_types=(TILE, plgpu.RefType(), plgpu.Layout.WG_SPLAT, plgpu.Layout.WG_SPLAT),
        return_type=plgpu.ShapeDtypeStruct(s.shape, jnp.float32, TILE),
    )
    def emit(_: Any, s: Any, words: Any, row: Any, column: Any) -> Any:
        index, i32, f32 = ir.IndexType.get(), ir.IntegerType.get_signless(32), ir.F32Type.get()

        def number(value: int, kind: Any = i32) -> Any:
            return arith.constant(kind, value)

        column = column.registers[()]
        block = arith.index_cast(index, arith.shli(arith.shrui(column, number(7)), number(2)))
        shift = arith.shrui(arith.andi(column, number(127)), number(2))
        first_row = arith.index_cast(index, row.registers[()])
        layout = TILE.to_mgpu()
        halves = []
        for own_row, own_column in layout.thread_idxs((s.shape[0], 8)):
            place = number(0, index)
            if num_rows > 1:
                place = arith.addi(first_row, own_row)
                place = arith.minsi(place, number(num_rows - 1, index))
            word = arith.addi(block, arith.divui(own_column, number(2, index)))
            halves.append(arith.shrui(memref.load(words, [place, word]), shift))
        hidden = arith.constant(f32, ir.FloatAttr.get(f32, -np.inf))

        def select(element: Any, place: tuple[int, ...], i: int) -> Any:
            bit = 2 * place[_COLUMNS_AXIS] + i
            half = halves[place[0] * 2 + place[_HALF_AXIS]]
            tested = arith.andi(half, number(1 << bit if bit < 31 else -(2**31)))
            is_seen = arith.cmpi(arith.CmpIPredicate.ne, tested, number(0))
            return arith.select(is_seen, element, hidden)

        return _each_element(s, select)

    return emit(s, words, row, column)


def _drop(x: Array, row_keys: Array, start: Array, threshold: int, keys_axis: int) -> Array:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith

    @plgpu.inline_mgpu(
        arg_types=(TILE, ROWS if keys_axis == 1 else COLUMNS, plgpu.Layout.WG_SPLAT),
        return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, TILE),
    )
    def emit(_: Any, x: Any, row_keys: Any, start: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)

        def number(value: int) -> Any:
            return arith.constant(i32, int(np.uint32(value).astype(np.int32)))

        queries = [_element(register, i) for register, i in _elements(row_keys)]
        own_row, own_column = next(iter(TILE.to_mgpu().thread_idxs((64, 8))))
        golden = int(mask.DROPOUT_GOLDEN)
        own = own_column
        if keys_axis == 0:  # 16 rows of keys a warp, of which a thread has two: one group
            eight = arith.constant(own_row.type, 8)
            warp = arith.divui(own_row, arith.constant(own_row.type, 16))
            own = arith.addi(arith.muli(warp, eight), arith.remui(own_row, eight))
        own = arith.muli(arith.index_cast(i32, own), number(golden))
        first = arith.addi(start.registers[()], own)
        drawn: dict[tuple[int, int], Any] = {}

        def bits(query: int, group: int) -> Any:
            """Shared by two keys; ``group`` is relative to the thread's first."""
            if (query, group) not in drawn:
                value = arith.addi(first, number(group * golden % 2**32))
                value = arith.xori(queries[query], value)
                for shift, factor in mask.DROPOUT_MIX:
                    value = arith.xori(value, arith.shrui(value, number(shift)))
                    value = value if factor is None else arith.muli(value, number(int(factor)))
                drawn[query, group] = value
            return drawn[query, group]

        def negate(element: Any, place: tuple[int, ...], i: int) -> Any:
            columns, half = place[_COLUMNS_AXIS], place[_HALF_AXIS]
            if keys_axis == 1:
                value, upper = bits(place[0] * 2 + half, columns // 2 * 8 + i), columns % 2
            else:
                value, upper = bits(columns * 2 + i, place[0] * 32), half
            value = value if upper else arith.andi(value, number(0xFFFF))
            least = number(threshold << 16 if upper else threshold)
            is_kept = arith.cmpi(arith.CmpIPredicate.uge, value, least)
            return arith.select(is_kept, element, arith.negf(element))

        return _each_element(x, negate)

    return emit(x, row_keys, start)


def _elements(x: Any) -> list[tuple[Any, int]]:
    """All registers of a FragmentedArray, with the places in them."""
    return [(register, i) for register in x.registers.flat for i in range(x.layout.vector_length)]


def _element(register: Any, i: int) -> Any:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import vector

    if not isinstance(register.type, ir.VectorType):
        return register
    return vector.extract(register, dynamic_position=[], static_position=[i])


def _any_nonfinite(x: Array) -> Array:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, vector

    @plgpu.inline_mgpu(
        arg_types=(TILE,),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, plgpu.Layout.WG_SPLAT(())),
    )
    def emit(_: Any, x: Any) -> Any:
        f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
        registers = list(x.registers.flat)
        chains = registers[:4]  # independent sums: a sum keeps a NaN, and makes one of an inf
        for place, register in enumerate(registers[4:]):
            chains[place % 4] = arith.addf(chains[place % 4], register)
        total = functools.reduce(arith.addf, chains)
        if isinstance(total.type, ir.VectorType):
            total = vector.reduction(f32, vector.CombiningKind.ADD, total)
        nonfinite = arith.cmpf(arith.CmpFPredicate.UNO, *[arith.subf(total, total)] * 2)
        found = mgpu.utils.inline_ptx(
            "vote.sync.any.pred $0, $1, 0xffffffff;",
            nonfinite,
            result_types=ir.IntegerType.get_signless(1),
            has_side_effects=True,
        )
        return mgpu.FragmentedArray.splat(arith.extui(i32, found), (), is_signed=True)

    return emit(x) != 0


def _any_of_warpgroup(condition: Array, barrier: Any) -> Array:
    from jaxlib.mlir import ir

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WG_SPLAT, plgpu.Layout.WG_SPLAT),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, plgpu.Layout.WG_SPLAT(())),
    )
    def emit(_: Any, condition: Any, barrier: Any) -> Any:
        found = mgpu.utils.inline_ptx(
            "{ .reg .pred any, own; setp.ne.s32 own, $1, 0; "
            "barrier.cta.red.or.pred any, $2, 128, own; selp.s32 $0, 1, 0, any; }",
            condition.registers[()],
            barrier.registers[()],
            result_types=ir.IntegerType.get_signless(32),
            has_side_effects=True,
        )
        return mgpu.FragmentedArray.splat(found, (), is_signed=True)

    return emit(condition.astype(jnp.int32), barrier) != 0


def _scale_unless_ones(value: Array, factor: Array) -> Array:
    """``value * factor[:, None]``, skipped by warps whose factors are all 1."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, scf, vector

    @plgpu.inline_mgpu(
        arg_types=(TILE, ROWS),
        return_type=plgpu.ShapeDtypeStruct(value.shape, jnp.float32, TILE),
    )
    def emit(_: Any, value: Any, factor: Any) -> Any:
        f32 = ir.F32Type.get()
        one = arith.constant(f32, ir.FloatAttr.get(f32, 1.0))
        differs = None
        for register in factor.registers.flat:
            if isinstance(register.type, ir.VectorType):
                register = vector.extract(register, dynamic_position=[], static_position=[0])
            test = arith.cmpf(arith.CmpFPredicate.UNE, register, one)
            differs = test if differs is None else arith.ori(differs, test)
        any_differs = mgpu.utils.inline_ptx(
            "vote.sync.any.pred $0, $1, 0xffffffff;",
            differs,
            result_types=ir.IntegerType.get_signless(1),
            has_side_effects=True,
        )
        types = [register.type for register in value.registers.flat]
        branch = scf.IfOp(any_differs, types, has_else=True)
        with ir.InsertionPoint(branch.then_block):
            scaled = value * factor.broadcast_in_dim(value.shape, (0,), value.layout)
            scf.yield_(list(scaled.registers.flat))
        with ir.InsertionPoint(branch.else_block):
            scf.yield_(list(value.registers.flat))
        registers = np.empty_like(value.registers)
        for index, result in zip(np.ndindex(registers.shape), branch.results, strict=True):
            registers[index] = result
        return mgpu.FragmentedArray(_registers=registers, _layout=value.layout, _is_signed=None)

    return emit(value, factor)
