# Every target makes .venv by itself: `make demo` and `make test` are all a newcomer needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# Two workers with one torch thread each use two cores better than one process with two.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# What skips where the packages of others are missing: Hugging Face, Lightning, Opacus.
OTHERS := tests/unit/integrations/transformers_test.py tests/unit/integrations/lightning_test.py \
    tests/unit/integrations/row_losses_test.py tests/unit/compat/lightning_test.py \
    tests/unit/compat/schedulers_test.py \
    tests/unit/engine/attention_test.py tests/properties/huggingface_test.py \
    tests/system/trainers_test.py tests/unit/train/recipes/text_features_test.py \
    tests/ranks/libraries_test.py

.PHONY: setup demo test test-all test-others audit docs lint format budget bench clean

setup: $(VENV)/.ready
demo: $(VENV)/.ready
	$(BIN)/vestige demo
test: $(VENV)/.ready-dev lint
	$(PYTEST) -m "not slow" --durations=25
test-all: $(VENV)/.ready-others lint
	$(PYTEST)
test-others: $(VENV)/.ready-others
	$(PYTEST) -m "not slow" --durations=10 $(OTHERS)
audit: $(VENV)/.ready-dev
	$(PYTEST) -m audit -rP
docs: $(VENV)/.ready-docs  # TUTORIAL_EPOCHS=2 runs the tutorials in their quick form
	OMP_NUM_THREADS=1 NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html"
lint: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tools/budget.py
format: $(VENV)/.ready-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
budget:
	$(PYTHON) tools/budget.py
bench: $(VENV)/.ready-bench
	$(BIN)/python -m benchmarks
clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .hypothesis src/*.egg-info

# torch first and alone: packages that need it then find the pinned build already there.
$(VENV)/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e '.[all]'
	@touch $@
$(VENV)/.ready-dev: $(VENV)/.ready
	$(PIP) -e '.[all,dev]'
	@touch $@
$(VENV)/.ready-docs: $(VENV)/.ready-dev
	$(PIP) -e '.[all,hf,docs]'
	@touch $@
$(VENV)/.ready-others: $(VENV)/.ready-dev
	$(PIP) -e '.[all,hf,lightning,bench]'
	@touch $@
$(VENV)/.ready-bench: $(VENV)/.ready-dev
	$(PIP) -e '.[all,bench]'
	@touch $@
