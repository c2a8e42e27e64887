# `make demo` shows it work, `make test` runs the tests; both make the virtual environment first.
PYTHON ?= python3
BIN = .venv/bin

.venv/installed: requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

.PHONY: demo test test-all check format docs
demo: .venv/installed
	$(BIN)/outlast demo

test: .venv/installed
	$(BIN)/pytest -m "not slow"

# The fast tests, then the slow ones.
test-all: test
	$(BIN)/pytest -m slow

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check
	$(BIN)/lint-imports
	$(BIN)/cog --check -I docs README.md docs/*.md

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: .venv/installed
	$(BIN)/cog -r -I docs README.md docs/*.md
