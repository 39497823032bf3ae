# Everything happens in .venv, which is made on first use from plain python3 and pip.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-slow test-attacks test-flower test-cluster check lint bench clean

demo: .venv/base
	$(BIN)/personax compare

test: .venv/test
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not slow"

test-slow: .venv/test
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m slow

# Prints how many attacks of each kind were attempted and refused, and what was measured. The fast ones are in `test`, too.
test-attacks: .venv/test
	$(BIN)/python -m pytest tests/live -m attack

# Flower pins its dependencies tightly: it has an environment of its own. It starts a process for each message, and
# the tests send some hundred: too long for `check`.
test-flower: .venv-flower/test
	.venv-flower/bin/python -m pytest tests/flower personax/flower

# Real schedulers on this machine: submitit, a Ray head with a second node, and Slurm if its daemons are installed
# (Debian: slurm-wlm and munge, as root). About ten minutes.
test-cluster: .venv-cluster/test
	.venv-cluster/bin/python -m pytest tests/cluster personax/cluster

lint: .venv/test .venv/lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

check: lint test

bench: .venv/base
	$(BIN)/personax bench --out bench.json
	$(BIN)/personax bench --only growth --out bench-growth.json

clean:
	rm -rf .venv .venv-flower .venv-cluster build *.egg-info .pytest_cache .ruff_cache

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/base: .venv/bin/python pyproject.toml constraints.txt
	$(INSTALL) --editable .
	touch $@

.venv/%: .venv/base
	$(INSTALL) --editable ".[$*]"
	touch $@

.venv-flower/test: pyproject.toml constraints-flower.txt
	$(PYTHON) -m venv .venv-flower
	.venv-flower/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-flower.txt \
		--editable ".[test-flower]"
	touch $@

.venv-cluster/test: pyproject.toml constraints-cluster.txt
	$(PYTHON) -m venv .venv-cluster
	.venv-cluster/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-cluster.txt \
		--editable ".[test-cluster]"
	touch $@
