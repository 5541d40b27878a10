# The environment is one folder, .venv; the stamp in it is newer than what it was made from, or it is
# brought up to date. Everything else is ordinary commands inside it.

BIN := .venv/bin
PYTHON ?= python3
STAMP := .venv/.setup-complete
KERNELS := vllm_h2o/kernels/native
LIBRARIES := $(KERNELS)/h2o_portable.so
PROCESSES ?= 2
PYTEST = python -m pytest --numprocesses $(PROCESSES) --dist worksteal
QUICK := --hypothesis-profile quick
# AFTER_TEST=--after-test: `make test-all` leaves out what `make test` has run as a whole.
AFTER_TEST ?=
RESULTS := benchmarks/results
LATER := 0.33.0
RAY := ray==2.60.0
OVERLAY := .venv-033
OVERLAY_STAMP := $(OVERLAY)/.setup-complete
TESTS_033 ?= tests/scheduler tests/worker tests/patches tests/options tests/planner tests/test_hooks.py \
    tests/sparsity tests/test_metrics.py tests/test_plugin.py tests/e2e
SHORT_033 := tests/scheduler tests/patches tests/e2e/test_retained.py

.DEFAULT_GOAL := help
.PHONY: help venv native demo test-fast test test-all test-033 soak bench bench-quality gpu-check \
    lint clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(STAMP)  ## set up .venv: vLLM for CPUs, this plugin, the tools (Python 3.11)

native: $(LIBRARIES)  ## compile the C++ kernels again, if their sources have changed

demo: $(STAMP)  ## run the demonstration on a small real model
	@$(BIN)/python -m demo

# Each tier is the one before and more. `slow` and `engine` are markers in pyproject.toml.
test-fast: lint $(LIBRARIES)  ## lint, then tests that start no engine (two minutes, in two processes)
	@$(BIN)/$(PYTEST) $(QUICK) -m "not engine and not slow"

test: lint $(LIBRARIES)  ## the same, and an engine test of each mechanism (8 minutes; `PROCESSES=`)
	@$(BIN)/$(PYTEST) $(QUICK) -m "not slow"

test-all: lint $(LIBRARIES)  ## lint, then every test, some on vLLM 0.33 too (about an hour)
	@if $(MAKE) --no-print-directory $(OVERLAY_STAMP); then \
	    $(MAKE) --no-print-directory test-033 TESTS_033="$(QUICK) $(SHORT_033)"; \
	else echo "SKIPPED: tests on vLLM 0.33, because its sources cannot be had (see above)"; fi
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(RAY) \
	    || echo "SKIPPED: tests on Ray, because it cannot be had (see above)"
	@$(BIN)/$(PYTEST) $(AFTER_TEST)

test-033: $(OVERLAY_STAMP) $(LIBRARIES)  ## tests on vLLM 0.33, its Python over the CPU build (`TESTS_033=` for others)
	@$(OVERLAY)/bin/$(PYTEST) $(TESTS_033)

soak: $(STAMP) $(LIBRARIES)  ## a server under load, then killed (16 minutes; `SOAK=` passes options)
	@$(BIN)/python -m benchmarks.soak --csv benchmarks/results/soak.csv $(SOAK)

bench: $(STAMP) $(LIBRARIES)  ## stock vLLM against h2o: table, CSV and chart (1 to 2 hours on two cores)
	@$(BIN)/python -m benchmarks.throughput

gpu-check:  ## on a machine with a GPU and vLLM: correctness, then speed (`PYTHON=`, `ARGUMENTS=--all`)
	@$(PYTHON) -m benchmarks.gpu $(ARGUMENTS)

bench-quality: $(STAMP) $(LIBRARIES)  ## what a budget costs: the charts' figures, and the chart (over an hour on two cores)
	@$(BIN)/python -m benchmarks.quality.charts --folder $(RESULTS)
	@$(BIN)/python -m benchmarks.quality.chart $(RESULTS)/quality.csv $(RESULTS)/quality_facts.csv \
	    $(RESULTS)/quality_presses.csv $(RESULTS)/quality.svg

lint: $(STAMP)  ## ruff, mypy, clang-format, and the language of docs and commits
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/clang-format --dry-run --Werror $(wildcard $(KERNELS)/*.cpp $(KERNELS)/*.h)
	@$(BIN)/mypy
	@$(BIN)/python -m tools.language

clean:  ## remove caches and build output; .venv and the converted model stay
	@rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . -path "./.venv*" -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml setup.py tools/setup_venv.sh
	@tools/setup_venv.sh

$(OVERLAY_STAMP): $(STAMP) tools/overlay.py patches/_sources.py
	@$(BIN)/python -m tools.overlay $(LATER) $(OVERLAY)
	@touch $@

# The installation has compiled them once. Without a compiler this does nothing, as there.
$(LIBRARIES): $(wildcard $(KERNELS)/*.cpp $(KERNELS)/*.h) | $(STAMP)
	@$(BIN)/python setup.py --quiet build_ext --inplace
