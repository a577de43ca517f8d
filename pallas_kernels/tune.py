"""The configuration of a launch: a table's where one has it, else the kernel's default.

:func:`tuned_config` is for every call; :func:`candidates` and :func:`neighbours` are what
``jax-flash tune`` (:mod:`jax_flash.tuner`) measures.

Test:  python -m pytest tests/test_tuning.py
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jax_flash import tuning
from pallas_kernels import forward as kernel
from pallas_kernels import tiles
from pallas_kernels.ops import Ops

_SOURCES = ("forward.py", "ops.py", "schedule.py", "tiles.py")
# Registers of a thread by the number of consumers: all that there are, in multiples of 8.
_REGISTERS = {
    1: {"consumer_registers": 240, "producer_registers": 24},
    2: {"consumer_registers": 240, "producer_registers": 24},
    3: {"consumer_registers": 160, "producer_registers": 32},
}
_MAX_GROWTH = 12.0  # P reaches 2**12: fp16 holds 2**15


def key_of(problem: kernel.Problem) -> tuning.Key:
    """What decides about the speed of a launch."""
    mask, window = tuning.mask_class(problem.mask, problem.kv_len)
    return tuning.Key(
        kernel="forward",
        dtype=jnp.dtype(problem.dtype).name,
        head_dim=problem.head_dim,
        value_dim=problem.value_dim,
        mask=mask,
        window=window,
        batch=problem.batch,
        q_len=problem.q_len,
        kv_len=problem.kv_len,
        num_q_heads=problem.num_q_heads,
        num_kv_heads=problem.num_kv_heads,
    )


def tuned_config(problem: kernel.Problem) -> kernel.ForwardConfig:
    """The measured configuration of this problem or one like it, else the default."""
    return tuning.choose(
        key_of(problem),
        problem,
        kernel.default_config(problem),
        device_kind=jax.devices()[0].device_kind,
        source=source(),
        fit=functools.partial(fit, problem),
    )


@functools.cache
def source() -> str:
    """A hash of what a measured time depends on."""
    folder = Path(__file__).parent
    text = b"".join((folder / name).read_bytes() for name in _SOURCES)
    return hashlib.sha256(text).hexdigest()[:12]


def fit(
    problem: kernel.Problem, config: kernel.ForwardConfig, is_exact: bool = True
) -> kernel.ForwardConfig:
    """The configuration for this problem.

    Args:
        problem: the launch.
        config: of it or, if not ``is_exact``, of one like it.
        is_exact: whether it was made for this very problem.

    Returns:
        The same, without what depends on the number of tiles if it was made for other ones.

    Raises:
        ValueError: the kernel cannot run the problem with it.
    """
    if not is_exact:
        config = dataclasses.replace(config, head_group=0)
    # Names, the smallest and the largest value, and what it must be a multiple of.
    for name, low, high, step in (
        ("num_warpgroups", 1, 3, 1),
        ("block_kv", 64, 256, 16),
        ("num_stages", 1, 8, 1),
        ("consumer_registers", 24, 256, 8),
        ("producer_registers", 24, 256, 8),
        ("head_group", 0, 2**20, 1),
        ("lazy_growth", 0, _MAX_GROWTH, 0),
    ):
        value = getattr(config, name)
        if not low <= value <= high or (step and value % step):
            multiple = f" and a multiple of {step}" if step > 1 else ""
            raise ValueError(f"{name}={value}: must be in [{low}, {high}]{multiple}")
    smem_bytes = tiles.smem_bytes(kernel.scratch_tree(problem, config, Ops()))
    if smem_bytes > tiles.MAX_SMEM_BYTES:
        raise ValueError(
            f"needs {smem_bytes} bytes of shared memory; there are {tiles.MAX_SMEM_BYTES}"
        )
    return config


def candidates(problem: kernel.Problem) -> tuple[kernel.ForwardConfig, ...]:
    """The default and the other shapes of a thread block: consumers, tiles, stages, Q's place.

    The rest is as in the default; :func:`neighbours` varies it.
    """
    default = kernel.default_config(problem)
    shapes = itertools.product((2, 3), (64, 128), (2, 3, 4), (False, True))
    options = (
        {
            "num_warpgroups": num_warpgroups,
            "block_kv": block_kv,
            "num_stages": num_stages,
            "query_registers": query_registers,
            "opaque_index": default.opaque_index and not query_registers,
            "share_out": default.share_out and not query_registers,
            **_REGISTERS[num_warpgroups],
        }
        for num_warpgroups, block_kv, num_stages, query_registers in shapes
        if _live_registers(problem, block_kv, query_registers)
        < _REGISTERS[num_warpgroups]["consumer_registers"]
    )
    return tuple(_valid(problem, default, options))


def neighbours(
    problem: kernel.Problem, config: kernel.ForwardConfig
) -> tuple[kernel.ForwardConfig, ...]:
    """Configurations that differ from this one in one option, for this problem."""
    switches = ["early_wait", "take_turns", "partial_sums", "opaque_index", "share_out"]
    options: list[dict[str, Any]] = []
    if not problem.mask.is_trivial:
        switches.append("split_edges")
        group = kernel.head_group(problem, config)
        num_heads = problem.batch * problem.num_q_heads
        groups = {min(max(size, 1), num_heads) for size in (group // 2, 2 * group, num_heads)}
        options += [{"head_group": size} for size in sorted(groups - {group})]
    options += [{name: not getattr(config, name)} for name in switches]
    options.append({"lazy_growth": 8.0 if config.lazy_growth == 0.0 else 0.0})
    return tuple(_valid(problem, config, options))[1:]


def _valid(
    problem: kernel.Problem, base: kernel.ForwardConfig, options: Iterable[dict[str, Any]]
) -> Iterator[kernel.ForwardConfig]:
    """The base and each change of it that the kernel can run, once."""
    seen = set()
    for changes in ({}, *options):
        try:
            config = fit(problem, dataclasses.replace(base, **changes))
        except ValueError:
            continue
        if config not in seen:
            seen.add(config)
            yield config


def _live_registers(problem: kernel.Problem, block_kv: int, query_registers: bool) -> int:
    """Registers of a thread that a step holds: O, S, P and perhaps Q."""
    q = problem.head_dim // 4 if query_registers else 0
    return problem.value_dim // 2 + block_kv // 2 + block_kv // 4 + q
