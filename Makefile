# Everything happens in .venv, which is created on first use from plain python3 and pip. Dependencies are installed by
# hash from locks/, which list all of them (written by tools/lock.py), and then the project itself.
PYTHON ?= python3
BIN := .venv/bin
PIP := python -m pip install --quiet --disable-pip-version-check
HASHED := $(PIP) --require-hashes --no-deps
PROJECT := $(PIP) --no-deps --no-build-isolation --editable .

.PHONY: demo test test-slow test-attacks test-flower test-cluster test-loggers check lint docs dist locks bench clean

demo: .venv/base
	$(BIN)/personax compare

test: .venv/test
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not slow"

test-slow: .venv/test
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m slow

# Prints how many attacks of each kind were attempted and refused, and what was measured. The fast ones are in `test`, too.
test-attacks: .venv/test
	$(BIN)/python -m pytest tests/live -m attack

# Flower pins its dependencies tightly: it is in a separate environment. It starts a process for each message, and
# the tests send some hundred: too long for `check`.
test-flower: .venv-flower/test
	.venv-flower/bin/python -m pytest tests/flower personax/flower

# Real schedulers on this machine: submitit, a Ray head with a second node, and Slurm if its daemons are installed
# (Debian: slurm-wlm and munge, as root). About ten minutes.
test-cluster: .venv-cluster/test
	.venv-cluster/bin/python -m pytest -rs tests/cluster personax/cluster

# wandb and MLflow have many dependencies: they are in a separate environment, too.
test-loggers: .venv-loggers/test
	.venv-loggers/bin/python -m pytest tests/experiment/test_loggers.py tests/experiment/test_trackers.py

lint: .venv/test .venv/lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

check: lint test

# Build the source distribution and the wheel, install each in an empty environment elsewhere, and run the demo there.
dist: .venv/dist
	rm -rf dist build
	$(BIN)/python -m build --no-isolation --outdir dist
	PYTHON=$(PYTHON) tools/try_dist.sh dist/*.whl dist/*.tar.gz

# Write locks/ again after a change of pyproject.toml or of a constraints file.
locks:
	$(PYTHON) tools/lock.py

# Runs the notebooks, which takes some minutes; PERSONAX_NOTEBOOKS=off builds the site without running them.
docs: .venv-docs/docs
	.venv-docs/bin/python -m sphinx -b html -n -W --keep-going docs docs/_build/html

bench: .venv/base
	$(BIN)/personax bench --out bench.json
	$(BIN)/personax bench --only growth --out bench-growth.json

clean:
	rm -rf .venv .venv-flower .venv-cluster .venv-loggers .venv-docs docs/_build docs/_generated build dist *.egg-info .pytest_cache .ruff_cache

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/base: .venv/bin/python pyproject.toml locks/base.txt
	$(BIN)/$(HASHED) --requirement locks/base.txt
	$(BIN)/$(PROJECT)
	touch $@

.venv/%: .venv/base locks/%.txt
	$(BIN)/$(HASHED) --requirement locks/base.txt --requirement locks/$*.txt
	touch $@

.venv-%/test: pyproject.toml locks/%.txt
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/$(HASHED) --requirement locks/$*.txt
	.venv-$*/bin/$(PROJECT)
	touch $@

.venv-docs/docs: pyproject.toml locks/docs.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/$(HASHED) --requirement locks/docs.txt
	.venv-docs/bin/$(PROJECT)
	touch $@
