"""How an append is cut over several devices: by heads, with whole pages on each.

XLA knows nothing about a custom call and would gather the pools on every device. Here it learns,
as a Shardy rule, which axes belong together, and is given the call on one part. (Attention itself
has its rule from :mod:`jax_flash`, for all kernels alike.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def append(call: Callable[..., Any], pool_axes: str) -> Callable[..., Any]:
    """An append with a rule for its partitioning.

    Args:
        call: takes two pools, tokens ``[N, Hk, D]`` for each, and slots; gives the pools.
        pool_axes: a letter for each axis of a pool but the last, ``g`` for the heads.
    """
    pools = ((*pool_axes, "d"), (*pool_axes, "v"))
    operands = (*pools, ("n", "g", "d"), ("n", "g", "v"), ("n",))
    heads_axis = pool_axes.index("g")

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
