"""Primitives written in MLIR and PTX, on the registers of arrays: the GPU half of :mod:`ops`.

What they compute is said there. The registers of a TILE ``[m, n]`` are an array
``[m / 64, n / 8, 1, 1, 2, 1, 1, 1, 1]`` of vectors of two: two neighbouring columns of eight, and
the row or the one 8 further down.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_flash import mask

Array = jax.Array
Ref = Any

TILE = plgpu.Layout.WGMMA  # a [64 * n, 8 * m] array over the 128 threads of a warpgroup
ROWS = TILE.reduce(1)  # one value a row of TILE, held by the four threads that share the row
COLUMNS = TILE.reduce(0)  # one value a column of TILE, held by all threads that share the column
_COLUMNS_AXIS, _HALF_AXIS = 1, 4
_MOST_POLLS = 2**27  # of a value that does not come: tens of seconds


def named_barrier(operation: str, barrier: int | Array, num_threads: int) -> None:
    """Emits ``bar.sync`` or ``bar.arrive``."""

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT,))
    def emit(_: Any, barrier: Any) -> None:
        mgpu.utils.inline_ptx(
            f"bar.{operation} $0, {num_threads};", barrier.registers[()], has_side_effects=True
        )

    emit(jnp.int32(barrier) if isinstance(barrier, int) else barrier)


def proxy_fence() -> None:
    """Orders this thread's writes to shared memory before later reads by wgmma and TMA."""

    @plgpu.inline_mgpu()
    def emit(_: Any) -> None:
        mgpu.utils.inline_ptx("fence.proxy.async.shared::cta;", has_side_effects=True)

    emit()


def publish(ref: Ref, value: Array) -> None:
    """See :meth:`Ops.publish`."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT))
    def emit(_: Any, ref: Any, value: Any) -> None:
        mgpu.utils.inline_ptx(
            "{ .reg .pred first; .reg .u32 thread; mov.u32 thread, %tid.x; "
            "and.b32 thread, thread, 127; setp.eq.u32 first, thread, 0; "
            "@first st.release.gpu.s32 [$0], $1; }",
            mgpu.utils.memref_ptr(ref),
            value.registers[()],
            has_side_effects=True,
        )

    emit(ref, value)


def await_value(ref: Ref, value: Array) -> Array:
    """See :meth:`Ops.await_value`."""
    from jaxlib.mlir import ir

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, plgpu.Layout.WG_SPLAT(())),
    )
    def emit(_: Any, ref: Any, value: Any) -> Any:
        found = mgpu.utils.inline_ptx(
            "{ .reg .pred p; .reg .u32 polls; mov.u32 polls, 0; "
            "AGAIN: ld.acquire.gpu.s32 $0, [$1]; setp.ge.s32 p, $0, $2; @p bra THERE; "
            f"add.u32 polls, polls, 1; setp.lt.u32 p, polls, {_MOST_POLLS}; @p bra AGAIN; trap; "
            "THERE: fence.proxy.async.global; }",
            mgpu.utils.memref_ptr(ref),
            value.registers[()],
            result_types=ir.IntegerType.get_signless(32),
            has_side_effects=True,
        )
        return mgpu.FragmentedArray.splat(found, (), is_signed=True)

    return emit(ref, value)


def add_fragment(ref: Ref, x: Array) -> None:
    """See :meth:`Ops.add_fragment`."""
    from jaxlib.mlir import ir

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), TILE))
    def emit(_: Any, ref: Any, x: Any) -> None:
        # Side effects keep it in the loop, where it costs no register that lasts.
        address = mgpu.utils.inline_ptx(
            "{ .reg .u32 thread; mov.u32 thread, %tid.x; and.b32 thread, thread, 127; "
            "mad.wide.u32 $0, thread, 16, $1; }",
            mgpu.utils.memref_ptr(ref),
            result_types=ir.IntegerType.get_signless(64),
            has_side_effects=True,
        )
        for place, halves in enumerate(x.registers.reshape(-1, 2)):
            mgpu.utils.inline_ptx(
                f"red.relaxed.gpu.global.add.v4.f32 [$0+{2048 * place}], {{$1, $2, $3, $4}};",
                address,
                *(_element(register, i) for register in halves for i in range(2)),
                has_side_effects=True,
            )

    emit(ref, x)


def opaque_zero() -> Array:
    """See :meth:`Ops.opaque_zero`."""
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


def own_warpgroup() -> Array:
    """See :meth:`Ops.warpgroup_in_register`."""
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


def gather_rows(ref: Ref, first: Array, count: int) -> Array:
    """See :meth:`Ops.gather_rows`."""
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


def counted_on(first: Array, size: int) -> Array:
    """Extends fp32 COLUMNS ``[8]`` to ``[size]`` by steps of 8."""
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


def _splat(kind: Any, value: float) -> Any:
    """A constant of a floating-point type, or of a vector of one."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith

    if not isinstance(kind, ir.VectorType):
        return arith.constant(kind, ir.FloatAttr.get(kind, value))
    element = ir.FloatAttr.get(ir.VectorType(kind).element_type, value)
    return arith.constant(kind, ir.DenseElementsAttr.get_splat(kind, element))


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


def tanh(x: Array) -> Array:
    """See :meth:`Ops.tanh`."""
    return _elementwise(x, "tanh.approx.f32 $0, $1;")


def saturate(x: Array) -> Array:
    """An fp32 TILE clamped to [0, 1]; NaN becomes 0."""
    return _elementwise(x, "mul.sat.f32 $0, $1, 0f3F800000;")


def _elementwise(x: Array, instruction: str) -> Array:
    """One PTX instruction on each element of an fp32 TILE."""
    from jaxlib.mlir import ir

    @plgpu.inline_mgpu(
        arg_types=(TILE,), return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, TILE)
    )
    def emit(_: Any, x: Any) -> Any:
        def apply(element: Any, *_: Any) -> Any:
            return mgpu.utils.inline_ptx(instruction, element, result_types=ir.F32Type.get())

        return _each_element(x, apply)

    return emit(x)


def store_transposed(ref: Ref, x: Array) -> None:
    """See :meth:`Ops.store_transposed`."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, memref, vector

    transforms = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms), TILE))
    def emit(_: Any, ref: Any, x: Any) -> None:
        def number(value: int) -> Any:
            return arith.constant(ir.IndexType.get(), value)

        # Of the first eight columns; the others are whole tiles of memory further.
        own = list(TILE.to_mgpu().thread_idxs((64, 8)))
        for i in range(x.layout.vector_length):
            for half, (column, row) in enumerate(own):
                row = arith.addi(row, number(i))
                tile = arith.divui(column, number(32))
                column = arith.remui(column, number(32))
                column = arith.xori(column, arith.shli(row, number(2)))  # the swizzle
                for place in np.ndindex(x.registers.shape):
                    if place[_HALF_AXIS] == half:
                        element = vector.extract(
                            x.registers[place], dynamic_position=[], static_position=[i]
                        )
                        at = [number(place[_COLUMNS_AXIS]), tile, row, column]
                        memref.store(element, ref, at)

    emit(ref, x)


def write_transposed(ref: Ref, x: Array) -> None:
    """See :meth:`Ops.write_transposed`.

    A warp writes 32 bytes in a row, or twice 16, which meet in the cache.
    """
    from jaxlib.mlir import ir

    size = x.dtype.itemsize

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), TILE))
    def emit(_: Any, ref: Any, x: Any) -> None:
        i32 = ir.IntegerType.get_signless(32)
        (stride, _), _ = ir.MemRefType(ref.type).get_strides_and_offset()
        # Of eight rows and columns a thread has one row, of eight, and two columns, of four pairs;
        # of 16 bits it is given one column and two rows.
        eight, four = (1, 2 * stride) if size == 4 else (stride, 2)
        address = mgpu.utils.inline_ptx(
            "{ .reg .u32 thread, warp, eight, four; .reg .u64 offset; mov.u32 thread, %tid.x; "
            "bfe.u32 warp, thread, 5, 2; bfe.u32 eight, thread, 2, 3; and.b32 four, thread, 3; "
            f"mul.wide.u32 offset, eight, {eight * size}; add.u64 $0, $1, offset; "
            f"mul.wide.u32 offset, four, {four * size}; add.u64 $0, $0, offset; "
            f"mul.wide.u32 offset, warp, {16 * size}; add.u64 $0, $0, offset; }}",
            mgpu.utils.memref_ptr(ref),
            result_types=ir.IntegerType.get_signless(64),
            has_side_effects=True,
        )
        for place, register in np.ndenumerate(x.registers):
            first = (8 * place[_COLUMNS_AXIS] * stride + 8 * place[_HALF_AXIS]) * size
            if size == 2:
                mgpu.utils.inline_ptx(
                    "{ .reg .b32 x; movmatrix.sync.aligned.m8n8.trans.b16 x, $1; "
                    f"st.global.b32 [$0+{first}], x; }}",
                    address,
                    mgpu.utils.bitcast(register, i32),
                    has_side_effects=True,
                )
                continue
            for i in range(2):
                mgpu.utils.inline_ptx(
                    f"st.global.f32 [$0+{first + i * stride * size}], $1;",
                    address,
                    _element(register, i),
                    has_side_effects=True,
                )

    emit(ref, x)


def widen(x: Array) -> Array:
    """A bf16 TILE in fp32, by two instructions a pair; LLVM, which unpacks it first, takes four."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, vector

    @plgpu.inline_mgpu(
        arg_types=(TILE,), return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, TILE)
    )
    def emit(_: Any, x: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        sixteen, upper = arith.constant(i32, 16), arith.constant(i32, -(2**16))
        pair = ir.VectorType.get((2,), i32)
        registers = np.empty_like(x.registers)
        for place in np.ndindex(registers.shape):
            bits = mgpu.utils.bitcast(x.registers[place], i32)
            halves = arith.shli(bits, sixteen), arith.andi(bits, upper)
            both = vector.from_elements(pair, halves)
            registers[place] = mgpu.utils.bitcast(both, ir.VectorType.get((2,), ir.F32Type.get()))
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    return emit(x)


def upper_halves(x: Array) -> tuple[Array, Array]:
    """Those of an fp32 TILE: see :func:`pallas_kernels.split.upper_halves`.

    Five instructions a pair, none of them a conversion, which would have half their rate. LLVM does
    not contract this subtraction with a product that an array comes from.
    """
    from jaxlib.mlir import ir

    @plgpu.inline_mgpu(
        arg_types=(TILE,), return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.bfloat16, TILE)
    )
    def upper(_: Any, x: Any) -> Any:
        i32, pair = ir.IntegerType.get_signless(32), ir.VectorType.get((2,), ir.BF16Type.get())
        registers = np.empty_like(x.registers)
        for place, register in np.ndenumerate(x.registers):
            both = mgpu.utils.inline_ptx(
                "prmt.b32 $0, $1, $2, 0x7632;",
                *(mgpu.utils.bitcast(_element(register, i), i32) for i in range(2)),
                result_types=i32,
            )
            registers[place] = mgpu.utils.bitcast(both, pair)
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    rest = "{ .reg .f32 upper; and.b32 upper, $1, 0xFFFF0000; sub.rn.f32 $0, $1, upper; }"
    return upper(x), _elementwise(x, rest)


def exp2(x: Array) -> Array:
    """See :meth:`Ops.exp2`."""
    return _elementwise(x, "ex2.approx.ftz.f32 $0, $1;")


def hide_by_bits(s: Array, words: Ref, row: Array, column: Array) -> Array:
    """See :meth:`Ops.hide_by_bits`."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, memref

    num_rows = words.shape[0]

    @plgpu.inline_mgpu(
        arg_types=(TILE, plgpu.RefType(), plgpu.Layout.WG_SPLAT, plgpu.Layout.WG_SPLAT),
        return_type=plgpu.ShapeDtypeStruct(s.shape, jnp.float32, TILE),
    )
    def emit(_: Any, s: Any, words: Any, row: Any, column: Any) -> Any:
        index, i32 = ir.IndexType.get(), ir.IntegerType.get_signless(32)

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
        hidden = _splat(ir.F32Type.get(), -np.inf)

        def select(element: Any, place: tuple[int, ...], i: int) -> Any:
            bit = 2 * place[_COLUMNS_AXIS] + i
            half = halves[place[0] * 2 + place[_HALF_AXIS]]
            tested = arith.andi(half, number(1 << bit if bit < 31 else -(2**31)))
            is_seen = arith.cmpi(arith.CmpIPredicate.ne, tested, number(0))
            return arith.select(is_seen, element, hidden)

        return _each_element(s, select)

    return emit(s, words, row, column)


def drop(
    x: Array, row_keys: Array, start: Array, threshold: int, keys_axis: int, negate: bool
) -> Array:
    """See :meth:`Ops.drop`; ``start`` is the second seed, moved to the tile's first key."""
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
        (spread, factor), (shift, _), _ = mask.DROPOUT_MIX
        hashes: dict[tuple[int, int], Any] = {}

        def stirred(value: Any, shift: int) -> Any:
            return arith.xori(value, arith.shrui(value, number(shift)))

        def hashed(query: int, group: int) -> Any:
            """What two queries and two keys share; ``group`` is relative to the thread's first."""
            if (query, group) not in hashes:
                key = stirred(arith.addi(first, number(group * golden % 2**32)), spread)
                value = arith.muli(arith.xori(queries[query], key), number(int(factor)))
                hashes[query, group] = stirred(value, shift)
            return hashes[query, group]

        least = number(threshold)
        # Side effects keep LLVM from moving the choice behind the next branch, apart from its test:
        # ptxas then has more predicates than a thread, and packs them into registers and back.
        choose = functools.partial(
            mgpu.utils.inline_ptx,
            "{ .reg .f32 other; neg.f32 other, $1; selp.f32 $0, $1, other, $2; }"
            if negate
            else "selp.f32 $0, $1, 0f00000000, $2;",
            result_types=ir.F32Type.get(),
            has_side_effects=True,
        )

        def drop(element: Any, place: tuple[int, ...], i: int) -> Any:
            columns, half = place[_COLUMNS_AXIS], place[_HALF_AXIS]
            if keys_axis == 1:
                member = half, columns % 2
                value = hashed(place[0] * 2, columns // 2 * 8 + i)
            else:
                member = columns % 2, half
                value = hashed(columns // 2 * 4 + i, place[0] * 32)
            bits = arith.muli(value, number(int(mask.DROPOUT_FACTORS[member])))
            is_kept = arith.cmpi(arith.CmpIPredicate.uge, bits, least)
            return choose(element, is_kept)

        return _each_element(x, drop)

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


def any_nonfinite(x: Array) -> Array:
    """See :meth:`Ops.any_nonfinite`."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, vector

    @plgpu.inline_mgpu(
        arg_types=(TILE,),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, plgpu.Layout.WG_SPLAT(())),
    )
    def emit(_: Any, x: Any) -> Any:
        f32 = ir.F32Type.get()
        registers = list(x.registers.flat)
        chains = registers[:4]  # independent sums: a sum keeps a NaN, and makes one of an inf
        for place, register in enumerate(registers[4:]):
            chains[place % 4] = arith.addf(chains[place % 4], register)
        total = functools.reduce(arith.addf, chains)
        if isinstance(total.type, ir.VectorType):
            total = vector.reduction(f32, vector.CombiningKind.ADD, total)
        nonfinite = arith.cmpf(arith.CmpFPredicate.UNO, *[arith.subf(total, total)] * 2)
        return _any_of_warp(nonfinite)

    return emit(x) != 0


def zero_blank_rows(ref: Ref, lse: Ref, swizzle: int) -> None:
    """See :meth:`Ops.zero_blank_rows`. Of a row it is all the same where the swizzle puts what."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, memref, scf, vector

    rows, columns = ref.shape
    tile = 8, swizzle // ref.dtype.itemsize
    transforms = (plgpu.TilingTransform(tile), plgpu.SwizzleTransform(swizzle))
    piece = 16 // ref.dtype.itemsize  # what a thread writes at a time
    threads = 128 // rows  # of a row

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms), plgpu.RefType()))
    def emit(_: Any, ref: Any, lse: Any) -> None:
        index = ir.IndexType.get()

        def number(value: int) -> Any:
            return arith.constant(index, value)

        thread = arith.remui(arith.index_cast(index, mgpu.utils.thread_idx()), number(128))
        row, own = arith.divui(thread, number(threads)), arith.remui(thread, number(threads))
        infinity = _splat(ir.F32Type.get(), np.inf)
        is_blank = arith.cmpf(arith.CmpFPredicate.OEQ, memref.load(lse, [row]), infinity)
        zeros = _splat(ir.VectorType.get((piece,), ir.MemRefType(ref.type).element_type), 0.0)
        row_tile, row = arith.divui(row, number(8)), arith.remui(row, number(8))
        with mgpu.utils.when(is_blank):
            first = arith.muli(own, number(piece))
            # A loop: the thread has few registers.
            loop = scf.ForOp(first, number(columns), number(piece * threads))
            with ir.InsertionPoint(loop.body):
                column = loop.induction_variable
                at = [arith.divui(column, number(tile[1])), arith.remui(column, number(tile[1]))]
                vector.store(zeros, ref, [row_tile, at[0], row, at[1]])
                scf.yield_([])

    emit(ref, lse)


def _any_of_warp(condition: Any) -> Any:
    """A bit of each thread as an int32 scalar that all threads of a warp have."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith

    found = mgpu.utils.inline_ptx(
        "vote.sync.any.pred $0, $1, 0xffffffff;",
        condition,
        result_types=ir.IntegerType.get_signless(1),
        has_side_effects=True,
    )
    found = arith.extui(ir.IntegerType.get_signless(32), found)
    return mgpu.FragmentedArray.splat(found, (), is_signed=True)


def any_of_warpgroup(condition: Array, barrier: Any) -> Array:
    """See :meth:`Ops.any_of_warpgroup`."""
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


def scale_unless_ones(value: Array, factor: Array) -> Array:
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
