"""Which implementation runs a call, and why the others do not.

An implementation is a module, loaded by name at first use, with

- ``FUSED``: True if it has ``forward`` and ``backward`` kernels that :mod:`jax_flash.vjp` joins,
  False if its ``forward`` is differentiable JAX;
- ``supports(spec, device) -> str | None``: None if it computes the call under the contract, else
  the reason why not. A pure question;
- ``limits(spec, device) -> str | None``, optional: ``supports``, were its kernels compiled;
- ``declines(spec, device) -> str | None``, optional: a reason to leave a call that it could run to
  a later implementation of the table when the choice is automatic;
- ``forward(spec, operands) -> (out, lse)``;
- ``backward(spec, residuals, do, delta) -> Gradients``, optional, if FUSED
- ``declines_gradient(spec) -> str | None``, optional: why another is to compute the gradient
  (:class:`jax_flash.spec.Residuals`, :class:`jax_flash.spec.Gradients`);
- ``how(spec) -> str | None``, optional: what is special about the way in which it computes a call,
  and what that costs;
- ``attend`` and ``tune``, optional, for ``jax-flash tune`` (:mod:`jax_flash.tuner`).

This is the only file that names implementations. Kernel packages are loaded by string, so a CPU
installation imports none of them.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import importlib
import importlib.util
import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, cast

import jax
from jax.experimental.xla_metadata import set_xla_metadata

from jax_flash.spec import AttentionSpec, Device, Operands

Array = jax.Array

# Tried from top to bottom: the fastest first, the one that does everything last.
_TABLE = {
    "mosaic": "pallas_kernels.backend",
    "cuda": "cuda_ffi.backend",
    "cudnn": "jax_flash.cudnn",
    "chunked": "jax_flash.chunked",
    "xla": "jax_flash.reference",
}
_NEEDS_GPU = ("mosaic", "cuda", "cudnn")
_PLAIN_XLA = ("chunked", "xla")

NAMES = tuple(_TABLE)


class UnsupportedError(NotImplementedError):
    """A valid call that the implementations named by the caller cannot compute."""


class Backend(Protocol):
    """What a module of the table offers; see this module's docstring."""

    FUSED: bool

    def supports(self, spec: AttentionSpec, device: Device) -> str | None: ...  # noqa: D102
    def forward(  # noqa: D102
        self, spec: AttentionSpec, operands: Operands
    ) -> tuple[Array, Array]: ...


@dataclasses.dataclass(frozen=True)
class Decision:
    """The outcome of one choice.

    Attributes:
        spec: the call.
        device: the device it was chosen for.
        chosen: the name of the implementation, or None if none can run the call.
        reasons: for each implementation that was asked and not chosen, why.
        is_gradient: whether this is about the derivative of a kernel that has none of its own.
    """

    spec: AttentionSpec
    device: Device
    chosen: str | None
    reasons: dict[str, str]
    is_gradient: bool = False


@functools.cache
def load(name: str) -> Backend | str:
    """The implementation, or the reason why this installation does not have it."""
    module = _TABLE[name]
    try:
        return cast(Backend, importlib.import_module(module))
    except ModuleNotFoundError as error:
        if error.name is not None and module.startswith(error.name):
            return f"not built: this installation has no module {module}"
        return f"not built: {module} needs the module {error.name}, which is not installed"
    except Exception as error:  # such as an API of JAX that has moved: the others must still run
        return f"not built: {module} cannot be imported ({type(error).__name__}: {error})"


def device_of(query: Array | None = None) -> Device:
    """The facts about the device on which a call will run.

    A traced array does not say where it is: then it is JAX's default device.
    """
    if isinstance(query, jax.Array) and not isinstance(query, jax.core.Tracer):
        return device_facts(next(iter(query.devices())))
    default = jax.config.jax_default_device
    if isinstance(default, str):
        return device_facts(jax.devices(default)[0])
    return device_facts(default if default is not None else jax.devices()[0])


def device_facts(device: jax.Device) -> Device:
    """Reads what :class:`Device` holds."""
    capability = getattr(device, "compute_capability", None) if device.platform == "gpu" else None
    return Device(device.platform, capability, device.device_kind)


def reason_against(
    name: str, spec: AttentionSpec, device: Device, *, is_compiled: bool = False
) -> str | None:
    """Why the implementation cannot run the call; None if it can.

    With ``is_compiled`` that its kernels are yet to be compiled is no reason.
    """
    if name in _NEEDS_GPU and device.platform != "gpu" and _is_installed(_TABLE[name]):
        return f"needs an NVIDIA GPU; the device is {device.platform}"
    backend = load(name)
    if isinstance(backend, str):
        return backend
    sizes = [size for x in jax.tree.leaves(spec.arrays) for size in x.shape]
    if name != NAMES[-1] and not all(isinstance(size, int) for size in sizes):
        return "needs sizes that are known when the call is traced; some are symbolic"
    ask = getattr(backend, "limits", backend.supports) if is_compiled else backend.supports
    return ask(spec, device)


@functools.cache
def _is_installed(module: str) -> bool:
    """Whether a module is there, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def _names(implementation: str | Sequence[str] | None) -> tuple[str, ...]:
    """The implementations to try, in order."""
    if implementation is None:
        return NAMES
    names = (implementation,) if isinstance(implementation, str) else implementation
    if not isinstance(names, Sequence):
        raise TypeError(
            f"implementation={implementation!r}: must be None, a name or a sequence of names. "
            f"Use None to let the call choose, or some of {NAMES}."
        )
    for name in names:
        if name not in _TABLE:
            raise ValueError(
                f"implementation={name!r}: must be None or of {NAMES}. "
                "Use None to let the call choose."
            )
    if not names:
        raise ValueError(
            f"implementation={implementation!r}: names no implementation. "
            f"Use None to let the call choose, or some of {NAMES}."
        )
    return tuple(names)


def decide(
    spec: AttentionSpec, implementation: str | Sequence[str] | None, device: Device
) -> Decision:
    """Asks the implementations in order until one answers yes."""
    reasons: dict[str, str] = {}
    chosen = None
    for name in _names(implementation):
        reason = reason_against(name, spec, device)
        if reason is None and implementation is None:
            declines = getattr(load(name), "declines", None)
            reason = declines(spec, device) if declines else None
        if reason is None:
            chosen = name
            break
        reasons[name] = reason
    return Decision(spec, device, chosen, reasons)


def choose(spec: AttentionSpec, implementation: str | Sequence[str] | None, query: Array) -> str:
    """The name of the implementation that runs the call, where the query is.

    Raises:
        ValueError: an unknown name.
        UnsupportedError: none of the implementations named by the caller can run the call.
    """
    decision = decide(spec, implementation, device_of(query))
    if (record := _recording.get()) is not None:
        record.append(decision)
        return decision.chosen or "xla"  # the report says it; the trace goes on
    if decision.chosen is None:
        raise UnsupportedError(
            f"implementation={implementation!r} cannot compute {spec}: "
            + "; ".join(f"{name}: {reason}" for name, reason in decision.reasons.items())
            + ". Use implementation=None to fall through to one that can."
        )
    if implementation is None and decision.device.platform == "gpu":
        _warn_about_plain_xla(decision)
    return decision.chosen


def reason_against_gradient(name: str, spec: AttentionSpec) -> str | None:
    """Why a kernel that runs the call does not compute its gradient; None if it does."""
    backend = load(name)
    if not hasattr(backend, "backward"):
        return "has no backward kernel yet"
    ask = getattr(backend, "declines_gradient", None)
    return ask(spec) if ask else None


def differentiable(spec: AttentionSpec) -> Backend:
    """The first implementation that supports the call and is differentiable JAX.

    It gives a kernel its gradient that does not compute it (:func:`reason_against_gradient`).
    """
    device, reasons = device_of(), {}
    for name in NAMES:
        reason = reason_against(name, spec, device)
        backend = load(name) if reason is None else None
        if backend is not None and not isinstance(backend, str) and not backend.FUSED:
            break
        reasons[name] = reason or reason_against_gradient(name, spec) or "is not differentiable"
    assert backend is not None  # the last one supports everything
    assert not isinstance(backend, str)
    decision = Decision(spec, device, name, reasons, is_gradient=True)
    if (record := _recording.get()) is not None:
        record.append(decision)
    elif device.platform == "gpu":
        _warn_about_plain_xla(decision)
    return backend


def how(name: str, spec: AttentionSpec) -> str | None:
    """What is special about how an implementation computes a call; None for nothing."""
    explain = getattr(load(name), "how", None)
    return None if explain is None else explain(spec)


def plain() -> Backend:
    """Differentiable JAX that holds no array of all logits: what kernels are checked against."""
    backend = load("chunked")
    assert not isinstance(backend, str)
    return backend


def append(*arrays: Array, page_layout: str) -> tuple[Array, Array]:
    """Scatters tokens into pools, by a kernel where there is one; see :func:`jax_flash.append_kv`.

    The arrays are those of :func:`jax_flash.reference.append`. The kernel has the derivative of the
    plain scatter, and under vmap gives way to it. On a mesh with explicit axes the pools stay
    sharded as they are.
    """
    run = functools.partial(_append, page_layout=page_layout)
    pools = tuple(jax.typeof(x).sharding for x in arrays[:2])
    if jax.sharding.AxisType.Explicit in pools[0].mesh.axis_types:
        run = jax.sharding.auto_axes(run, out_sharding=pools)
    return run(*arrays)


def _append(*arrays: Array, page_layout: str) -> tuple[Array, Array]:
    scatter = functools.partial(_module("xla").append, page_layout=page_layout)
    device = device_of(arrays[0])
    if device.platform != "gpu" and "cuda" in _NEEDS_GPU:
        return scatter(*arrays)
    kernels: Any = load("cuda")
    if isinstance(kernels, str) or kernels.append_reason(*arrays, device=device) is not None:
        return scatter(*arrays)
    kernel = jax.custom_batching.custom_vmap(
        functools.partial(kernels.append, page_layout=page_layout)
    )

    @kernel.def_vmap
    def batch(size: int, mapped: list[bool], *arrays: Array) -> Any:
        axes = [0 if is_mapped else None for is_mapped in mapped]
        return jax.vmap(scatter, axes, axis_size=size)(*arrays), (True, True)

    run = jax.custom_jvp(kernel)

    @run.defjvp
    def derivative(primals: Any, tangents: Any) -> Any:
        return jax.jvp(scatter, primals, tangents)

    return run(*arrays)


def _module(name: str) -> Any:
    return importlib.import_module(_TABLE[name])


def _warn_about_plain_xla(decision: Decision) -> None:
    """Says once for each set of reasons that a GPU runs a call without a fused kernel."""
    if decision.chosen not in _PLAIN_XLA:
        return
    reasons = tuple((n, r) for n, r in decision.reasons.items() if n not in _PLAIN_XLA)
    if reasons in _warned:
        return
    _warned.add(reasons)
    subject = f"{'the gradient of ' * decision.is_gradient}attention ({decision.spec})"
    warnings.warn(
        f"jax_flash: {subject} runs on plain XLA ({decision.chosen!r}), although a GPU is present. "
        + "; ".join(f"{name}: {reason}" for name, reason in reasons),
        skip_file_prefixes=(os.path.dirname(__file__),),
    )


_warned: set[tuple[tuple[str, str], ...]] = set()
_recording: contextvars.ContextVar[list[Decision] | None] = contextvars.ContextVar(
    "jax_flash_recording", default=None
)
_num_recordings = 0


@contextlib.contextmanager
def recording() -> Iterator[list[Decision]]:
    """Collects every decision made while a function is traced inside the context.

    The metadata is part of JAX's trace cache key: functions that were traced before are traced
    again, so that no call is missed.
    """
    global _num_recordings
    _num_recordings += 1
    decisions: list[Decision] = []
    token = _recording.set(decisions)
    try:
        with set_xla_metadata(jax_flash_recording=_num_recordings):
            yield decisions
    finally:
        _recording.reset(token)
