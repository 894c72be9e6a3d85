"""Trainings whose breakpoints and reports find no room on the disk.

The argument is the size that no file may exceed, in bytes. Prints what happened, as
JSON.
"""

import json
import os
import pathlib
import resource
import sys
import tempfile
import warnings

import numpy as np
from keras import layers
from test_overflow_breakpoint import build, data, fit

import keras_mp.tools.display.plots  # noqa: F401
from keras_mp.callbacks import OverflowBreakpoint

WIDE = [lambda: layers.Dense(200, name="wide"), lambda: layers.Dense(200, name="more")]
TWICE = [lambda: layers.Lambda(lambda x: x * 2, name="twice")]
BATCHES = 5


def main():
    limit = int(sys.argv[1])
    x, y = data(poisoned=(1,), batches=BATCHES)
    long = np.repeat(x, 2000, axis=0), np.repeat(y, 2000, axis=0)
    trainings = {
        "a large model": (build(WIDE), (x, y)),
        "large weights, whose model no file can hold": (build(WIDE + TWICE), (x, y)),
        "a large batch": (build(), long),
    }
    # From here on; Python ignores the signal, and gets an OSError.
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    print(json.dumps({name: trained(*parts) for name, parts in trainings.items()}))


def trained(model, examples):
    x, y = examples
    with tempfile.TemporaryDirectory() as parent:
        folder = pathlib.Path(parent) / "overflow"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            watch = OverflowBreakpoint(folder, skips=1)
            fit(model, watch, x=x, y=y, batch_size=len(x) // BATCHES, epochs=2)
        optimizer = model.optimizer
        return {
            # NumPy tells Keras of a change to come, on torch.
            "warnings": [str(w.message) for w in caught if w.category is UserWarning],
            "folder": str(folder),
            "left": os.listdir(parent),
            "skipped": int(optimizer.skipped_steps),
            "steps": int(optimizer.iterations) + int(optimizer.skipped_steps),
        }


main()
