# Needs Python 3.10 or newer, a C++17 compiler and make; everything else comes into $(VENV).
#   make demo    quantize a real checkpoint at 8 to 1 bits and compare      make test     all tests
#   make build   the library, after a change of csrc/ or generator/        make lint     what .ci/run checks
#   make wheel   the wheel, in dist/                                       make matrix   that wheel under every Python
#   make check-cuda   what the machine code of the last build's CUDA kernels must keep; needs cuobjdump
# Variables: PYTHON, VENV, TORCH (what to install), MAX_JOBS, LOWBIT_ONLY (only kernels that match these globs),
# LOWBIT_CUDA_ARCHS (see README.md), WHEEL_ARCHS (for which GPUs the wheel has kernels; none where there is no nvcc).
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
CPP := $(shell git ls-files -co --exclude-standard '*.cpp' '*.h' '*.cu' '*.cuh' 2>/dev/null)
WHEEL_ARCHS ?= $(if $(shell command -v nvcc 2>/dev/null),80;90a;100;120,none)
export LOWBIT_ONLY MAX_JOBS

.PHONY: demo test build wheel check-cuda lint format matrix clean
.DELETE_ON_ERROR:

demo: build
	$(BIN)/lowbit demo

test: build
	$(BIN)/python -m pytest tests -q

# Without isolation, because an isolated build would download torch once more.
$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -U pip "setuptools>=77" ninja $(TORCH)
	$(BIN)/python -m pip install -q --no-build-isolation -e ".[dev]"
	touch $@

build: $(VENV)/ready
	$(BIN)/python setup.py -q build_ext --inplace

wheel: $(VENV)/ready
	rm -rf dist
	LOWBIT_PORTABLE=1 LOWBIT_CUDA_ARCHS='$(WHEEL_ARCHS)' $(BIN)/python -m pip wheel -q --no-build-isolation --no-deps -w dist .
	$(BIN)/python -m tools.check_wheel dist/*.whl build/obj/cpu_*_*.o

check-cuda: $(VENV)/ready
	$(BIN)/python -m tools.check_cuda

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CPP)

format: $(VENV)/ready
	$(BIN)/ruff check -q --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

matrix: wheel
	$(BIN)/python -m tools.wheel_matrix dist/*.whl

clean:
	rm -rf build dist lowbit/lib *.egg-info
