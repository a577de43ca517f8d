"""Sums over the rows of a tile, added to a vector in global memory: for the rare path only.

A warp has 16 rows of 64, so that four atomic additions meet at each column.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.ops import TILE, Ops

Array = jax.Array
Ref = Any


def add_column_sums(ops: Ops, x: Array, target: Ref) -> None:
    """``target += x.sum(axis=0)``, atomic for each element, in whatever order.

    Args:
        ops: primitives.
        x: fp32 ``[m, n]`` in the layout of a TILE.
        target: fp32 ``[n]`` in global memory.
    """
    if ops.interpret is not None:
        target[...] = target[...] + x.sum(axis=0)
        return
    _add_column_sums(x, target)


def _add_column_sums(x: Array, target: Ref) -> None:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, memref, scf, vector

    @plgpu.inline_mgpu(arg_types=(TILE, plgpu.RefType()))
    def emit(_: Any, x: Any, target: Any) -> None:
        index = ir.IndexType.get()
        own_row, own_column = next(iter(TILE.to_mgpu().thread_idxs((64, 8))))
        eight, zero = (arith.constant(own_row.type, n) for n in (8, 0))
        is_first = arith.cmpi(arith.CmpIPredicate.eq, arith.remui(own_row, eight), zero)
        by_columns = np.moveaxis(x.registers, 1, 0)
        totals = []
        for registers in by_columns:
            pair = functools.reduce(arith.addf, registers.flat)
            for i in range(x.layout.vector_length):
                total = vector.extract(pair, dynamic_position=[], static_position=[i])
                for distance in (4, 8, 16):  # the lanes that have the same columns
                    total = arith.addf(total, mgpu.utils.shfl_bfly(total, distance))
                totals.append(total)
        branch = scf.IfOp(is_first)
        with ir.InsertionPoint(branch.then_block):
            for place, total in enumerate(totals):
                column, i = divmod(place, x.layout.vector_length)
                where = arith.addi(own_column, arith.constant(index, 8 * column + i))
                memref.atomic_rmw(arith.AtomicRMWKind.addf, total, target, [where])
            scf.yield_([])

    emit(x, target)
