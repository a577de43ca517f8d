"""The command line: ``jax-flash info``, ``jax-flash explain`` and ``jax-flash tune``."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jax_flash
from jax_flash import backends, features, measure, tuner, tuning
from jax_flash.spec import Device

_HOPPER = Device("gpu", "9.0")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: the command line without the program's name; None for that of the process.

    Returns:
        The exit status: 0; 1 if there is nothing to tune here; 2 for arguments that make no valid
        call.
    """
    parser = argparse.ArgumentParser(prog="jax-flash", description=jax_flash.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="devices, versions, and which implementations are available")
    explain = commands.add_parser("explain", help="what would run a call, and why not the others")
    _add_call(explain)
    explain.add_argument("--residual", action="store_true", help="also return the log-sum-exp")
    explain.add_argument("--implementation", help="ask only this one")
    explain.add_argument(
        "--table", action="store_true", help="instead: who computes which feature, in Markdown"
    )
    explain.add_argument(
        "--device", type=_device, help='of the table, such as "gpu 9.0" (the default) or "cpu"'
    )
    tune = commands.add_parser("tune", help="measure how a call runs fastest on this machine's GPU")
    _add_call(tune)
    tune.add_argument(
        "--seconds", type=_positive, default=300.0, metavar="S", help="try nothing new after that"
    )
    tune.add_argument(
        "--timeout", type=_positive, default=60.0, metavar="S", help="for each configuration"
    )
    tune.add_argument(
        "--table", type=Path, metavar="FILE", help="where to write (default: the user's table)"
    )
    options = parser.parse_args(arguments)
    command = {"info": _info, "explain": _explain, "tune": _tune}[options.command]
    try:
        print(command(options))
    except (TypeError, ValueError) as error:
        print(f"jax-flash: {error}", file=sys.stderr)
        return 2
    except measure.TuningError as error:
        print(f"jax-flash: {error}", file=sys.stderr)
        return 1
    return 0


def _add_call(parser: argparse.ArgumentParser) -> None:
    """The options that describe a call."""
    for name, default, meaning in (
        ("--batch", 1, "batch size"),
        ("--q-len", 1024, "queries"),
        ("--kv-len", None, "keys (default: as many as queries)"),
        ("--heads", 8, "query heads"),
        ("--kv-heads", None, "key/value heads (default: as many as query heads)"),
        ("--head-dim", 64, "head dim of queries and keys"),
        ("--value-dim", None, "head dim of values (default: that of keys)"),
    ):
        parser.add_argument(name, type=_size, default=default, help=meaning, metavar="N")
    dtypes = ("bfloat16", "float16", "float32")
    parser.add_argument("--dtype", default="bfloat16", choices=dtypes)
    parser.add_argument("--causal", action="store_true", help="causal mask")
    parser.add_argument("--window", type=int, metavar="W", help="local window of W on each side")


def _size(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= 0")
    return int(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number > 0")
    return value


def _device(text: str) -> Device:
    match = re.fullmatch(r"cpu|gpu (\d+\.\d)", text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither 'cpu' nor 'gpu' with a compute capability, such as 'gpu 9.0'"
        )
    return Device(text[:3], match[1])


def _info(options: argparse.Namespace) -> str:
    del options
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
    if options.table:
        return features.markdown(options.device or _HOPPER)
    if options.device is not None:
        raise ValueError(
            f"--device {options.device.platform}: is about the table; a call is explained for the "
            "device that is here. Add --table, or leave --device out."
        )
    return str(
        _report(
            options,
            return_residual=options.residual,
            implementation=options.implementation,
        )
    )


def _tune(options: argparse.Namespace) -> str:
    # This process holds a context on the GPU too; the memory is for the one that measures.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    decision = _report(options).decisions[0]
    name = tuner.tunable(decision.spec, decision.device)
    path = options.table or tuning.user_table(decision.device.name)
    if path is None:
        raise ValueError(
            f"{tuning.VARIABLE}=off: no table is read, so that tuning would change nothing. "
            "Unset it, or name a file with --table."
        )
    outcome = tuner.tune(
        name,
        decision.spec,
        seconds=options.seconds,
        timeout_s=options.timeout,
        log=lambda line: print(line, flush=True),
    )
    entry = outcome.entry(tuner.source(name), tuner.provenance(jax_flash.__version__))
    tuning.write(path, decision.device.name, [entry], drop_stale=options.table is None)
    return f"\n{outcome}\nwritten to {path}"


def _report(options: argparse.Namespace, **keywords: Any) -> jax_flash.Report:
    kv_len = options.q_len if options.kv_len is None else options.kv_len
    kv_heads = options.heads if options.kv_heads is None else options.kv_heads
    value_dim = options.head_dim if options.value_dim is None else options.value_dim

    def array(length: int, heads: int, dim: int) -> jax.ShapeDtypeStruct:
        shape = (options.batch, length, heads, dim)
        return jax.ShapeDtypeStruct(shape, jnp.dtype(options.dtype))

    return jax_flash.explain(
        jax_flash.dot_product_attention,
        array(options.q_len, options.heads, options.head_dim),
        array(kv_len, kv_heads, options.head_dim),
        array(kv_len, kv_heads, value_dim),
        is_causal=options.causal,
        local_window_size=options.window,
        **keywords,
    )
