"""Finds the compiled kernels, loads them and registers their targets with XLA, once and lazily.

Two libraries offer the same targets: ``libjax_flash_cuda.so`` on the platform ``"CUDA"``, and its
twin in plain C++ on the CPU. They know nothing of Python: ctypes loads them. They are looked for in
``cuda_ffi/lib``, where ``CMakeLists.txt`` puts them, or in the folder that the environment variable
``JAX_FLASH_LIBRARY_DIR`` names.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

import jax

# A version in the names: exported programs hold on to what a target takes.
DECODE = "jax_flash.v3.decode"
APPEND = "jax_flash.v3.append"
_SYMBOLS = {DECODE: "jax_flash_decode", APPEND: "jax_flash_append"}
_FILES = {"gpu": ("libjax_flash_cuda.so", "CUDA"), "cpu": ("libjax_flash_cpu.so", "cpu")}


@functools.cache
def missing(platform: str) -> str | None:
    """Registers the targets for a platform; the reason why it cannot, or None.

    Args:
        platform: ``"gpu"`` or ``"cpu"``.
    """
    if platform not in _FILES:
        return f"there are no kernels for {platform}"
    file, xla_platform = _FILES[platform]
    folder = Path(os.environ.get("JAX_FLASH_LIBRARY_DIR") or Path(__file__).parent / "lib")
    path = folder / file
    if not path.exists():
        return f"not built: there is no {path} (make kernels)"
    try:
        library = ctypes.CDLL(str(path))
        symbols = {name: getattr(library, symbol) for name, symbol in _SYMBOLS.items()}
    except (OSError, AttributeError) as error:
        return f"not built: {path} cannot be loaded ({error})"
    for name, symbol in symbols.items():
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(symbol), platform=xla_platform)
    return None
