"""The way to the product's kernel, one idea a step: small kernels to read, to test and to time.

All compute ``out = softmax(scale * Q K^T + mask) V`` for sequences of equal length. A thread
block is one warpgroup (128 threads); it works on tiles of 64 queries and 64 keys:

    1  naive             S = Q K^T; P = softmax(S); O = P V. Three kernels: S and P, [T, T] for each
                         head, go through device memory.
    2  FlashAttention-1  For each key tile j, for each query tile i (Dao et al. 2022, algorithm 1):
                             m' = max(m_i, rowmax S_ij);  l' = l_i exp(m_i - m') + rowsum P_ij
                             O_i = (O_i l_i exp(m_i - m') + P_ij V_j) / l'
                         No [T, T] array, but O, l and m go through device memory at every step.
    3  FlashAttention-2  The loops change places (Dao 2023, algorithm 1), a thread block for each
                         query tile. O, l and m stay in registers; O is divided by l at the end.
    4  + causal pruning  The loop over j ends at the diagonal: tiles of nothing but exp(-inf) = 0
                         are left out, and only the diagonal one is masked.
    5  + swizzle         The same sums. Rows of Q and out lie permuted in shared memory: the eight
                         rows that a warp reads at once are no longer all in the same banks.
    6  + ring            The same sums. The next key tiles are loaded (TMA), into a ring of
                         buffers, while this one is computed.
    7  + warp specialisation, overlap of softmax and matrix products, persistent blocks, all masks:
                         :mod:`pallas_kernels.forward`, which ``jax_flash`` ships.

m and l are statistics of the scores times ``scale * log2(e)``, and ``exp`` is ``exp2``.

Constraints: fp16 or bf16; D 64 or 128; as many key heads as query heads; T a multiple of 64. Mosaic
adds barriers of its own: the warpgroup meets before and after what touches shared memory.

Test:  python -m pytest tests/test_ladder.py     Time:  python -m bench run ladder
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import tiles
from pallas_kernels.ops import ROWS, TILE, Ops

Array = jax.Array
Ref = Any

BLOCK = tiles.WARPGROUP_ROWS  # queries, and keys, of a tile
HEAD_DIMS = (64, 128)
_NARROWEST_SWIZZLE = 32  # bytes, of what wgmma reads from shared memory


@dataclasses.dataclass(frozen=True)
class Stage:
    """One step of the ladder.

    Attributes:
        name: what it adds.
        launch: ``(call, stage, ops, q, k, v) -> out``.
        prunes: key tiles past the diagonal are left out.
        swizzles: Q and out lie swizzled in shared memory, keys and values with the widest swizzle.
        num_buffers: of the ring of key and value tiles.
    """

    name: str
    launch: Callable[[_Call, Stage, Ops, Array, Array, Array], Array]
    prunes: bool = False
    swizzles: bool = False
    num_buffers: int = 1

    @property
    def kernel_name(self) -> str:
        """What profilers call it; those of the first step have more words at the end."""
        return "ladder_" + self.name.lower().replace(" ", "_").replace("-", "_")


@dataclasses.dataclass(frozen=True)
class _Call:
    """Static facts: sizes, dtype of the arrays, factor of the scores, mask."""

    batch: int
    length: int
    num_heads: int
    head_dim: int
    dtype: Any
    scale: float
    is_causal: bool

    @property
    def scale_log2(self) -> float:
        return self.scale * tiles.LOG2_E

    @property
    def num_tiles(self) -> int:
        return self.length // BLOCK

    def array(self, dtype: Any = None) -> Any:
        """Shaped like q."""
        shape = (self.batch, self.length, self.num_heads, self.head_dim)
        return jax.ShapeDtypeStruct(shape, dtype or self.dtype)

    def operand(self, stage: Stage, *leading: int) -> Any:
        """A tile of keys or values in shared memory, which wgmma reads."""
        swizzle = 128 if stage.swizzles else _NARROWEST_SWIZZLE
        return tiles.buffer((*leading, BLOCK, self.head_dim), self.dtype, widest=swizzle)

    def staging(self, stage: Stage) -> Any:
        """A tile of queries or of out in shared memory, on its way to or from registers."""
        shape = (BLOCK, self.head_dim)
        return tiles.buffer(shape, self.dtype) if stage.swizzles else plgpu.SMEM(shape, self.dtype)


def attend(
    number: int,
    q: Array,
    k: Array,
    v: Array,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Array:
    """Attention by one step of the ladder.

    Args:
        number: of the step, a key of :data:`STAGES`.
        q: fp16 or bf16 ``[B, T, H, D]``.
        k: like q.
        v: like q.
        is_causal: whether a query sees only keys up to its own position.
        scale: factor of the scores; None: ``D ** -0.5``.
        interpret: run in interpret mode, on a CPU.

    Returns:
        ``[B, T, H, D]`` in q's dtype.

    Raises:
        ValueError: shapes or dtypes that the ladder does not take.
    """
    batch, length, num_heads, head_dim = q.shape
    if not q.shape == k.shape == v.shape or not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must be alike; got {q}, {k} and {v}")
    if length % BLOCK or head_dim not in HEAD_DIMS or q.dtype not in (jnp.float16, jnp.bfloat16):
        raise ValueError(
            f"the ladder takes fp16 and bf16, T a multiple of {BLOCK} and D of {HEAD_DIMS}; got "
            f"{q.dtype}{list(q.shape)}"
        )
    scale = head_dim**-0.5 if scale is None else scale
    call = _Call(batch, length, num_heads, head_dim, q.dtype, scale, is_causal)
    stage = STAGES[number]
    return stage.launch(call, stage, Ops(interpret), q, k, v)


# What the steps share.


def _launch(
    ops: Ops,
    body: Callable[..., None],
    inputs: Mapping[str, Array],
    outputs: Mapping[str, Any],
    scratch: Mapping[str, Any],
    grid: Mapping[str, int],
    name: str,
) -> Sequence[Array]:
    """Runs ``body(refs)``, refs by name, once for each point of the grid; the last axis is fastest.

    An axis ``i`` of the grid is ``lax.axis_index(i)`` in the body.
    """

    def with_names(*refs: Ref, **scratch: Ref) -> None:
        body(dict(zip((*inputs, *outputs), refs, strict=True)) | scratch)

    kernel = plgpu.kernel(
        with_names,
        out_type=list(outputs.values()),
        scratch_types={name: item for name, item in scratch.items() if item is not None},
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=1,
        thread_name="warpgroup",
        kernel_name=name,
        interpret=ops.interpret or False,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )
    return kernel(*inputs.values())


def _own_head(call: _Call) -> tuple[Any, Any]:
    """This thread block's batch element and head."""
    index = lax.axis_index("batch_and_head")
    heads = jnp.int32(call.num_heads)
    return lax.div(index, heads), lax.rem(index, heads)


def _rows(tile: Any) -> Any:
    return pl.ds(tile * BLOCK, BLOCK)


def _hide(call: _Call, ops: Ops, s: Array, q_tile: Any, kv_tile: Any) -> Array:
    """Scores with -inf where a key comes after the query."""
    if not call.is_causal:
        return s
    past = ops.iota((BLOCK,), 0) + (q_tile * BLOCK + 1)
    return tiles.hide(ops, s, tiles.RowBounds(None, past, None), kv_tile * BLOCK, None)


def _load(ops: Ops, ref: Ref, layout: Any = TILE) -> Array:
    """From any memory to registers, bank conflicts or not."""
    if ops.interpret is not None:
        return ref[...]
    return plgpu.load(ref, layout=layout, optimized=False)


def _store(ops: Ops, ref: Ref, x: Array) -> None:
    """From registers to any memory, bank conflicts or not."""
    if ops.interpret is None and hasattr(plgpu, "store"):  # JAX 0.12; before, the only way
        plgpu.store(ref, x, optimized=False)
    else:
        ref[...] = x


def _wait(refs: Mapping[str, Ref], name: str, slot: Any = None) -> None:
    """Waits for a barrier, or for one of several."""
    plgpu.barrier_wait(refs[name] if slot is None else refs[name].at[slot])


def _product(ops: Ops, a: Array, b: Ref, scratch: Ref | None, *, transpose_b: bool) -> Array:
    """``a @ b`` or ``a @ b.T`` of a in registers and b in shared memory, fp32."""
    columns = b.shape[0] if transpose_b else b.shape[1]

    def multiply(acc: Ref) -> Array:
        ops.matmul_registers(acc, a, b, transpose_b=transpose_b)
        return ops.load_accumulator(acc, wait=0)

    backing = None if scratch is None else scratch.at[0]
    return ops.with_accumulator(multiply, (BLOCK, columns), backing)


# 1: S and P in device memory.


def _naive(call: _Call, stage: Stage, ops: Ops, q: Array, k: Array, v: Array) -> Array:
    """S = Q K^T, P = softmax(S), O = P V."""
    square = (call.batch * call.num_heads, call.length, call.length)
    grid = {"batch_and_head": square[0], "q_tile": call.num_tiles}
    s = jax.ShapeDtypeStruct(square, jnp.float32)
    p = jax.ShapeDtypeStruct(square, call.dtype)
    acc = ops.accumulator_scratch(1, (BLOCK, BLOCK))
    tile = {"q_s": call.staging(stage), "k_s": call.operand(stage), "acc": acc}
    launch = functools.partial(_launch, ops)
    name = stage.kernel_name
    full = {"full": plgpu.Barrier(num_arrivals=2)}

    def scores(refs: dict[str, Ref]) -> None:
        batch, own_head = _own_head(call)
        q_tile, kv_tile = lax.axis_index("q_tile"), lax.axis_index("kv_tile")
        for x, at in (("q", q_tile), ("k", kv_tile)):
            source = refs[x].at[batch, _rows(at), own_head]
            plgpu.copy_gmem_to_smem(source, refs[f"{x}_s"], refs["full"])
        _wait(refs, "full")
        queries = _load(ops, refs["q_s"])
        s = _product(ops, queries, refs["k_s"], refs.get("acc"), transpose_b=True)
        s = _hide(call, ops, s * call.scale_log2, q_tile, kv_tile)
        head = lax.axis_index("batch_and_head")
        _store(ops, refs["s"].at[head, _rows(q_tile), _rows(kv_tile)], s)

    every_tile = grid | {"kv_tile": call.num_tiles}
    (s,) = launch(scores, {"q": q, "k": k}, {"s": s}, tile | full, every_tile, f"{name}_scores")

    def softmax(refs: dict[str, Ref]) -> None:
        head, rows = lax.axis_index("batch_and_head"), _rows(lax.axis_index("q_tile"))

        def over_tiles(body: Callable[[Any, Array, Any], Any], carry: Any) -> Any:
            def step(j: Any, carry: Any) -> Any:
                return body(j, _load(ops, refs["s"].at[head, rows, _rows(j)]), carry)

            return lax.fori_loop(0, call.num_tiles, step, carry)

        def exp(s: Array, m: Array) -> Array:
            return jnp.exp2(s - lax.broadcast_in_dim(m, s.shape, [0]))

        m = over_tiles(
            lambda _, s, m: jnp.maximum(m, s.max(axis=1)), ops.full_rows(BLOCK, -jnp.inf)
        )
        l = over_tiles(lambda _, s, l: l + exp(s, m).sum(axis=1), ops.full_rows(BLOCK, 0.0))

        def write(j: Any, s: Array, _: None) -> None:
            p = exp(s, m) * lax.broadcast_in_dim(1.0 / l, s.shape, [0])
            _store(ops, refs["p"].at[head, rows, _rows(j)], p.astype(call.dtype))

        over_tiles(write, None)

    (p,) = launch(softmax, {"s": s}, {"p": p}, {}, grid, f"{name}_softmax")

    def values(refs: dict[str, Ref]) -> None:
        batch, head = _own_head(call)
        q_tile = lax.axis_index("q_tile")
        weights = refs["p"].at[lax.axis_index("batch_and_head"), _rows(q_tile)]

        def multiply(acc: Ref) -> Array:
            def step(j: Any, _: None) -> None:
                source = refs["v"].at[batch, _rows(j), head]
                plgpu.copy_gmem_to_smem(source, refs["v_s"], refs["full"])
                _wait(refs, "full")
                ops.matmul_registers(acc, _load(ops, weights.at[:, _rows(j)]), refs["v_s"])
                ops.wait_matmuls(0)

            lax.fori_loop(0, call.num_tiles, step, None)
            return ops.load_accumulator(acc, wait=0)

        shape = (BLOCK, call.head_dim)
        o = ops.with_accumulator(multiply, shape, refs["acc"].at[0] if "acc" in refs else None)
        _store(ops, refs["out"].at[batch, _rows(q_tile), head], o.astype(call.dtype))

    acc = ops.accumulator_scratch(1, (BLOCK, call.head_dim))
    scratch = {"v_s": call.operand(stage), "acc": acc, "full": plgpu.Barrier()}
    outputs = {"out": call.array()}
    return launch(values, {"p": p, "v": v}, outputs, scratch, grid, f"{name}_values")[0]


# 2: O, l and m in device memory, a thread block for each head.


def _flash_attention_1(call: _Call, stage: Stage, ops: Ops, q: Array, k: Array, v: Array) -> Array:
    """Key tiles outside, query tiles inside."""

    def body(refs: dict[str, Ref]) -> None:
        batch, head = _own_head(call)
        state = {
            "o": lambda i: refs["o"].at[batch, _rows(i), head],
            "m": lambda i: refs["m"].at[batch, head, _rows(i)],
            "l": lambda i: refs["l"].at[batch, head, _rows(i)],
        }

        def fetch(barrier: str, **sources: Ref) -> None:
            for name, source in sources.items():
                plgpu.copy_gmem_to_smem(source, refs[f"{name}_s"], refs[barrier])
            _wait(refs, barrier)

        def outer(j: Any, _: None) -> None:
            keys = _rows(j)
            fetch("kv_full", k=refs["k"].at[batch, keys, head], v=refs["v"].at[batch, keys, head])
            lax.fori_loop(0, call.num_tiles, functools.partial(inner, j), None)

        def inner(j: Any, i: Any, _: None) -> None:
            fetch("q_full", q=refs["q"].at[batch, _rows(i), head])

            def old() -> tuple[Array, Array, Array]:
                fetch("state_full", **{name: at(i) for name, at in state.items()})
                m, l = (_load(ops, refs[f"{name}_s"], ROWS) for name in "ml")
                return _load(ops, refs["o_s"]), m, l

            def nothing() -> tuple[Array, Array, Array]:
                stats = tiles.first_stats(ops, BLOCK, partial_sums=False)
                return ops.full_tile((BLOCK, call.head_dim), 0.0), *stats

            queries = _load(ops, refs["q_s"])
            s = _product(ops, queries, refs["k_s"], refs.get("s_acc"), transpose_b=True)
            s = _hide(call, ops, s, i, j)
            o, m, l = lax.cond(j == 0, nothing, old)
            p, new, alpha = tiles.softmax_step(
                s, tiles.RowStats(m, l), call.scale_log2, lazy_growth=0.0
            )
            pv = _product(
                ops, p.astype(call.dtype), refs["v_s"], refs.get("o_acc"), transpose_b=False
            )
            kept, added = l * alpha / new.l, 1.0 / new.l
            o = o * lax.broadcast_in_dim(kept, o.shape, [0])
            o = o + pv * lax.broadcast_in_dim(added, o.shape, [0])
            for (name, at), x in zip(state.items(), (o, *new), strict=True):
                _store(ops, refs[f"{name}_s"], x)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(refs[f"{name}_s"], at(i))
            plgpu.wait_smem_to_gmem(0)

        lax.fori_loop(0, call.num_tiles, outer, None)

    rows = jax.ShapeDtypeStruct((call.batch, call.num_heads, call.length), jnp.float32)
    scratch = {
        "q_s": call.staging(stage),
        "k_s": call.operand(stage),
        "v_s": call.operand(stage),
        "o_s": plgpu.SMEM((BLOCK, call.head_dim), jnp.float32),
        "m_s": plgpu.SMEM((BLOCK,), jnp.float32),
        "l_s": plgpu.SMEM((BLOCK,), jnp.float32),
        "s_acc": ops.accumulator_scratch(1, (BLOCK, BLOCK)),
        "o_acc": ops.accumulator_scratch(1, (BLOCK, call.head_dim)),
        "q_full": plgpu.Barrier(),
        "kv_full": plgpu.Barrier(num_arrivals=2),
        "state_full": plgpu.Barrier(num_arrivals=3),
    }
    outputs = {"o": call.array(jnp.float32), "m": rows, "l": rows}
    grid = {"batch_and_head": call.batch * call.num_heads}
    inputs = {"q": q, "k": k, "v": v}
    o, _, _ = _launch(ops, body, inputs, outputs, scratch, grid, stage.kernel_name)
    return o.astype(call.dtype)


# 3 to 6: O, l and m in registers, a thread block for each query tile.


def _flash_attention_2(call: _Call, stage: Stage, ops: Ops, q: Array, k: Array, v: Array) -> Array:
    """Query tiles outside, in parallel; key tiles inside."""

    def body(refs: dict[str, Ref]) -> None:
        batch, head = _own_head(call)
        q_tile = lax.axis_index("q_tile")
        end = jnp.int32(call.num_tiles)
        if stage.prunes and call.is_causal:
            q_tile = call.num_tiles - 1 - q_tile  # the longest loops first
            end = q_tile + 1

        def load(j: Any) -> None:
            slot = lax.rem(j, jnp.int32(stage.num_buffers))
            for x in "kv":
                source = refs[x].at[batch, _rows(j), head]
                plgpu.copy_gmem_to_smem(source, refs[f"{x}_s"].at[slot], refs["full"].at[slot])

        def attend(o_acc: Ref) -> tuple[Array, tiles.RowStats]:
            def step(j: Any, stats: tiles.RowStats) -> tiles.RowStats:
                slot = lax.rem(j, jnp.int32(stage.num_buffers))
                _wait(refs, "full", slot)
                queries = _load(ops, refs["q_s"])
                key = refs["k_s"].at[slot]
                s = _product(ops, queries, key, refs.get("s_acc"), transpose_b=True)
                if stage.prunes:
                    s = lax.cond(j == q_tile, lambda: _hide(call, ops, s, q_tile, j), lambda: s)
                else:
                    s = _hide(call, ops, s, q_tile, j)
                p, stats, alpha = tiles.softmax_step(s, stats, call.scale_log2, lazy_growth=0.0)
                ops.rescale(o_acc, alpha)
                ops.matmul_registers(o_acc, p.astype(call.dtype), refs["v_s"].at[slot])
                ops.wait_matmuls(0)
                following = j + stage.num_buffers
                pl.when(following < end)(lambda: load(following))
                return stats

            first = tiles.first_stats(ops, BLOCK, partial_sums=False)
            stats = lax.fori_loop(0, end, step, first)
            return ops.load_accumulator(o_acc, wait=0), stats

        plgpu.copy_gmem_to_smem(
            refs["q"].at[batch, _rows(q_tile), head], refs["q_s"], refs["q_full"]
        )
        for j in range(stage.num_buffers):
            pl.when(j < end)(functools.partial(load, jnp.int32(j)))
        _wait(refs, "q_full")
        backing = refs["o_acc"].at[0] if "o_acc" in refs else None
        o, stats = ops.with_accumulator(attend, (BLOCK, call.head_dim), backing)
        inverse, _ = tiles.finish(stats)
        o = o * lax.broadcast_in_dim(inverse, o.shape, [0])
        _store(ops, refs["q_s"], o.astype(call.dtype))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(refs["q_s"], refs["out"].at[batch, _rows(q_tile), head])
        plgpu.wait_smem_to_gmem(0)

    scratch = {
        "q_s": call.staging(stage),
        "k_s": call.operand(stage, stage.num_buffers),
        "v_s": call.operand(stage, stage.num_buffers),
        "s_acc": ops.accumulator_scratch(1, (BLOCK, BLOCK)),
        "o_acc": ops.accumulator_scratch(1, (BLOCK, call.head_dim)),
        "q_full": plgpu.Barrier(),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=stage.num_buffers),
    }
    grid = {"batch_and_head": call.batch * call.num_heads, "q_tile": call.num_tiles}
    inputs, outputs = {"q": q, "k": k, "v": v}, {"out": call.array()}
    return _launch(ops, body, inputs, outputs, scratch, grid, stage.kernel_name)[0]


STAGES = {
    1: Stage("naive", _naive),
    2: Stage("FlashAttention-1", _flash_attention_1),
    3: Stage("FlashAttention-2", _flash_attention_2),
    4: Stage("causal pruning", _flash_attention_2, prunes=True),
    5: Stage("swizzle", _flash_attention_2, prunes=True, swizzles=True),
    6: Stage("ring", _flash_attention_2, prunes=True, swizzles=True, num_buffers=2),
}
