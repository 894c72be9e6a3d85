"""From `apply` to the write a gradient passes few files, which CONTRIBUTING names."""

import pathlib
import re
import sys

import keras
import numpy as np
import pytest
from backends import BACKEND, COMPILED, stateful_step
from keras import ops

import keras_mp

REPOSITORY = pathlib.Path(__file__).parent.parent
PACKAGE = REPOSITORY / "keras_mp"
GRADIENTS = {"grads", "grad", "prepared", "tensors"}


def files_passed(step):
    """The files whose functions take gradients, before Keras' optimizer does."""
    found, written = set(), False
    package = f"{PACKAGE}/"

    def look(frame, event, argument):
        nonlocal written
        code = frame.f_code
        if written or event != "call" or not code.co_filename.startswith(package):
            return
        path = code.co_filename.removeprefix(package)
        written = (code.co_name, path) == ("apply", "seams.py")
        taken = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if not written and GRADIENTS & {*taken}:
            found.add(path)

    sys.setprofile(look)
    try:
        step()
    finally:
        sys.setprofile(None)
    return found


# AutoGraph's functions are in files of its own.
@pytest.mark.parametrize("compiled", COMPILED if BACKEND == "jax" else [False])
@pytest.mark.parametrize("bad", [1.0, float("inf")], ids=["finite", "infinite"])
def test_a_gradient_passes_at_most_seven_files_which_contributing_names(bad, compiled):
    optimizer = keras_mp.LossScaleOptimizer("adam")
    variables = [keras.Variable(np.ones((4, 4), "float32")) for _ in range(2)]
    optimizer.build(variables)
    optimizer.scale_loss(ops.ones(()))
    grads = [np.ones((4, 4), "float32"), np.full((4, 4), bad, "float32")]
    step = stateful_step(optimizer, variables, compiled)
    passed = files_passed(lambda: step(grads))
    assert {"loss_scaling/optimizer.py", f"backends/{BACKEND}/step.py"} <= passed
    assert len(passed) <= 7, sorted(passed)
    text = (REPOSITORY / "CONTRIBUTING.md").read_text()
    (way,) = re.findall(r"## The way of a gradient\n(.*?)\n## ", text, re.S)
    for path in passed - {"loss_scaling/optimizer.py", "backends/step.py"}:
        assert pathlib.Path(path).name in way, path
