PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.made
FLOWER := .venv-flower

.PHONY: demo test coverage wheel test-flower test-flower-faults killed lint bench bench-peers bench-page docs clean

demo: $(STAMP)
	$(BIN)/python examples/quickstart.py

# A process a core, at most four: each may take 3 GB. One alone: make test WORKERS=0.
WORKERS := logical
test: $(STAMP)
	$(BIN)/python -m pytest -q --numprocesses $(WORKERS) --maxprocesses 4 --dist worksteal

# The same with branches counted, in worker processes too: of each package at least 95 %.
coverage: $(STAMP)
	$(BIN)/python -m pytest -q --numprocesses $(WORKERS) --maxprocesses 4 --dist worksteal --cov --cov-report=json:coverage.json
	$(BIN)/python tests/covered.py coverage.json

# The built wheel alone, away from the repository.
wheel: $(STAMP)
	rm -rf dist
	$(BIN)/python -m pip wheel --disable-pip-version-check --quiet --no-deps --wheel-dir dist .
	$(BIN)/python -m zipfile --extract dist/*.whl dist/alone
	cd dist && PYTHONPATH=alone $(CURDIR)/$(BIN)/python -P $(CURDIR)/tests/smoke.py alone

# With Flower itself, in an environment of its own: the stand-in's tests with Flower's own classes; the table of hashes,
# in a simulation and on deployed nodes; secure sums, and private runs. Then what fails, and who is let in. One process:
# Flower starts its own. What was seen is kept where FLOWER_RECORD says; docs/scripts/flower.py makes the page of it.
test-flower: $(FLOWER)/.made
	FLOWER_TARGET=$@ $(FLOWER)/bin/python -m pytest -q tests/fl/flower tests/flower_real/test_equal.py \
		tests/flower_real/test_secure.py tests/flower_real/test_private.py

test-flower-faults: $(FLOWER)/.made
	FLOWER_TARGET=$@ $(FLOWER)/bin/python -m pytest -q tests/flower_real/test_faults.py tests/flower_real/test_closed.py

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

# On an idle machine: what is measured is kept, and the page made of it. Killed, the first goes on where it was.
bench-page: $(STAMP)
	$(BIN)/python -m tests.benchmarks --out docs/results/benchmarks.jsonl; made=$$?; \
	$(BIN)/python docs/scripts/benchmarks.py && exit $$made

# The engine beside Flower's simulation and pfl-research, in Flower's environment.
bench-peers: $(FLOWER)/.made
	$(FLOWER)/bin/python -m pip install --disable-pip-version-check --quiet "pfl==0.6.*"
	$(FLOWER)/bin/python -m tests.benchmarks peers --out docs/results/peers.json; made=$$?; \
	$(FLOWER)/bin/python docs/scripts/benchmarks.py && exit $$made

docs: $(STAMP)
	$(BIN)/mkdocs build --strict

# The environment is made once, reused, and made anew when pyproject.toml changes.
$(STAMP): pyproject.toml
	@echo "Setting up $(VENV): PyTorch and the rest, 5.9 GB on Linux; one to two minutes on a fast line."
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --no-input --progress-bar on -e ".[dev]"
	touch $(STAMP)

$(FLOWER)/.made: pyproject.toml
	rm -rf $(FLOWER)
	$(PYTHON) -m venv $(FLOWER)
	$(FLOWER)/bin/python -m pip install --disable-pip-version-check --no-input --progress-bar on -e ".[dev]" "flwr[simulation]==1.41.*"
	touch $(FLOWER)/.made

clean:
	rm -rf $(VENV) $(FLOWER) dist site coverage.json .mypy_cache .ruff_cache .hypothesis
