"""Runs a generator in a process of its own, whose peak of device memory is nobody else's.

``python -m bench.isolated MODULE:FUNCTION ARGUMENTS``, the arguments a JSON list, prints what the
function yields.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

from bench.provenance import ROOT

# What the parent must have set before JAX looks for a device: it keeps no memory that it does not
# use, so that the child may have nearly all.
PARENT_ENVIRONMENT = {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
_CHILD_ENVIRONMENT = {
    "XLA_PYTHON_CLIENT_ALLOCATOR": "default",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "XLA_CLIENT_MEM_FRACTION": "0.95",
}
_OLD_NAME = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # JAX refuses both
_MARK = "yielded: "
_LINES_OF_ERROR = 3


class DiedError(Exception):
    """The process ended before the generator did; the message has the end of what it printed."""


def items(target: str, *arguments: Any, timeout_s: float) -> Iterator[Any]:
    """What ``target`` ("module:function") yields for the arguments; both must be plain JSON.

    Raises:
        DiedError: the function raised, the process crashed or took longer than ``timeout_s``.
    """
    inherited = {name: value for name, value in os.environ.items() if name != _OLD_NAME}
    command = [sys.executable, "-m", "bench.isolated", target, json.dumps(arguments)]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**inherited, **_CHILD_ENVIRONMENT},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        timer = threading.Timer(timeout_s, process.kill)
        timer.start()
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith(_MARK):
                    yield json.loads(line.removeprefix(_MARK))
            status = process.wait()
        finally:
            timer.cancel()
            process.kill()  # if the caller lost interest; nothing if it has ended
            process.wait()
            process.stdout.close()
        if status != 0:
            errors.seek(0)
            end = " ".join(errors.read().splitlines()[-_LINES_OF_ERROR:])
            raise DiedError(f"{target} ended with status {status} (limit {timeout_s:.0f} s): {end}")


def main() -> None:
    """The child's part."""
    module, function = sys.argv[1].split(":")
    for item in getattr(importlib.import_module(module), function)(*json.loads(sys.argv[2])):
        print(_MARK + json.dumps(item), flush=True)


if __name__ == "__main__":
    main()
