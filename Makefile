# The front door. Overrides are typed straight after the target: make run pipeline=finetune stages.train.learning_rate=3e-4
# make hands them over in one environment variable; `pipelines/__main__.py` splits them. ARGS= is for flags (--traceback).
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
# cuda where there is an NVIDIA device, else cpu.
TORCH ?= $(shell if [ -e /dev/nvidia0 ]; then echo cuda; else echo cpu; fi)
TORCH_VERSION := 2.13.0
READY := $(VENV)/.ready-$(TORCH)
LOAD_TOOL := .raykeel/tools/guidellm
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu

export RAYKEEL_OVERRIDES := $(MAKEOVERRIDES)
override TEXT := $(value TEXT)
override STAGE := $(value STAGE)
override SWEEP := $(value SWEEP)
override WHAT := $(value WHAT)
override MODEL := $(value MODEL)
override TO := $(value TO)
export TEXT STAGE CONF PORT SWEEP WHAT MODEL TO APPLY REPAIR ROWS SPLIT SEED IDS WHOLE CHECK ID
RAYKEEL := $(BIN)/python -m pipelines

.PHONY: help setup run plan why preview debug config sweep best ui ask chat trace serve serve-config rollback status gc pin unpin verify export doctor down load-tool test test-slow lint types check bench mutants clean reference golden

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | awk -F'\t' '{printf "  make %-10s %s\n", $$1, $$2}'
	@echo '  overrides follow the target: make run pipeline=finetune stages.train.learning_rate=3e-4 run.until=evaluate'

$(READY): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) is not installed (Debian: apt install python3.11 python3.11-venv)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing the pinned dependencies into $(VENV) (log: $(VENV)/install.log)"
	@# torch first: the plain name would pull CUDA builds; what pip already sees, else PyTorch's own CPU index.
	@if [ "$(TORCH)" = cpu ]; then \
	  $(BIN)/pip install -q --disable-pip-version-check -c constraints.txt "torch==$(TORCH_VERSION)+cpu" >$(VENV)/install.log 2>&1 \
	  || $(BIN)/pip install -q --disable-pip-version-check -c constraints.txt --extra-index-url $(TORCH_CPU_INDEX) "torch==$(TORCH_VERSION)+cpu" >>$(VENV)/install.log 2>&1 \
	  || { tail -n 5 $(VENV)/install.log; exit 1; }; \
	else \
	  $(BIN)/pip install -q --disable-pip-version-check -c constraints.txt "torch==$(TORCH_VERSION)" >$(VENV)/install.log 2>&1 || { tail -n 5 $(VENV)/install.log; exit 1; }; \
	fi
	@$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]' >>$(VENV)/install.log 2>&1 || { tail -n 5 $(VENV)/install.log; exit 1; }
	@rm -f $(VENV)/.ready-*; touch $@

setup: $(READY) ## virtual environment with pinned dependencies (TORCH=cpu|cuda)

run: setup ## run a pipeline: what is known is reused, the rest is made
	@$(RAYKEEL) run $(ARGS)

plan: setup ## what would run, what is reused, and why; starts nothing
	@$(RAYKEEL) plan $(ARGS)

why: setup ## the same field by field
	@$(RAYKEEL) why $(ARGS)

preview: setup ## three rows of tokens: what carries loss, where documents begin (ROWS=3 SPLIT=train SEED=0 IDS=1 WHOLE=1)
	@$(RAYKEEL) preview $(ARGS)

debug: setup ## one stage under pdb in this process, without Ray: make debug STAGE=train
	@$(RAYKEEL) debug $(ARGS)

config: setup ## print the composed configuration
	@$(RAYKEEL) config $(ARGS)

sweep: setup ## many points: make sweep stages.train.learning_rate=1e-3,3e-3; SWEEP=name goes on with one
	@$(RAYKEEL) sweep $(ARGS)

best: setup ## the winner of a sweep, as overrides for make run (SWEEP=name; default: the latest)
	@$(RAYKEEL) best $(ARGS)

ui: setup ## the MLflow UI on the store that the runs write to (PORT=5000)
	@$(RAYKEEL) ui $(ARGS)

ask: setup ## ask the served model: make ask TEXT="os.path.join("
	@$(RAYKEEL) ask $(ARGS)

chat: setup ## talk with the served model in this terminal (a page for it: the endpoint's address in a browser)
	@$(RAYKEEL) chat $(ARGS)

trace: setup ## from an answer to its origin: make trace ID=<response id> (TEXT="the answer" when the endpoint forgot it)
	@$(RAYKEEL) trace $(ARGS)

serve: setup ## serve a registered version: make serve MODEL=models:/quickstart@champion
	@$(RAYKEEL) serve $(ARGS)

rollback: setup ## serve the version before again (TO=3: that one), under the same options
	@$(RAYKEEL) rollback $(ARGS)

serve-config: setup ## Ray Serve's own YAML of an endpoint: make serve-config MODEL=models:/quickstart@champion TO=serve.yaml (CHECK=serve.yaml)
	@$(RAYKEEL) serve-config $(ARGS)

status: setup ## what is served, registered, running and stored
	@$(RAYKEEL) status $(ARGS)

gc: setup ## what nothing needs any more, and its bytes; APPLY=1 removes it
	@$(RAYKEEL) gc $(ARGS)

pin: setup ## keep something: make pin WHAT=models:/quickstart@champion (or a digest, or a run)
	@$(RAYKEEL) pin $(ARGS)

unpin: setup ## and no longer
	@$(RAYKEEL) unpin $(ARGS)

verify: setup ## re-hash all that is stored, reconcile the registry; REPAIR=1 sets broken results aside
	@$(RAYKEEL) verify $(ARGS)

export: setup ## a plain Hugging Face folder: make export MODEL=models:/quickstart@champion TO=folder
	@$(RAYKEEL) export $(ARGS)

doctor: setup ## is this machine fit: versions, cores, memory, disk, ports, Ray, MLflow, store, GPU
	@$(RAYKEEL) doctor $(ARGS)

down: setup ## stop the endpoint, this project's Ray and the process that keeps MLflow open
	@$(RAYKEEL) down $(ARGS)

$(LOAD_TOOL)/.ready-$(TORCH): constraints-load.txt
	@$(PYTHON) -m venv $(LOAD_TOOL)
	@echo "installing the load generator into $(LOAD_TOOL)"
	@if [ "$(TORCH)" = cpu ]; then \
	  $(LOAD_TOOL)/bin/pip install -q --disable-pip-version-check "torch==$(TORCH_VERSION)+cpu" >$(LOAD_TOOL)/install.log 2>&1 \
	  || $(LOAD_TOOL)/bin/pip install -q --disable-pip-version-check --extra-index-url $(TORCH_CPU_INDEX) "torch==$(TORCH_VERSION)+cpu" >>$(LOAD_TOOL)/install.log 2>&1 \
	  || { tail -n 5 $(LOAD_TOOL)/install.log; exit 1; }; \
	fi
	@$(LOAD_TOOL)/bin/pip install -q --disable-pip-version-check -c constraints-load.txt "torch==$(TORCH_VERSION)" guidellm >>$(LOAD_TOOL)/install.log 2>&1 || { tail -n 5 $(LOAD_TOOL)/install.log; exit 1; }
	@touch $@

load-tool: $(LOAD_TOOL)/.ready-$(TORCH) ## the load generator of the stage load, in an environment of its own (once)

test: setup ## the default tests, real Ray and a small life end to end (under 5 minutes)
	@$(BIN)/python -m pytest -q -m "not slow and not gpu" $(ARGS)

test-slow: setup ## the rest: faults, long runs, rendered pages (an hour on two slow cores)
	@$(BIN)/python -m pytest -q -m "slow and not gpu" $(ARGS)

lint: setup ## ruff: lint and format, no changes
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: setup ## mypy --strict on both packages
	@$(BIN)/mypy

check: lint types test ## what a commit must pass

golden: setup ## rewrite tests/golden; review the diff
	@$(BIN)/python -m pytest -q tests/test_conf.py --golden

reference: setup ## rewrite docs/reference.md from the config classes
	@$(BIN)/python -m docs.reference

bench: setup ## the paired benchmarks; results as JSON in benchmarks/results
	@$(BIN)/python -m benchmarks $(ARGS)

mutants: setup ## break each promise of docs/guarantees.md in a copy of the code: its test must notice
	@$(BIN)/python -m tests.mutants $(ARGS)

clean: ## caches and build leftovers; never the store, models, MLflow or the virtual environment
	@rm -rf build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './$(VENV)/*' -not -path './.raykeel/*' -prune -exec rm -rf {} +
