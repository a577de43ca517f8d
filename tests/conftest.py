"""What all tests share: the devices, JAX's strictness and Hypothesis's settings.

Tests run on the CPU, shown to JAX as four devices so that sharding can be tested. With
JAX_FLASH_TEST_GPU=1 they run on the GPU instead, those marked `gpu` among them.
"""

import functools
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ON_GPU = os.environ.get("JAX_FLASH_TEST_GPU") == "1"

# JAX reads these when it is imported or first used, and so do programs that the tests start.
if ON_GPU:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
else:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache/jax"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
# On a GPU, XLA would time candidates for each of thousands of small products, and compile kernels
# with Triton for them, which takes as long as all the rest. Our own kernels go past both.
flags = "--xla_force_host_platform_device_count=4 --xla_gpu_autotune_level=0"
if ON_GPU:
    flags += " --xla_gpu_enable_triton_gemm=false"
os.environ["XLA_FLAGS"] = f"{flags} {os.environ.get('XLA_FLAGS', '')}"
# XLA runs each of a kernel's warpgroups in a thread of a pool, which waits there for the others:
# with four of them, one that the pool has no thread for would never come.
os.environ.setdefault("PJRT_NPROC", "8")
# NumPy multiplies in the oracle. With two workers on two cores, threads made that six times slower.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax  # noqa: E402 (the lines above must come first)

jax.config.update("jax_numpy_dtype_promotion", "strict")

if not ON_GPU:
    from tests import interpret

    interpret.speed_up()

try:
    import hypothesis
except ImportError:  # a test that needs it begins with pytest.importorskip("hypothesis")
    pass
else:
    hypothesis.configuration.set_hypothesis_home_dir(ROOT / ".cache/hypothesis")
    hypothesis.settings.register_profile(
        "ci", derandomize=True, database=None, deadline=None, max_examples=50
    )
    hypothesis.settings.load_profile("ci")


@pytest.fixture(autouse=True)
def paths_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """What :func:`bench.aot.unavailable` adds is gone after a test: a compiler, for one."""
    monkeypatch.setenv("PATH", os.environ["PATH"])
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture(autouse=True)
def kernels_without_a_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, tests of the implementation "mosaic" run its kernels in JAX's interpret mode."""
    parameters = getattr(request.node, "callspec", None)
    if parameters is None or parameters.params.get("implementation") != "mosaic":
        return
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from jax_flash import backends
    from jax_flash.spec import Device
    from pallas_kernels import backend

    if ON_GPU:
        return
    options = {"interpret": plgpu.InterpretGPUParams(), "num_blocks": 2}
    hopper = Device("gpu", "9.0", "NVIDIA H200")
    monkeypatch.setattr(backends, "device_of", lambda *_: hopper)
    monkeypatch.setattr(backend, "forward", functools.partial(backend.attend, **options))
    monkeypatch.setattr(backend, "backward", functools.partial(backend.differentiate, **options))


@pytest.fixture(autouse=True, scope="module")
def programs_are_let_go() -> Iterator[None]:
    """Each compiled program holds memory maps, of which Linux grants a process 65530.

    Past that, XLA crashes.
    """
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture
def standard_promotion() -> Iterator[None]:
    """For code that needs implicit promotion: Optax, and `jax.nn.dot_product_attention` itself."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips the tests marked `gpu`, unless a GPU was asked for and is there."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not ON_GPU:
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a GPU and JAX_FLASH_TEST_GPU=1"))
    elif gpu_items and jax.default_backend() != "gpu":
        raise pytest.UsageError(
            f"JAX_FLASH_TEST_GPU=1, but JAX finds no GPU, only {jax.devices()}: "
            "check nvidia-smi and that jax[cuda13] is installed"
        )
