# Two commands do all: `make demo` and `make test`. Both create the environment first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# The exact versions that are installed.
CONSTRAINTS ?= constraints.txt
# Which tests run; `make test TESTS=` runs all: also those that take long, and more cases of some.
TESTS  ?= not slow

.PHONY: demo test lint types unit clean

$(STAMP): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip -c $(CONSTRAINTS)
	$(BIN)/python -m pip install --quiet torch -c $(CONSTRAINTS)
	$(BIN)/python -m pip install --quiet --editable '.[dev,vision]' -c $(CONSTRAINTS)
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/llmcompressor demo

test: lint types unit

lint: $(STAMP)
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks

types: $(STAMP)
	$(BIN)/mypy

# Many tests start processes: each would compile the package again, and pytest all tests.
unit: export PYTHONDONTWRITEBYTECODE :=
unit: $(STAMP)
	$(BIN)/python -m pytest -n logical --dist worksteal -m "$(TESTS)"

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build dist
