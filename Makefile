PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.made
FLOWER := .venv-flower

.PHONY: demo gpu test test-slow coverage wheel release tag test-flower test-flower-faults killed mutants lint lint-versions constraints bench bench-peers bench-page docs docs-version clean

demo: $(STAMP)
	$(BIN)/python examples/quickstart.py

# Tests, benchmarks and the papers' sizes on an accelerator, in pieces of minutes; ARGS=--smoke runs tiny settings on a CPU.
gpu: $(STAMP)
	$(BIN)/python examples/gpu.py $(ARGS)

# One process per core, at most four, because each may use 3 GB. Use `make test WORKERS=0` for a single process.
WORKERS := logical
test: $(STAMP)
	$(BIN)/python -m pytest -q --numprocesses $(WORKERS) --maxprocesses 4 --dist worksteal

# Tests of minutes each: pasted documents, examples, all pairs of add-ons, the table of benchmarks, fuzzing at length,
# kills, and captures at every entry point.
test-slow: $(STAMP)
	$(BIN)/python -m pytest -q -m slow --numprocesses $(WORKERS) --maxprocesses 4 --dist worksteal

# Count statements and branches, also in worker processes; fails below 95 % for a package.
coverage: $(STAMP)
	$(BIN)/python -m pytest -q --numprocesses $(WORKERS) --maxprocesses 4 --dist worksteal --cov --cov-report=
	for package in distillkit fl attacks; do \
		$(BIN)/coverage report --include="$$package/*" --skip-covered --fail-under=95 || exit 1; \
	done

# Build the wheel and use it away from the repository.
wheel: $(STAMP)
	rm -rf dist
	$(BIN)/python -m pip wheel --disable-pip-version-check --quiet --no-deps --wheel-dir dist .
	$(BIN)/python -m zipfile --extract dist/*.whl dist/alone
	cd dist && PYTHONPATH=alone $(CURDIR)/$(BIN)/python -P $(CURDIR)/tests/smoke.py alone

# Build what is uploaded from a clean checkout, check it, and use the wheel in an empty environment on every Python found.
# WHEEL_DEPS=FOLDER takes the dependencies from that site-packages, on its Python only, in place of the registry.
PYTHONS := 3.11 3.12 3.13 3.14
release: $(STAMP)
	@test -n "$(REPOSITORY_URL)" || { echo "REPOSITORY_URL is missing: set it to the address of the public repository"; exit 1; }
	@test -z "$$(git status --porcelain)" || { echo "The checkout has changes: commit them first"; exit 1; }
	rm -rf dist
	$(BIN)/python -m build --outdir dist/upload
	$(BIN)/python -m twine check --strict dist/upload/*
	for version in $(PYTHONS); do WHEEL_DEPS=$(WHEEL_DEPS) bash scripts/try_wheel.sh $$version || exit 1; done
	@echo "Ready: \`make tag\`, then \`$(BIN)/python -m twine upload dist/upload/*\`"

tag:
	bash scripts/tag.sh

# Tests on Flower itself, in a separate environment: the adapter's tests with Flower's own classes, equal hashes in
# simulation and on deployed nodes, secure sums and private runs; then faults and access control. They run in one process,
# because Flower starts its own. FLOWER_RECORD names the record, from which docs/scripts/tables.py makes its page.
test-flower: $(FLOWER)/.made
	FLOWER_TARGET=$@ $(FLOWER)/bin/python -m pytest -q tests/fl/flower tests/flower_real/test_equal.py \
		tests/flower_real/test_secure.py tests/flower_real/test_private.py

test-flower-faults: $(FLOWER)/.made
	FLOWER_TARGET=$@ $(FLOWER)/bin/python -m pytest -q tests/flower_real/test_faults.py tests/flower_real/test_closed.py

# Run the smoke presets of the federated examples, then kill each with SIGKILL and resume it. Takes minutes.
killed: $(STAMP)
	$(BIN)/python -m tests.kill_examples --kills 1
	$(BIN)/python -m tests.kill_examples --kills 3 --seconds 5 --out runs/killed-in-pieces

# Plant 20 mistakes in every module that differs from BASE, one at a time in a copy, and report those that no test
# notices. Takes minutes a module; `python -m tests.mutants MODULE ... --log FILE` continues an interrupted run.
BASE := origin/main
mutants: $(STAMP)
	$(BIN)/python -m tests.mutants $$(git diff --name-only --diff-filter=d $(BASE) -- 'distillkit/*.py' 'fl/*.py' 'attacks/*.py')

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff check --preview --select PLW1514 . # text files have a stated encoding
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Check the types for every supported Python, and compile the sources with those that are installed here.
lint-versions: $(STAMP)
	for version in 3.11 3.12 3.13; do \
		$(BIN)/mypy --python-version $$version || exit 1; \
		if command -v python$$version >/dev/null && python$$version -c ""; then \
			python$$version -W error -m compileall -qf distillkit fl attacks examples || exit 1; \
		else echo "Python $$version is not installed here: its compiler was not tried"; fi; \
	done

# Write the versions of the environment in which the tests run.
constraints: $(STAMP)
	{ head -n 2 constraints.txt; $(BIN)/python -m pip freeze --exclude-editable; } > constraints.new
	mv constraints.new constraints.txt

bench: $(STAMP)
	$(BIN)/python -m tests.benchmarks
	$(BIN)/python -m tests.benchmarks stored --pictures 200

# Measure on an idle machine, keep the record and make its page. An interrupted measurement continues.
bench-page: $(STAMP)
	$(BIN)/python -m tests.benchmarks --out docs/results/benchmarks.jsonl; made=$$?; \
	$(BIN)/python docs/scripts/tables.py && exit $$made

# Compare the engine with Flower's simulation and pfl-research, in Flower's environment.
bench-peers: $(FLOWER)/.made
	$(FLOWER)/bin/python -m pip install --disable-pip-version-check --quiet "pfl==0.6.*"
	$(FLOWER)/bin/python -m tests.benchmarks peers --out docs/results/peers.json; made=$$?; \
	$(FLOWER)/bin/python docs/scripts/tables.py && exit $$made

docs: $(STAMP)
	$(BIN)/mkdocs build --strict

# Add this version's site, with a menu of all versions, to the local branch gh-pages. Nothing is pushed.
docs-version: $(STAMP)
	version=$$(sed -n 's/^version = "\(.*\)"$$/\1/p' pyproject.toml); \
	export DOCS_VERSIONS=mike PATH="$(CURDIR)/$(BIN):$$PATH"; \
	mike deploy --update-aliases $$version latest && mike set-default latest

# The environment is created once and recreated when pyproject.toml changes.
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
