# Every target sets itself up: it makes .venv with pinned versions and reuses it on the next run.
PYTHON ?= python3
PIP := .venv/bin/python -m pip --disable-pip-version-check
# One thread a worker: two workers whose threads spin against each other take ten times as long.
PYTEST := OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n 2

.PHONY: demo demo-full test test-all check bench setup
setup: .venv/.dev

demo: .venv/.run          ## data, tokenizer, training, evaluation, report, chat
	.venv/bin/nanok3 demo $(ARGS)

demo-full: demo           ## the same, then post-training in its quick form
	.venv/bin/nanok3 posttrain --quick --out runs/posttrain-quick

test: .venv/.dev          ## the test suite without its slow checks
	$(PYTEST) -m "not slow" $(ARGS)

test-all: .venv/.dev      ## everything, slow checks too
	$(PYTEST) $(ARGS)

check: .venv/.dev         ## lint, format and types
	.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy

bench: .venv/.dev         ## a few minutes of measurements side by side; ARGS=all for more, ARGS="kda fused" for some
	.venv/bin/nanok3 bench $(or $(ARGS),quick)

# torch goes first and by exact version: a bare `torch` may resolve to a build of several gigabytes.
.venv/.torch: constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) install -q torch==2.13.0
	touch $@

.venv/.run: .venv/.torch pyproject.toml
	$(PIP) install -q -c constraints.txt -e '.[data,train]'
	touch $@

.venv/.dev: .venv/.run
	$(PIP) install -q -c constraints.txt -e '.[dev]'
	touch $@
