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

.PHONY: help install demo test test-slow test-gpu test-browser torture check format browser bench clean

help:
	@echo "make demo          train an RNN and a DOT(S)-RNN on Bach chorales; music in out/"
	@echo "make test          all quick tests"
	@echo "make check         lint and types"
	@echo "make test-browser  the page, in Chromium (installs it where it is missing)"
	@echo "make test-gpu      the backend grid and the kernels, on an NVIDIA GPU"
	@echo "make test-slow     tests of minutes;  make torture: 200 kills of a training run"
	@echo "make bench         speed beside peers on this machine"

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "deeprnn needs Python 3.11 or newer"'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all,dev]'
	@touch $@

install: $(STAMP)

demo: $(STAMP)
	$(BIN)/deeprnn demo

# A test that hangs ends, with every thread's traceback, and fails: no test here takes a tenth of that time.
WATCH := -o faulthandler_timeout=300 -o faulthandler_exit_on_timeout=true

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal $(WATCH)

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

torture: $(STAMP)
	$(BIN)/python -m pytest -m slow tests/training/test_torture.py

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
	rm -rf $(VENV) out .pytest_cache .ruff_cache .hypothesis
