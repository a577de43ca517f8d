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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jax_flash import tuning
from pallas_kernels import forward as kernel
from pallas_kernels import tiles
from pallas_kernels.ops import Ops

_SOURCES = (
    "forward.py",
    "forward_tiles.py",
    "ops.py",
    "recompute.py",
    "registers.py",
    "schedule.py",
    "terms.py",
    "tiles.py",
)
# Registers of a thread by the number of consumers: all that there are, in multiples of 8.
_REGISTERS = {
    1: {"consumer_registers": 240, "producer_registers": 24},
    2: {"consumer_registers": 240, "producer_registers": 24},
    3: {"consumer_registers": 160, "producer_registers": 32},
}
_SPARE_REGISTERS = 32  # for statistics, addresses and counters
_BLOCK_KV = (64, 128, 192)
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
    if problem.has_terms:  # the tables do not know them
        return kernel.default_config(problem)
    return tuning.choose(
        key_of(problem),
        problem,
        kernel.default_config(problem),
        device_kind=device_kind(),
        source=source(),
        fit=functools.partial(fit, problem),
    )


def device_kind() -> str:
    """JAX's name of the default device, whose tables count."""
    return jax.devices()[0].device_kind


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
        The same with the default's budget for spills, which no time was measured for; without what
        depends on the number of tiles if it was made for other ones.

    Raises:
        ValueError: the kernel cannot run the problem with it.
    """
    config = dataclasses.replace(
        config,
        spill_bytes=kernel.default_config(problem).spill_bytes,
        head_group=config.head_group if is_exact else 0,
    )
    # Names, the smallest and the largest value, and what it must be a multiple of.
    for name, low, high, step in (
        ("num_warpgroups", 1, 3, 1),
        ("block_kv", 64, 256, 64),  # a wgmma has 64 columns of P, given the swizzle of V
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

    The rest is as in the default; :func:`neighbours` varies it. The most alike come first.
    """
    default = kernel.default_config(problem)

    def changes(config: kernel.ForwardConfig) -> int:
        pairs = zip(dataclasses.astuple(config), dataclasses.astuple(default), strict=True)
        return sum(x != y for x, y in pairs)

    return tuple(dict.fromkeys([default, *sorted(_shapes(problem, default), key=changes)]))


def _shapes(
    problem: kernel.Problem, default: kernel.ForwardConfig
) -> Iterator[kernel.ForwardConfig]:
    """Thread blocks for which there are registers and shared memory."""
    for num_warpgroups, block_kv, num_stages, query_registers in itertools.product(
        (2, 3), _BLOCK_KV, (2, 3, 4), (False, True)
    ):
        registers = _REGISTERS[num_warpgroups]
        live = _live_registers(problem, block_kv, query_registers)
        if live > registers["consumer_registers"] - _SPARE_REGISTERS:
            continue
        for share_out in (False, True):  # where the memory does not allow a buffer of its own
            changes = {
                "num_warpgroups": num_warpgroups,
                "block_kv": block_kv,
                "num_stages": num_stages,
                "query_registers": query_registers,
                "opaque_index": default.opaque_index and not query_registers,
                "share_out": share_out,
                **registers,
            }
            if (config := _changed(problem, default, changes)) is not None:
                yield config
                break


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
    changed = (_changed(problem, config, changes) for changes in options)
    return tuple(dict.fromkeys(x for x in changed if x is not None))


def _changed(
    problem: kernel.Problem, config: kernel.ForwardConfig, changes: dict[str, Any]
) -> kernel.ForwardConfig | None:
    """A configuration with other options, or None if the kernel cannot run so."""
    try:
        return fit(problem, dataclasses.replace(config, **changes))
    except ValueError:
        return None


def _live_registers(problem: kernel.Problem, block_kv: int, query_registers: bool) -> int:
    """Registers of a thread that a step holds: O, S, P and perhaps Q."""
    q = problem.head_dim // 4 if query_registers else 0
    return problem.value_dim // 2 + block_kv // 2 + block_kv // 4 + q
