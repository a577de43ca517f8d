"""Attention on several devices: what of a call may be split over them, and how.

A kernel is opaque to XLA's partitioner, which without a rule would gather all operands on every
device. :func:`partitioned` gives the rule: batch elements and heads are independent, so that each
device runs the kernel on its own; everything else must be whole.

On a mesh with explicit axes, :func:`keep_query_sharding` says what the results look like. Inside
``shard_map`` a kernel sees one device's part; what is left to say there is over which mesh axes its
results vary (:func:`vary_alike`), which ``check_vma`` wants to know.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_flash.spec import AttentionSpec, Gradients, Operands, page_axes, wide_dtype

Array = jax.Array

# What an axis of an array stands for, if it may be split; None for an axis that must be whole.
BATCH, Q_HEADS, KV_HEADS = "batch", "query heads", "key heads"
Roles = tuple[str | None, ...]


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


def roles_of_operands(spec: AttentionSpec, operands: Operands) -> Any:
    """The roles of each array's axes, in a tree like ``operands`` with :data:`Roles` as leaves."""
    sizes = {BATCH: spec.batch, Q_HEADS: spec.num_q_heads, KV_HEADS: spec.num_kv_heads}
    if spec.page_layout is None:
        key: Roles = (BATCH, None, KV_HEADS, None)
    else:
        key = tuple(KV_HEADS if i == page_axes(spec.page_layout)[0] else None for i in range(4))
    named: dict[str, Roles] = {
        "query": (BATCH, None, Q_HEADS, None),
        "key": key,
        "value": key,
        "kv_pages": (None, *key),
        "k_scale": key[:-1],
        "v_scale": key[:-1],
        "bias": (BATCH, Q_HEADS, None, None),
        "array": (BATCH, Q_HEADS, None, None),
        "alibi_slopes": (BATCH, Q_HEADS),
        "sinks": (BATCH, Q_HEADS),
    }

    def roles(path: Any, x: Any) -> Roles:
        wanted = named.get(path[-1].name, (BATCH,))
        wanted += (None,) * (len(x.shape) - len(wanted))
        # Where an axis is broadcast, every device has all of it.
        return tuple(
            role if role is not None and size == sizes[role] and size > 1 else None
            for role, size in zip(wanted, x.shape, strict=True)
        )

    return jax.tree_util.tree_map_with_path(roles, operands)


def roles_of_results(spec: AttentionSpec) -> tuple[Roles, Roles]:
    """Of out and lse."""
    query: Roles = roles_of_operands(spec, spec.arrays).query
    return query, query[:3]


def roles_of_gradients(spec: AttentionSpec) -> Gradients:
    """Of the gradients of the operands."""
    operands = roles_of_operands(spec, spec.arrays)
    roles: dict[str, Any] = {
        name: None if name in spec.constants else getattr(operands, name)
        for name in Gradients._fields
    }
    return Gradients(**roles)


def partitioned(
    function: Callable[..., Any], spec: AttentionSpec, arguments: Any, roles_in: Any, roles_out: Any
) -> Any:
    """``function(*arguments)``, run by each device on its own batch elements and heads.

    Which those are, the query's sharding decides. Such a program cannot be exported for several
    devices (a limit of JAX's custom partitioning); one with ``shard_map`` can.

    Args:
        function: of arrays, whole or a device's part; returns a tree of arrays.
        spec: of the whole call.
        arguments: tuple of trees of arrays.
        roles_in: tuple of trees like them, with :data:`Roles` as leaves.
        roles_out: likewise for what ``function`` returns. A result that has no batch axis, or no
            axis of heads, is a sum over them: it is summed over the devices, in fp32.
    """
    varying = _varying_axes(arguments)
    if varying:
        return _vary(function(*arguments), varying)
    if jax.device_count() == 1:
        return function(*arguments)
    # They take a while to import, and one device does not need them.
    from jax.experimental.custom_partitioning import custom_partitioning
    from jax.extend.core import jaxpr_as_fun

    traced, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    if traced.effects:  # of interpret mode, which calls back
        return function(*arguments)
    flat_roles_in, flat_roles_out = _flat(roles_in), _flat(roles_out)
    structure = jax.tree.structure(arguments)

    def flat_function(*leaves: Array) -> list[Array]:
        return jax.tree.leaves(function(*jax.tree.unflatten(structure, leaves)))

    # A jit of its own, because constants (a kernel's schedule) may not be captured here.
    split = custom_partitioning(lambda *leaves: jax.jit(jaxpr_as_fun(traced))(*leaves))
    split.def_partition(
        functools.partial(_partition, flat_function, spec, flat_roles_in, flat_roles_out),
        sharding_rule=functools.partial(_rule, spec, flat_roles_in, flat_roles_out),
    )
    return jax.tree.unflatten(jax.tree.structure(shapes), split(*jax.tree.leaves(arguments)))


def vary_alike(tree: Any) -> Any:
    """Arrays that vary over the same manual mesh axes: over all those that any of them varies over.

    The derivative of what this does to an array sums its gradient over the devices that share it.
    """
    return _vary(tree, _varying_axes(tree))


def _varying_axes(tree: Any) -> frozenset[str]:
    types = (jax.typeof(x).manual_axis_type for x in jax.tree.leaves(tree))
    return frozenset().union(*(each.varying for each in types))


def _vary(tree: Any, names: frozenset[str]) -> Any:
    def vary(x: Array) -> Array:
        missing = names - jax.typeof(x).manual_axis_type.varying
        return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x

    return jax.tree.map(vary, tree)


def _flat(roles: Any) -> list[Roles]:
    def is_roles(x: Any) -> bool:
        return type(x) is tuple and all(role is None or isinstance(role, str) for role in x)

    return jax.tree.leaves(roles, is_leaf=is_roles)


def _rule(
    spec: AttentionSpec,
    roles_in: list[Roles],
    roles_out: list[Roles],
    mesh: Mesh,
    arguments: Any,
    results: Any,
) -> tuple[str, dict[str, Any]]:
    """Shardy's rule: factors of the axes, of which all but batch and heads must be whole."""
    # Of grouped heads one factor each: a common one could be split over a part of a mesh axis.
    grouped = spec.num_q_heads != spec.num_kv_heads
    factors = {BATCH: "b", KV_HEADS: "h", Q_HEADS: "q" if grouped else "h"}
    numbers = itertools.count()
    whole: list[str] = []

    def factor(role: str | None) -> str:
        if role is not None:
            return factors[role]
        whole.append(f"x{next(numbers)}")
        return whole[-1]

    def side(roles: list[Roles]) -> str:
        return ", ".join(" ".join(map(factor, axes)) for axes in roles)

    rule = f"{side(roles_in)} -> {side(roles_out)}"
    return rule, {"need_replication_factors": tuple(whole)}


def _partition(
    function: Callable[..., list[Array]],
    spec: AttentionSpec,
    roles_in: list[Roles],
    roles_out: list[Roles],
    mesh: Mesh,
    arguments: Any,
    results: Any,
) -> Any:
    """What XLA's partitioner asks: what each device runs, on which parts of the operands."""
    query = arguments[0].sharding  # the first leaf of all operands
    if isinstance(query, NamedSharding):
        batch_axes, head_axes = _axis_names(query.spec, 0), _axis_names(query.spec, 2)
    else:  # no mesh is known, whose axes could be named
        mesh = Mesh(np.array(list(query.device_set)), ("devices",))
        batch_axes = head_axes = ()
    if spec.batch % _size(mesh, batch_axes):
        batch_axes = ()
    if spec.num_kv_heads > 1 and spec.num_kv_heads % _size(mesh, head_axes):
        head_axes = ()
    if spec.num_q_heads % _size(mesh, head_axes) or spec.dropout_rate > 0.0:
        head_axes = ()  # what is dropped depends on the number of the head
    names = {BATCH: batch_axes, Q_HEADS: head_axes, KV_HEADS: head_axes}

    def sharding(roles: Roles) -> NamedSharding:
        entries = (names[role] or None if role else None for role in roles)
        return NamedSharding(mesh, PartitionSpec(*entries))

    def on_each_device(*leaves: Array) -> list[Array]:
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            results = function(*leaves)
            return [
                _sum_over(
                    x,
                    (() if BATCH in roles else batch_axes)
                    + (() if Q_HEADS in roles or KV_HEADS in roles else head_axes),
                )
                for x, roles in zip(results, roles_out, strict=True)
            ]

    return mesh, on_each_device, list(map(sharding, roles_out)), tuple(map(sharding, roles_in))


def _axis_names(spec: PartitionSpec, axis: int) -> tuple[str, ...]:
    entry = spec[axis] if axis < len(spec) else None
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def _size(mesh: Mesh, names: tuple[str, ...]) -> int:
    return math.prod(mesh.shape[name] for name in names)


def _sum_over(x: Array, names: tuple[str, ...]) -> Array:
    if not names:
        return x
    return jax.lax.psum(x.astype(wide_dtype(x.dtype)), names).astype(x.dtype)
