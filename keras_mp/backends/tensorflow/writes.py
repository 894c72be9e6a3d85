"""TensorFlow variables that are written only if a predicate is true."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_mp.replaced import instead, replaced
from keras_mp.types import Tensor, Variable

_WRITING = threading.RLock()


@contextlib.contextmanager
def written_where(
    predicate: tf.Tensor, variables: Iterable[Variable]
) -> Iterator[None]:
    """Lets variables be written only if `predicate` is true, within this context.

    Selecting at each write, not once at the end, keeps XLA from computing a moment
    twice, for itself and for the weight.
    """
    # Keras names some variables twice.
    native = {id(v): v.value if isinstance(v, keras.Variable) else v for v in variables}
    with _WRITING, contextlib.ExitStack() as undone:
        for variable in native.values():
            # Replaces the methods of the class, only for these variables.
            methods = _methods(variable, predicate).items()
            new = {name: instead(method) for name, method in methods}
            undone.enter_context(replaced("writes", variable, new))
        yield


def _methods(variable: Variable, predicate: tf.Tensor) -> dict[str, Callable]:
    write, thread = variable.assign, threading.get_ident()
    # The value before any write: so fewer values are alive at the same time.
    before = tf.identity(variable)

    def assign(value: Tensor, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return write(value, *args, **kwargs)
        value = tf.convert_to_tensor(value, variable.dtype)
        return write(tf.where(predicate, value, before), *args, **kwargs)

    def assign_add(delta: Any, *args: Any, **kwargs: Any) -> Any:
        return assign(variable + delta, *args, **kwargs)

    def assign_sub(delta: Any, *args: Any, **kwargs: Any) -> Any:
        return assign(variable - delta, *args, **kwargs)

    return {"assign": assign, "assign_add": assign_add, "assign_sub": assign_sub}
