SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO := $(VENV)/.demo

# Many small processes share the cores in tests and benchmarks: one thread each.
export OMP_NUM_THREADS := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Compiled modules are kept: every process of a test would compile all of them anew.
export PYTHONDONTWRITEBYTECODE :=
# mkdocs-material announces its successor at every build otherwise.
export NO_MKDOCS_2_WARNING := 1

.PHONY: help setup test test-matrix test-gpu faults lint types format demo demo-hogwild bench bench-gpu evidence docs docs-version serve-docs clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## +/\t/' \
		| while IFS=$$'\t' read -r name text; do printf '  make %-13s %s\n' "$$name" "$$text"; done

setup: $(READY)  ## create .venv with offbeat and the tools (PYTHON=... chooses)
	@:

# $(call install,EXTRA): offbeat with an extra and its pinned packages, in .venv.
define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "setup: offbeat needs Python 3.11 or newer; $(PYTHON) is" \
			"$$($(PYTHON) --version 2>&1 | grep ^Python || echo not there)." \
			"Try: make setup PYTHON=python3.11" >&2; exit 1; }
	@echo "setup: environment in $(VENV)"
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "setup: packages pinned in constraints.txt (a minute or more the first time)"
	@set -o pipefail; n=0; $(BIN)/python -m pip install --progress-bar off --no-input --no-compile \
		-c constraints.txt -e '.[$(1)]' </dev/null 2>&1 | tee $(VENV)/setup.log \
		| while read -r first rest; do case $$first in \
			Collecting|Processing) n=$$((n + 1)); [ $$((n % 20)) -ne 0 ] || echo "setup: $$n packages found";; \
			Installing) [ "$${rest%% *}" != collected ] || echo "setup: installing them";; \
			ERROR:) echo "$$first $$rest" >&2;; \
		esac; done \
		|| { echo "setup: pip failed, its full output is in $(VENV)/setup.log" >&2; exit 1; }
	@echo "setup: done"
endef

$(READY): pyproject.toml constraints.txt
	$(call install,dev)
	@touch $@ $(DEMO)

$(DEMO): pyproject.toml constraints.txt
	$(call install,demo)
	@touch $@

# First the mathematics, kernels and the examples of docstrings, and the types beside them, by two
# workers, each of which compiles the kernels that it does not find on disk: a broken equation fails
# within two minutes. Then what else runs in threads, eight at a time since many of these tests wait
# for heartbeats; then what starts processes, three at a time (file by file, so that what a module's
# tests share is set up once, and the longest files first, which pytest-xdist would take for short:
# they have few tests); last, one by one, what measures times.
EQUATIONS := tests/reference tests/functional tests/topology tests/test_contract.py
KERNELS := tests/kernels tests/hogwild src
OTHERS := tests $(addprefix --ignore=,$(EQUATIONS) $(filter tests/%,$(KERNELS)))
LONGEST := $(addprefix tests/,integrations device replica test_examples.py compare lab)
PROCESSES = $(shell grep -rl --include='test_*.py' mark.processes $(LONGEST) tests)

test: lint  ## lint, types, tests and doctests
	@$(BIN)/mypy & types=$$!; \
	$(BIN)/python -m pytest -n 2 --dist worksteal -x $(EQUATIONS) $(KERNELS) \
		-m "not processes and not gpu"; \
	failed=$$?; wait $$types && exit $$failed
	$(BIN)/python -m pytest -n 8 --dist worksteal --durations=10 $(OTHERS) \
		-m "not processes and not quiet and not gpu"
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --durations=10 $(PROCESSES) \
		-m "processes and not quiet and not gpu"
	$(BIN)/python -m pytest --durations=10 -m quiet tests/lab tests/doctor tests/elastic tests/data \
		tests/plan/test_profile.py

test-matrix:  ## a part of the tests with other Pythons and torches (PAIRS="3.12-2.13.0")
	$(PYTHON) tests/matrix.py $(PAIRS)

test-gpu: setup  ## the tests that need a GPU, and those of its kernels, on the first one
	$(BIN)/python -m pytest -m gpu -rs --durations=10 tests/gpu
	$(BIN)/python -m pytest -rs --durations=10 tests/kernels

faults: setup  ## run the cases of docs/faults.md and write it (SEEDS="1 2 3")
	$(BIN)/python tests/faults.py $(SEEDS)

lint: setup  ## ruff: rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup  ## mypy, strict
	$(BIN)/mypy

format: setup  ## format the code and fix what lint can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo: $(DEMO)  ## compare five methods on a slow network (about 7 minutes)
	$(BIN)/python examples/demo.py

demo-hogwild: $(DEMO)  ## asynchronous Adam with one worker and with two (half a minute)
	$(BIN)/python examples/demo_hogwild.py

bench: setup  ## list the benchmarks and how to run one, some or all
	@$(BIN)/python -m bench
	@echo "Prefix with $(BIN)/, for example: $(BIN)/python -m bench run sgp/speed"

bench-gpu: setup  ## measure kernels and training steps on a GPU (10 minutes; exit code 2 without)
	$(BIN)/python -m bench run gpu

evidence: setup  ## run the benchmarks behind the papers' claims, and write docs/evidence.md
	$(BIN)/python -m bench evidence

docs: setup  ## build the documentation into site/
	$(BIN)/mkdocs build --strict

docs-version: setup  ## add the documentation of VERSION="0.2" to the branch gh-pages, as "latest"
	@test -n "$(VERSION)" || { echo 'docs-version: say which, as in VERSION=0.2' >&2; exit 2; }
	PATH="$(abspath $(BIN)):$$PATH" mike deploy --update-aliases $(VERSION) latest  # it calls mkdocs
	$(BIN)/mike set-default latest

serve-docs: setup  ## show the documentation on localhost, rebuilt on change
	$(BIN)/mkdocs serve

clean:  ## remove caches and build outputs (.venv stays)
	rm -rf build dist site .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
