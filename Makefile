PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.made

.PHONY: demo test killed lint bench docs clean

demo: $(STAMP)
	$(BIN)/python examples/quickstart.py

# A process a core, at most four: each may take 3 GB. One alone: make test WORKERS=0.
WORKERS := logical
test: $(STAMP)
	$(BIN)/python -m pytest -q --numprocesses $(WORKERS) --maxprocesses 4 --dist worksteal

# The federated examples' smoke presets, each whole and then killed with -9 and started again: minutes.
killed: $(STAMP)
	$(BIN)/python -m tests.kill_examples --kills 1

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)
	$(BIN)/python -m tests.benchmarks

docs: $(STAMP)
	$(BIN)/mkdocs build --strict

# The environment is made once, reused, and made anew when pyproject.toml changes.
$(STAMP): pyproject.toml
	@echo "Setting up $(VENV): PyTorch and the rest, 5.9 GB on Linux; one to two minutes on a fast line."
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --no-input --progress-bar on -e ".[dev]"
	touch $(STAMP)

clean:
	rm -rf $(VENV) dist site .mypy_cache .ruff_cache .hypothesis
