# make demo | test | lint | bench.  The first call makes a virtual environment; later ones start at once.
#   VENV=DIR    another place for the environment      PYTHON=BIN  the Python that makes it
#   ARGS="..."  arguments for the command that the target runs

VENV ?= .venv
PYTHON ?= python3
# Without a GPU this release is known to work; pip would pick the newest that pyproject.toml allows.
TORCH ?= torch==2.13.0
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
INSTALLED := $(VENV)/.lightning_zero_installed

.DEFAULT_GOAL := test
.PHONY: demo test lint bench

demo: $(INSTALLED)
	$(BIN)/python examples/train_gpt.py $(ARGS)

test: $(INSTALLED)
	$(BIN)/python -m pytest $(ARGS)

lint: $(INSTALLED)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

bench: $(INSTALLED)
	$(BIN)/python benchmarks/step_time.py $(ARGS)

$(INSTALLED): pyproject.toml
	@echo "installing into $(VENV) (a few minutes, once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@command -v nvidia-smi >/dev/null || $(BIN)/python -c "import torch" 2>/dev/null || $(PIP) "$(TORCH)"
	@$(PIP) --editable ".[test,examples]"
	@touch $@
