# Two commands are enough on a fresh machine: `make audit` and `make test`.
PYTHON ?= python3
BIN    := .venv/bin
# torch goes in first and plainly: a range, or another package's wish for torch, may bring gigabytes of GPU libraries.
TORCH  ?= torch==2.13.0
# Python compiles what it imports; compiling all of torch and its company first takes half a minute.
PIP_FLAGS := --quiet --disable-pip-version-check --no-compile
# Small networks run slower on many threads than on one as soon as anything else runs.
export OMP_NUM_THREADS ?= 1
# Every process, and there are many, would compile all of torch again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: audit test test-deployment lint format index clean

audit: .venv/.installed
	$(BIN)/gradveil audit --budget quick --resume

test: lint
	$(BIN)/python -m pytest -n 2 --dist worksteal

# Starts a Flower deployment on loopback (a SuperLink and SuperNodes with TLS and keys) and a Ray cluster. A few minutes.
test-deployment: .venv/.installed-dev
	$(BIN)/python -m pytest -m deployment tests/federation/test_deployment.py tests/audit/test_workers.py tests/cli/test_cli.py

lint: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# What `gradveil list` and `--help` say of the registries, kept in a file so that they need not import torch.
index: .venv/.installed-dev
	$(BIN)/python -m gradveil.cli._index

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "gradveil needs Python 3.11 or newer, got " + sys.version.split()[0] + "; name another with make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv

.venv/.installed: pyproject.toml | .venv/bin/python
	$(BIN)/pip install $(PIP_FLAGS) $(TORCH)
	$(BIN)/pip install $(PIP_FLAGS) --editable '.[audit]'
	touch $@

.venv/.installed-dev: pyproject.toml .venv/.installed
	$(BIN)/pip install $(PIP_FLAGS) --editable '.[dev]'
	touch $@
