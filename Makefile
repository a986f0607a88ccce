# Each target finds a Python, makes .venv and installs what it needs; a second run installs nothing again.
PYTHON := .venv/bin/python
WORKERS ?= 2
ARGS ?=

.PHONY: help demo demo-report test test-oldest test-gpu test-multigpu benchmarks lint format readme clean

help:  ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile

demo:  ## Train the toy task with both attentions and compare them (ARGS="--help": the options)
	@scripts/bootstrap.sh .venv demo
	$(PYTHON) train_demo.py $(ARGS)

test:  ## Run the tests on the CPU (ARGS="tests/test_masks.py -k causal": some of them)
	@scripts/bootstrap.sh .venv test
	JAX_PLATFORMS=cpu $(PYTHON) -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

test-oldest:  ## Run the tests with the oldest supported jax, in an environment of its own
	@scripts/bootstrap.sh .venv-oldest test 0.11.2
	JAX_PLATFORMS=cpu .venv-oldest/bin/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

test-gpu:  ## Run the tests of the compiled kernels on an NVIDIA GPU (ARGS="-n 16": in so many processes)
	@scripts/bootstrap.sh .venv test
	XLA_PYTHON_CLIENT_PREALLOCATE=false $(PYTHON) -m pytest -m "gpu and not multigpu" $(ARGS)

test-multigpu:  ## Run the tests that need two NVIDIA GPUs (ARGS likewise)
	@scripts/bootstrap.sh .venv test
	XLA_PYTHON_CLIENT_PREALLOCATE=false $(PYTHON) -m pytest -m multigpu $(ARGS)

demo-report:  ## The report under docs/demo, on a large NVIDIA GPU (ARGS="--output DIR": where the checkpoints go)
	@scripts/bootstrap.sh .venv demo
	$(PYTHON) train_demo.py --preset 125m --implementation reference,flash,cudnn --checkpoint-every 1000 \
		--report-to docs/demo $(ARGS)

benchmarks:  ## Measure this operator and its peers on this machine (ARGS="--help": the options)
	@scripts/bootstrap.sh .venv benchmarks
	$(PYTHON) -m pallas_flash.benchmarks run $(ARGS)

lint:  ## Check style (ruff) and types (pyright)
	@scripts/bootstrap.sh .venv test
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m pyright --pythonpath $(PYTHON)

format:  ## Rewrite the sources in ruff's format
	@scripts/bootstrap.sh .venv test
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

readme:  ## Write the tables of README.md and docs anew, from the dispatch table and from measurements
	@scripts/bootstrap.sh .venv test
	JAX_PLATFORMS=cpu $(PYTHON) -m scripts.support_table --write
	JAX_PLATFORMS=cpu $(PYTHON) -m scripts.benchmark_tables --write
	$(PYTHON) -m scripts.reliability_table --write

clean:  ## Delete the environments and caches
	rm -rf .venv .venv-oldest .uv .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
