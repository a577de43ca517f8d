"""How a custom call is cut over several devices: by batch and by heads, each part on its own.

XLA knows nothing about a custom call and would gather all of its operands on every device. Here it
learns, as a Shardy rule, which axes belong together, and is given the call on one part.

An axis is a letter. ``b`` and ``g`` (key/value heads) may be cut, and ``h``, the query heads, which
are ``g`` times ``r`` of a group; any other axis is whole on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Array = jax.Array
Axes = Sequence[Sequence[str]]  # of each array

_CUT = ("b", "g", "h")


def decode(
    call: Callable[..., Any],
    arrays: Sequence[jax.ShapeDtypeStruct],
    kv_layout: str,
    group: int,
) -> Callable[..., Any]:
    """A decode call with a rule for its partitioning.

    Args:
        call: takes ``arrays`` and gives out ``[B, Tq, Hq, Dv]`` and lse ``[B, Tq, Hq]``; right on
            any part of the batch, and of the key/value heads together with their query heads.
        arrays: query, key, value, block tables, lengths, sinks, slopes and two scales. Those that
            are not there have one axis, of size 0.
        kv_layout: the axes of key and value but the last, such as ``"pgs"`` for HND pages.
        group: query heads for each key/value head.
    """
    kv_heads = arrays[1].shape[kv_layout.index("g")]
    # A product of factors must not have one of size 1.
    heads, sizes = "(g r)", {"r": group}
    if group == 1 or kv_heads == 1:
        heads, sizes = ("g" if group == 1 else "r"), {}

    def names(mesh: Mesh, query: PartitionSpec) -> dict[str, Any]:
        batch, _, heads, *_ = (*query, *(None,) * 4)
        if kv_heads == 1:  # every part has it
            return {"b": batch, "h": heads}
        if kv_heads % _size(mesh, heads):  # a key/value head would be cut
            return {"b": batch}
        return {"b": batch, "h": heads, "g": heads}

    outputs = (("b", "t", "h", "v"), ("b", "t", "h"))
    return _with_rule(call, _decode_axes(arrays, kv_layout), outputs, names, {"h": heads}, sizes)


def append(call: Callable[..., Any], kv_layout: str) -> Callable[..., Any]:
    """An append with a rule for its partitioning: by heads, and whole pages on every device.

    Args:
        call: takes two pools, tokens ``[N, Hk, D]`` for each, and slots; gives the pools.
        kv_layout: as for :func:`decode`.
    """
    pools = ((*kv_layout, "d"), (*kv_layout, "v"))
    axes = (*pools, ("n", "g", "d"), ("n", "g", "v"), ("n",))

    def names(mesh: Mesh, pool: PartitionSpec) -> dict[str, Any]:
        del mesh
        return {"g": (*pool, *(None,) * 4)[kv_layout.index("g")]}

    return _with_rule(call, axes, pools, names)


def _with_rule(
    call: Callable[..., Any],
    axes: Axes,
    outputs: Axes,
    names: Callable[[Mesh, PartitionSpec], Mapping[str, Any]],
    words: Mapping[str, str] | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Callable[..., Any]:
    """``call`` with a rule.

    Args:
        call: gives arrays with the axes ``outputs`` from arrays with the axes ``axes``.
        axes: of the operands.
        outputs: of the results.
        names: from a mesh and the partitioning of the first operand, the mesh axes of each letter.
        words: what Shardy calls a letter, where that is not the letter.
        sizes: of factors that are no axis of their own.
    """

    def text(arrays: Axes) -> str:
        return ", ".join(" ".join((words or {}).get(x, x) for x in array) for array in arrays)

    def partition(mesh: Mesh, operands: Any, results: Any) -> Any:
        del results
        of = names(mesh, operands[0].sharding.spec)

        def shardings(arrays: Axes) -> tuple[NamedSharding, ...]:
            specs = (PartitionSpec(*map(of.get, array)) for array in arrays)
            return tuple(NamedSharding(mesh, spec) for spec in specs)

        return mesh, call, shardings(outputs), shardings(axes)

    letters = dict.fromkeys(x for array in (*axes, *outputs) for x in array)
    partitioned = custom_partitioning(call)
    partitioned.def_partition(
        partition=partition,
        sharding_rule=f"{text(axes)} -> {text(outputs)}",
        need_replication_factors=tuple(x for x in letters if x not in _CUT),  # in this order
        **(sizes or {}),
    )
    return partitioned


def _decode_axes(arrays: Sequence[jax.ShapeDtypeStruct], kv_layout: str) -> Axes:
    """Letters; an axis of size 1 that serves all of a larger one has a letter of its own."""
    query, key = arrays[:2]
    axes: list[tuple[str, ...]] = [("b", "t", "h", "d"), (*kv_layout, "d"), (*kv_layout, "v")]
    full = {"b": query.shape[0], "h": query.shape[2]}
    full |= dict(zip(kv_layout, key.shape, strict=False))
    wanted = (("b", "m"), ("b",), ("b", "h"), ("b", "h"), tuple(kv_layout), tuple(kv_layout))
    for own, array, letters in zip("ijklno", arrays[3:], wanted, strict=True):
        if len(array.shape) != len(letters):
            letters = ("-",) * len(array.shape)
        sizes = enumerate(zip(letters, array.shape, strict=True))
        axes.append(
            tuple(x if full.get(x, n) == n and x != "-" else f"{own}{i}" for i, (x, n) in sizes)
        )
    return axes


def _size(mesh: Mesh, names: str | tuple[str, ...] | None) -> int:
    """The number of parts that an axis is cut into."""
    size = 1
    for name in (names,) if isinstance(names, str) else names or ():
        size *= mesh.shape[name]
    return size
