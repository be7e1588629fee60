# `make demo` and `make test` need nothing but make and Python 3.11 or newer; see README.md.
# Tests keep their compiled files, whatever the environment says: compiling is half of the time until the first test.
# A folder other than .venv or an interpreter of your choice: make test VENV=/tmp/env PYTHON=python3.12

VENV ?= .venv
OUT ?= demo-run
ifndef PYTHON
PYTHON := $(shell for p in python3.14 python3.13 python3.12 python3.11 python3; do \
	if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then echo $$p; break; fi; done)
endif
BIN := $(VENV)/bin

.PHONY: help demo test snapshots chaos attack bench check lint types format docs site wheel-test clean

help:
	@echo 'make demo        two recorded training runs, into $(OUT)'
	@echo 'make test        the tests but the slow ones; make check runs all'
	@echo 'make snapshots   write the screens of tests/snapshots anew'
	@echo 'make chaos       a run against a provider that fails in many ways'
	@echo 'make attack      kills, damaged files, cancellations and ten trainers in one loop; 20 minutes'
	@echo 'make bench       the cost of calls and of runs by their size, with plots; eleven minutes'
	@echo 'make check       what CI checks: lint, types, all tests, docs, the built wheel'
	@echo 'make lint        ruff, check only'
	@echo 'make types       mypy, strict'
	@echo 'make format      fix lint and formatting'
	@echo 'make docs        update the generated pages of docs/, and build the site'
	@echo 'make site        build the site in build/site; a broken link is an error'
	@echo 'make wheel-test  install the built wheel, alone and beside other packages; run the demos'
	@echo 'make clean       remove the virtual environment and build products'

demo: $(VENV)/.installed
	$(BIN)/reflact demo --out $(OUT)

test: $(VENV)/.installed-dev
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n auto --dist loadfile $(PYTEST)

snapshots: $(VENV)/.installed-dev
	$(BIN)/pytest --snapshots tests/test_facts.py tests/test_live.py tests/test_look.py

chaos: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/chaos.py

attack: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/attack.py

bench: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/calls.py
	$(BIN)/python benchmarks/runs.py
	$(BIN)/python benchmarks/page.py
	$(BIN)/python benchmarks/schedule.py

check: PYTEST = --thorough --no-loadscope-reorder $(REST)
check: lint types wheel-test site test

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.installed-dev
	$(BIN)/python scripts/generate_docs.py
	$(MAKE) --no-print-directory site

site: $(VENV)/.installed-docs
	$(BIN)/python scripts/build_site.py

wheel-test: $(VENV)/.installed-dev
	bash scripts/wheel_test.sh $(abspath $(BIN)/python)

clean:
	rm -rf $(VENV) dist build

$(VENV)/.pip:
	@test -n "$(PYTHON)" || { echo 'error: found no Python 3.11 or newer; install one, or name it: make PYTHON=/path/to/python' >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	@touch $@

$(VENV)/.installed: $(VENV)/.pip pyproject.toml
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.pip pyproject.toml
	$(BIN)/python -m pip install --quiet --editable . --group dev
	@touch $(VENV)/.installed $@

$(VENV)/.installed-docs: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet --group docs
	@touch $@
