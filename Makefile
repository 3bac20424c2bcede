# `make help` lists the targets. Each builds .venv from nothing when it is missing or out of date.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test test-all mutations oldest check parity fix gpu sanitize clean

# What Python has compiled is kept, as it is by default: tests start hundreds of processes that would compile it again.
export PYTHONDONTWRITEBYTECODE :=

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
EXTRAS := dev,cli,hf,data,triton,eval,experiments
CODE := saf tests tools experiments benchmarks $(wildcard examples)
PYTEST_ARGS ?=
WORKERS ?= 2
OLDEST := transformers==5.17.0 "huggingface_hub<2" httpx httpcore anyio sniffio regex

help: ## List these targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /|/' | awk -F'|' '{printf "make %-9s %s\n", $$1, $$2}'

$(READY): pyproject.toml constraints.txt tools/make_venv.sh
	@PYTHON=$(PYTHON) tools/make_venv.sh $(VENV) $(EXTRAS)
	@touch $@

demo: $(READY) ## The main job at toy size on a CPU: pretrain, freeze at the midpoint, continue, compare
	@$(BIN)/python examples/demo.py

PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --ignore=tests/gpu -n $(WORKERS) --dist loadfile

test: $(READY) ## Tests that need no GPU, but for the slow ones
	@$(PYTEST) -m "not slow" $(PYTEST_ARGS)

test-all: $(READY) ## All tests that need no GPU: also long compilations, every kernel for Hopper, every recipe
	@$(PYTEST) $(PYTEST_ARGS)

mutations: $(READY) ## Show that a test of `make test` notices each of many single-line breaks of the code
	@$(BIN)/python tools/mutations.py

oldest: $(READY) ## Tests of models of transformers with the oldest version that is supported
	@test -d build/oldest || $(PYTHON) -m pip install -q --no-deps --target build/oldest $(OLDEST)
	@OMP_NUM_THREADS=1 PYTHONPATH=build/oldest $(BIN)/python -m pytest tests/adapters tests/integrations -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

check: $(READY) ## Everything that is checked without running tests: format, lint, types, layers, rules, documents
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/pyright --pythonpath $(BIN)/python saf experiments
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tools/check_source.py
	$(BIN)/python tools/check_docs.py
	$(BIN)/python tools/mutations.py --check

parity: $(READY) ## Show that no number moved since the commit BASE (make parity BASE=main)
	@$(BIN)/python tools/parity.py --base "$(or $(BASE),$(error say which commit to compare with, such as BASE=main))"

fix: $(READY) ## Format, and mend what the linter can mend by itself
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

gpu: $(READY) ## The tests that need a CUDA device
	@$(BIN)/python -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "make gpu needs a CUDA device and a CUDA build of torch")'
	@$(BIN)/python -m pytest tests/gpu -m gpu $(PYTEST_ARGS)

sanitize: $(READY) ## The kernels' test cases under compute-sanitizer; needs CUDA and its toolkit
	@PYTHON=$(BIN)/python tools/sanitize.sh

clean: ## Remove .venv, caches and build products; runs and results stay
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
