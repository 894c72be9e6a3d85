"""Keras' own tests of its LossScaleOptimizer pass with our class in its place.

So do those of optimizers with sparse gradients, which have a case of it.
"""

import os
import pathlib
import subprocess
import sys

import keras
import pytest

PLUGIN = """
import keras.src.optimizers as optimizers
import keras.src.optimizers.loss_scale_optimizer as module
import keras_mp

optimizers.LossScaleOptimizer = keras_mp.LossScaleOptimizer
module.LossScaleOptimizer = keras_mp.LossScaleOptimizer
"""
SPARSE = keras.src.backend.SUPPORTS_SPARSE_TENSORS
FILES = ["loss_scale_optimizer_test.py", *["optimizer_sparse_test.py"] * SPARSE]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.slow("Keras' own files of tests, in a process of their own.")
def test_keras_own_tests_of_loss_scaling_pass_whole(name, tmp_path):
    (tmp_path / "swap_in_keras_mp.py").write_text(PLUGIN)
    tests = pathlib.Path(keras.src.optimizers.__file__).parent / name
    path = os.pathsep.join(
        [str(tmp_path), str(pathlib.Path(__file__).parents[1]),
         os.environ.get("PYTHONPATH", "")]
    )  # fmt: skip
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "swap_in_keras_mp",
         "-p", "no:cacheprovider", "-W", "ignore", "--rootdir", str(tmp_path),
         str(tests)],
        env={**os.environ, "PYTHONPATH": path, "PYTEST_ADDOPTS": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout
    # All of them ran: what Keras itself skips on a backend counts, failures do not.
    passed = int(run.stdout.split(" passed")[0].split()[-1])
    assert passed >= 20 and "failed" not in run.stdout
