# The two commands a newcomer needs are `make up` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
# The settings of the environment hold, unless make is told otherwise: make up PORT=8400
HOST ?= $(or $(KDATUNE_HOST),127.0.0.1)
PORT ?= $(or $(KDATUNE_PORT),8321)
DATABASE ?= $(or $(KDATUNE_DATABASE_URL),sqlite:///kdatune.db)
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: up serve setup check test docs fmt clean help

help:  ## what each target does
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(BIN)/python:
	$(PYTHON) -c 'import sys; assert (3, 11) <= sys.version_info < (3, 14), "kdatune needs Python 3.11, 3.12 or 3.13"'
	$(PYTHON) -m venv $(VENV)

# Without a card the service needs no torch: gigabytes and minutes saved.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	if nvidia-smi -L >/dev/null 2>&1; then $(PIP) install -q -c constraints.txt -e '.[gpu]'; else $(PIP) install -q -c constraints.txt -e .; fi
	touch $@

# The tests run torch on the CPU and Triton's interpreter and compiler. A CUDA build of torch brings its own Triton; a CPU
# build brings none, and then the oldest supported one is taken: what must work there.
$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install -q -c constraints.txt torch==2.13.0
	$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) install -q -c constraints.txt triton==3.6.0
	$(PIP) install -q -c constraints.txt -e '.[gpu,dev]'
	touch $@ $(VENV)/.installed

up: $(VENV)/.installed  ## install, migrate, tune the default shapes, serve
	KDATUNE_DATABASE_URL=$(DATABASE) $(BIN)/kdatune up --host $(HOST) --port $(PORT)

serve: $(VENV)/.installed  ## serve what is stored
	KDATUNE_DATABASE_URL=$(DATABASE) $(BIN)/kdatune serve --host $(HOST) --port $(PORT)

setup: $(VENV)/.dev  ## the development environment in .venv

check: $(VENV)/.dev  ## ruff, mypy --strict, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fmt: $(VENV)/.dev  ## let ruff fix what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Exit code 1: all tests ran and some failed. Anything else is a run that broke off, and has no second go.
test: $(VENV)/.dev  ## the whole test suite
	$(BIN)/pytest -n auto --dist loadfile || { [ $$? -eq 1 ] && $(BIN)/python tests/second_go.py; }

docs: $(VENV)/.dev  ## write the pages that are made from the code
	$(BIN)/python tests/docs/test_cli_page.py > docs/cli.md
	$(BIN)/python tests/docs/test_api_page.py > docs/api.md
	$(BIN)/python tests/tuner/test_settings_page.py > docs/settings.md

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
