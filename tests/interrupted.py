"""A process whose `fit`, `evaluate` and `predict` are interrupted at random moments.

It goes on each time.

Prints what was wrong after any of the interrupts, as JSON.
"""

import json
import os
import random
import signal
import sys
import threading

import keras
import numpy as np
from keras import layers, ops

import keras_mp

TIMES = 60  # Half of them in `fit`.
RANDOM = random.Random(0)
LONGEST = 0.1  # In seconds; an epoch takes less.


class Counted(layers.Layer):
    """Its weights have a gradient of 1: at a rate of 1 they count the updates."""

    def build(self, shape):
        self.counts = [
            self.add_weight(shape=(1,), initializer="zeros") for _ in range(3)
        ]

    def call(self, x):
        return 1e-3 * x + sum(self.counts)


def counted_model(**options):
    inputs = keras.Input((64,))
    x = layers.Dense(64, activation="tanh", dtype="mixed_float16")(inputs)
    x = layers.BatchNormalization()(x)
    x = layers.Dropout(0.1)(x)
    model = keras.Model(inputs, Counted()(layers.Dense(1)(x)))
    # The scale grows into an overflow every few steps.
    optimizer = keras_mp.LossScaleOptimizer(
        keras.optimizers.SGD(1.0),
        2.0**30,
        dynamic_growth_steps=2,
        max_scale=2.0**60,
        retake_steps=None,
    )
    model.compile(optimizer, lambda y, y_pred: ops.mean(y_pred, axis=-1), **options)
    return model


def what_is_wrong(model):
    model.get_weights()
    counts = {float(ops.convert_to_numpy(c)[0]) for c in model.layers[-1].counts}
    if counts != {-float(model.optimizer.iterations)}:
        yield f"{int(model.optimizer.iterations)} steps, counted {counts}"
    for variable in [*model.variables, *model.optimizer.variables]:
        if not np.all(np.isfinite(ops.convert_to_numpy(variable))):
            yield f"{variable.path} is not finite"
    if "train_step" in vars(model):
        yield "`train_step` is still wrapped"


def interrupted(model, **options):
    x, y = np.zeros((256, 64), "float32"), np.zeros((256, 1), "float32")
    options |= {"verbose": 0, "batch_size": 16}
    model.fit(x, y, validation_data=(x, y), **options)  # Compiles.
    model.predict(x, **options)

    verbs = [
        lambda: model.fit(x, y, epochs=3, **options),
        lambda: model.evaluate(x, y, **options),
        lambda: model.fit(x, y, validation_data=(x, y), epochs=3, **options),
        lambda: model.predict(x, **options),
    ]
    for time in range(TIMES):
        verb = verbs[time % len(verbs)]
        delay = RANDOM.uniform(0, LONGEST)
        timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            # Python drops an interrupt that comes within a `__del__`.
            while timer.is_alive():
                verb()
            timer.join()
        except KeyboardInterrupt:
            pass
        for wrong in what_is_wrong(model):
            yield f"interrupt {time}, after {delay:.3f} s: {wrong}"
    steps = int(model.optimizer.iterations)
    model.fit(x, y, **options)
    if int(model.optimizer.iterations) != steps + 16:
        yield "`fit` does not go on"


if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    print(json.dumps([*interrupted(counted_model(**options))]))
