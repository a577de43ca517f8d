"""The CUDA kernels' way into JAX: the contract of decoding held by their twin on the CPU.

The same tests run the kernels themselves with JAX_FLASH_TEST_GPU=1. The contract's own tests are run
here once more, with the implementation "cuda" alone, as if a CPU had it.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cuda_ffi import backend, library
from jax_flash import append_kv, backends, decode_attention, paged_attention
from tests import oracle64 as oracle
from tests import test_decode, tolerance
from tests.test_decode import INF, NAN, cache, check, dense_errors, into_pages, run
from tests.tolerance import bits, rand

ON_GPU = jax.default_backend() == "gpu"
REASON = library.missing(jax.default_backend())
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


@pytest.fixture(autouse=True)
def as_if_the_cpu_had_it(monkeypatch):
    monkeypatch.setattr(backends, "_NEEDS_GPU", ("mosaic", "cudnn"))
    monkeypatch.setattr(tolerance, "_answers", {})


def with_cuda_alone(test):
    """The same test without its other implementations."""

    @functools.wraps(test)
    def only(*args, **kwargs):
        return test(*args, **kwargs)

    only.__signature__ = inspect.signature(test)
    only.pytestmark = [
        pytest.mark.parametrize("implementation", ["cuda"]).mark
        if mark.name == "parametrize" and mark.args[0] == "implementation"
        else mark
        for mark in test.pytestmark
    ]
    return only


CONTRACT = [
    test
    for name, test in vars(test_decode).items()
    if name.startswith("test_") and "implementation" in inspect.signature(test).parameters
]
globals().update(
    {
        test.__name__: with_cuda_alone(test)
        for test in CONTRACT
        if test is not test_decode.test_a_table_without_columns_leaves_every_query_empty
    }
)
