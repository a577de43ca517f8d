"""Where and when something was measured: device, versions, commit, date."""

from __future__ import annotations

import datetime
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
UNKNOWN = "unknown"


def commit(root: Path = ROOT) -> str:
    """The short hash of HEAD, ending in "-dirty" if tracked files differ from it."""
    revision = _output("git", "-C", str(root), "rev-parse", "--short", "HEAD")
    if revision == UNKNOWN:
        return revision
    changes = _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return f"{revision}-dirty" if changes else revision


def date() -> str:
    """Now, in UTC to the minute."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%MZ")


def device() -> dict[str, str]:
    """Device, driver, jax and cuda, of JAX's default device."""
    import jax

    chip = jax.devices()[0]
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    number = re.search(r"cuda (\d+)", chip.client.platform_version)
    cuda = int(number[1]) if number else None
    return {
        "device": chip.device_kind,
        "driver": driver.splitlines()[0] if driver else UNKNOWN,
        "jax": jax.__version__,
        "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else UNKNOWN,
    }


def _output(*command: str) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return UNKNOWN
    return result.stdout.strip()
