"""The command line: ``jax-flash info`` and ``jax-flash explain``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import jax
import jax.numpy as jnp

import jax_flash
from jax_flash import backends


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: the command line without the program's name; None for that of the process.

    Returns:
        The exit status: 0, or 2 for arguments that make no valid call.
    """
    parser = argparse.ArgumentParser(prog="jax-flash", description=jax_flash.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="devices, versions, and which implementations are available")
    explain = commands.add_parser("explain", help="what would run a call, and why not the others")
    for name, default, meaning in (
        ("--batch", 1, "batch size"),
        ("--q-len", 1024, "queries"),
        ("--kv-len", None, "keys (default: as many as queries)"),
        ("--heads", 8, "query heads"),
        ("--kv-heads", None, "key/value heads (default: as many as query heads)"),
        ("--head-dim", 64, "head dim of queries and keys"),
        ("--value-dim", None, "head dim of values (default: that of keys)"),
    ):
        explain.add_argument(name, type=_size, default=default, help=meaning, metavar="N")
    dtypes = ("bfloat16", "float16", "float32")
    explain.add_argument("--dtype", default="bfloat16", choices=dtypes)
    explain.add_argument("--causal", action="store_true", help="causal mask")
    explain.add_argument("--window", type=int, metavar="W", help="local window of W on each side")
    explain.add_argument("--residual", action="store_true", help="also return the log-sum-exp")
    explain.add_argument("--implementation", help="ask only this one")
    options = parser.parse_args(arguments)
    try:
        print(_info() if options.command == "info" else _explain(options))
    except (TypeError, ValueError) as error:
        print(f"jax-flash: {error}", file=sys.stderr)
        return 2
    return 0


def _size(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= 0")
    return int(text)


def _info() -> str:
    lines = [f"jax_flash {jax_flash.__version__}, jax {jax.__version__}", "devices:"]
    lines += [f"  {device} ({device.device_kind})" for device in jax.devices()]
    lines.append("implementations, in the order in which they are tried:")
    for name in backends.NAMES:
        lines.append(f"  {name:<8} {_unavailable(name) or 'available'}")
    return "\n".join(lines)


def _unavailable(name: str) -> str | None:
    """Why the implementation runs neither a plain dense call nor a plain decode call here."""
    x = jax.ShapeDtypeStruct((1, 128, 1, 64), jnp.bfloat16)
    one = jax.ShapeDtypeStruct((1, 1, 1, 64), jnp.bfloat16)
    lens = jax.ShapeDtypeStruct((1,), jnp.int32)
    dense = jax_flash.explain(jax_flash.dot_product_attention, x, x, x, is_causal=True)
    decode = jax_flash.explain(jax_flash.decode_attention, one, x, x, lens)
    reasons = [
        backends.reason_against(name, decision.spec, decision.device)
        for decision in dense.decisions + decode.decisions
    ]
    return None if None in reasons else reasons[0]


def _explain(options: argparse.Namespace) -> str:
    kv_len = options.q_len if options.kv_len is None else options.kv_len
    kv_heads = options.heads if options.kv_heads is None else options.kv_heads
    value_dim = options.head_dim if options.value_dim is None else options.value_dim

    def array(length: int, heads: int, dim: int) -> jax.ShapeDtypeStruct:
        shape = (options.batch, length, heads, dim)
        return jax.ShapeDtypeStruct(shape, jnp.dtype(options.dtype))

    report = jax_flash.explain(
        jax_flash.dot_product_attention,
        array(options.q_len, options.heads, options.head_dim),
        array(kv_len, kv_heads, options.head_dim),
        array(kv_len, kv_heads, value_dim),
        is_causal=options.causal,
        local_window_size=options.window,
        return_residual=options.residual,
        implementation=options.implementation,
    )
    return str(report)
