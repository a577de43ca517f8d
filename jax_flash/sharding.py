"""Meshes with explicit axes: attention keeps the sharding of its queries.

Under ``jax.jit`` with automatic axes, and inside ``shard_map``, nothing here is needed.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_flash.spec import Operands

Array = jax.Array


def keep_query_sharding(
    attend: Callable[[Operands], tuple[Array, Array]], operands: Operands
) -> tuple[Array, Array]:
    """Runs ``attend``; on a mesh with explicit axes it is partitioned automatically inside.

    Args:
        attend: computes out ``[B, Tq, Hq, Dv]`` and lse ``[B, Tq, Hq]``.
        operands: the arrays of the call.

    Returns:
        What ``attend`` returns, sharded over batch, queries and heads as the query is.
    """
    sharding = jax.typeof(operands.query).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return attend(operands)
    spec = PartitionSpec(*sharding.spec[:3])
    shard = NamedSharding(sharding.mesh, spec)
    return jax.sharding.auto_axes(attend, out_sharding=(shard, shard))(operands)
