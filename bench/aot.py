"""Compiles the kernels for Hopper on a machine that has no GPU, and reads what ptxas says.

Needs ``ptxas`` and the plugin wheels ``jax-cuda13-plugin`` and ``jax-cuda13-pjrt`` of JAX's own
version: installed, or unpacked with ``nvidia-cuda-nvcc`` in a folder that ``JAX_FLASH_CUDA_WHEELS``
names (``make test`` does that). No CUDA driver or library is touched.

A kernel passes if it spills no more than its configuration allows and if ptxas did not serialise
its matrix products (C7512: too few registers; C7513, C7514: accumulators touched in flight).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import itertools
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

SERIALISED = ("C7511", "C7512", "C7513", "C7514")
_WHEELS = "JAX_FLASH_CUDA_WHEELS"

# The device that is compiled for, in XLA's own terms.
_H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 threads_per_core_limit: 2048
  core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 151397597184 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  device_vendor: "NVIDIA Corporation" platform_version: "Compute Capability 9.0a"
  device_address_bits: 64 name: "NVIDIA H200"
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H200"
"""


@dataclasses.dataclass(frozen=True)
class Report:
    """What ptxas said about one kernel.

    Attributes:
        name: of the case.
        registers: registers a thread, before the warpgroups divide them again.
        spill_bytes: bytes stored to local memory for want of registers.
        budget_bytes: what the configuration allows of them.
        smem_bytes: shared memory of a thread block; None where nobody counted it.
        serialised: warnings that wgmma was serialised.
        compile_s: seconds for lowering and compiling.
    """

    name: str
    registers: int
    spill_bytes: int
    budget_bytes: int
    smem_bytes: int | None
    serialised: tuple[str, ...]
    compile_s: float

    @property
    def passed(self) -> bool:
        """Whether the kernel is as fast as it was meant to be, as far as ptxas can tell."""
        return self.spill_bytes <= self.budget_bytes and not self.serialised


def unavailable() -> str | None:
    """Why kernels cannot be compiled here; None if they can."""
    folder = os.environ.get(_WHEELS)
    if folder and folder not in sys.path:
        sys.path.insert(0, folder)
        os.environ["PATH"] = f"{folder}/nvidia/cu13/bin{os.pathsep}{os.environ['PATH']}"
    if shutil.which("ptxas") is None:
        return "there is no ptxas on the path"
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        return (
            "the wheels jax-cuda13-plugin and jax-cuda13-pjrt are not installed, and "
            f"{_WHEELS} names no folder that has them"
        )
    return None


@functools.cache
def _sharding() -> Any:
    import jax
    import numpy as np
    from jax.experimental import topologies

    topology = topologies.get_topology_desc("", "cuda", target_config=_H200, topology="1x1x1")
    mesh = jax.sharding.Mesh(np.array([topology.devices[0]]), ("x",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def compile_kernel(
    name: str,
    function: Callable[..., Any],
    *args: Any,
    budget_bytes: int,
    smem_bytes: int | None,
) -> Report:
    """Compiles ``function(*args)`` (ShapeDtypeStructs); of several kernels the worst counts."""
    import jax

    os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
    start = time.perf_counter()
    sharding = _sharding()
    jitted = jax.jit(function, in_shardings=sharding, out_shardings=sharding)
    lowered = jitted.trace(*args).lower(lowering_platforms=("cuda",))
    log, _ = _captured(lowered.compile)
    compile_s = time.perf_counter() - start
    registers = [int(x) for x in re.findall(r"Used (\d+) registers", log)]
    spills = [int(x) for x in re.findall(r"(\d+) bytes spill stores", log)]
    if not registers or not spills:
        raise RuntimeError(f"ptxas reported nothing about {name}: {log[-2000:]!r}")
    serialised = tuple(code for code in SERIALISED if code in log)
    return Report(
        name, max(registers), max(spills), budget_bytes, smem_bytes, serialised, compile_s
    )


def _captured(action: Callable[[], Any]) -> tuple[str, Any]:
    """What the process writes to its standard streams, C++ code included, during the action."""
    with tempfile.TemporaryFile() as file:
        sys.stdout.flush()
        sys.stderr.flush()
        saved = os.dup(1), os.dup(2)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            result = action()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for descriptor, copy in zip((1, 2), saved, strict=True):
                os.dup2(copy, descriptor)
                os.close(copy)
        file.seek(0)
        return file.read().decode(errors="replace"), result


@dataclasses.dataclass(frozen=True)
class Case:
    """One launch to compile.

    Attributes:
        name: of the kernel and its problem.
        function: launches the kernel.
        args: of the function, as ShapeDtypeStructs.
        config: the configuration; None where there is none, and nothing may be spilled.
        scratch: shared memory and barriers, by name; None where nobody counts them.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    config: Any = None
    scratch: dict[str, Any] | None = None

    def compile(self) -> Report:
        """Compiles it."""
        from pallas_kernels import tiles

        return compile_kernel(
            self.name,
            self.function,
            *self.args,
            budget_bytes=0 if self.config is None else self.config.spill_bytes,
            smem_bytes=None if self.scratch is None else tiles.smem_bytes(self.scratch),
        )


def cases() -> Iterator[Case]:
    """Every configuration that the kernels ship, and the steps of the ladder."""
    yield from forward_cases()
    yield from backward_cases()
    yield from ladder_cases()


def _problems(dims: Iterable[tuple[int, int]]) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Names, problems and the arrays q, k and v of all masks, with and without grouped heads."""
    import jax
    import jax.numpy as jnp

    from jax_flash.mask import Mask
    from pallas_kernels import config

    lengths = jax.ShapeDtypeStruct((2, 1), jnp.int32)
    segments = jax.ShapeDtypeStruct((2, 2048), jnp.int32)
    masks = {
        "full": Mask(),
        "causal": Mask(is_causal=True),
        "window": Mask(is_causal=True, window=(1000, 0)),
        "lengths": Mask(is_causal=True, kv_ends=lengths),
        "segments": Mask(is_causal=True, q_segments=segments, kv_segments=segments),
    }
    for head_dim, value_dim in dims:
        for mask_name, mask in masks.items():
            for dtype in ("bfloat16", "float16", "float32"):
                if dtype == "float16" and (head_dim, value_dim, mask_name) != (128, 128, "causal"):
                    continue
                if dtype == "float32" and max(head_dim, value_dim) not in (64, 128):
                    continue
                for num_kv_heads, heads in ((4, ""), (2, " grouped")):
                    problem = config.Problem(
                        batch=2,
                        q_len=2048,
                        kv_len=2048,
                        num_q_heads=4,
                        num_kv_heads=num_kv_heads,
                        head_dim=head_dim,
                        value_dim=value_dim,
                        dtype=jnp.dtype(dtype),
                        scale=0.1,
                        mask=mask,
                    )
                    shapes = (4, head_dim), (num_kv_heads, head_dim), (num_kv_heads, value_dim)
                    arrays = tuple(jax.ShapeDtypeStruct((2, 2048, *x), dtype) for x in shapes)
                    yield f"D{head_dim}/{value_dim} {mask_name} {dtype}{heads}", problem, arrays


def _problems_with_terms() -> Iterator[tuple[str, Any, tuple[Any, ...], Any]]:
    """Likewise with each term, and with all of them; the last is the arrays of the terms."""
    import jax

    from pallas_kernels.terms import Arrays

    def array(dtype: str, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    alibi = {"alibi_slopes": array("float32", 1, 4)}
    rest = {"sinks": array("float32", 1, 4), "dropout_seeds": array("uint32", 2, 2)}
    bias = array("bfloat16", 1, 4, 2048, 2048)
    mask = array("bool", 1, 4, 2048, 2048)
    rates = {"soft_cap": 30.0, "dropout_rate": 0.1}
    terms: dict[str, tuple[dict[str, Any], dict[str, Any], Any]] = {
        "soft cap, dropout, sinks": (rest, rates, None),
        "ALiBi": (alibi, {}, None),
        "bias of keys": ({"bias": array("float32", 2, 1, 1, 2048)}, {}, None),
        "bias": ({"bias": bias}, {}, None),
        "bias fp32": ({"bias": array("float32", 1, 4, 2048, 2048)}, {}, None),
        "bias of its own": ({"bias": array("bfloat16", 2, 4, 2048, 2048)}, {}, None),
        "boolean mask": ({}, {}, mask),
        "everything": ({**alibi, **rest, "bias": bias}, rates, mask),
    }
    for name, problem, arrays in _problems([(64, 64), (96, 96), (128, 128), (256, 256)]):
        if "float16" in name and "bfloat16" not in name:
            continue
        if not any(x in name for x in ("causal", "lengths")):
            continue
        for term, (given, static, array_of_mask) in terms.items():
            if "lengths" in name and (term != "everything" or problem.head_dim != 128):
                continue
            if problem.head_dim == 256 and term not in ("bias", "everything"):
                continue
            if problem.head_dim == 96 and term not in ("bias", "boolean mask", "everything"):
                continue
            if problem.parts > 1 and term not in ("bias fp32", "everything"):
                continue
            changed = dataclasses.replace(
                problem,
                mask=dataclasses.replace(problem.mask, array=array_of_mask),
                bias=given.get("bias"),
                has_alibi="alibi_slopes" in given,
                has_sinks="sinks" in given,
                **static,
            )
            yield f"{name}, {term}", changed, arrays, Arrays(**given)


def forward_cases() -> Iterator[Case]:
    """Every configuration that the forward kernel ships."""
    from pallas_kernels import config, forward
    from pallas_kernels.ops import Ops
    from pallas_kernels.terms import Arrays

    unequal = [(192, 128), (64, 256), (256, 64), (192, 256), (256, 192)]
    plain = _problems([(d, d) for d in config.HEAD_DIMS] + unequal)
    problems = itertools.chain(((*x, Arrays()) for x in plain), _problems_with_terms())
    for name, problem, arrays, terms in problems:
        options = config.default_config(problem)
        yield Case(
            f"forward {name}",
            functools.partial(forward.attention_forward, problem, config=options),
            (*arrays, problem.mask, terms),
            options,
            forward.scratch_tree(problem, options, Ops()),
        )


def backward_cases() -> Iterator[Case]:
    """Every configuration that the backward kernel ships, with all gradients of terms."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels import backward, backward_config, backward_scratch, backward_terms
    from pallas_kernels.ops import Ops
    from pallas_kernels.terms import Arrays

    dims = [(64, 64), (80, 80), (96, 96), (128, 128), (192, 192), (256, 256)]
    unequal = [(96, 64), (80, 96), (128, 64), (192, 128)]
    plain = ((*x, Arrays()) for x in _problems(dims + unequal))
    for name, problem, (q, k, v), terms in itertools.chain(plain, _problems_with_terms()):
        problem = dataclasses.replace(problem, blocks_meet=True)  # as on a GPU
        do = jax.ShapeDtypeStruct((*q.shape[:3], problem.value_dim), q.dtype)
        rows = jax.ShapeDtypeStruct((2, 4, problem.q_len), jnp.float32)
        dims = problem.head_dim, problem.value_dim
        has_room = not backward_config.fills_memory(problem.dtype, *dims)
        if not has_room and problem.dropout_rate > 0.0:
            continue  # another implementation's
        wanted = backward_terms.Wanted(
            bias=terms.bias is not None and has_room,
            alibi_slopes=terms.alibi_slopes is not None and has_room,
        )
        sums = backward_terms.sums(problem, wanted, problem.q_len, problem.kv_len)
        options = backward.fitting(problem, backward_config.default_config(problem), tuple(sums))
        launch = functools.partial(
            backward.attention_backward, problem, config=options, wanted=wanted
        )
        yield Case(
            f"backward {name}",
            launch,
            (q, k, v, do, rows, rows, problem.mask, terms._replace(sinks=None)),
            options,
            backward_scratch.scratch_tree(problem, options, Ops(), tuple(sums)),
        )


def ladder_cases() -> Iterator[Case]:
    """The steps of the ladder."""
    import jax

    from pallas_kernels import ladder

    for number in ladder.STAGES:
        for head_dim in ladder.HEAD_DIMS:
            for mask_name, is_causal in (("full", False), ("causal", True)):
                x = jax.ShapeDtypeStruct((2, 2048, 4, head_dim), "bfloat16")
                attend = functools.partial(ladder.attend, number, is_causal=is_causal)
                yield Case(f"ladder {number} D{head_dim} {mask_name}", attend, (x, x, x))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``python -m bench aot``."""
    parser.add_argument("--match", default="", help="only cases whose name contains this")


def run(arguments: argparse.Namespace) -> int:
    """Compiles all cases and prints a table; the number of failures is the exit status."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    reason = unavailable()
    if reason is not None:
        print(f"SKIPPED: {reason}")
        return 0
    print(f"{'kernel':<44} regs  spills/budget  smem     s")
    failures = 0
    for case in cases():
        if arguments.match not in case.name:
            continue
        report = case.compile()
        failures += not report.passed
        print(
            f"{case.name:<44} {report.registers:>4} {report.spill_bytes:>7}/"
            f"{report.budget_bytes:<6} {report.smem_bytes or '–':>6} {report.compile_s:>5.1f} "
            f"{' '.join(report.serialised)}{'' if report.passed else '  FAILED'}",
            flush=True,
        )
    print(f"{failures} failed")
    return min(failures, 1)
