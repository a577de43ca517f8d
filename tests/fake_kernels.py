"""A stand-in for a kernel package, to test what surrounds the kernels.

Its kernels are JAX primitives without any transformation rule, as real ones are: batching or
differentiating one directly is an error. The forward is the dense oracle's; the backward is the
textbook's, from q, k, v, out, lse and delta alone.
"""

import functools
import sys
import types

import jax
import jax.extend.core
import jax.numpy as jnp
from jax.interpreters import mlir

from jax_flash import backends, reference, vjp
from jax_flash.mask import dropout_keep


def textbook_backward(spec, residuals, do, delta):
    """Dao 2023 (FlashAttention-2), section 3.1.2, dense, with every term of the contract."""
    operands, _, lse = residuals
    group = spec.num_q_heads // spec.num_kv_heads
    q, do = (x.astype(jnp.float32) for x in (operands.query, do))
    k, v = (jnp.repeat(x.astype(jnp.float32), group, 2) for x in (operands.key, operands.value))
    lse, delta = (jnp.swapaxes(x, 1, 2)[..., None] for x in (lse, delta))
    rows, keys, heads = (
        jnp.arange(n, dtype=jnp.int32) for n in (spec.q_len, spec.kv_len, spec.num_q_heads)
    )
    distance = keys - jnp.asarray(operands.mask.positions(spec.q_len))[..., None]
    distance = distance[:, None].astype(jnp.float32)
    x = spec.scale * jnp.einsum("bqhd,bkhd->bhqk", q, k)
    seen = operands.mask.to_array(spec.q_len, spec.kv_len)
    seen = jnp.ones((), bool) if seen is None else seen
    if operands.bias is not None:
        x = x + operands.bias
        seen = seen & (operands.bias != -jnp.inf)
    if operands.alibi_slopes is not None:
        x = x + operands.alibi_slopes[:, :, None, None] * distance
    slope = jnp.ones(())
    if spec.soft_cap is not None:
        x = spec.soft_cap * jnp.tanh(x / spec.soft_cap)
        slope = 1.0 - (x / spec.soft_cap) ** 2
    empty = lse == -jnp.inf
    p = jnp.where(seen & ~empty, jnp.exp(x - jnp.where(empty, 0.0, lse)), 0.0)
    drop = jnp.ones(())
    if operands.dropout_seeds is not None:
        keep = dropout_keep(operands.dropout_seeds, heads, rows, keys, spec.dropout_rate)
        drop = keep.astype(jnp.float32) / (1.0 - spec.dropout_rate)
    dx = p * (drop * jnp.einsum("bqhd,bkhd->bhqk", do, v) - delta) * slope

    def per_kv_head(x):
        return x.reshape(*x.shape[:2], spec.num_kv_heads, group, -1).sum(3)

    def like(x, operand):
        """Sums x over the axes along which the operand was broadcast."""
        if operand is None:
            return None
        axes = [
            i for i, (n, full) in enumerate(zip(operand.shape, x.shape, strict=True)) if n < full
        ]
        return x.sum(axes, keepdims=True).astype(operand.dtype)

    sinks = operands.sinks
    p_sink = 0.0 if sinks is None else jnp.exp(sinks[:, :, None, None] - jnp.where(empty, 0.0, lse))
    return vjp.Gradients(
        query=like(spec.scale * jnp.einsum("bhqk,bkhd->bqhd", dx, k), operands.query),
        key=like(per_kv_head(spec.scale * jnp.einsum("bhqk,bqhd->bkhd", dx, q)), operands.key),
        value=like(per_kv_head(jnp.einsum("bhqk,bqhd->bkhd", p * drop, do)), operands.value),
        bias=like(dx, operands.bias),
        alibi_slopes=like((dx * distance).sum((2, 3)), operands.alibi_slopes),
        sinks=like(jnp.where(empty, 0.0, -p_sink * delta).sum((2, 3)), sinks),
    )


def as_primitive(name, function):
    """`function(spec, *trees)` as one opaque equation named `name`."""
    primitive = jax.extend.core.Primitive(name)
    primitive.multiple_results = True

    def flat(*leaves, spec, tree):
        return jax.tree.leaves(function(spec, *jax.tree.unflatten(tree, leaves)))

    def avals(*leaves, spec, tree):
        return [jax.core.ShapedArray(x.shape, x.dtype) for x in
                jax.eval_shape(functools.partial(flat, spec=spec, tree=tree), *leaves)]  # fmt: skip

    primitive.def_abstract_eval(avals)
    primitive.def_impl(flat)
    mlir.register_lowering(primitive, mlir.lower_fun(flat, multiple_results=True))

    def bind(spec, *trees):
        leaves, tree = jax.tree.flatten(trees)
        shapes = jax.eval_shape(functools.partial(function, spec), *trees)
        outs = primitive.bind(*leaves, spec=spec, tree=tree)
        return jax.tree.unflatten(jax.tree.structure(shapes), outs)

    return bind


_forward_primitive = as_primitive("fake_forward", reference.forward)
_backward_primitive = as_primitive("fake_backward", textbook_backward)


def check_batch(spec, operands):
    """Arrays have B elements or, where a kernel is told so, one that serves all."""
    full = [operands.query, operands.dropout_seeds]
    if spec.page_layout is None:
        full += [operands.key, operands.value]
    assert {x.shape[0] for x in full if x is not None} == {spec.batch}
    rest = operands.mask, operands.bias, operands.alibi_slopes, operands.sinks
    assert {x.shape[0] for x in jax.tree.leaves(rest)} <= {1, spec.batch}


class FakeKernels(types.ModuleType):
    """A fused implementation without a backward kernel."""

    FUSED = True

    def supports(self, spec, device):
        return None

    def forward(self, spec, operands):
        check_batch(spec, operands)
        return _forward_primitive(spec, operands)


class FakeKernelsWithBackward(FakeKernels):
    """A fused implementation with both."""

    def backward(self, spec, residuals, do, delta):
        check_batch(spec, residuals.operands)
        assert do.shape[0] == delta.shape[0] == spec.batch
        return _backward_primitive(spec, residuals, do, delta)


def register(monkeypatch, kind=FakeKernelsWithBackward):
    """Puts a stand-in named "fake" into the table, last, and returns it."""
    kernels = kind("fake_kernels")
    monkeypatch.setitem(sys.modules, "fake_kernels", kernels)
    monkeypatch.setitem(backends._TABLE, "fake", "fake_kernels")
    backends.load.cache_clear()
    return kernels


def equations(jaxpr):
    """All equations of a jaxpr, those inside other equations too."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def equations_of(function, *args):
    """All equations of a function, traced on these arguments."""
    return list(equations(jax.make_jaxpr(function)(*args).jaxpr))


def launches(function, *args):
    """The stand-in's kernels that a function launches, each with its batch size."""
    return [
        (e.primitive.name.removeprefix("fake_"), e.params["spec"].batch)
        for e in equations_of(function, *args)
        if e.primitive.name.startswith("fake_")
    ]
