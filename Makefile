# Every task of the project. CI calls the same targets.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
HAS_COMPILER := command -v $${CXX:-c++} >/dev/null

# Tests of modules without ray, torch, redis, grpc and processes.
PURE_TESTS := tests/cluster/core tests/cluster/lab tests/worker/kvcache \
  $(addprefix tests/router/test_,scoring.py route_ledger.py routing_state.py reuse_explanation.py reuse_scenarios.py seen_prompts.py ghost_list.py) \
  $(addprefix tests/worker/test_,scheduler.py sequence_group.py beam_search.py cache_scenarios.py cache_reuse.py constrained_requests.py engine_random.py \
    engine_loop.py block_switches.py kv_sizing.py)

.DEFAULT_GOAL := help
.PHONY: help install serve demo test test-unit test-long check format proto flash-env flash-check gpu-check bench bench-serving image clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

install: $(STAMP)  ## create .venv and install kvray with its development tools

# The editable install maps packages when it is made, so a new package installs again.
$(STAMP): pyproject.toml constraints.txt CMakeLists.txt $(shell find cluster router worker -name __init__.py -o -path '*/csrc/*')
	@echo "installing into $(VENV) (a few minutes the first time)"
	@$(HAS_COMPILER) || echo "no C++ compiler: installing without the native CPU kernels, which makes CPUs many times slower"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(HAS_COMPILER) || export KVRAY_PURE=1; $(BIN)/python -m pip install -q --constraint constraints.txt --editable ".[dev]"
	@touch $(STAMP)

serve: install  ## serve the demo model on this machine until Ctrl-C (options: ARGS="--replicas 1")
	@exec $(BIN)/kvray serve $(ARGS)

demo: install  ## serve, send 16 requests, show what the prefix cache did
	@exec $(BIN)/python -m cluster.demo

test: install  ## all tests
	$(BIN)/python -m pytest -q $(ARGS)

test-unit: install  ## the pure code only, in seconds
	$(BIN)/python -m pytest -q -m "not cluster and not model and not redis and not torch" $(PURE_TESTS) $(ARGS)

test-long: install  ## the long forms: all 64 tokens of the parity runs, many more random drives, the drills of docs/drills
	KVRAY_LONG=1 $(BIN)/python -m pytest -q tests/integration/test_parity.py tests/worker/test_engine_random.py tests/worker/test_scheduling_random.py tests/worker/test_pressure.py tests/cluster/simulate/test_queue_order_on_traces.py tests/worker/kvcache/test_kv_driver.py tests/integration/test_simulator_reality.py tests/integration/test_two_front_doors.py tests/cluster/bench/test_calibration.py tests/k8s/test_node_drain.py tests/drills tests/drills/ray_up_onprem.py $(ARGS)

bench: install  ## micro benchmarks; results belong in benchmarks/RESULTS.md
	$(BIN)/python -m benchmarks.bench_kvcache $(ARGS)
	$(BIN)/python benchmarks/bench_kernels.py
	$(BIN)/python -m benchmarks.bench_index

bench-serving: install  ## kvray and its engine under five workloads (ARGS="--peer vllm=http://127.0.0.1:8101 --json FILE")
	$(BIN)/kvray bench --serve --engine $(ARGS)

check: install  ## lint, types, import rules, generated code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --explicit-package-bases --exclude tests/support tests benchmarks
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m pytest -q tests/architecture

format: install  ## format the code
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

proto: install  ## generate the gRPC stubs from proto/
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=. --pyi_out=. --grpc_python_out=. proto/cluster/rpc/inference.proto

gpu-check: install  ## check and measure a CUDA device, as a table for an issue (ten minutes; ARGS="--model DIR")
	$(BIN)/python -m benchmarks.gpu_check $(ARGS)

FLASH_ENV := build/flash-env

flash-env: $(FLASH_ENV)/.installed  ## install the flash extra into build/flash-env (5 GB) and check what our adapter relies on
	$(FLASH_ENV)/bin/python -W ignore::UserWarning -m worker.kernels.flash.contract_check

$(FLASH_ENV)/.installed: constraints-flash.txt
	@echo "installing vllm-flash-attn and its torch into $(FLASH_ENV): 5 GB, a few minutes, Python 3.11 or 3.12"
	@test -x $(FLASH_ENV)/bin/python || $(PYTHON) -m venv $(FLASH_ENV)
	$(FLASH_ENV)/bin/python -m pip install -q --constraint constraints-flash.txt vllm-flash-attn==2.6.2
	@touch $@

flash-check: install  ## resolve the flash extra against its own constraints, without installing it
	$(BIN)/python -m pip install --dry-run --ignore-installed -q --constraint constraints-flash.txt vllm-flash-attn==2.6.2

image:  ## build the container image (ARGS="cuda --tag NAME:TAG"); without a container engine: say what it needs
	@k8s/image/build $(ARGS)

clean:  ## remove what the targets made here
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis
