"""Which implementation would run each attention call of a function, and why not the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jax_flash import backends, tuning


@dataclasses.dataclass(frozen=True)
class Report:
    """The decisions of one traced function, in the order of its attention calls.

    ``str(report)`` is a table.

    Attributes:
        decisions: one for each attention call that was traced; what JAX traces once, such as the
            body of a scan, counts once.
        tuned: the configurations of the kernels that can be tuned, and where they come from; each
            once.
    """

    decisions: tuple[backends.Decision, ...]
    tuned: tuple[tuning.Choice[Any], ...] = ()

    @property
    def chosen(self) -> tuple[str | None, ...]:
        """The implementation of each call; None where those named by the caller all refuse."""
        return tuple(decision.chosen for decision in self.decisions)

    def __str__(self) -> str:
        if not self.decisions:
            return "The function makes no attention call of jax_flash."
        tables = "\n\n".join(map(_table, self.decisions))
        return "\n".join([tables, *dict.fromkeys(map(str, self.tuned))])


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """Traces ``function(*args, **kwargs)`` and reports what runs its attention calls.

    Nothing is computed or compiled. The function may be one of this package, or any function that
    calls them, such as the forward pass of a Flax model or its loss under ``jax.grad``.

    Args:
        function: any function that JAX can trace.
        *args: its arguments; arrays, or ``jax.ShapeDtypeStruct`` in their place, in any pytree.
            Everything else is passed on as it is.
        **kwargs: likewise.

    Returns:
        A :class:`Report`; print it for a table.

    Raises:
        ValueError: an argument that the function itself refuses.
        TypeError: likewise.

    Example:
        >>> q = jax.ShapeDtypeStruct((1, 128, 4, 64), "bfloat16")
        >>> print(explain(dot_product_attention, q, q, q, is_causal=True))  # doctest: +SKIP
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    traced = [isinstance(x, jax.Array | np.ndarray | jax.ShapeDtypeStruct) for x in leaves]

    def call(*arrays: Any) -> Any:
        rest = iter(arrays)
        full = [next(rest) if is_traced else x for x, is_traced in zip(leaves, traced, strict=True)]
        args, kwargs = jax.tree.unflatten(tree, full)
        # Outputs need not be arrays: only the trace matters.
        return [x for x in jax.tree.leaves(function(*args, **kwargs)) if isinstance(x, jax.Array)]

    with backends.recording() as decisions, tuning.recording() as choices:
        jax.eval_shape(call, *(x for x, is_traced in zip(leaves, traced, strict=True) if is_traced))
    tuned = {(choice.key, choice.path): choice for choice in choices}
    return Report(tuple(decisions), tuple(tuned.values()))


def _table(decision: backends.Decision) -> str:
    device = decision.device
    capability = f", compute capability {device.compute_capability}" * bool(
        device.compute_capability
    )
    subject = f"{'gradient of ' * decision.is_gradient}{decision.spec}"
    lines = [f"{subject} on {device.platform} ({device.name}{capability})"]
    for name in backends.NAMES:
        if name == decision.chosen:
            special = backends.how(name, decision.spec)
            verdict = f"chosen: {special}" if special else "chosen"
        elif name in decision.reasons:
            verdict = decision.reasons[name]
        else:
            reason = backends.reason_against(name, decision.spec, device)
            verdict = reason or "could run it, but is not asked: it comes later or was not named"
        lines.append(f"  {name:<8} {verdict}")
    return "\n".join(lines)
