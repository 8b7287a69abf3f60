# make demo: set up, fit, write a picture, two posteriors and a calibration report.
# make test: set up, run the suite.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# what is installed: the package alone, and what the tests and the lint need as well
PLAIN = $(VENV)/.installed-plain
STAMP = $(VENV)/.installed

.PHONY: demo test test-slow lint install clean

install: $(STAMP)

$(PLAIN): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable .
	touch $(PLAIN)

$(STAMP): $(PLAIN)
	$(BIN)/python -m pip install --quiet --editable ".[test,lint]"
	touch $(STAMP)

demo: $(PLAIN)
	$(BIN)/lightning-bnn demo --out demo

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal

# the long ones: statistical checks over many seeds, and what takes minutes
test-slow: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m slow

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python .ci/layers.py

clean:
	rm -rf $(VENV) demo build dist *.egg-info
