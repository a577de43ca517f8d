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
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

Array = jax.Array
Ref = Any

TILE = plgpu.Layout.WGMMA  # a [64 * n, 8 * m] array over the 128 threads of a warpgroup
ROWS = TILE.reduce(1)  # one value a row of TILE, held by the four threads that share the row


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

    def pace_wait(self, barrier: int | Array, num_threads: int) -> None:
        """``bar.sync``: waits for a named barrier that only sets the pace."""
        if self.interpret is None:
            _named_barrier("sync", barrier, num_threads)

    def pace_arrive(self, barrier: int | Array, num_threads: int) -> None:
        """``bar.arrive``: arrives at a named barrier without waiting."""
        if self.interpret is None:
            _named_barrier("arrive", barrier, num_threads)


def _named_barrier(operation: str, barrier: int | Array, num_threads: int) -> None:
    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT,))
    def emit(_: Any, barrier: Any) -> None:
        mgpu.utils.inline_ptx(
            f"bar.{operation} $0, {num_threads};", barrier.registers[()], has_side_effects=True
        )

    emit(jnp.int32(barrier) if isinstance(barrier, int) else barrier)


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
