# Everything from a fresh machine with Python >= 3.11: `make demo`, `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Tests find the benchmark files here; without them they skip, saying so.
ifeq ($(origin DEEPRNN_DATA), undefined)
ifneq ($(wildcard ../shared/data),)
export DEEPRNN_DATA := $(abspath ../shared/data)
endif
endif

# How long `make torture` attacks, and in which order; the seed is printed and can be given again.
TORTURE_MINUTES ?= 20
TORTURE_SEED ?=
# Which build of torch `make install-locked` installs: cpu (where pip is told where that lies), or cuda (the index's).
TORCH ?= cpu

.PHONY: help install install-locked lock audit dist demo test test-slow test-gpu test-browser torture check format \
        browser bench clean

help:
	@echo "make demo          train an RNN and a DOT(S)-RNN with a NADE on Bach chorales; music in out/"
	@echo "make test          all quick tests"
	@echo "make check         lint and types"
	@echo "make test-browser  the page, in Chromium (installs it where it is missing)"
	@echo "make test-gpu      the backend grid and the kernels, on an NVIDIA GPU"
	@echo "make test-slow     tests of minutes"
	@echo "make torture       kills, full disks, damaged files, hostile inputs, for TORTURE_MINUTES=20"
	@echo "make dist          wheel and sdist, tried in an empty environment"
	@echo "make install-locked, lock, audit   the same releases byte by byte; their hashes; known vulnerabilities"
	@echo "make bench         speed beside peers on this machine"

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "deeprnn needs Python 3.11 or newer"'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all,dev]'
	@touch $@

install: $(STAMP)

# Every file is checked against its hash; the project itself is built with what was installed so.
install-locked:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock \
	  -r requirements-$(TORCH).lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $(STAMP)

lock: $(STAMP)
	$(BIN)/python scripts/lock.py

audit: $(STAMP)
	$(BIN)/python scripts/audit.py

dist: $(STAMP)
	rm -rf dist
	$(BIN)/python -m hatchling build
	$(BIN)/python scripts/check_dist.py dist

demo: $(STAMP)
	$(BIN)/deeprnn demo

# A test that hangs ends, with every thread's traceback, and fails: no test here takes a tenth of that time.
WATCH := -o faulthandler_timeout=300 -o faulthandler_exit_on_timeout=true

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal $(WATCH)

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

torture: $(STAMP)
	$(BIN)/python -m tests.torture --minutes $(TORTURE_MINUTES) $(addprefix --seed ,$(TORTURE_SEED))

test-gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu -v -n 8

# Debian's Chromium, where no Chromium is there yet.
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null \
	  || { apt-get update -qq && apt-get install -y -qq chromium; }

test-browser: $(STAMP) browser
	$(BIN)/python -m pytest -m browser $(WATCH)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/deeprnn bench

clean:
	rm -rf $(VENV) out dist .pytest_cache .ruff_cache .hypothesis
