"""Trains a model of one layer and a Dense head with Keras' `fit`."""

from typing import Any

import keras
import numpy as np
from keras import tree

from sweeps.layer_cases import CASES, Case
from sweeps.layer_errors import Outcome, first_line

# One case of each class is enough: the plain one, which comes first.
_PLAIN = {case.cls: case.name for case in reversed(CASES)}


def fits(case: Case) -> bool:
    """Does `fit` train this case? Text stays outside of models."""
    chosen = case.name == _PLAIN[case.cls] or "regularizer" in case.name
    flat = tree.flatten([case.inputs(), dict(case.options())])
    return chosen and all(
        getattr(x, "dtype", np.dtype(int)).kind in "fiub" for x in flat
    )


def fit(case: Case, policy: Any) -> Outcome:
    """The result of two steps of `fit`; its status is never "error"."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    keras.utils.set_random_seed(0)
    try:
        model = OneLayer(case)
        model.compile(keras.optimizers.SGD(1e-6), "mse")
        x = tree.flatten(case.inputs())
        batch = len(x[0])
        y = np.zeros((batch, 1), "float32")
        history = model.fit(x, y, batch, epochs=2, verbose=0, shuffle=False)
    except Exception as error:  # The table shows it, of whatever kind.
        return Outcome("raises", message=first_line(error))
    finally:
        keras.config.set_dtype_policy(before)
    if not np.isfinite(history.history["loss"]).all():
        return Outcome("not finite", where="loss")
    for weight in model.weights:
        if not np.isfinite(keras.ops.convert_to_numpy(weight)).all():
            return Outcome("not finite", where=weight.name)
    return Outcome("ok")


class OneLayer(keras.Model):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.arguments = case.inputs()
        self.options = case.options()
        self.layer = case.layer()
        if case.adapt is not None:
            self.layer.adapt(case.adapt())
        self.head = keras.layers.Dense(1)

    def call(self, inputs: list) -> Any:
        args = tree.pack_sequence_as(self.arguments, list(inputs))
        outputs = tree.flatten(self.layer(*args, **self.options))
        return self.head(
            keras.ops.concatenate(
                [
                    keras.ops.reshape(x, (keras.ops.shape(x)[0], -1))
                    for x in outputs
                    if "float" in keras.backend.standardize_dtype(x.dtype)
                ],
                axis=-1,
            )
        )
