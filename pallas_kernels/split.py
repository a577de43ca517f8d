"""fp32 products on tensor cores that multiply bf16: three parts of each factor, six products.

    x = x0 + x1 + x2        x0 = bf16(x), x1 = bf16(x - x0), x2 = x - x0 - x1      3 x 8 bits: exact
    a b = a0 b0 + (a0 b1 + a1 b0) + (a1 b1 + a0 b2 + a2 b0)       the rest is below 2**-22 |a b|

bf16 has the exponents of fp32, so nothing overflows and nothing has to be scaled. The smallest
products come first. Of a factor that is made in registers parts are truncated, not rounded, which
takes no conversions: x1 is then up to twice as large. Where both factors are so, in dQ, the rest
has the sign of a b: 4e-8 of it in the mean, up to 2**-21. Tensor cores add up with truncation,
which biases long sums: the products of one tile get an accumulator of their own, which is added to
a longer sum with rounding (:meth:`pallas_kernels.ops.Ops.with_partial_sum`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array = jax.Array

PARTS = 3
PRODUCTS = ((2, 0), (0, 2), (1, 1), (1, 0), (0, 1), (0, 0))  # parts of a and of b
DTYPE = jnp.dtype("bfloat16")  # of the parts


def split(x: Array) -> tuple[Array, ...]:
    """The parts of an fp32 array, bf16; those of inf are inf, 0 and 0."""
    parts = []
    for _ in range(PARTS):
        # XLA may take a conversion to bf16 and back for nothing, this it may not.
        part = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        parts.append(part.astype(DTYPE))
        x = jnp.where(jnp.isfinite(part), x - part, 0.0)
    return tuple(parts)


def upper_halves(x: Array) -> tuple[Array, Array]:
    """An fp32 array without its lower 16 bits, as a bf16 array, and what that leaves of it."""
    bits = lax.bitcast_convert_type(x, jnp.uint32) & np.uint32(0xFFFF0000)
    upper = lax.bitcast_convert_type(bits, jnp.float32)
    return upper.astype(DTYPE), x - upper


def split_in_one(x: Array) -> Array:
    """The parts of an fp32 array ``[...]`` in one: bf16 ``[3, ...]``."""
    return jnp.stack(split(x))
