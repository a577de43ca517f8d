"""What the backward kernel has in shared memory: see :mod:`pallas_kernels.backward`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import tiles
from pallas_kernels.backward_config import GROUPS, BackwardConfig, dq_shares, transposes_bias
from pallas_kernels.backward_tiles import KEY_SUMS, ROWS, key_vectors
from pallas_kernels.config import Problem
from pallas_kernels.ops import Ops


def query_swizzles(problem: Problem, config: BackwardConfig) -> dict[str, int]:
    """Swizzles of Q and K, and of dO and V, in bytes.

    A slice of an operand must consist of whole swizzled tiles, and both operands be alike: those of
    dQ, of which one is a part of K, and so those of S'. With own keys V and dO are free.
    """
    shares = tiles.swizzle_bytes(math.gcd(*dq_shares(problem, config)), jnp.bfloat16)
    widest = {"q": shares, "do": shares if config.own_gradients else 128}
    dims = {"q": problem.head_dim, "do": problem.value_dim}
    return {x: min(widest[x], tiles.swizzle_bytes(dims[x], jnp.bfloat16)) for x in dims}


def row_vectors(problem: Problem) -> dict[str, tuple[str, ...]]:
    """Names of what comes with a tile of Q or dO and has a number for each of its rows."""
    of_q = ["lse"]
    if problem.dropout_rate > 0.0:
        of_q.append("row_keys")
    if problem.parts == 1 and problem.mask.kv_segments is not None:
        of_q.append("q_segments")
    return {"q": tuple(of_q), "do": ("delta",)}


def scratch_tree(
    problem: Problem, config: BackwardConfig, ops: Ops, extra: Sequence[str] = ()
) -> dict[str, Any]:
    """Shared memory and barriers, by name; ``extra`` are the gradients of terms."""
    key_sums = sum(name in extra for name in KEY_SUMS)
    d, dv, dtype = problem.head_dim, problem.value_dim, problem.dtype
    block_q, block_kv, stages = config.block_q, config.block_kv, config.ds_buffers
    kv_stages = config.kv_stages
    shares = dq_shares(problem, config)
    is_unequal = shares[0] != shares[1]
    scores = (ROWS, config.part_columns)
    swizzles = query_swizzles(problem, config)

    def buffer(*shape: int) -> Any:
        return tiles.operand_buffer(shape, dtype, swizzles["q"])

    def value_buffer(*shape: int) -> Any:
        return tiles.operand_buffer(shape, dtype, swizzles["do"])

    def dq_buffer(count: int, share: int) -> Any:
        shape = count, ROWS, config.dq_columns or share
        return tiles.buffer(shape, jnp.float32, tiles.swizzle_bytes(d, jnp.float32))

    def barriers(count: int = 1, arrivals: int = GROUPS) -> Any:
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)

    # The parts of fp32 leave no room for what masks compare.
    of_keys = key_vectors(problem) if problem.parts == 1 else ()
    tree = {
        "k_s": buffer(kv_stages, block_kv, d),
        "v_s": None if config.dq_warpgroup else value_buffer(kv_stages, block_kv, dv),
        "q_s": buffer(config.q_stages, block_q, d),
        "do_s": value_buffer(config.do_stages, block_q, dv),
        "ds_s": buffer(stages, block_q // ROWS, block_kv, ROWS),
        "of_keys_s": plgpu.SMEM((kv_stages, len(of_keys), block_kv), jnp.int32)
        if of_keys
        else None,
        "k_full": barriers(kv_stages, problem.parts + len(of_keys)),
        "v_full": barriers(kv_stages, problem.parts),
        "kv_empty": barriers(kv_stages),
        "sums_s": plgpu.SMEM((GROUPS, key_sums, ROWS), jnp.float32) if key_sums else None,
        "meeting": None if ops.interpret is None else plgpu.Barrier(num_arrivals=GROUPS),
        "s_acc": ops.accumulator_scratch(GROUPS * config.parts, scores),
        "dp_acc": ops.accumulator_scratch(GROUPS * config.parts, scores),
        "dk_acc": ops.accumulator_scratch(GROUPS, (ROWS, d)),
        "dv_acc": ops.accumulator_scratch(GROUPS, (ROWS, dv)),
        "dq_acc": ops.accumulator_scratch(config.consumers, (ROWS, shares[0])),
        "dq_rest_acc": ops.accumulator_scratch(GROUPS, (ROWS, shares[1])) if is_unequal else None,
    }
    # Where rows may have to be zeroed tiles have barriers twice: ready, and behind these come.
    ways = 2 if problem.can_have_empty_rows else 1
    rings = {"q": config.q_stages, "do": config.do_stages}
    for x, names in row_vectors(problem).items():
        tree[f"{x}_full"] = barriers(ways * rings[x], problem.parts + len(names))
        tree[f"{x}_empty"] = barriers(rings[x])
        for name in names:
            number = jnp.float32 if name in ("lse", "delta") else jnp.int32
            tree[f"{name}_s"] = plgpu.SMEM((rings[x], block_q), number)
    if not config.adds_registers:
        tree["dq_s"] = dq_buffer(1 if is_unequal or config.dq_warpgroup else GROUPS, shares[0])
        tree["dq_rest_s"] = dq_buffer(1, shares[1]) if is_unequal else None
    if problem.parts > 1:
        tree["part_acc"] = ops.accumulator_scratch(GROUPS, (ROWS, max(d, dv)))
    is_alike = not (is_unequal or config.dq_warpgroup or config.adds_registers)
    if "dbias" in extra and not (is_alike and (config.dq_columns or shares[0]) == ROWS):
        # Where dQ is staged, if anywhere, rows are of another length, or by another warpgroup.
        makers = 1 if config.own_gradients else GROUPS
        tree["dbias_s"] = tiles.buffer((makers, 32, ROWS), jnp.float32)
    if problem.bias is not None and problem.has_bias_tiles and config.bias_stages:
        shape = block_kv, config.part_columns
        if transposes_bias(problem, config):
            shape = shape[::-1]
        tree |= {
            "bias_s": tiles.buffer((config.bias_stages, *shape), problem.bias.dtype),
            "bias_full": barriers(config.bias_stages, 1),
            "bias_empty": barriers(config.bias_stages),
        }
    if config.dq_warpgroup:  # K and V come in fp32, and have places, and barriers, of their own
        sizes = {"k": d, "v": dv}
        tree |= {f"{x}_wide_s": tiles.buffer((block_kv, n), dtype) for x, n in sizes.items()}
        once = ("k_full", "v_full", "v_empty", "kv_full", "kv_empty")  # kv: the parts of K
        tree |= {name: barriers(arrivals=1) for name in once} | {"k_empty": barriers()}
    if config.own_gradients:
        if not config.hands_over_in_ds:
            tree["p_s"] = tiles.buffer((block_kv, block_q), dtype, swizzles["q"])
        tree |= {
            "p_full": barriers(arrivals=1),
            "p_empty": barriers(arrivals=1),
            "ds_full": barriers(stages, arrivals=1),
            "ds_empty": barriers(stages, arrivals=1),
        }
    else:
        tree |= {"ds_full": barriers(stages), "ds_empty": barriers(stages)}
        # TMA wants a whole buffer: what is narrower than a tile of dS' cannot be staged in one.
        tree |= {
            f"{name}_rest_s": value_buffer(GROUPS, ROWS, size % ROWS)
            for name, size in (("dk", d), ("dv", dv))
            if size % ROWS
        }
    return {name: item for name, item in tree.items() if item is not None}
