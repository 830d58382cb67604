# Every target sets up what it needs, once: a virtual environment in .venv with the exact versions of requirements.lock.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(shell for candidate in python3.11 python3 python; do \
	$$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$candidate && break; done)
BIN := .venv/bin
STAMP := .venv/.lowkey-installed
ARGS ?=
WORKERS ?= 2

# One thread for each of the test processes: small tensors gain nothing from more, and two pools on two cores fight.
TEST_ENV := OMP_NUM_THREADS=1

# What the privacy argument rests on is covered line by line, branch by branch.
PROOF := src/lowkey/boundary.py,src/lowkey/release/*,src/lowkey/account/*,src/lowkey/sample/*

.PHONY: help setup demo test slow coverage lint lint-style lint-imports lint-types format bench experiments docs clean distclean

help:
	@echo "make demo | test | slow | coverage | lint | format | bench | experiments | docs | clean | distclean"

setup: $(STAMP)

$(STAMP): requirements.lock pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed. Install it, or name it with make PYTHON=..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

demo: $(STAMP)
	$(BIN)/lowkey demo $(ARGS)

test: $(STAMP)
	$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

slow: $(STAMP)
	$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) -m slow $(ARGS)

coverage: $(STAMP)
	$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) --cov --cov-report= $(ARGS)
	$(BIN)/coverage report
	$(BIN)/coverage report --fail-under=95 > /dev/null || { echo "Branch coverage is below 95 %." >&2; exit 1; }
	$(BIN)/coverage report --include='$(PROOF)' --fail-under=100 > /dev/null || { echo "The folders that the proof rests on are not fully covered." >&2; exit 1; }

lint: lint-style lint-imports lint-types

lint-style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint-imports: $(STAMP)
	$(BIN)/lint-imports

lint-types: $(STAMP)
	$(BIN)/pyright

format: $(STAMP)
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/python scripts/collect_privacy_lines.py

bench: $(STAMP)
	$(BIN)/python benchmarks/run.py $(ARGS)
	$(BIN)/python benchmarks/size.py

experiments: $(STAMP)
	$(BIN)/python experiments/compare.py $(ARGS)
	$(BIN)/python experiments/fill_pages.py

docs: $(STAMP)
	$(BIN)/python scripts/collect_privacy_lines.py
	$(BIN)/python -m sphinx --fail-on-warning --keep-going -b html docs docs/_build/html

clean:
	rm -rf build dist docs/_build .pytest_cache .ruff_cache .hypothesis .import_linter_cache .coverage .coverage.*
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv
