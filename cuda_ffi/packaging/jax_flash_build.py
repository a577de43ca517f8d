"""Builds wheels: hatchling, and before it CMake for the kernels.

It stays out of the wheel. An editable installation compiles nothing: there ``make kernels`` does.

- What a build needs besides hatchling is asked for only where it is missing: nvcc comes from PyPI
  (one minor version of all five packages, or they do not fit together) unless it is on the PATH or
  named by ``CUDACXX``; XLA's headers come with the oldest jaxlib supported, since libraries built
  against them load with all later ones.
- Without a C++ compiler the wheel is plain Python, without nvcc it has the CPU twin alone; both
  say so, and fail where ``JAX_FLASH_REQUIRE_CUDA=1``. ``JAX_FLASH_NO_CUDA=1`` leaves CUDA out.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import hatchling.build
from hatchling.build import *  # noqa: F403 (all that PEP 517 asks for, but what is below)
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_NVCC = [
    f"nvidia-{name}==13.0.*"
    for name in ("cuda-nvcc", "cuda-crt", "nvvm", "cuda-runtime", "cuda-cccl")
]


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """What pip installs into the environment of the build."""
    requires = hatchling.build.get_requires_for_build_wheel(config_settings)
    requires += ["jaxlib==0.11.2", "cmake>=3.24", "ninja"]
    has_nvcc = bool(os.environ.get("CUDACXX") or shutil.which("nvcc"))
    return requires if has_nvcc or os.environ.get("JAX_FLASH_NO_CUDA") == "1" else requires + _NVCC


class KernelsHook(BuildHookInterface):
    """Compiles the kernels into cuda_ffi/lib and puts them into the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """See hatchling."""
        if self.target_name != "wheel" or version == "editable":
            return
        must = os.environ.get("JAX_FLASH_REQUIRE_CUDA") == "1"
        if not any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))):
            message = "no C++ compiler was found: the wheel is without kernels"
            if must:
                raise RuntimeError(f"JAX_FLASH_REQUIRE_CUDA=1, but {message}")
            print(f"jax_flash: {message}", file=sys.stderr)
            return
        source = Path(self.root, "cuda_ffi")
        build = Path(self.root, "build", "cuda_ffi")
        for path in (source / "lib").glob("*.so"):
            path.unlink()
        # What an earlier build has found or was told, architectures among it, does not count.
        configure = ["cmake", "--fresh", "-S", source, "-B", build]
        configure += [f"-DPython_EXECUTABLE={sys.executable}"]
        if shutil.which("ninja"):
            configure += ["-G", "Ninja"]
        subprocess.run(configure, check=True)
        jobs = str(len(os.sched_getaffinity(0)))
        subprocess.run(["cmake", "--build", build, "--parallel", jobs], check=True)
        build_data["artifacts"].append("cuda_ffi/lib/*.so")
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-linux_x86_64"
