"""The seams cost next to nothing: counted, not timed."""

import gc
import sys
from pkgutil import resolve_name

import keras
import numpy as np
import pytest
from backends import BACKEND
from keras import ops
from test_layering import in_a_fresh_interpreter

import keras_mp
from keras_mp.backends import known
from keras_mp.kernels.table import KERNELS
from keras_mp.repairs.table import REPAIRS, names_in

WINGS = "keras_mp.tools", "keras_mp.kernels"


def test_importing_keras_mp_loads_neither_tools_nor_kernels():
    # They are half of all modules, and of the time.
    loaded = in_a_fresh_interpreter(
        "import json, sys, keras_mp\n"
        "print(json.dumps([n for n in sys.modules if n.startswith('keras_mp.')]))\n"
    )
    assert [name for name in loaded if name.startswith(WINGS)] == []


def test_it_loads_nothing_that_keras_does_not_load_beside_its_own_modules():
    loaded = in_a_fresh_interpreter(
        "import json, sys, keras\n"
        "before = set(sys.modules)\n"
        "import keras_mp\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))\n"
    )
    assert [name for name in loaded if name.split(".")[0] != "keras_mp"] == []


@pytest.mark.parametrize("module", [keras_mp, keras_mp.callbacks])
def test_every_public_name_is_there_and_listed(module):
    assert set(module.__all__) <= set(dir(module))
    for name in module.__all__:
        assert getattr(module, name).__name__ in (name, f"keras_mp.{name}")
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        module.nonsense  # noqa: B018


OF_THREADS = ("concurrent.", "threading", "weakref", "_weakrefset")


def calls_of(function):
    """The names of the Python functions that a call of `function` runs.

    But for those of threads: how many are started depends on the time.
    """
    names = []

    def profile(frame, event, argument):
        module = frame.f_globals.get("__name__", "")
        if event == "call" and not module.startswith(OF_THREADS):
            names.append(frame.f_code.co_qualname)

    gc.disable()  # Others have functions called at each collection.
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return names


def layers():
    x = keras.ops.ones((2, 4))
    identity, dense = keras.layers.Identity(), keras.layers.Dense(4)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
    return {
        "Identity": (lambda: identity(x), 1),
        # Two layers: the model itself, and the one within.
        "Sequential": (lambda: model(x), 2),
        "Dense": (lambda: dense(x), 1),
    }


@pytest.mark.parametrize("name", ["Identity", "Dense", "Sequential"])
def test_a_layer_call_costs_one_python_call_more(name):
    if BACKEND == "jax":
        # JAX keeps the trace of a step that failed, in another test, with its tensors.
        resolve_name("keras_mp.repairs.logits:noted").facts.clear()
    keras_mp.install()
    call, number = layers()[name]
    call(), call()
    with_seams = calls_of(call)
    keras_mp.uninstall()
    call()
    added = len(with_seams) - len(calls_of(call))
    of_dense = 2 if BACKEND == "torch" else 4
    assert with_seams.count("wrap_call.<locals>.__call__") == number
    # The product goes through one function, and so does the sum with the bias; to ask
    # for a dtype is a call but on torch. And what a model returns is looked at, which
    # takes Keras and NumPy a few.
    looks = 26 if name == "Sequential" else 0
    assert added <= number + of_dense * (name != "Identity") + looks


def ours_in(call):
    """The functions of ours that a call runs, by `sys.setprofile`."""
    found = []

    def profile(frame, event, argument):
        if event == "call" and "/keras_mp/" in frame.f_code.co_filename:
            found.append(frame.f_code.co_qualname)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


IMAGE, MATRIX = np.ones((1, 4, 4, 2), "float32"), np.ones((4, 4), "float32")
LABELS = np.zeros(4, "int32")
FLOAT32 = {
    "add": lambda x: ops.add(x, x),
    "subtract": lambda x: ops.subtract(x, x),
    "multiply": lambda x: ops.multiply(x, x),
    "divide": lambda x: ops.divide(x, x),
    "tanh": ops.tanh,
    "where": lambda x: ops.where(x > 0, x, x),
    "softmax": ops.softmax,
    "argmax": ops.argmax,
    "matmul": lambda x: ops.matmul(x, x),
    "einsum": lambda x: ops.einsum("ab,bc->ac", x, x),
    "gelu": ops.gelu,
    "selu": ops.selu,
    "relu": ops.relu,
    "moments": lambda x: ops.moments(x, 0),
    "normalize": ops.normalize,
    "arange": lambda x: ops.arange(4),
    "conv": lambda x: ops.conv(IMAGE, np.ones((3, 3, 2, 2), "float32")),
    "depthwise_conv": lambda x: ops.depthwise_conv(
        IMAGE, np.ones((3, 3, 2, 1), "float32")
    ),
    "dot_product_attention": lambda x: ops.dot_product_attention(IMAGE, IMAGE, IMAGE),
    "sparse_categorical_crossentropy": lambda x: ops.sparse_categorical_crossentropy(
        LABELS, x, from_logits=True
    ),
    "categorical_crossentropy": lambda x: ops.categorical_crossentropy(x, x, True),
}


# On torch: operations that are wrapped for their numbers, and what makes a tensor of
# one, as for `normalize`.
OF_NUMBERS = (
    "beside_tensors.<locals>.operation",
    "extremes.<locals>.operation",
    "filled.<locals>.convert_to_tensor",
    "_filled",
    "_fits",
)


@pytest.mark.parametrize("name", FLOAT32)
@pytest.mark.kernels
def test_an_operation_in_float32_passes_one_function_of_ours(name):
    """For each that is wrapped: one may call others."""
    keras_mp.install()
    x = ops.convert_to_tensor(MATRIX)
    FLOAT32[name](x)
    for facts in known.IN_USE:  # Of a step that failed, in another test.
        facts.clear()
    found = ours_in(lambda: FLOAT32[name](x))
    wrapped = names_in((*REPAIRS, *KERNELS), BACKEND)
    assert len(found) >= (name in wrapped)
    first_tests = ("_guarded.<locals>.operation", f".<locals>.{name}", *OF_NUMBERS)
    assert all(x.endswith(first_tests) for x in found), found


def fitting(with_seams=True, callbacks=(), retake_steps=100):
    """A function of a number of steps, which `fit` takes."""
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(4),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(1),
        ]
    )
    optimizer = keras_mp.LossScaleOptimizer("adam", retake_steps=retake_steps)
    model.compile(optimizer, "mse", metrics=["mae"])
    if not with_seams:
        keras_mp.uninstall()
        model.fit(np.ones((4, 4)), np.ones((4, 1)), batch_size=1, verbose=0)
        model.train_function.__module__ = "a user's"  # It stays when they are back.
        keras_mp.install()

    def fit(steps):
        x, y = np.ones((steps, 4)), np.ones((steps, 1))
        model.fit(x, y, batch_size=1, verbose=0, callbacks=[*callbacks])

    return fit


def calls_a_step(fit):
    fit(4)
    few, many = calls_of(lambda: fit(4)), calls_of(lambda: fit(14))
    return (len(many) - len(few)) / 10


def test_rollback_and_monitor_cost_a_step_of_fit_a_few_python_calls():
    # After the first steps, at each of which `fit` looks.
    without = calls_a_step(fitting(with_seams=False))
    rollback = calls_a_step(fitting(retake_steps=0))
    monitor = keras_mp.callbacks.LossScaleMonitor()
    monitored = calls_a_step(fitting(callbacks=[monitor], retake_steps=0))
    # On torch a step takes some 4500 calls. Copies of the scale and of the skips are
    # made for the monitor alone. On JAX most calls are those by which the handler of
    # SIGINT goes out and comes back.
    few = {"torch": 205, "jax": 45, "tensorflow": 4}[BACKEND]
    assert rollback - without <= few
    # Two results more, which TensorFlow unpacks and Keras makes numbers of.
    more = {"tensorflow": 150, "torch": few - (rollback - without) + 5}
    assert monitored - rollback <= more.get(BACKEND, 5)


@pytest.mark.skipif(BACKEND != "torch", reason="elsewhere steps are compiled")
def test_the_rollback_does_not_wait_for_the_device():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Reads(TorchDispatchMode):
        """Counts tensors that become a number of Python's."""

        number = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.number += "_local_scalar_dense" in str(function)
            return function(*args, **(kwargs or {}))

    def reads_a_step(fit):
        counts = []
        for steps in (4, 14):
            with Reads() as reads:
                fit(steps)
            counts.append(reads.number)
        return (counts[1] - counts[0]) / 10

    # Of the norm of the gradients, and of what is decided by it, before the update.
    assert 0 < reads_a_step(fitting()) <= 2
