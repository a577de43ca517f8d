"""How an append is cut over several devices: by heads, with whole pages on each.

XLA knows nothing about a custom call and would gather the pools on every device. Here it learns,
as a Shardy rule, which axes belong together, and is given the call on one part. (Attention itself
has its rule from :mod:`jax_flash`, for all kernels alike.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def append(
    call: Callable[..., Any], arrays: Sequence[jax.Array], pool_axes: str
) -> Callable[..., Any]:
    """An append with a rule for its partitioning.

    Args:
        call: takes the arrays of :func:`cuda_ffi.backend.append`, gives the pools.
        arrays: these arrays.
        pool_axes: a letter for each axis of a pool but the last, ``g`` for the heads.
    """
    is_fused = arrays[0].ndim == 5
    axes = pool_axes[0] + "t" * is_fused + pool_axes[1:]
    pools = ((*axes, "d"), ("e",) if is_fused else (*axes, "v"))
    heads_axis = axes.index("g")
    num_heads = arrays[0].shape[heads_axis]
    value = "d" if is_fused else "v"
    # Of what is absent, or one number for all heads, every device has all.
    scales = (("g",) if x.shape == (num_heads,) else (f"s{i}",) for i, x in enumerate(arrays[5:7]))
    angles = ((f"a{i}" if x.size == 0 else "n", f"r{i}") for i, x in enumerate(arrays[7:]))
    operands = (*pools, ("n", "g", "d"), ("n", "g", value), ("n",), *scales, *angles)

    def partition(mesh: Mesh, arguments: Any, results: Any) -> Any:
        del results
        spec = arguments[0].sharding.spec
        heads = spec[heads_axis] if heads_axis < len(spec) else None

        def sharding(axes: tuple[str, ...]) -> NamedSharding:
            return NamedSharding(mesh, PartitionSpec(*(heads if x == "g" else None for x in axes)))

        return mesh, call, tuple(map(sharding, pools)), tuple(map(sharding, operands))

    letters = dict.fromkeys(x for axes in operands for x in axes)
    partitioned = custom_partitioning(call)
    partitioned.def_partition(
        partition=partition,
        sharding_rule=f"{_text(operands)} -> {_text(pools)}",
        need_replication_factors=tuple(x for x in letters if x != "g"),  # in this order
    )
    return partitioned


def _text(arrays: tuple[tuple[str, ...], ...]) -> str:
    return ", ".join(map(" ".join, arrays))
