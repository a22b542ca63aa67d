# Two commands do all: `make demo` and `make test`. Both create the environment first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# The exact versions that are installed.
CONSTRAINTS ?= constraints.txt
# Which tests run; `make test TESTS=` runs all: also those that take long, and more cases of some.
TESTS  ?= not slow

.PHONY: demo test lint types unit docs test-vllm serve-demo clean

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
	$(BIN)/ruff check src tests benchmarks docs examples
	$(BIN)/ruff format --check src tests benchmarks docs examples

types: $(STAMP)
	$(BIN)/mypy

# Many tests start processes: each would compile the package again, and pytest all tests.
unit: export PYTHONDONTWRITEBYTECODE :=
unit: $(STAMP)
	$(BIN)/python -m pytest -n logical --dist worksteal -m "$(TESTS)"

# Tests that run checkpoints in vLLM: make test-vllm PYTHON_VLLM=vllm-env/bin/python
test-vllm: $(STAMP)
	@test -n "$(PYTHON_VLLM)" || { echo "Give PYTHON_VLLM, the Python of an environment with vLLM."; exit 2; }
	PYTHON_VLLM="$(PYTHON_VLLM)" $(BIN)/python -m pytest -m vllm tests

# Serves the embedded model with vLLM and compares it with transformers; the same PYTHON_VLLM.
serve-demo: $(STAMP)
	@test -n "$(PYTHON_VLLM)" || { echo "Give PYTHON_VLLM, the Python of an environment with vLLM."; exit 2; }
	$(BIN)/python benchmarks/serve_demo.py --vllm-python "$(PYTHON_VLLM)"

# The same environment: the pages of commands and of recipe fields are made by importing the package.
$(VENV)/.docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --editable '.[docs]' -c $(CONSTRAINTS)
	touch $@

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "Open site/index.html; for the search: $(BIN)/python -m http.server --directory site"

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build dist site
