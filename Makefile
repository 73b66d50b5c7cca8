# `make demo` and `make test` set everything up by themselves; a second run starts at once.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# Pins hold for what pip builds with, too.
export PIP_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

help: ## show this list
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(READY) ## make .venv and install the pinned versions

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

demo: $(READY) ## see why topology and algorithm matter
	@mkdir -p out && $(BIN)/mimatrix demo --picture out/demo.png

test: $(READY) ## run the tests
	$(BIN)/python -m pytest -n 2

check: $(READY) ## formatting, linting, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(READY) ## how long the command takes to start, and replays as ranks grow
	$(BIN)/python -m bench.command_start
	$(BIN)/python -m bench.replay_speed

study: $(READY) ## make docs/measurements/simulated.md with its pictures anew
	$(BIN)/python -m bench.study

allreduce: $(READY) ## measure collectives on this host and in the lab (root): docs/measurements/allreduce.md
	$(BIN)/python -m bench.allreduce

engine: $(READY) ## measure the engine: docs/measurements/engine.md
	$(BIN)/python -m bench.engine

soak: $(READY) ## kill and stop ranks: a hundred times in collectives, where every survivor names the right one in time; twenty while saving
	$(BIN)/python tests/comm/soak.py --rounds 100
	$(BIN)/python tests/engine/soak_saving.py --rounds 20

docs: $(READY) ## make the generated pages and pictures anew
	$(BIN)/python docs/generate.py
	$(MAKE) study

.PHONY: help setup demo test check bench study allreduce engine soak docs
