# make demo   run ops on photographs and see which kernel ran
# make test   run the tests
# make check  everything that CI runs
# make fix    repair format and lint
# make bench  measure the budgets: ratios of things timed in one run (minutes)
# make compile-all  compile every kernel for every architecture (an hour or two on 2 cores)
# PYTHON=python3.12 make demo   with a Python of your choice

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.10 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $$p && break; done)
RUN := .venv/bin
SOURCES := tileops-core tileops-backend-example tests tools conftest.py
# A page's blocks share a namespace, so a file stays on one worker. Eight are enough: each imports torch.
WORKERS := -n auto --maxprocesses 8 --dist loadfile
STAGES := format lint types imports wheels budgets

.PHONY: demo test gpu check fix bench compile-all environment $(STAGES)

demo: environment
	@$(RUN)/tileops demo

test: environment
	@$(RUN)/python -m pytest -q $(WORKERS)

gpu: environment
	@$(RUN)/python -m pytest -q -m gpu

bench: environment
	@$(RUN)/python tests/benchmarks/budgets.py

compile-all: environment
	@$(RUN)/python tests/ops/compile_all.py

check: test $(STAGES)

environment:
	@test -n "$(PYTHON)" || { echo "tileops needs Python 3.10 or later, and none is on PATH; give one: make PYTHON=/path/to/python"; exit 1; }
	@$(PYTHON) tools/environment.py .venv

format: environment
	@$(RUN)/python tools/timed.py $@ $(RUN)/ruff format --check --quiet $(SOURCES)

lint: environment
	@$(RUN)/python tools/timed.py $@ $(RUN)/ruff check --quiet $(SOURCES)

types: environment
	@$(RUN)/python tools/timed.py $@ $(RUN)/pyright --pythonpath $(RUN)/python

imports: environment
	@$(RUN)/python tools/timed.py $@ $(RUN)/lint-imports --no-cache

wheels: environment
	@$(RUN)/python tools/timed.py $@ $(RUN)/python tools/check_wheels.py

budgets: environment
	@$(RUN)/python tools/timed.py $@ $(RUN)/python tests/benchmarks/budgets.py --check

fix: environment
	@$(RUN)/ruff format $(SOURCES)
	@$(RUN)/ruff check --fix $(SOURCES)
