PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint lock clean

# One recipe makes the environment; everything else stands on it. Both `make` and CI install from the lock file.
.venv/installed: requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	touch $@

demo: .venv/installed
	$(BIN)/e2e-registry check --suite short-cpu

test: .venv/installed
	$(BIN)/python -m pytest -n 2

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/e2e-registry lint e2e_registry scripts

lock: .venv/installed
	$(BIN)/pip-compile --quiet --all-extras --strip-extras --no-emit-index-url --no-emit-find-links \
		--no-emit-options --no-header --annotation-style line --output-file requirements.lock.new pyproject.toml
	{ echo '# Every package that the Makefile and CI install, pinned. Made by `make lock`; do not edit by hand.'; \
		sed 's/+cpu//' requirements.lock.new; } > requirements.lock
	rm requirements.lock.new

clean:
	rm -rf .venv .e2e_runs build dist *.egg-info
