"""`evaluate` and `predict` leave a model its values if an exception ends them.

Keras takes the values out of the variables while they run, and has no `finally` there.
"""

from collections.abc import Callable
from typing import Any


def ends_with_values(original: Callable) -> Callable:
    """Wraps `evaluate` or `predict`: a callback may raise between two steps."""

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        except BaseException:
            self.jax_state_sync()
            raise

    return run
