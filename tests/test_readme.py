"""The code blocks of README run, in their order, as they stand."""

import pathlib
import re

import keras
import numpy as np
from backends import BACKEND

README = pathlib.Path(__file__).parents[1] / "README.md"
BLOCK = re.compile(
    r"(?:<!-- backend: (?P<backend>\w+) -->\n)?```python\n(?P<code>.*?)```", re.DOTALL
)


def dtype(tensor):
    return keras.backend.standardize_dtype(tensor.dtype)


def test_the_code_of_readme_runs_and_does_what_it_says():
    rng = np.random.default_rng(0)
    names = {
        "x": rng.normal(size=(32, 16)).astype("float32"),
        "y": rng.integers(0, 10, 32),
    }
    blocks = list(BLOCK.finditer(README.read_text()))
    assert {block["backend"] for block in blocks} == {None, "jax", "tensorflow"}
    for block in blocks:
        if block["backend"] in (None, BACKEND):
            exec(compile(block["code"], str(README), "exec"), names)
    hidden, softmax = names["model"].layers
    assert (hidden.compute_dtype, softmax.compute_dtype) == ("float16", "float32")
    assert dtype(names["norm"](np.ones((2, 3), "float32"))) == "float32"
    assert dtype(names["half"](names["x"])) == "float16"
    assert dtype(names["head"](names["x"])) == "float32"
    assert dtype(names["layer"](names["x"])) == "float16"
    if BACKEND in ("jax", "tensorflow"):
        assert np.isfinite(float(names["loss"]))
