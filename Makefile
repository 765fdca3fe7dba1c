PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test repeat lint lint-workflows lock clean

# One recipe makes the environment; everything else stands on it. Both `make` and CI install from the lock file.
.venv/installed: requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	touch $@

# The command line alone, at the same versions: what CI's jobs that plan and merge need.
.venv/core: requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint requirements.lock --editable .
	touch $@

demo: .venv/installed
	$(BIN)/e2e-registry check --suite short-cpu

test: .venv/installed
	$(BIN)/python -m pytest -n 2 --dist worksteal

# Twice 200 steps under one seed, which must be equal in every bit of every parameter, and once under another.
repeat: .venv/installed
	$(BIN)/e2e-registry repeat --seed 0 -- $(BIN)/python scripts/run_digits_classifier.py --deterministic-mode \
		--seed {seed} --checkpoint {run_dir}/checkpoints/last.pt

lint: .venv/installed lint-workflows
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/e2e-registry lint e2e_registry scripts

# Without shellcheck actionlint would pass over the shell in workflows and say nothing.
lint-workflows: .venv/installed
	$(BIN)/shellcheck --version >/dev/null
	$(BIN)/shellcheck .ci/run .github/actions/*.sh
	$(BIN)/actionlint -shellcheck $(BIN)/shellcheck
	$(BIN)/zizmor --offline --no-progress --quiet --persona pedantic .
	$(BIN)/python scripts/check_workflows.py

lock: .venv/installed
	$(BIN)/pip-compile --quiet --all-extras --strip-extras --no-emit-index-url --no-emit-find-links \
		--no-emit-options --no-header --annotation-style line --output-file requirements.lock.new pyproject.toml
	{ echo '# Every package that the Makefile and CI install, pinned. Made by `make lock`; do not edit by hand.'; \
		sed 's/+cpu//' requirements.lock.new; } > requirements.lock
	rm requirements.lock.new

clean:
	rm -rf .venv .e2e_runs build dist *.egg-info
