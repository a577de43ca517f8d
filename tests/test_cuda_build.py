"""The build of the CUDA kernels, on machines that have the compilers."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cuda_ffi import backend

CUDA = Path(__file__).parents[1] / "cuda_ffi"
CMAKE = (CUDA / "CMakeLists.txt").read_text()
DIMS = re.findall(r"X\((\d+), (\d+)\)", (CUDA / "csrc/instances.h").read_text())


def source(name):
    return (CUDA / "csrc" / name).read_text()


def test_what_is_compiled_is_what_is_called():
    dims = re.search(r"foreach\(dims (.*)\)", CMAKE)[1]
    assert re.findall(r'"(\d+) (\d+)"', dims) == DIMS
    assert max(int(x) for pair in DIMS for x in pair) == backend.MAX_HEAD_DIM


def test_numbers_that_python_and_the_kernels_share_are_equal():
    assert f"kChunk = {backend._CHUNK};" in source("kv_view.cuh")
    layouts = dict(re.findall(r"k(NHD|HND|Contiguous) = (\d)", source("call.h")))
    assert {name or "Contiguous": str(n) for name, n in backend._LAYOUTS.items()} == layouts
    # The room for parts: as many floats a row as the kernels lay out.
    assert "kPitch = DV + 4;" in source("config.cuh")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "cache"), [(80, "kE4M3"), (90, "kE4M3"), (90, "kBF16")], ids=str
)
def test_kernels_compile_without_a_spill(architecture, cache, tmp_path):
    if shutil.which("nvcc") is None:
        pytest.skip("there is no nvcc")
    command = ["nvcc", "-std=c++17", "-O3", "-Xptxas", "-v", "-c", "-o", tmp_path / "x.o"]
    command += [f"-gencode=arch=compute_{architecture},code=sm_{architecture}"]
    command += [f"-D{x}" for x in ("JF_QUERY=kBF16", f"JF_CACHE={cache}", "JF_DK=128", "JF_DV=128")]
    command += ["-DJAX_FLASH_HOPPER", CUDA / "csrc/decode_instance.cu"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", result.stderr)
    assert len(spills) >= 10
    # On sm_80 one kernel of 8-bit caches wants a register more than there are.
    known = {("4", "20")} if (architecture, cache) == (80, "kE4M3") else set()
    assert set(spills) - known == {("0", "0")}
    assert sum(x != ("0", "0") for x in spills) <= 1


@pytest.mark.slow
def test_without_nvcc_the_twin_is_built_alone_and_it_is_said(tmp_path):
    if not all(map(shutil.which, ("cmake", "c++"))):
        pytest.skip("there is no CMake or no C++ compiler")
    headers = Path(importlib.util.find_spec("jaxlib").submodule_search_locations[0], "include")
    environment = os.environ | {"JAX_FLASH_NO_CUDA": "1"}

    def configure(**more):
        command = ["cmake", "-S", CUDA, "-B", tmp_path / "build", f"-DXLA_INCLUDE_DIR={headers}"]
        command += [f"-DPython_EXECUTABLE={sys.executable}"]
        command += [f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={tmp_path / 'lib'}"]
        return subprocess.run(
            command, env=environment | more, capture_output=True, text=True, check=False
        )

    refused = configure(JAX_FLASH_REQUIRE_CUDA="1")
    assert refused.returncode != 0
    assert "no nvcc was found" in refused.stderr
    allowed = configure()
    assert allowed.returncode == 0, allowed.stderr
    assert "only the CPU twin is built" in allowed.stdout
    subprocess.run(["cmake", "--build", tmp_path / "build"], check=True, capture_output=True)
    assert [path.name for path in (tmp_path / "lib").iterdir()] == ["libjax_flash_cpu.so"]
