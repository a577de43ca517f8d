SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.PHONY: help install kernels wheel demo docs test lint format clean

VENV := .venv
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.installed
AOT := .cache/aot
TWIN := cuda_ffi/lib/libjax_flash_cpu.so
# More arguments for pytest or the training command: make test ARGS="-k mask"
ARGS :=

help: ## list these targets
	@sed -nE 's/^([a-z]+):.*## (.*)/make \1\t\2/p' Makefile | expand -t 16

install: $(STAMP) $(TWIN) ## create .venv with the library, the test tools and what the demo needs

kernels: $(STAMP) ## compile the CUDA kernels for the GPU that is here; needs CMake and nvcc, no network
	@ninja=(); if command -v ninja >/dev/null; then ninja=(-G Ninja); fi
	cmake -S cuda_ffi -B build/cuda_ffi "$${ninja[@]}" -DPython_EXECUTABLE=$(CURDIR)/$(PYTHON)
	cmake --build build/cuda_ffi --parallel "$$(nproc)"

wheel: $(STAMP) ## build a wheel with the kernels for all architectures in dist/
	@JAX_FLASH_ARCHITECTURES="80;89;90;100;120" $(PYTHON) -m pip wheel --no-deps -w dist .

demo: install ## train a small GPT, sample from it and draw its loss
	@$(PYTHON) -m models.train --preset demo $(ARGS)

docs: install ## build the site, the report and its PDF in build/docs; warnings are errors
	@if ! $(PYTHON) -c 'import furo, myst_nb, pypandoc, typst' &>/dev/null; then
	    if grep -q offline $(STAMP); then
	        echo 'SKIPPED: the site (Sphinx is not in this offline environment)'
	        exit
	    fi
	    $(PYTHON) -m pip install -q -e '.[docs]'
	fi
	JAX_PLATFORMS=cpu $(PYTHON) -m sphinx -W --keep-going -q -d build/doctrees docs build/docs
	echo 'build/docs/index.html, and the report: build/docs/technical_report.pdf'

test: lint $(AOT) ## lint, then run all the tests on the CPU
	@has() { $(PYTHON) -c "import $$1" &>/dev/null; }
	flags=()
	if has xdist && [[ $${JAX_FLASH_TEST_GPU:-} != 1 ]]; then flags+=(-n auto --dist worksteal); fi
	if has pytest_timeout; then flags+=(--timeout 600); fi
	export JAX_FLASH_CUDA_WHEELS=$${JAX_FLASH_CUDA_WHEELS:-$(CURDIR)/$(AOT)}
	$(PYTHON) -m pytest "$${flags[@]}" $(ARGS)

lint: install ## check style and types
	@run() {
	    if $(PYTHON) -m $$1 --version &>/dev/null || ! grep -q offline $(STAMP); then
	        echo "$$@"
	        $(PYTHON) -m "$$@"
	    else
	        echo "SKIPPED: $$@ ($$1 is not in this offline environment)"
	    fi
	}
	run ruff check .
	run ruff format --check .
	run mypy

format: install ## put the code in shape
	@$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

clean: ## remove all that these targets made, except what was trained (runs/)
	@rm -rf $(VENV) .cache .pytest_cache build dist cuda_ffi/lib *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +

# What compiles the Pallas kernels for Hopper without a GPU: JAX's CUDA plugin and ptxas 13.0, apart
# from the environment, where the plugin would look for a GPU. Without it a test is skipped.
$(AOT): $(STAMP)
	@if ! grep -q online $(STAMP) || [[ $$(uname -sm) != 'Linux x86_64' ]]; then exit; fi
	version=$$($(PYTHON) -c 'import jaxlib; print(jaxlib.__version__)')
	packages=("jax-cuda13-plugin==$$version" "jax-cuda13-pjrt==$$version" 'nvidia-cuda-nvcc==13.0.*')
	rm -rf $@ $@.part
	if $(PYTHON) -m pip install -q --no-deps --target $@.part "$${packages[@]}"; then
	    mv $@.part $@
	    touch $@
	else
	    echo 'SKIPPED: the Pallas kernels are not compiled, for want of these packages.'
	fi

# The kernels' twin in plain C++, which the tests run; without a compiler they say that they skip it.
$(TWIN): cuda_ffi/csrc/cpu.cc cuda_ffi/csrc/call.h cuda_ffi/csrc/params.h | $(STAMP)
	@if ! command -v $(CXX) >/dev/null; then
	    echo "No C++ compiler ($(CXX)): the CPU twin of the CUDA kernels is not built."
	    exit
	fi
	where='import importlib.util as u; print(u.find_spec("jaxlib").submodule_search_locations[0])'
	mkdir -p $(@D)
	$(CXX) -std=c++17 -O2 -fPIC -shared -fvisibility=hidden \
	    -isystem "$$($(PYTHON) -c "$$where")/include" cuda_ffi/csrc/cpu.cc -o $@

# With a package index, .venv is an ordinary environment. Without one, it borrows the packages of
# the first Python that has JAX, Flax and Optax. Running each candidate skips a broken pyenv shim.
$(STAMP): pyproject.toml
	@find_python() { # set $$python to the first that runs the code $$1
	    for python in $(PYTHON) python3.14 python3.13 python3.12 python3 python; do
	        if "$$python" -c "$$1" &>/dev/null; then return; fi
	    done
	    echo "No Python found that has $$2; tried those named python* on the PATH." >&2
	    exit 1
	}
	if grep -qs borrowed $(STAMP); then rm -rf $(VENV); fi
	new_enough='import sys; assert sys.version_info >= (3, 12)'
	find_python "$$new_enough" 'version 3.12 or newer'
	if [[ $$python != $(PYTHON) ]]; then "$$python" -m venv --clear $(VENV) || true; fi
	extras=test,demo
	if nvidia-smi -L &>/dev/null; then extras+=,cuda13; fi
	echo "Installing jax-flash[$$extras] in $(VENV); the first time takes minutes."
	if PIP_RETRIES=2 $(PYTHON) -m pip install -q -e ".[$$extras]"; then
	    echo online >$@
	    exit
	fi
	echo 'pip failed (is there a network?): looking for a Python that has the packages already.'
	find_python "$$new_enough; import jax, flax, optax" 'version 3.12 or newer, jax, flax and optax'
	mode=offline
	if [[ $$python != $(PYTHON) ]]; then
	    mode+=' borrowed'
	    "$$python" -m venv --clear --without-pip $(VENV)
	    folders='import sys; print(*[p for p in sys.path if p.endswith("-packages")], sep="\n")'
	    "$$python" -c "$$folders" | sed 's/.*/import site; site.addsitedir("&")/' \
	        >$$(echo $(VENV)/lib/python3.*/site-packages)/borrowed.pth
	    echo "$(VENV) borrows the packages of $$python."
	fi
	if $(PYTHON) -m pip install -q --no-deps --no-build-isolation -e . &>/dev/null; then
	    echo 'jax-flash is installed in $(VENV), editable.'
	else
	    echo '$(CURDIR)' >$$(echo $(VENV)/lib/python3.*/site-packages)/jax_flash.pth
	    echo 'There is no hatchling to build jax-flash: $(VENV) imports it from this folder.'
	fi
	echo $$mode >$@
