# One command for each thing a contributor does. Every target sets up what it
# needs in .venv, once; PYTHON=python3.12 picks another interpreter for that.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# One backend a process: Keras reads KERAS_BACKEND once, when it is imported.
BACKENDS ?= jax tensorflow torch
# The one that the demo runs on.
BACKEND ?= jax
# A file stays in one process, and so does what is made for all of its tests.
PYTEST_ARGS ?= -n 2 --dist loadfile

comma := ,
empty :=
space := $(empty) $(empty)

# `with-jax,demo` stands for `pip install -e ".[jax,demo]"`: one stamp for each
# set of extras, renewed when pyproject.toml changes.
DEMO := $(VENV)/with-$(BACKEND),demo
CHECK := $(VENV)/with-dev
TEST := $(VENV)/with-test,$(subst $(space),$(comma),$(strip $(BACKENDS)))
TESTS := $(addprefix test-,$(BACKENDS))
SWEEP_MODELS := $(VENV)/with-sweep,jax,tensorflow
BENCH := $(VENV)/with-bench,$(subst $(space),$(comma),$(strip $(BACKENDS)))
BENCH_BACKENDS := $(subst $(space),$(comma),$(strip $(BACKENDS)))

.PHONY: help demo test check bench bench-train bench-quality sweep sweep-layers \
  sweep-models clean $(TESTS)
# Two pip processes in one environment would tread on each other.
.NOTPARALLEL:
# A half-made environment must not pass for a whole one.
.DELETE_ON_ERROR:

help:
	@echo "make demo    train handwritten digits under three policies, draw the result"
	@echo "make test    run the tests on: $(BACKENDS)  (one alone: make test-jax)"
	@echo "make check   format, lint, check types"
	@echo "make bench   measure what loss scaling costs, beside other packages"
	@echo "make bench-train    measure whole training steps under each policy"
	@echo "make bench-quality  train to the end under each policy"
	@echo "make sweep   measure what the tests are too short for, both of these:"
	@echo "make sweep-layers   measure every layer of Keras in half precision"
	@echo "make sweep-models   train every model of keras.applications, and KerasHub's"
	@echo "make clean   remove what the other commands made"

demo: $(DEMO)
	$(BIN)/keras-mp demo --backend $(BACKEND)

test: $(TESTS)

$(TESTS): test-%: $(TEST)
	KERAS_BACKEND=$* $(BIN)/python -m pytest $(PYTEST_ARGS)

# Under ten minutes on a quiet machine. benchmarks/ is what comes of these three.
bench: $(BENCH)
	$(BIN)/keras-mp bench --backend $(BENCH_BACKENDS) --out benchmarks/cost.json
	$(BIN)/keras-mp bench --suite seams --backend $(BENCH_BACKENDS) \
	  --out benchmarks/seams.json
	$(BIN)/python -m keras_mp.benchmarks.readme

# With an NVIDIA GPU it needs JAX and torch with CUDA: see benchmarks/README.md.
bench-train: $(BENCH)
	$(BIN)/keras-mp bench --suite train --out benchmarks/train.json
	$(BIN)/python -m keras_mp.benchmarks.readme

bench-quality: $(BENCH)
	$(BIN)/keras-mp bench --suite quality --out benchmarks/quality.json
	$(BIN)/python -m keras_mp.benchmarks.readme

sweep: sweep-layers sweep-models

# An hour or two: every layer is compiled a dozen times on each backend.
sweep-layers: $(TEST)
	$(BIN)/python -m sweeps.layers

# A few hours; cut off, it goes on where it stopped.
sweep-models: $(SWEEP_MODELS)
	$(BIN)/python -m sweeps.models

# Continuous integration sets CI: there an unformatted file is a failure.
check: $(CHECK)
	$(BIN)/ruff format $(if $(CI),--check) .
	$(BIN)/ruff check .
	$(BIN)/mypy keras_mp keras_mp_cli.py

clean:
	rm -rf $(VENV) build dist *.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis keras_mp_demo.png
	find . -name .git -prune -o -name __pycache__ -exec rm -rf {} +

$(VENV)/with-%: pyproject.toml | $(VENV)/pyvenv.cfg
	$(BIN)/python -m pip install --quiet --editable ".[$*]"
	@touch "$@"

$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "keras_mp needs Python 3.11 or newer, and $(PYTHON) is not:" \
	    "$$($(PYTHON) --version 2>&1). Name one that is: make PYTHON=python3.12" >&2; \
	  exit 1; }
	$(PYTHON) -m venv $(VENV)
