# `make train` and `make test` are all a newcomer needs; both make .venv first.

# The first Python that is new enough and can make virtual environments.
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13; do \
	$$p -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' \
	2>/dev/null && { echo $$p; break; }; done)
WORKERS ?= 2

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Left behind when .venv holds what setup.py and constraints.txt ask for.
INSTALLED := .venv/installed
MODEL_GARDEN := tf-models-official==2.20.0

.PHONY: install train lint test test-all cases test-slow matrix fuzz golden docs reference \
  constraints clean

install: $(INSTALLED)

# pip and setuptools are pinned too, so no build environment is fetched on the side.
# The Model Garden comes without what it asks for, 1 GB for pictures and datasets: its
# layers of language models, which tests train, need none of it.
# Bytecode is made here, in 20 s on two cores: where PYTHONDONTWRITEBYTECODE is set, as in
# many containers, every process would compile TensorFlow anew, which takes 6 s.
# The warning is setuptools' word to the wise on every editable install.
$(INSTALLED): setup.py pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "No Python >= 3.11 with venv here (Debian:" \
	  "apt install python3.11-venv); or name one: make PYTHON=/path/to/python" >&2; \
	  exit 1; }
	@echo "Installing into .venv: 800 MB to fetch, 4 GB on disk, a minute or two,"
	@echo "five on a busy machine."
	$(PYTHON) -m venv .venv
	$(PIP) install --quiet --constraint constraints.txt pip setuptools
	PYTHONWARNINGS='ignore:Editable installation' \
	  $(PIP) install --quiet --no-compile --no-build-isolation \
	  --constraint constraints.txt --editable '.[test,docs,plan,mt,asr,seg,safetensors,zoo]'
	$(PIP) install --quiet --no-compile --no-deps $(MODEL_GARDEN)
	@$(BIN)/python -m compileall -q -j 0 .venv/lib >/dev/null || true  # Templates do not.
	@touch $@

train: install
	$(BIN)/meshwright-train --gin_file=lm/stdlib_tiny.gin --model_dir=logs/stdlib_tiny

lint: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check

# What is run before every commit: all checks, and the tests that `tests/some_cases.txt`
# leaves, which run at least 95% of the lines that all tests run.
test: lint
	$(BIN)/pytest -n $(WORKERS) -m 'not slow and not more'

# What CI runs: all checks, then all tests but the slow ones, in groups of folders: in one
# go, two workers would hold more than 24 GB.
test-all: lint
	$(BIN)/python -m tests.house.in_turn -n $(WORKERS) -m 'not slow'

# Chooses anew which cases `make test` runs; look at the diff.
cases: install
	$(BIN)/python -m tests.house.choose_cases

# Tests that take minutes each.
test-slow: install
	$(BIN)/python -m tests.house.in_turn -n $(WORKERS) -m slow

# The operator matrix with this many cases, others for each seed;
# docs/internals/operators.md.
# LAYOUTS=1 draws single operators over all axes instead; OPERATOR=gather draws that one;
# ROW='uneven indices' counts what meets that row of the table of faults without need.
CASES ?= 5000
SEED ?= $(shell date +%s)
OPERATOR ?=
ROW ?=
matrix: install
	$(BIN)/python -m tests.operators.matrix --cases=$(CASES) --seed=$(SEED) \
	  --workers=$(WORKERS) $(if $(LAYOUTS),--layouts) \
	  $(if $(OPERATOR),--operators $(OPERATOR)) $(if $(ROW),--row='$(ROW)')

# So many hostile files for each reader, others for each seed;
# docs/internals/hostile_input.md.
fuzz: install
	FUZZ_CASES=$(CASES) FUZZ_SEED=$(SEED) $(BIN)/pytest -n $(WORKERS) tests/fuzz

# Rewrites the sharding text of every shipped config; look at the diff.
golden: install
	$(BIN)/python tests/golden/refresh.py

# The site, which loads nothing from the network; search wants a server:
# python -m http.server --directory build/site
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "Built build/site/index.html"

# Writes the pages of docs/reference that gin files and docstrings make; look at the diff.
reference: install
	$(BIN)/python -m tests.house.docs.reference_pages

# Repins everything to the newest versions that go together, all extras included.
# It installs nothing: run `make test-all test-slow` after it.
define PINS
import json, sys
found = json.load(sys.stdin)["install"]
pins = ["{name}=={version}".format(**p["metadata"]) for p in found if not p["is_direct"]]
print("# Every package at its exact version, written by `make constraints`.")
print(*sorted(pins, key=str.lower), sep="\n")
endef
export PINS

constraints: install
	$(PIP) install --quiet --dry-run --ignore-installed --report - \
	  pip setuptools '.[test,docs,plan,mt,asr,seg,safetensors,zoo,tpu,cuda]' | $(BIN)/python -c "$$PINS" > .venv/pins
	mv .venv/pins constraints.txt

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
