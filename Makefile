# `make demo` and `make test` install what they need; a second run starts at once.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
ECOSYSTEM := .venv/.ecosystem
PSEUDOLOCALE := $(addprefix tests/,api dashboard launch processes server worker)
# The pins apply to build dependencies too.
export PIP_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

help: ## list the targets
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(READY) ## make .venv and install the pinned versions

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

demo: $(READY) ## train on three workers of different speed: evenly, and as planned
	@mkdir -p out && $(BIN)/mimatrix demo --picture out/demo.png

test: $(READY) ## run the tests
	$(BIN)/python -m pytest -n 2

long: ecosystem pseudolocale ## run the slow tests
	$(BIN)/python -m pytest -n 2 -m long

pseudolocale: $(READY) ## run the server's and launchers' tests with every sentence in other letters: no code may read one
	PYTHONPATH=tests $(BIN)/python -m pytest -n 2 -p support.pseudo_locale -m "not wording and not long" $(PSEUDOLOCALE)

check: $(READY) ## check formatting, linting, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(READY) ## measure the start of the command, and replays, plans and scheduling by size
	$(BIN)/python -m bench.command_start
	$(BIN)/python -m bench.replay_speed
	$(BIN)/python -m bench.planner_speed
	$(BIN)/python -m bench.scheduler_speed

study: $(READY) ## measure simulated collectives: docs/measurements/simulated.md and its pictures
	$(BIN)/python -m bench.simulation_study

allreduce: $(READY) ## measure collectives on this host and in the lab (root): docs/measurements/allreduce.md
	$(BIN)/python -m bench.allreduce

engine: $(READY) ## measure the engine: docs/measurements/engine.md
	$(BIN)/python -m bench.engine

heterogeneous: $(READY) ## workers of unequal speed and memory, side by side with other systems (root): docs/measurements/heterogeneous.md
	$(BIN)/python -m bench.heterogeneous --peer-rounds 1 --keep
	$(BIN)/python -m bench.drift --keep
	$(BIN)/python -m bench.uneven_memory --keep

server: $(READY) ## measure the job server: docs/measurements/server.md
	$(BIN)/python -m bench.server --keep

peers: $(READY) ## install the systems that `make heterogeneous` compares with; torch stays as it is
	$(BIN)/python -m pip install --quiet --no-deps accelerate==1.15.0 lightning-fabric==2.6.6 lightning-utilities==0.15.3 pyyaml==6.0.3 huggingface_hub==2.4.0 tqdm==4.70.1
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --no-deps --no-build-isolation deepspeed==0.19.8 hjson==3.1.0 py-cpuinfo==9.0.0 einops==0.8.2 msgpack==1.2.4 ninja==1.13.2

ecosystem: $(ECOSYSTEM) ## install Trainer, Accelerate, Lightning, PEFT, datasets and WebDataset for the tests that run them (400 MB)

$(ECOSYSTEM): $(READY)
	$(BIN)/python -m pip install --quiet --editable '.[ecosystem]'
	@touch $@

soak: $(READY) ## kill and stop ranks, a hundred times in collectives and twenty while saving; fifty limits of memory (root); fifty kills of the server, and of groups; of Ray's node agents; strangers at every socket; full disks (root)
	$(BIN)/python tests/comm/soak.py --rounds 100
	$(BIN)/python tests/engine/soak_saving.py --rounds 20
	$(BIN)/python tests/profiler/soak_limits.py --runs 50
	$(BIN)/python tests/server/soak_kills.py --kills 50
	$(BIN)/python tests/hybrid/soak_groups.py --kills 50
	$(BIN)/python tests/server/soak_hostile.py --seconds 600
	$(BIN)/python tests/server/soak_faults.py supervisors
	$(BIN)/python tests/server/soak_faults.py agents --times 10
	$(BIN)/python tests/server/soak_faults.py disks
	$(BIN)/python tests/server/soak_faults.py restore

docs: $(READY) ## write the generated pages and pictures again
	$(BIN)/python docs/generate.py
	$(MAKE) study

pictures: $(READY) ## take the pictures of the dashboard again; needs Chromium and an idle machine
	$(BIN)/python tests/dashboard/pictures.py

.PHONY: help setup demo test long pseudolocale check bench study allreduce engine heterogeneous server peers ecosystem soak docs pictures
