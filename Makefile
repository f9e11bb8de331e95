# `make plan` and `make test` need Python 3.11 or newer, make and a package index; nothing else.
# pip obeys its own variables: PIP_EXTRA_INDEX_URL=... make test

VENV := .venv
PY := $(VENV)/bin/python
CLUSTER_OF_MAKE_PLAN := --model llama3-70b --nodes 16

# The first Python on this machine that is new enough; `make PYTHON=/path/to/python plan` overrides it.
NEW_ENOUGH := import sys, ensurepip, venv; raise SystemExit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c '$(NEW_ENOUGH)' 2>/dev/null && echo $$p && break; done)

# What no ordinary machine has.
NO_ACCELERATOR := not gpu and not neuron and not nxd and not gspmd and not xla
PYTEST := $(PY) -m pytest --numprocesses auto --dist worksteal
PLANNER_TESTS := $(addprefix tests/,spec graph layout schedule plan cost blocks search calibration imports exports report jobs cli house)

.DEFAULT_GOAL := help
.PHONY: help plan test test-all thorough gpu soak coverage lint site check bench clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

plan: $(VENV)/.base  ## plan Llama-3 70B on 16 trn1 nodes and print the table
	$(VENV)/bin/autoshard plan $(CLUSTER_OF_MAKE_PLAN)

test: $(VENV)/.dev  ## the tests that need no accelerator, but the slow ones: five to ten minutes on two cores
	$(PYTEST) -m "$(NO_ACCELERATOR) and not slow"

test-all: $(VENV)/.dev  ## what `make test` leaves out, the slow tests: 20 to 45 minutes on two cores
	$(PYTEST) -m "$(NO_ACCELERATOR) and slow and not thorough" --hypothesis-profile more $(if $(MINUTES),--minutes $(MINUTES))

thorough: $(VENV)/.dev  ## every property with 200 examples, and all parameters of all tests: hours
	$(PYTEST) -m "$(NO_ACCELERATOR) and (hypothesis or thorough)" --hypothesis-profile thorough -o faulthandler_timeout=7200

gpu: $(VENV)/.dev  ## on a machine with GPUs: their tests, then what they measure (docs/guides/gpus.md): half an hour
	$(PY) -m pytest -m gpu tests/gpu; tests=$$?; $(PY) -m benchmarks on_gpu && exit $$tests

soak: $(VENV)/.dev  ## hunts for what breaks where users start it (docs/developers/soak.md): hours
	$(PY) -m tests.soak all --record

coverage: $(VENV)/.dev  ## the lines and branches of the planner that its tests reach: at least 95%; ten minutes
	$(PYTEST) -m "$(NO_ACCELERATOR) and not slow and not ranks" --hypothesis-profile more $(PLANNER_TESTS) --cov

lint: $(VENV)/.dev  ## format, lint, types, floors
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/ruff check
	$(VENV)/bin/pyright --pythonpath $(PY)
	$(VENV)/bin/lint-imports

site: $(VENV)/.dev  ## the documentation as pages in build/site, links checked: seconds
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet

check: export CI := true
check: lint test  ## what every commit passes: lint, then test; CI goes on with test-all

bench: $(VENV)/.dev  ## every benchmark, as a table, and into their history; BENCH=--wandb logs it
	$(PY) -m benchmarks all --record $(BENCH)

clean:  ## remove the environment, caches and built files
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .import_linter_cache .coverage build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps: a second run installs nothing, a changed dependency installs again. `plan` never installs torch.
$(VENV)/.created:
	@test -n "$(PYTHON)" || { echo "autoshard needs Python 3.11 or newer (with venv); give one: make PYTHON=/path/to/python $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/.base: pyproject.toml constraints.txt | $(VENV)/.created
	$(PY) -m pip install --quiet -c constraints.txt -e .
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/.created
	$(PY) -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $(VENV)/.base $@
