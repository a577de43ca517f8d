"""Runs a call on its implementation, with the one custom derivative that all kernels share.

A kernel implementation (``FUSED``) offers

    forward(spec, operands)              -> (out [B, Tq, Hq, Dv], lse [B, Tq, Hq])
    backward(spec, residuals, do, delta) -> Gradients

and this module joins them: residuals, their checkpoint names, delta, and vmap.

Residuals are ``(operands, out, lse)`` whatever the implementation, so forward and backward may come
from different ones: without ``backward``, the derivative is that of the first implementation in the
table that is differentiable JAX and supports the call, run on the operands.

``delta = rowsum(do * out) - dlse`` carries the gradient of the returned log-sum-exp, since
``d lse / d x_j = p_j`` (Dao 2023, FlashAttention-2, section 3.1).

Under vmap the mapped axis is folded into the batch axis, so that a kernel is launched once, never
in a loop. Every array of :class:`Operands` has a leading axis of size B or 1, which makes the fold
one rule.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from jax_flash import backends, sharding
from jax_flash.backends import UnsupportedError
from jax_flash.spec import AttentionSpec, Gradients, Operands, Residuals, wide_dtype

Array = jax.Array


def attend(spec: AttentionSpec, operands: Operands, name: str) -> tuple[Array, Array]:
    """Runs one call on the implementation ``name``.

    Returns:
        out ``[B, Tq, Hq, Dv]`` and lse ``[B, Tq, Hq]``.

    Raises:
        UnsupportedError: forward-mode or second derivatives of a kernel.
    """
    backend = backends.load(name)
    assert not isinstance(backend, str), backend
    if backend.FUSED:
        try:
            return _fused(spec, name, *_split(sharding.vary_alike(operands)))
        except TypeError as error:
            if "forward-mode" in str(error):
                raise _no_other_derivative(spec, name) from error
            raise
    return _tag(*backend.forward(spec, operands))


def delta(residuals: Residuals, do: Array, dlse: Array) -> Array:
    """``rowsum(do * out) - dlse``, fp32 ``[B, Tq, Hq]``."""
    wide = residuals.lse.dtype
    return jnp.sum(do.astype(wide) * residuals.out.astype(wide), axis=-1) - dlse.astype(wide)


def _no_other_derivative(spec: AttentionSpec, name: str) -> UnsupportedError:
    return UnsupportedError(
        f"implementation={name!r}: attention kernels have one reverse-mode derivative; {spec} is "
        "differentiated in forward mode or more than once. Use implementation='chunked', which is "
        "plain JAX."
    )


def _differentiable_once(function: Any, spec: AttentionSpec, name: str) -> Any:
    """``function``, with a clear error where JAX would differentiate it."""
    once = jax.custom_jvp(function)

    @once.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        raise _no_other_derivative(spec, name)

    return once


def _tag(out: Array, lse: Array) -> tuple[Array, Array]:
    return checkpoint_name(out, "flash_out"), checkpoint_name(lse, "flash_lse")


def _split(operands: Operands, constants: tuple[str, ...] = ()) -> tuple[Gradients, Operands]:
    """The differentiable arrays but ``constants``, and the operands without them."""
    floats: dict[str, Any] = {
        name: None if name in constants else getattr(operands, name) for name in Gradients._fields
    }
    rest: dict[str, Any] = {name: None for name, x in floats.items() if x is not None}
    return Gradients(**floats), dataclasses.replace(operands, **rest)


def _join(floats: Gradients, rest: Operands) -> Operands:
    present = {name: x for name, x in floats._asdict().items() if x is not None}
    return dataclasses.replace(rest, **present)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Constants:
    """:attr:`AttentionSpec.constants` among the residuals, which hold no strings as leaves."""

    names: tuple[str, ...] = dataclasses.field(metadata={"static": True})


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _fused(
    spec: AttentionSpec, name: str, floats: Gradients, rest: Operands
) -> tuple[Array, Array]:
    return _tag(*_forward(spec, name, _join(floats, rest)))


def _fused_forward(
    spec: AttentionSpec, name: str, floats: Gradients, rest: Operands
) -> tuple[tuple[Array, Array], tuple[_Constants, Residuals]]:
    # Each leaf comes with whether it is differentiated.
    constants = [
        field for field, x in floats._asdict().items() if x is not None and not x.perturbed
    ]
    operands = jax.tree.map(lambda leaf: leaf.value, _join(floats, rest))
    out, lse = _tag(*_forward(spec, name, operands))
    return (out, lse), (_Constants(tuple(constants)), Residuals(operands, out, lse))


def _fused_backward(
    spec: AttentionSpec,
    name: str,
    saved: tuple[_Constants, Residuals],
    cotangents: tuple[Array | SymbolicZero, Array | SymbolicZero],
) -> tuple[Gradients, None]:
    constants, residuals = saved
    do, dlse = (
        jnp.zeros(x.shape, x.dtype) if isinstance(x, SymbolicZero) else x for x in cotangents
    )
    spec = dataclasses.replace(spec, constants=constants.names)
    return _backward(spec, name, residuals, do, dlse), None


_fused.defvjp(_fused_forward, _fused_backward, symbolic_zeros=True)


def _forward(spec: AttentionSpec, name: str, operands: Operands) -> tuple[Array, Array]:
    """The forward kernel, with a vmap rule."""
    kernels: Any = backends.load(name)

    def on_device(operands: Operands) -> tuple[Array, Array]:
        return kernels.forward(spec.with_operands(operands), operands)

    @jax.custom_batching.custom_vmap
    def run(operands: Operands) -> tuple[Array, Array]:
        roles = (sharding.roles_of_operands(spec, operands),)
        return sharding.partitioned(
            on_device, spec, (operands,), roles, sharding.roles_of_results(spec)
        )

    @run.def_vmap
    def rule(size: int, mapped: list[Any], operands: Operands) -> Any:
        folded = _fold(size, spec, operands, mapped[0])
        out, lse = _forward(spec.with_operands(folded), name, folded)
        return (_unfold(size, out), _unfold(size, lse)), (True, True)

    return _differentiable_once(run, spec, name)(operands)


def _backward(
    spec: AttentionSpec, name: str, residuals: Residuals, do: Array, dlse: Array
) -> Gradients:
    """The backward kernel, with a vmap rule."""

    @jax.custom_batching.custom_vmap
    def run(residuals: Residuals, do: Array, dlse: Array) -> Gradients:
        if backends.reason_against_gradient(name, spec) is not None:
            return _derived_backward(spec, residuals, do, dlse)
        kernel = getattr(backends.load(name), "backward")  # noqa: B009 (an optional member)

        def on_device(residuals: Residuals, do: Array, dlse: Array) -> Gradients:
            local = spec.with_operands(residuals.operands)
            grads = kernel(local, residuals, do, delta(residuals, do, dlse))
            wanted = _split(residuals.operands, spec.constants)[0]
            return Gradients(*map(_or_nan, grads, wanted))

        operands = sharding.roles_of_operands(spec, residuals.operands)
        results = sharding.roles_of_results(spec)
        return sharding.partitioned(
            on_device,
            spec,
            (residuals, do, dlse),
            ((operands, *results), *results),
            sharding.roles_of_gradients(spec),
        )

    @run.def_vmap
    def rule(size: int, mapped: list[Any], residuals: Residuals, do: Array, dlse: Array) -> Any:
        # Each mapped instance needs gradients of its own, also of an array that they share.
        expand = functools.partial(_fold_leaf, size, spec.batch, expand=True)
        operands = _fold(size, spec, residuals.operands, mapped[0].operands, expand=True)
        out, lse = expand(residuals.out, mapped[0].out), expand(residuals.lse, mapped[0].lse)
        do, dlse = expand(do, mapped[1]), expand(dlse, mapped[2])
        folded = Residuals(operands, out, lse)
        grads = _backward(spec.with_operands(operands), name, folded, do, dlse)
        grads = jax.tree.map(
            functools.partial(_unfold_gradient, size),
            _split(spec.arrays, spec.constants)[0],
            grads,
        )
        return grads, jax.tree.map(lambda _: True, grads)

    return _differentiable_once(run, spec, name)(residuals, do, dlse)


def _or_nan(gradient: Array | None, wanted: Array | None) -> Any:
    """A gradient that is wanted, NaN where it is missing."""
    if wanted is None:
        return None
    return jnp.full_like(wanted, jnp.nan) if gradient is None else gradient


def _derived_backward(
    spec: AttentionSpec, residuals: Residuals, do: Array, dlse: Array
) -> Gradients:
    """Gradients by JAX's own derivative of another implementation."""
    floats, rest = _split(residuals.operands, spec.constants)
    forward = backends.differentiable(spec).forward
    _, pullback = jax.vjp(lambda floats: forward(spec, _join(floats, rest)), floats)
    return pullback((do, dlse))[0]


def _fold(
    size: int, spec: AttentionSpec, operands: Operands, mapped: Operands, expand: bool = False
) -> Operands:
    """All operands with the mapped axis folded into the batch axis.

    Arrays that serve all batch elements as they are stay so; with ``expand`` those that have a
    gradient do not.
    """
    has_batch = {"query", "dropout_seeds"}  # these have B on their leading axis, never 1
    pool = set() if spec.page_layout is None else {"key", "value", "k_scale", "v_scale"}
    if not pool:
        has_batch |= {"key", "value"}
    folded: dict[str, Any] = {}
    for name in (field.name for field in dataclasses.fields(Operands)):
        must_expand = name in has_batch or (expand and name in Gradients._fields)
        leaf = functools.partial(_fold_leaf, size, spec.batch, expand=must_expand)
        # A pool of keys and values is given up: its halves are folded.
        if name not in pool and name not in ("block_tables", "kv_pages"):
            folded[name] = jax.tree.map(leaf, getattr(operands, name), getattr(mapped, name))
    if not pool:
        return Operands(**folded)
    # Pages have no batch axis: one pool may serve all instances, else theirs become one large pool.
    num_pages = operands.key.shape[1 if mapped.key else 0]
    separate = expand or any(getattr(mapped, name) for name in pool)
    for name in pool:
        x = getattr(operands, name)
        if x is not None and separate:
            x = _fold_leaf(size, num_pages, x, getattr(mapped, name), expand=True)
        folded[name] = x
    tables = operands.block_tables
    assert tables is not None
    tables = tables if mapped.block_tables else jnp.broadcast_to(tables, (size, *tables.shape))
    if separate:
        first = jnp.arange(size, dtype=jnp.int32)[:, None, None] * num_pages
        names_a_page = (tables >= 0) & (tables < num_pages)
        tables = jnp.where(names_a_page, tables + first, -1)
    return Operands(**folded, block_tables=tables.reshape(size * spec.batch, tables.shape[-1]))


def _fold_leaf(size: int, batch: int, x: Array, is_mapped: bool, *, expand: bool) -> Array:
    """``[N, B|1, ...]`` (mapped) or ``[B|1, ...]`` as ``[N * B, ...]``.

    An unmapped array whose leading axis is 1 serves all batch elements as it is, unless ``expand``.
    """
    if not is_mapped:
        if x.shape[0] == 1 and not expand:
            return x
        x = jnp.broadcast_to(x, (size, *x.shape))
    x = jnp.broadcast_to(x, (size, batch, *x.shape[2:]))
    return x.reshape(size * batch, *x.shape[2:])


def _unfold(size: int, x: Array) -> Array:
    """``[N * B, ...]`` as ``[N, B, ...]``."""
    return x.reshape(size, x.shape[0] // size, *x.shape[1:])


def _unfold_gradient(size: int, like: jax.ShapeDtypeStruct, gradient: Array) -> Array:
    """Gradients of the mapped instances, ``[N, *like.shape]``; sums over a shared B in fp32."""
    gradient = _unfold(size, gradient)
    if gradient.shape[1] != like.shape[0]:
        wide = wide_dtype(gradient.dtype)
        gradient = jnp.sum(gradient, axis=1, keepdims=True, dtype=wide).astype(like.dtype)
    return gradient
