PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check

.PHONY: demo test check bench test-slow clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch is pinned here: the range in pyproject.toml alone may choose a CUDA build of several GB.
$(VENV)/train.stamp: pyproject.toml | $(BIN)/python
	$(PIP) torch==2.13.0
	$(PIP) --editable '.[train]'
	touch $@

$(VENV)/dev.stamp: pyproject.toml $(VENV)/train.stamp
	$(PIP) --editable '.[train,dev]'
	touch $@

demo: $(VENV)/train.stamp
	$(BIN)/python examples/make_tiny_models.py --out build/tiny
	$(BIN)/nereus train examples/ppo_counting.yaml

test: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -m "not slow"

check: $(VENV)/dev.stamp
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/dev.stamp
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/plan_choice.py

test-slow: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -m slow

clean:
	rm -rf $(VENV) build dist
