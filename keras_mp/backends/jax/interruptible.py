"""`fit`, `evaluate` and `predict` leave a model its values if an exception ends them.

Keras takes the values out of the variables while they run. Before the first step nobody
else has them, and `evaluate` and `predict` have no `finally`.
"""

from collections.abc import Callable
from typing import Any

import keras_mp.keras_private as private


def ends_with_values(original: Callable) -> Callable:
    """Wraps `fit`, `evaluate` or `predict`."""

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer = getattr(self, "optimizer", None)
        variables = [*self.variables, *(optimizer.variables if optimizer else ())]
        before = [(variable, private.raw_value(variable)) for variable in variables]
        try:
            return original(self, *args, **kwargs)
        except BaseException as error:
            self.jax_state_sync()  # A callback may raise between two steps.
            for variable, value in before:
                # The first step takes what is here, and notes what it returns.
                taken = value is None or value.is_deleted()
                if private.raw_value(variable) is None and not taken:
                    variable.assign(value)
            private.drop_internal_frames(error)
            raise

    return run
