"""The code blocks of README run, in their order, as they stand."""

import os
import pathlib
import re
import subprocess
import sys

import documents
import keras
import numpy as np
from backends import BACKEND
from documents import README

import keras_mp
from keras_mp.policies.weights import LARGE


def dtype(tensor):
    return keras.backend.standardize_dtype(tensor.dtype)


def one_step_under_the_distribution(names):
    try:
        model = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(1)])
        model.compile("adam", "mse")
        loss = model.fit(names["x"], names["y"], verbose=0).history["loss"]
        assert np.isfinite(loss).all() and hasattr(model.optimizer, "skipped_steps")
    finally:
        keras.distribution.set_distribution(None)


def test_the_code_of_readme_runs_and_does_what_it_says(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # It saves a model.
    if BACKEND == "tensorflow":
        import tensorflow as tf
        from engine_tensorflow import mirrored

        strategy = mirrored(2)  # The one of this process, see there.
        monkeypatch.setattr(tf.distribute, "MirroredStrategy", lambda: strategy)
    monkeypatch.setenv("KERAS_BACKEND", BACKEND)  # Put back: a block sets it.

    def after(names):
        if keras.distribution.distribution() is not None:
            one_step_under_the_distribution(names)

    names = documents.run(README, after)
    assert [row.compute_dtype for row in names["inspection"].layers] == [
        "float16",
        "float32",
    ]
    hidden, softmax = names["model"].layers
    assert (hidden.compute_dtype, softmax.compute_dtype) == ("float16", "float32")
    assert dtype(names["norm"](np.ones((2, 3), "float32"))) == "float32"
    assert dtype(names["half"](names["x"])) == "float16"
    assert dtype(names["head"](names["x"])) == "float32"
    assert dtype(names["layer"](names["x"])) == "float16"
    if BACKEND in ("jax", "tensorflow"):
        assert np.isfinite(float(names["loss"]))


def test_the_quick_start_runs_where_it_is_pasted(tmp_path):
    code = documents.blocks(README)[0]["code"]
    script = tmp_path / "train.py"
    script.write_text(code.replace('= "jax"', f'= "{BACKEND}"'))
    environment = {k: v for k, v in os.environ.items() if k != "KERAS_BACKEND"}
    environment["PYTHONPATH"] = str(README.parent)
    done = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "8/8" in done.stdout and "loss" in done.stdout


def test_readme_says_how_large_a_head_is():
    assert f"of {LARGE:,} weights or more" in README.read_text()


def test_every_test_that_readme_names_is_there():
    tests = "".join(p.read_text() for p in pathlib.Path(__file__).parent.glob("*.py"))
    named = re.findall(r"`(test_\w+)`", README.read_text())
    assert len(named) > 15
    assert [name for name in named if f"def {name}(" not in tests] == []


def test_every_name_of_the_package_that_a_text_has_exists():
    root = README.parent
    for path in [README, root / "CHANGELOG.md", *(root / "notebooks").glob("*.ipynb")]:
        for name in set(
            re.findall(r"\bkeras_mp((?:\.[A-Za-z_]\w*)+)", path.read_text())
        ):
            found = keras_mp
            for part in name.split(".")[1:]:
                assert hasattr(found, part), f"{path.name} has keras_mp{name}"
                found = getattr(found, part)
