# On a machine with Python 3.11 or newer and pip: `make demo` trains a language model on two
# sharded processes, `make test` runs the tests. Both make the environment .venv first.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.complete
# pip shows its progress to a person only.
PIP_FLAGS = $$(test -t 1 || echo --quiet)

# Torch's thread pools of several processes on few cores slow each other down.
export OMP_NUM_THREADS ?= 1

# Two processes, about a minute of training on two cores.
PROCESSES ?= 2
DEMO_ARGS ?= --out runs/demo --fresh

.DEFAULT_GOAL := help
.PHONY: help bench demo test test-gpu test-slow random lint typecheck clean

help:
	@echo "make demo       train a small language model, sharded over $(PROCESSES) processes"
	@echo "make test       run the tests (PYTEST_ARGS=... narrows them)"
	@echo "make test-slow  run the slow tests, which make test leaves out"
	@echo "make test-gpu   run the tests that need a GPU (skipped without one)"
	@echo "make random     train random configurations and compare with one process (CASES=500 SEED=1)"
	@echo "make bench      measure beside FSDP2 and DDP, against the targets (BENCH_ARGS=... narrows)"
	@echo "make lint       ruff: style and imports"
	@echo "make typecheck  mypy --strict"
	@echo "make docs       build the documentation into site/"
	@echo "make clean      remove the environment, caches and builds (runs/ stays)"

demo: $(STAMP)
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node=$(PROCESSES) \
		examples/train_lm.py $(DEMO_ARGS)

# Another -m in PYTEST_ARGS takes the place of this one.
test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow" $(PYTEST_ARGS)

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

# On a machine with a GPU and no wish for an environment: python3 -m pytest tests/gpu
test-gpu: $(STAMP)
	$(BIN)/python -m pytest tests/gpu $(PYTEST_ARGS)

CASES ?= 200
SEED ?= 0

random: $(STAMP)
	$(BIN)/python -m tests.random_training --cases $(CASES) --seed $(SEED) $(RANDOM_ARGS)

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

lint: $(STAMP)
	$(BIN)/python -m ruff check .

typecheck: $(STAMP)
	$(BIN)/python -m mypy

docs: $(VENV)/.docs
	$(BIN)/python -m mkdocs build --quiet
	@echo "the documentation is in site/index.html"

docs-pictures: $(STAMP)
	$(BIN)/python docs/make_pictures.py

clean:
	rm -rf $(VENV) site build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last: an environment whose making was interrupted is finished, or made
# anew when its pip does not run, by the next call. Some distributions' Python cannot put pip into
# an environment itself; their own pip can.
$(STAMP): pyproject.toml constraints.txt
	@rm -f $@
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
		python="$$(PYTHON='$(PYTHON)' .ci/find-python)" && \
		echo "making $(VENV) with $$python" && \
		{ "$$python" -m venv --clear $(VENV) >/dev/null 2>&1 || \
		{ "$$python" -m venv --clear --without-pip $(VENV) && \
		"$$python" -m pip --python $(BIN)/python install --quiet pip; }; }; }
	@echo "installing torch and the pinned tools into $(VENV) (once; this takes some minutes)"
	@$(BIN)/python -m pip install $(PIP_FLAGS) -c constraints.txt setuptools
	@$(BIN)/python -m pip install $(PIP_FLAGS) -c constraints.txt --no-build-isolation \
		-e ".[test,examples,dev]"
	@touch $@

$(VENV)/.bench: $(STAMP)
	@$(BIN)/python -m pip install $(PIP_FLAGS) -c constraints.txt --no-build-isolation -e ".[bench]"
	@touch $@

$(VENV)/.docs: $(STAMP)
	@$(BIN)/python -m pip install $(PIP_FLAGS) -c constraints.txt --no-build-isolation -e ".[docs]"
	@touch $@
