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
DOCS := $(VENV)/with-docs,$(BACKEND)
CHECK := $(VENV)/with-dev
TEST := $(VENV)/with-test,docs,$(subst $(space),$(comma),$(strip $(BACKENDS)))
TESTS := $(addprefix test-,$(BACKENDS))
SLOW_TESTS := $(addprefix test-slow-,$(BACKENDS))
SWEEP_MODELS := $(VENV)/with-sweep,jax,tensorflow
BENCH := $(VENV)/with-bench,$(subst $(space),$(comma),$(strip $(BACKENDS)))
BENCH_BACKENDS := $(subst $(space),$(comma),$(strip $(BACKENDS)))

# Environments of their own: with a plugin in it, JAX looks for its device everywhere.
GPU_VENV := .venv-gpu
GPU_GATES := $(GPU_VENV)/with-cuda12
TPU_VENV := .venv-tpu
DIST_VENV := .venv-dist
TPU_GATES := $(TPU_VENV)/with-libtpu
# Without conftest.py, which imports what only `make test` installs.
GATES := -m pytest --noconftest -p no:cacheprovider -W "ignore::DeprecationWarning"

.PHONY: help demo docs test test-slow test-fast test-without-kernels test-notebooks test-versions check bench bench-train bench-quality bench-compiled gpu-gates \
  tpu-gates sweep sweep-layers sweep-models sweep-dtypes sweep-endings sweep-own-calls sweep-kernels sweep-operations sweep-first-steps sweep-chunks dist clean $(TESTS) $(SLOW_TESTS)
# Two pip processes in one environment would tread on each other.
.NOTPARALLEL:
# A half-made environment must not pass for a whole one.
.DELETE_ON_ERROR:

help:
	@echo "make demo    train handwritten digits under three policies, draw the result"
	@echo "make docs    build the documentation, docs/_build/html/index.html"
	@echo "make test    run the tests on: $(BACKENDS)  (one alone: make test-jax)"
	@echo "make test-slow    run those that take long and are rarely red"
	@echo "make test-fast    run those that are quick, on torch"
	@echo "make test-without-kernels   run them without kernels"
	@echo "make test-notebooks   run every notebook on every backend"
	@echo "make test-versions    run them on old and new versions of Keras and its backends"
	@echo "make check   format, lint, check types"
	@echo "make bench   measure what loss scaling costs, beside other packages"
	@echo "make bench-train    measure whole training steps under each policy"
	@echo "make bench-quality  train to the end under each policy"
	@echo "make bench-compiled compile training steps for an H100 and a TPU, and read them"
	@echo "make gpu-gates   what a compiled step costs on an H100, without one"
	@echo "make tpu-gates   what it costs on a TPU v5e, without one"
	@echo "make sweep   measure what the tests are too short for, both of these:"
	@echo "make sweep-layers   measure every layer of Keras in half precision"
	@echo "make sweep-models   train every model of keras.applications, and KerasHub's"
	@echo "make sweep-dtypes   write what each layer of some models computes in (minutes)"
	@echo "make sweep-endings  train every kind of model, last activation and loss"
	@echo "make sweep-own-calls  call every kind of model that uses its own inputs"
	@echo "make sweep-kernels  train with every operation that may lack half precision"
	@echo "make sweep-operations  write what each operation of keras.ops does in half precision"
	@echo "make sweep-first-steps  count the batches that are lost to the first loss scale"
	@echo "make sweep-chunks   compile heads and losses in chunks of several sizes"
	@echo "make dist    build what an index gets, check it, and run the quick start with it"
	@echo "make clean   remove what the other commands made"

demo: $(DEMO)
	$(BIN)/keras-mp demo --backend $(BACKEND)

# A warning of Sphinx is an error: a link that leads nowhere, a page in no menu.
docs: $(DOCS)
	KERAS_BACKEND=$(BACKEND) $(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet \
	  --fresh-env docs docs/_build/html

# Without what is marked as slow, each with its reason, which `make test-slow` runs.
test: $(TESTS)

$(TESTS): test-%: $(TEST)
	KERAS_BACKEND=$* $(BIN)/python -m pytest $(PYTEST_ARGS) -m "not slow"

test-slow: $(SLOW_TESTS)

$(SLOW_TESTS): test-slow-%: $(TEST)
	KERAS_BACKEND=$* $(BIN)/python -m pytest $(PYTEST_ARGS) -m slow

# In under a minute: on torch, which compiles nothing, the tests of every public name that
# start no process.
FAST := bad_input bfloat16 callbacks comparison compile conversion diagnosis \
  explicit_scaling fit float32_layers hardware inspection install loss_scale \
  loss_scale_optimizer optimizers overflow_breakpoint paths policies resuming rounding \
  rules sharding skip_watch step_sequences
test-fast: $(TEST)
	KERAS_BACKEND=torch $(BIN)/python -m pytest $(PYTEST_ARGS) -m "not slow" \
	  $(FAST:%=tests/test_%.py)

# What is right stays right without the kernels, which only make it faster or smaller.
test-without-kernels: $(TEST)
	for backend in $(BACKENDS); do \
	  KERAS_MP_KERNELS=0 KERAS_BACKEND=$$backend $(BIN)/python -m pytest $(PYTEST_ARGS) \
	    -m "not slow" || exit 1; \
	done

# Every notebook on every backend: `make test` runs most of them on one.
test-notebooks: $(TEST)
	for backend in $(BACKENDS); do \
	  KERAS_BACKEND=$$backend EVERY_NOTEBOOK=1 \
	    $(BIN)/python -m pytest tests/test_notebooks.py || exit 1; \
	done

# Each set of tests/versions/sets.toml in an environment of its own. SETS="oldest nightly"
# picks some. An hour or two for all.
test-versions:
	$(PYTHON) tests/versions/run.py $(SETS)

# On a quiet machine. These three write the results in benchmarks/ and render its README.
bench: $(BENCH)
	$(BIN)/python -m benchmarks --backend $(BENCH_BACKENDS) --out benchmarks/cost.json
	$(BIN)/python -m benchmarks --suite seams --backend $(BENCH_BACKENDS) \
	  --out benchmarks/seams.json
	$(if $(filter torch,$(BACKENDS)),$(BIN)/python -m benchmarks --suite kernels \
	  --backend torch --out benchmarks/kernels.json)
	$(BIN)/python -m benchmarks.readme

# With an NVIDIA GPU it needs JAX and torch with CUDA: see benchmarks/README.md.
bench-train: $(BENCH)
	$(BIN)/python -m benchmarks --suite train --out benchmarks/train.json
	$(BIN)/python -m benchmarks.readme

bench-quality: $(BENCH)
	$(BIN)/python -m benchmarks --suite quality --out benchmarks/quality.json
	$(BIN)/python -m benchmarks.readme

# The programs are compiled for an H100 and read, not run: no GPU is needed.
gpu-gates: $(GPU_GATES)
	cd tests && KERAS_BACKEND=jax JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 \
	  KERAS_MP_GPU_TARGET=h100.txtpb $(abspath $(GPU_VENV))/bin/python $(GATES) \
	  test_compiled_step.py test_whole_steps.py test_lowering.py test_xla_tricks.py \
	  test_steps_beside_keras.py
	cd tests && KERAS_BACKEND=tensorflow JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 \
	  KERAS_MP_GPU_TARGET=h100.txtpb $(abspath $(GPU_VENV))/bin/python $(GATES) \
	  test_tensorflow_steps.py

# Ten to twenty minutes on two cores, most of them for ResNet-50.
# libtpu looks for its machine unless it is told, and lets one process in at a time.
tpu-gates: $(TPU_GATES)
	cd tests && KERAS_BACKEND=jax JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 \
	  TPU_ACCELERATOR_TYPE=v5litepod-4 TPU_WORKER_HOSTNAMES=localhost \
	  TPU_STDERR_LOG_LEVEL=3 TPU_MIN_LOG_LEVEL=3 ALLOW_MULTIPLE_LIBTPU_LOAD=1 \
	  KERAS_MP_TPU_TARGET=v5e:2x2 $(abspath $(TPU_VENV))/bin/python $(GATES) \
	  test_whole_steps.py test_lowering.py test_xla_tricks.py

# Steps are compiled for an H100 and a TPU v5e, and read, not run. An hour on two cores.
bench-compiled: $(GPU_GATES) $(TPU_GATES)
	for venv in $(GPU_VENV) $(TPU_VENV); do \
	  $$venv/bin/python -m pip install --quiet --editable ".[jax,compiled]" && \
	  $$venv/bin/python -m benchmarks --suite compiled \
	    --out benchmarks/compiled.json || exit 1; \
	done
	$(GPU_VENV)/bin/python -m benchmarks.readme

sweep: sweep-layers sweep-models

# An hour or two: every layer is compiled a dozen times on each backend.
sweep-layers: $(TEST)
	$(BIN)/python -m sweeps.layers

# A few hours; cut off, it goes on where it stopped.
sweep-models: $(SWEEP_MODELS)
	$(BIN)/python -m sweeps.models

# Read its difference in git before and after a change to what every model passes through.
sweep-dtypes: $(SWEEP_MODELS)
	$(BIN)/python -m sweeps.layer_dtypes

# Two minutes on torch, a quarter of an hour on TensorFlow, half an hour on JAX.
sweep-endings: $(TEST)
	$(BIN)/python -m sweeps.endings

sweep-own-calls: $(TEST)
	$(BIN)/python -m sweeps.own_calls

sweep-kernels: $(TEST)
	$(BIN)/python -m sweeps.missing_kernels

sweep-operations: $(TEST)
	$(BIN)/python -m sweeps.operations

sweep-first-steps: $(BENCH)
	$(BIN)/python -m sweeps.first_steps

# A quarter of an hour; compiled for an H100, not run.
sweep-chunks: $(GPU_GATES)
	$(GPU_VENV)/bin/python -m pip install --quiet --editable ".[jax,compiled]"
	$(GPU_VENV)/bin/python -m sweeps.chunks

# What an index would get, installed where nothing else is.
dist: $(VENV)/with-dist
	rm -rf dist $(DIST_VENV)
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m twine check --strict dist/*
	$(PYTHON) -m venv $(DIST_VENV)
	$(DIST_VENV)/bin/python -m pip install --quiet "$$(ls dist/*.whl)[$(BACKEND)]"
	awk '/^```/ { if (code) exit; code = /python/; next } code' README.md \
	  | sed 's/= "jax"/= "$(BACKEND)"/' > $(DIST_VENV)/quick_start.py
	cd $(DIST_VENV) && bin/python quick_start.py
	@echo "dist/ holds what would be uploaded; README's quick start runs with it."

# Continuous integration sets CI: there an unformatted file is a failure.
check: $(CHECK)
	$(BIN)/ruff format $(if $(CI),--check) .
	$(BIN)/ruff check .
	$(BIN)/mypy keras_mp keras_mp_cli benchmarks sweeps

clean:
	rm -rf $(VENV) $(GPU_VENV) $(TPU_VENV) $(DIST_VENV) .venv-versions build dist *.egg-info
	rm -rf docs/_build docs/_generated .pytest_cache .mypy_cache .ruff_cache .hypothesis keras_mp_demo.png
	find . -name .git -prune -o -name __pycache__ -exec rm -rf {} +

$(VENV)/with-%: pyproject.toml | $(VENV)/pyvenv.cfg
	@echo "Setting up $(VENV) for: $*. Once, a minute or more."
	$(BIN)/python -m pip install --editable ".[$*]"
	@touch "$@"

$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "keras_mp needs Python 3.11 or newer, and $(PYTHON) is not:" \
	    "$$($(PYTHON) --version 2>&1). Name one that is: make PYTHON=python3.12" >&2; \
	  exit 1; }
	$(PYTHON) -m venv $(VENV)

# The plugin of JAX's own version, without the libraries of CUDA: two wheels of 180 MB in
# place of gigabytes.
$(GPU_GATES): pyproject.toml
	$(PYTHON) -m venv $(GPU_VENV)
	$(GPU_VENV)/bin/python -m pip install --quiet pytest --editable ".[jax,tensorflow]"
	@version=$$($(GPU_VENV)/bin/python -c 'import jax; print(jax.__version__)'); \
	$(GPU_VENV)/bin/python -m pip install --quiet --no-deps \
	  jax-cuda12-plugin==$$version jax-cuda12-pjrt==$$version || { \
	  echo "make gpu-gates needs the wheels jax-cuda12-plugin and jax-cuda12-pjrt" \
	    "$$version, which cannot be installed here: they exist for Linux on x86-64 and" \
	    "ARM, for the Pythons of that release of JAX." >&2; \
	  exit 1; }
	@touch "$@"

$(TPU_GATES): pyproject.toml
	$(PYTHON) -m venv $(TPU_VENV)
	$(TPU_VENV)/bin/python -m pip install --quiet pytest --editable ".[jax]"
	$(TPU_VENV)/bin/python -m pip install --quiet --no-deps "libtpu==0.0.42.*" || { \
	  echo "make tpu-gates needs the wheel libtpu 0.0.42, which cannot be installed here:" \
	    "it exists for Linux on x86-64." >&2; \
	  exit 1; }
	@touch "$@"
