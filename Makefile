# Everything a fresh machine with Python 3.11+ and make needs. `make help` lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS := .venv-peers
DOCS := .venv-docs
TPU := .venv-tpu
GPU := .venv-gpu
NEWEST := .venv-newest
NEWEST_PYTHON ?= python3.13
# What needs neither TensorFlow nor SeqIO: layers, NNX, whole models, decoding and meshes.
NEWEST_TESTS := tests/attention tests/layers tests/models tests/inference \
  tests/sharding/test_ambient.py tests/sharding/test_lowering.py tests/test_nnx.py tests/test_multi_head.py
QUICK_LAYERS := ([Random- or [DotProduct- or [TalkingHeads-)
OPTIMIZED_TESTS := tests/attention/test_routes.py tests/layers/test_contract.py \
	-k "not test_contract or $(QUICK_LAYERS) or [Dense- or [Gaussian- or [DynamicConvolution-"
# T5's own tasks and what importing them needs beside the data extra; their other requirements are not used.
ORACLES := t5 gin-config babel
WORKDIR ?= runs/quickstart

.PHONY: help install quickstart quick test lint types tests optimized hosts test-tpu test-gpu test-newest test-peers dist docs notebooks reliability fuzz combinations bench bench-peers clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade -c constraints.txt pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[data,gcs,test]'
	$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt $(ORACLES)
	touch $(STAMP)

install: $(STAMP)  ## make .venv with the tested versions

quickstart: $(STAMP)  ## train two small models on the synthetic mixture and write a report
	$(BIN)/synthesizer-jax quickstart --workdir $(WORKDIR)

test: lint types tests  ## lint, types and the test suite

lint: $(STAMP)  ## format, lint, the direction of imports between packages, and circles of imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	! git grep -n "fmt: skip" -- '*.py'
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m tools.import_circles

types: $(STAMP)  ## static types
	$(BIN)/mypy

quick: lint types  ## in a minute: lint, types, the contract of three layers, one training step
	$(BIN)/pytest -q -n 2 tests/layers/test_contract.py -k "test_contract and $(QUICK_LAYERS)"
	$(BIN)/pytest -q "tests/training/test_recipes.py" -k "quickstart and random_vanilla"

tests: $(STAMP)  ## the test suite, on three processes: two compute, one may wait
	$(BIN)/pytest -n 3 --dist worksteal -m "not hosts"

optimized: $(STAMP)  ## oracles and gradients at XLA's default optimization level, as users compile
	TESTS_OPTIMIZED=1 $(BIN)/pytest -q -n 2 --dist worksteal $(OPTIMIZED_TESTS)

hosts: $(STAMP)  ## the tests of several processes that train as one
	$(BIN)/pytest -m hosts

$(TPU)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(TPU)
	$(TPU)/bin/python -m pip install --quiet --upgrade -c constraints.txt pip
	$(TPU)/bin/python -m pip install --quiet -c constraints.txt -e '.[tpu,test]'
	touch $@

test-tpu: $(TPU)/.installed  ## compile training steps for real TPU topologies, without a TPU
	JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 $(TPU)/bin/pytest tests/tpu

# The plugin alone compiles; the libraries that a GPU needs, gigabytes, are in the extra `cuda`.
$(GPU)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(GPU)
	$(GPU)/bin/python -m pip install --quiet --upgrade -c constraints.txt pip
	$(GPU)/bin/python -m pip install --quiet -c constraints.txt -e '.[test]' jax-cuda13-plugin
	touch $@

test-gpu: $(GPU)/.installed  ## compile attention and training steps for GPUs, without a GPU
	JAX_PLATFORMS=cpu $(GPU)/bin/pytest tests/gpu

$(NEWEST)/.installed: pyproject.toml
	$(NEWEST_PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --upgrade pip
	$(NEWEST)/bin/python -m pip install --quiet -e '.[test]'
	touch $@

# Deprecated functions of jax and flax are errors, except Triton, whose end docs/design.md is about.
DEPRECATIONS := -W error::DeprecationWarning -W error::PendingDeprecationWarning \
  -W "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"

test-newest: $(NEWEST)/.installed  ## the tests that need no TensorFlow, with the newest jax and flax (NEWEST_PYTHON=python3.13)
	$(NEWEST)/bin/pytest -n 2 --dist worksteal $(DEPRECATIONS) $(NEWEST_TESTS)

notebooks: $(STAMP)  ## run the notebooks of docs/notebooks, and keep what they print and draw
	$(BIN)/python -m pip install --quiet -c constraints.txt --group notebooks
	$(BIN)/python -m tools.notebooks

dist: $(STAMP)  ## build wheel and sdist in dist/, and try the wheel alone in a fresh environment
	rm -rf dist
	$(BIN)/python -m pip install --quiet -c constraints.txt --group dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m tools.try_wheel

$(DOCS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --upgrade -c constraints.txt pip
	$(DOCS)/bin/python -m pip install --quiet -c constraints.txt --group docs
	touch $@

docs: $(DOCS)/.installed  ## build the documentation as a site in build/site; warnings are errors, so a dead link is one
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

reliability: $(STAMP)  ## kill runs 100 times, and write docs/reliability.md
	$(BIN)/python benchmarks/reliability.py --kills 50 --processes 1 --page docs/reliability.md
	$(BIN)/python benchmarks/reliability.py --kills 50 --processes 1 2 --page docs/reliability.md

fuzz: $(STAMP)  ## damage inputs at random, and write docs/reliability.md
	$(BIN)/python benchmarks/fuzz.py --attempts 400 --page docs/reliability.md

combinations: $(STAMP)  ## train 100 random combinations of settings, and write docs/reliability.md
	$(BIN)/python benchmarks/combinations.py --count 100 --jobs 2 --page docs/reliability.md

bench: $(STAMP)  ## the attention benchmark
	$(BIN)/python benchmarks/attention.py

$(PEERS)/.installed: benchmarks/peers.txt pyproject.toml
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --upgrade pip
	$(PEERS)/bin/python -m pip install --quiet -r benchmarks/peers.txt -e '.[test]'
	touch $@

bench-peers: $(PEERS)/.installed  ## install PyTorch, transformers and CTranslate2 to compare with

test-peers: $(PEERS)/.installed  ## compare pretrained models with transformers
	$(PEERS)/bin/pytest tests/peers

clean:  ## remove what make made
	rm -rf $(VENV) $(PEERS) $(TPU) $(GPU) $(NEWEST) $(DOCS) build dist *.egg-info
