"""A scope in which bfloat16 variables are updated as if they were float32."""

from collections.abc import Callable, Iterable
from typing import Any

import keras
from keras import ops

import keras_mp.keras_private as private
from keras_mp.backends.interface import BFLOAT16
from keras_mp.types import Variable


class RoundingScope(keras.StatelessScope):
    """Reads bfloat16 variables in float32, and rounds what is written to them.

    Each write is stored at once: the next read gets the rounded value, and no float32
    copy stays. Inside another scope the value goes there, else into the variable.

    Args:
        variables: those that may be written; only bfloat16 ones are rounded.
        rounded: float32 tensor -> bfloat16 tensor.
    """

    def __init__(
        self, variables: Iterable[Variable], rounded: Callable[[Any], Any]
    ) -> None:
        super().__init__(initialize_variables=False)
        self._rounded = rounded
        self._own = {id(v): v for v in variables if v.dtype == BFLOAT16}

    def __enter__(self) -> "RoundingScope":
        super().__enter__()
        self._named_float32 = private.as_dtype(self._own.values(), "float32")
        self._named_float32.__enter__()
        return self

    def __exit__(self, *args: Any, **kwargs: Any) -> None:
        self._named_float32.__exit__(None, None, None)
        super().__exit__(*args, **kwargs)

    def get_current_value(self, variable: Variable) -> Any:
        """The value, float32 instead of bfloat16; None if Keras finds it itself."""
        outer = self.original_scope
        value = None if outer is None else outer.get_current_value(variable)
        if id(variable) not in self._own:
            return value
        return ops.cast(
            private.raw_value(variable) if value is None else value, "float32"
        )

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Stores the value of a variable, rounded where the variable is bfloat16."""
        variable, value = update
        if id(variable) in self._own:
            value = self._rounded(value)
        if self.original_scope is not None:
            self.original_scope.add_update((variable, value))
        else:
            getattr(variable, private.WRITE)(value)
