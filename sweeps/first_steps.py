"""What the first loss scale costs: `make sweep-first-steps`, on JAX, two minutes.

Three trainings of a hundred steps each: in float32, in mixed_float16 without a second
try for a skipped batch, and with one. It writes how many batches were lost, and the
metric on the test data, for three seeds, into README.md.
"""

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from sweeps.sections import write_section

STEPS, SEEDS, BATCH = 100, 3, 32
TITLE = "The first steps"
INTRODUCTION = f"""\
How many of the first {STEPS} batches are lost to a loss scale that is too high, and the
metric on the test data after them, for {SEEDS} seeds: in float32, in `mixed_float16`
with `retake_steps=0`, and as it is. `make sweep-first-steps` measures anew, on JAX.
"""


def main() -> None:
    os.environ["KERAS_BACKEND"] = "jax"
    from benchmarks.quality.tasks import TASKS
    from keras_mp.tables import Table

    tasks = {task.name: task for task in TASKS}
    cases = {
        "digits, a CNN (loss)": (tasks["digits"].data, tasks["digits"].build),
        "targets past 65504 (mean absolute error)": (
            tasks["regression"].data,
            tasks["regression"].build,
        ),
        "rows of four digits, CTC, a bidirectional LSTM (loss)": (
            _rows_of_digits,
            _reader_of_rows,
        ),
    }
    rows = []
    for name, (data, build) in cases.items():
        for way in ("float32", "retake_steps=0", "retake_steps=100"):
            runs = [_trained(data(), build, way, seed) for seed in range(SEEDS)]
            lost = ", ".join(str(lost) for lost, _ in runs)
            ends = ", ".join(f"{metric:.5g}" for _, metric in runs)
            rows.append((name, way, lost, ends))
            print(*rows[-1], flush=True)
            name = ""
    table = Table(("", "trained with", "batches lost", "after them"), rows)
    write_section(TITLE, f"{INTRODUCTION}\n{table.markdown()}")


def _trained(
    data: Any, build: Callable[[], Any], way: str, seed: int
) -> tuple[int, float]:
    """How many of the first batches were lost, and the loss on the test data."""
    import keras

    import keras_mp

    keras.utils.set_random_seed(seed)
    with keras_mp.policy_scope("float32" if way == "float32" else "mixed_float16"):
        model, optimizer, compiled_with = build()
    if way != "float32":
        _, _, steps = way.partition("=")
        optimizer = keras_mp.LossScaleOptimizer(optimizer, retake_steps=int(steps))
    model.compile(optimizer, **compiled_with)
    order = np.random.default_rng(seed).integers(0, len(data.x), STEPS * BATCH)
    model.fit(data.x[order], data.y[order], batch_size=BATCH, shuffle=False, verbose=0)
    results = model.evaluate(data.test_x, data.test_y, verbose=0, return_dict=True)
    return STEPS - int(model.optimizer.iterations), float(results["loss"])


def _rows_of_digits() -> Any:
    """Images of 8 x 32 pixels as 32 columns, from 0 to 16, and their four digits."""
    from benchmarks.quality.tasks import TASKS, Data

    digits = TASKS[0].data()
    random = np.random.default_rng(0)

    def rows(images: Any, labels: Any, number: int) -> tuple[Any, Any]:
        chosen = random.integers(0, len(images), (number, 4))
        columns = 16 * np.swapaxes(images[chosen][..., 0], 2, 3)
        # Class 0 means no digit.
        return columns.reshape(number, 32, 8), labels[chosen] + 1

    train = rows(digits.x, digits.y, 2000)
    return Data(*train, *rows(digits.test_x, digits.test_y, 500))


def _reader_of_rows() -> Any:
    import keras
    from keras import layers

    model = keras.Sequential(
        [
            keras.Input((32, 8)),
            layers.Bidirectional(layers.LSTM(64, return_sequences=True)),
            layers.Dense(11),
        ]
    )
    return model, keras.optimizers.Adam(3e-3), {"loss": keras.losses.CTC()}


if __name__ == "__main__":
    main()
