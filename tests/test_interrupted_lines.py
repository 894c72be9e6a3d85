"""An interrupt at a line of ours leaves Keras, the policy and the model unpatched.

Of the lines that an operation runs some are taken, evenly: each raises once. Lines that
put something back are left out: no Python can do this without them.
"""

import ast
import functools
import os
import pathlib
import signal
import sys
import threading

import keras
import numpy as np
import pytest
from backends import BACKEND
from keras import layers

import keras_mp
import keras_mp.keras_private as private
from keras_mp import installing
from keras_mp.tools.breakpoint.replay import replay

PACKAGE = str(pathlib.Path(keras_mp.__file__).parent)
X, Y = np.ones((8, 4), "float32"), np.ones((8, 2), "float32")
TIMES = int(os.environ.get("LINES", 12 if BACKEND == "torch" else 2))


def model():
    with keras_mp.policy_scope("mixed_float16"):
        inputs = keras.Input((4,))
        x = layers.BatchNormalization()(layers.Dense(4)(inputs))
        x = layers.Dropout(0.1)(layers.Dense(4, trainable=False)(x))
        made = keras.Model(inputs, layers.Dense(2)(x))
    # Its first step overflows.
    optimizer = keras_mp.LossScaleOptimizer("adam", 2.0**30, max_scale=2.0**60)
    made.compile(optimizer, "mse", run_eagerly=BACKEND == "tensorflow")
    return made


def fit_with_a_breakpoint(made, folder):
    made.optimizer._loss_scaling.retakes = False  # It is to be skipped.
    callback = keras_mp.callbacks.OverflowBreakpoint(folder / "overflow", skips=1)
    made.fit(X, Y, verbose=0, callbacks=[callback])


def fit_traced(made, folder):
    made.jit_compile = True
    made.optimizer._loss_scaling.retake_steps = None  # It need not wait for these.
    made.fit(X, Y, epochs=5, verbose=0)


def compare(made, folder):
    options = dict(epochs=1, batch_size=8, seeds=[0], verbose=0)
    keras_mp.compare(model, (X, Y), (X, Y), **options)


OPERATIONS = {
    "fit": lambda made, folder: made.fit(X, Y, verbose=0),
    "fit with a breakpoint": fit_with_a_breakpoint,
    "evaluate": lambda made, folder: made.evaluate(X, Y, verbose=0),
    "diagnose": lambda made, folder: keras_mp.diagnose(made, X, Y),
    "convert": lambda made, folder: keras_mp.convert(made, "float32"),
    "save": lambda made, folder: made.save(folder / "model.keras"),
    "replay": lambda made, folder: replay(folder / "overflow"),
}
if BACKEND == "torch":
    OPERATIONS["fit, traced"] = fit_traced


@functools.cache
def lines_that_put_back(file):
    """The lines of `finally` and `except` blocks, and of `__exit__`."""
    lines = set()
    for node in ast.walk(ast.parse(pathlib.Path(file).read_text())):
        blocks = []
        if isinstance(node, ast.Try):
            blocks = [*node.finalbody, *node.handlers]
        elif isinstance(node, ast.FunctionDef) and node.name in (
            "__exit__",
            "put_back",
        ):
            blocks = node.body
        for block in blocks:
            lines.update(range(block.lineno, block.end_lineno + 1))
    return lines


def can_come():
    """Does an interrupt come here, and is not held back?"""
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler


def traced(function, see):
    """Runs a function; `see(file, line)` is called for each line of the package."""

    def local(frame, event, argument):
        file, line = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and line not in lines_that_put_back(file) and can_come():
            see(file, line)
        return local

    def call(frame, event, argument):
        file = frame.f_code.co_filename
        # What holds interrupts back has tests of its own.
        ours = file.startswith(PACKAGE) and not file.endswith("interrupts.py")
        return local if ours else None

    sys.settrace(call)
    try:
        function()
    finally:
        sys.settrace(None)


def state_of_threads():
    """What the modules of the package remember of this thread."""
    modules = [m for name, m in sys.modules.items() if name.startswith("keras_mp")]
    return {
        f"{module.__name__}.{name}.{key}": found
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, threading.local)
        for key, found in vars(value).items()
        if found
    }


OWNERS = [keras.Operation, private.backend_random, keras.optimizers.Optimizer]


def patched(objects):
    """All that is patched for a while, or set for a while."""
    methods = {
        (i, name): value
        for i, x in enumerate([*OWNERS, *objects])
        for name, value in vars(x).items()
        if callable(value) and name not in ("train_function", "test_function")
    }
    places = {(n, str(o)): vars(o)[n] for o, n in installing._installed}
    return {
        "policy": keras_mp.global_policy(),
        "threads": state_of_threads(),
        "handler": signal.getsignal(signal.SIGINT),
        "methods": methods,
        "seams": places,
    }


TRAINS_MANY = pytest.param("compare", marks=pytest.mark.trains_many)


@pytest.mark.parametrize("name", [*OPERATIONS, TRAINS_MANY])
@pytest.mark.filterwarnings("ignore::UserWarning")  # What is half done may say so.
@pytest.mark.slow("Every line of an operation is interrupted in turn.")
def test_it_leaves_nothing_patched(name, tmp_path):
    keras_mp.set_global_policy("mixed_bfloat16")
    operation = compare if name == "compare" else OPERATIONS[name]
    if name == "replay":
        fit_with_a_breakpoint(model(), tmp_path)
    lines = []
    traced(lambda: operation(model(), tmp_path), lambda *line: lines.append(line))
    distinct = list(dict.fromkeys(lines))
    assert len(distinct) > 5
    for place in distinct[:: max(1, len(distinct) // TIMES)]:
        made = model()
        optimizer = made.optimizer
        objects = [made, optimizer, optimizer.inner_optimizer, *made.variables]
        before, raised = patched(objects), False

        def see(*line, place=place):
            nonlocal raised
            if line == place and not raised:
                raised = True
                raise KeyboardInterrupt

        try:
            traced(lambda made=made: operation(made, tmp_path), see)
        except KeyboardInterrupt:
            pass
        after = patched(objects)
        for key, value in before.items():
            assert after[key] == value, (place, key)
        assert all(np.isfinite(w).all() for w in made.get_weights()), place
