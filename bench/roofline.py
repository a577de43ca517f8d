"""The ceilings of the device, measured in the same run as what is held against them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from bench.timing import Call, kernel_times_us


def _time_us(function: jax.stages.Wrapped, *args: jax.Array) -> float:
    (time_us,) = kernel_times_us({"": Call(function.lower(*args).compile(), args)}).values()
    if isinstance(time_us, Exception):
        raise time_us
    return time_us


def matmul_tflops(size: int = 8192) -> float:
    """Of a square bf16 matrix product of random numbers (zeros would draw less power)."""
    a, b = jax.random.normal(jax.random.key(0), (2, size, size), jnp.bfloat16)
    return 2 * size**3 / _time_us(jax.jit(jnp.dot), a, b) / 1e6


def read_gbps(num_bytes: int = 2**32) -> float:
    """Of the sum of an fp32 matrix along its rows, the cache far exceeded."""
    x = jax.random.normal(jax.random.key(0), (num_bytes // 2**16, 2**14), jnp.float32)
    return x.nbytes / _time_us(jax.jit(lambda x: x.sum(axis=1)), x) / 1e3
