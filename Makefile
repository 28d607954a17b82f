# `make train` and `make test` are all a fresh machine needs: python3 with venv, and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# With it, every one of the many processes of the tests would compile all that it imports again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test test-sixth test-all models packing parallel audit faults mutants docs wheel lint types clean

train: $(VENV)/.installed
	$(BIN)/python train.py

test: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow and not gpu"

# The slow tests of this commit: those of tests/test_net.py, and a sixth of the others, chosen by its hash.
test-sixth: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "slow and not gpu" --sixth-of $$(git rev-parse HEAD)

test-all: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not gpu"

models: $(VENV)/.installed
	OMP_NUM_THREADS=1 PYTHONPATH=tests/helpers $(BIN)/python tools/models_table.py

packing: $(VENV)/.installed
	OMP_NUM_THREADS=1 PYTHONPATH=tests/helpers $(BIN)/python tools/packing_table.py

parallel: $(VENV)/.installed
	OMP_NUM_THREADS=1 PYTHONPATH=tests/helpers $(BIN)/python tools/parallel_table.py

audit: $(VENV)/.installed
	OMP_NUM_THREADS=1 PYTHONPATH=tests/helpers $(BIN)/python tools/audit.py

faults: $(VENV)/.installed
	OMP_NUM_THREADS=1 PYTHONPATH=tests/helpers $(BIN)/python tests/faults/harness.py --kills 200 --seed 1

mutants: $(VENV)/.installed
	$(BIN)/python tools/mutants.py --count 200 --seed 1

docs: $(VENV)/.installed
	$(BIN)/python tools/build_site.py

wheel: $(VENV)/.installed
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	$(BIN)/python tools/build_ops_wheel.py

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/pyright --pythonpath $(BIN)/python

# The stamp is written last: an interrupted installation is taken up again by the next `make`. Without --no-compile, pip
# would spend a minute on modules that are never imported.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .ruff_cache
