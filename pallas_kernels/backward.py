"""Backward attention for Hopper: dq, dk and dv in one pass over queries, for each tile of keys.

For a tile of keys j and each tile of queries i that sees some of it (Dao 2023, FlashAttention-2,
algorithm 2; Shah et al. 2024, FlashAttention-3, appendix B), everything transposed:

    S'  = K_j Q_i^T        P'  = exp2(S' c - lse)          c = scale * log2(e); lse in log2 units
    dP' = V_j dO_i^T       dS' = P' * (dP' - delta)        delta = rowsum(dO * out) - dlse
    dV += P' dO_i          dK += dS' Q_i                   fp32, in registers until the tile ends
    dQ_i += dS'^T K_j                                      fp32, added up in global memory

so that lse and delta belong to columns. Five products; nothing is summed over thread blocks but dQ,
whose last bits therefore depend on their order. The queries of all heads that share a key head are
walked in turn, which sums dK and dV over them.

A thread block is two consumer warpgroups (in fp32 up to D = 64 three) and a producer (TMA),
persistent, and walks its row of the schedule (:func:`pallas_kernels.schedule.make_for_keys`). Two
layouts:

    own keys        D and Dv up to 128. Each consumer has 64 keys; P' and dS' stay in its registers
                    as operands of dV and dK. dS' also goes through shared memory, and each makes
                    half of dQ, or nearly so in whole tiles, one step late: so neither waits for the
                    other, and one works on its softmax while the other occupies the tensor cores
                    (they take turns).
    own gradients   up to 256, where dK and dV of the same keys do not fit into one warpgroup; and
                    in fp32. Both have the same 64 keys: one makes S', P' and dV, the other dP', dS'
                    and dK. P' (rounded) and dS' go through shared memory. Each makes half of dQ,
                    that with dV one step late, so it never waits for the other's dS' of a step.

dQ is added by TMA from shared memory; at D = 256, where every query sees all keys, from registers
in the order in which threads hold it: it is put in order when it is rounded.

Queries that need no mask come without a test. In the rest scores and dS' are replaced where a key
is hidden, and K_j is cleaned of NaN and inf once, because dQ multiplies it by zeros. Where lengths
are known at run time only, what is compared are the first and last query of each key, which come to
shared memory with K_j. Rows with lse = +inf have P' = 0: that is how the launcher marks rows that
see nothing, or see NaN. Where the mask or a bias can leave rows without keys, such rows of Q and dO
may hold anything: if there are any, the producer zeroes them in each tile before it hands it over,
which costs consumers nothing.

Terms (:mod:`pallas_kernels.terms`) are compile-time options. What the logits of a query have in
common goes into lse, outside, unless a soft cap stands between. With a soft cap c tanh(x / c), dS'
has the factor 1 - tanh^2. Dropout, drawn anew, makes P' negative where it drops: dV then takes the
rest, and dS' = P' * (dP' / (1 - rate) - delta) or |P'| * (0 - delta). A boolean mask has lists of
the query tiles that see a key tile, a bias comes tile by tile and is transposed on its way into
registers, or before if it is in fp32. Gradients of terms are computed where somebody asks for
them: that of a full bias is dS', in its own shape, written in its type where each batch element has
a bias of its own, else added up in fp32 (where all elements visit the same tiles, the first writes,
and the others wait for that and then add); those of a bias of one row and of ALiBi slopes are sums
over queries, kept in registers; those of sinks and of a bias of one column are known without the
kernel, the latter unless there is a soft cap.

fp32 (:mod:`pallas_kernels.split`), up to D = 128: own gradients, three parts of each operand. Up to
D = 64 P' is handed over in fp32, and K or V stays in registers as an operand of S' or dP', which
halves what that product reads of shared memory. Without terms a third consumer makes dQ there, all
of its columns at once, so that nobody makes part of dQ between its own products; K and V then come
in fp32, the next tile's while this one's are in registers. Above D = 64 shared memory has room for
one Q and one dO, and P' is handed over, in parts, in the place of dS'. dV and dK of a step get
accumulators of their own, as dQ has anyway.

Constraints: those of the forward kernel, with head dims of
:func:`pallas_kernels.backward_config.padded_dims`.

Test:  python -m pytest tests/test_pallas_backward.py    Compile without a GPU:  python -m bench aot
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_flash.mask import Mask
from pallas_kernels import backward_terms, fragments, tiles
from pallas_kernels import schedule as schedules
from pallas_kernels.backward_config import (
    GROUPS,
    BackwardConfig,
    default_config,
    head_group,
)
from pallas_kernels.backward_layouts import OwnGradients, OwnKeys
from pallas_kernels.backward_scratch import scratch_tree
from pallas_kernels.backward_terms import Wanted
from pallas_kernels.backward_tiles import QUERY_BOUNDS
from pallas_kernels.config import Problem
from pallas_kernels.ops import Ops
from pallas_kernels.split import split, split_in_one
from pallas_kernels.terms import Arrays

_SLAB_BYTES = 2**30  # of all copies of dq that a deterministic launch may add up
_ADDED_BYTES = 2**27  # of a bias's gradient, up to which adding to zeros is no slower

Array = jax.Array
Ref = Any


def attention_backward(
    problem: Problem,
    q: Array,
    k: Array,
    v: Array,
    do: Array,
    lse: Array,
    delta: Array,
    mask: Mask,
    arrays: Arrays | None = None,
    *,
    wanted: Wanted | None = None,
    deterministic: bool = False,
    config: BackwardConfig | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[Array, Array, Array, dict[str, Array]]:
    """Launches the kernel.

    With ``deterministic`` it is launched once for every few key tiles, and no two thread blocks of
    a launch add to the same place: dq is then summed in one order.

    Args:
        problem: static facts.
        q: ``[B, Tq', Hq, D]`` with Tq' = Tq rounded up to a multiple of 8.
        k: ``[B, Tk', Hk, D]``, Tk' likewise.
        v: ``[B, Tk', Hk, Dv]``.
        do: ``[B, Tq', Hq, Dv]``.
        lse: fp32 ``[B, Hq, Tq]``, natural; +inf where a row has no gradient: q and do must be
            finite there, unless :attr:`~pallas_kernels.config.Problem.can_have_empty_rows`.
        delta: fp32 ``[B, Hq, Tq]``, finite there.
        mask: with its arrays.
        arrays: of the terms; None is none.
        wanted: gradients of terms; None is none.
        deterministic: whether dq must be bit-equal from run to run, as dk and dv always are.
        config: compile-time options; None takes :func:`default_config`.
        interpret: run in interpret mode, on a CPU.

    Returns:
        dq fp32 ``[B, Tq'', Hq, D]`` with surplus rows, times ``scale`` where q is fp32 and without
        that factor where it has 16 bits;
        dk ``[B, Tk', Hk, D]`` and dv ``[B, Tk', Hk, Dv]``; and what
        :func:`pallas_kernels.backward_terms.sums` declares: ``dbias`` in fp32 or the bias's type.
        Where thread blocks waited for others also ``dbias_rows``, by which these told how far
        they were.
    """
    config = config or default_config(problem)
    ops = Ops(interpret, problem.parts)
    sizes = (problem.q_len, problem.kv_len, config.block_q, config.block_kv)
    inputs = {}
    if mask.array is None:
        ranges, edges = schedules.find_query_ranges(mask, *sizes)
    else:
        heads = (problem.num_q_heads, problem.num_kv_heads)
        inputs["visits"], ranges = schedules.find_query_visits(mask, problem.batch, *heads, *sizes)
        edges = schedules.QueryEdges()
    batch, num_heads, num_kv_tiles = problem.batch, problem.num_kv_heads, ranges.lo.shape[1]
    num_blocks = min(problem.num_blocks, batch * num_heads * num_kv_tiles)
    if interpret is not None and not deterministic:
        num_blocks = 1  # adding to dq is not atomic there
    surplus = -problem.q_len % config.block_q
    if not mask.has_static_ranges:
        num_keys = num_kv_tiles * config.block_kv
        bounds = schedules.find_query_bounds(mask, problem.q_len, problem.kv_len, num_keys)
        inputs |= dict(zip(QUERY_BOUNDS, bounds, strict=True))
    if mask.q_segments is not None and mask.kv_segments is not None:
        inputs["q_segments"] = jnp.pad(mask.q_segments, ((0, 0), (0, surplus)))
        kv_surplus = -problem.kv_len % config.block_kv
        inputs["kv_segments"] = jnp.pad(mask.kv_segments, ((0, 0), (0, kv_surplus)))
    rows, keys = problem.q_len + surplus, num_kv_tiles * config.block_kv
    arrays = arrays or Arrays()
    extra = backward_terms.sums(problem, wanted or Wanted(), rows, keys)
    config = fitting(problem, config, tuple(extra))
    scratch = scratch_tree(problem, config, ops, tuple(extra))
    read, lse = backward_terms.inputs(problem, mask, arrays, lse, rows, keys, config)
    inputs |= read
    # Rows past the end, like rows without a gradient, have probabilities of exp2(0 - inf).
    padding = ((0, 0), (0, 0), (0, surplus))
    unit = 1.0 if problem.is_wide else tiles.LOG2_E
    # XLA's GPU compiler gets the transposition wrong that lse may come from, if it has the
    # comparison below in the same kernel (seen with JAX 0.11.2).
    lse = jnp.pad(lse * unit, padding, constant_values=jnp.inf)
    lse, zero = lax.optimization_barrier((lse, jnp.zeros((), jnp.float32)))
    if problem.can_have_empty_rows:
        has_blank = jnp.isposinf(lse[:, :, : problem.q_len]).any()
        inputs["has_blank"] = has_blank.astype(jnp.int32)[None]
    operands = {"q": q, "k": k, "v": v, "do": do}
    if problem.parts > 1:
        # A bias leaves no registers for more TMA descriptors.
        make = split if problem.bias is None else split_in_one
        before = ("q", "do") if config.dq_warpgroup else tuple(operands)
        operands |= {name: make(operands[name]) for name in before}
    inputs |= operands | {"lse": lse, "delta": jnp.pad(delta, padding)}
    dq_shape = (batch, problem.q_len + surplus, problem.num_q_heads, problem.head_dim)
    slabs = 1
    if deterministic:
        affordable = _SLAB_BYTES // max(4 * math.prod(dq_shape), 1)
        slabs = max(min(num_kv_tiles, num_blocks // (batch * num_heads), affordable), 1)
    if config.adds_registers:
        dq_shape = (batch, dq_shape[2], *fragments.shape(dq_shape[1], dq_shape[3]))
    dq_shape = (slabs * batch, *dq_shape[1:])
    table, writes_bias, written, zeroed = None, False, {}, {}
    if not deterministic:
        group = head_group(problem, config)
        # Batch elements that share a bias read it, and add to its gradient, one after another.
        is_shared = problem.has_bias_tiles and problem.bias.shape[0] == 1
        table = schedules.make_for_keys(
            ranges, batch, num_heads, num_blocks, group, batch_first=is_shared
        )
        writes_bias = "dbias" in extra and _writes_bias(problem, config, ranges, table)
        if writes_bias:
            written, zeroed = _bias_buffers(problem, config, ranges, extra.pop("dbias"))
    # A deterministic launch writes some rows of dk and dv, another launch the others.
    sums = (*(("dq", "dk", "dv") if deterministic else ("dq",)), *extra, *zeroed)
    outputs = {} if deterministic else {"dk": k, "dv": v, **written}

    def body(*refs: Ref, **buffers: Ref) -> None:
        named = dict(zip(("schedule", *inputs, *sums, *outputs), refs, strict=True))
        layout = OwnGradients if config.own_gradients else OwnKeys
        layout(problem, config, ops, edges, named | buffers, writes_bias).run()

    kernel = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs.values()],
        scratch_types=scratch,
        grid=(num_blocks,),
        grid_names=("block",),
        num_threads=config.consumers + 1,
        thread_name="warpgroup",
        kernel_name="jax_flash_backward",
        interpret=interpret or False,
        compiler_params=plgpu.CompilerParams(
            approx_math=problem.parts == 1,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )

    def add_up(refs: Any) -> None:
        dq, dk, dv, *others = refs
        if not deterministic:
            num_added = len(others) - len(written)
            added, replaced = others[:num_added], (dk, dv, *others[num_added:])
            results = kernel(jnp.asarray(table), *inputs.values(), dq, *added)
            for ref, result in zip(replaced, results, strict=True):
                ref[...] = result
            return
        rounds = schedules.make_in_rounds(ranges, batch, num_heads, num_blocks, slabs)
        tables = jnp.asarray(rounds)

        def launch(number: Any, _: None) -> None:
            kernel(tables[number], *inputs.values(), dq, dk, dv, *others)

        lax.fori_loop(0, tables.shape[0], launch, None)

    # Not jax.new_ref: its effect would be seen outside, where custom derivatives know none.
    # Inside shard_map do may vary over a mesh, of which a kernel's reference must not by its type.
    depends = not jax.typeof(do).manual_axis_type.varying
    depends = depends and do.size == math.prod(dq_shape) and do.dtype.itemsize == 2
    zeros = [_zeros_from(do, dq_shape) if depends else jnp.full(dq_shape, zero)]
    zeros += [jnp.zeros_like(k), jnp.zeros_like(v)]
    of_terms = extra | zeroed | written
    zeros += [jnp.zeros(x.shape, x.dtype) for x in of_terms.values()]
    dq, dk, dv, *others = pl.run_state(add_up)(zeros)
    dq = dq.reshape(slabs, batch, *dq_shape[1:]).sum(axis=0) if slabs > 1 else dq
    dq = fragments.to_rows(dq) if config.adds_registers else dq
    found = dict(zip(of_terms, others, strict=True))
    if "dbias_rows" in found:
        visited = _visited(problem, config, ranges, rows)
        found["dbias"] = _zeros_elsewhere(found["dbias"], visited)
    return dq, dk, dv, found


def _zeros_from(x: Array, shape: tuple[int, ...]) -> Array:
    """fp32 zeros that XLA believes to be made from an array of 16-bit numbers.

    Then it writes them in the kernel that reads these for delta.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint16)
    return (bits & lax.optimization_barrier(jnp.uint16(0))).astype(jnp.float32).reshape(shape)


def _writes_bias(
    problem: Problem, config: BackwardConfig, ranges: schedules.QueryRanges, table: Any
) -> bool:
    """Whether a bias's gradient is written tile by tile, not added to zeros.

    A tile must be of one head. Where batch elements share the bias one of them writes, in fp32, and
    the others wait for it and add, which saves zeros that would be written and read again: then
    thread blocks must be able to wait for each other, all elements must visit the same tiles, known
    at trace time, and it pays off only well beyond what the L2 cache holds.
    """
    bias = problem.bias
    if config.own_gradients or bias.shape[1] != problem.num_q_heads:
        return False
    if bias.shape[0] == problem.batch:
        return True
    visited = _visited(problem, config, ranges, problem.q_len)
    if visited is None or 4 * math.prod(bias.shape) < _ADDED_BYTES:
        return False
    if bias.dtype == jnp.float32 and not visited.all():
        return False  # zeros elsewhere would take a pass of their own, with no conversion to be in
    if not (problem.blocks_meet and isinstance(table, np.ndarray)):
        return False
    return schedules.can_await_first(table, problem.num_kv_heads)


def _bias_buffers(
    problem: Problem,
    config: BackwardConfig,
    ranges: schedules.QueryRanges,
    dbias: jax.ShapeDtypeStruct,
) -> tuple[dict[str, jax.ShapeDtypeStruct], dict[str, jax.ShapeDtypeStruct]]:
    """What holds a bias's gradient that is written: buffers of which nothing is read, and zeros.

    ``dbias`` is what it would be added to.
    """
    if problem.bias.shape[0] < problem.batch:
        counters = problem.num_q_heads, ranges.lo.shape[1], GROUPS
        return {"dbias": dbias}, {"dbias_rows": jax.ShapeDtypeStruct(counters, jnp.int32)}
    own = {"dbias": jax.ShapeDtypeStruct(dbias.shape, problem.bias.dtype)}
    visited = _visited(problem, config, ranges, dbias.shape[2])
    return (own, {}) if visited is not None and visited.all() else ({}, own)


def _visited(
    problem: Problem, config: BackwardConfig, ranges: schedules.QueryRanges, rows: int
) -> np.ndarray | None:
    """Which tiles are visited, ``[query tiles, key tiles]``; None if it varies, or is not known."""
    is_known = problem.mask.array is None and isinstance(ranges.lo, np.ndarray)
    if not is_known or len(ranges.lo) > 1:
        return None
    q_tile = np.arange(-(-rows // config.block_q))[:, None]
    return (ranges.lo[0] <= q_tile) & (q_tile < ranges.hi[0])


def _zeros_elsewhere(dbias: Array, visited: np.ndarray) -> Array:
    """A bias's gradient ``[B|1, Hq, rows, keys]`` with zeros where no tile has been written."""
    if visited.all():
        return dbias
    rows, keys = (size // tiles for size, tiles in zip(dbias.shape[2:], visited.shape, strict=True))
    tiled = dbias.reshape(*dbias.shape[:2], visited.shape[0], rows, visited.shape[1], keys)
    return jnp.where(visited[:, None, :, None], tiled, 0.0).reshape(dbias.shape)


def fitting(problem: Problem, config: BackwardConfig, extra: Sequence[str]) -> BackwardConfig:
    """The configuration, or less of it where gradients of terms take the room.

    Args:
        problem: static facts.
        config: options.
        extra: what :func:`pallas_kernels.backward_terms.sums` declares.

    Raises:
        ValueError: not even that fits into shared memory.
    """
    ops = Ops(None, problem.parts)  # as on a GPU, also where the kernel is interpreted

    def smem_bytes(config: BackwardConfig) -> int:
        return tiles.smem_bytes(scratch_tree(problem, config, ops, extra))

    while (taken := smem_bytes(config)) > tiles.MAX_SMEM_BYTES:
        # A second K and V, a tile of the bias, or the second dS' gives way.
        if config.kv_stages > 1:
            less = {"kv_stages": 1}
        elif config.bias_stages:
            less = {"bias_stages": config.bias_stages - 1}
        elif config.own_gradients and config.ds_buffers > 1:
            less = {"ds_buffers": 1}
        else:
            raise ValueError(
                f"{config} takes {taken} bytes of shared memory of {tiles.MAX_SMEM_BYTES}"
            )
        config = dataclasses.replace(config, **less)
    return config
