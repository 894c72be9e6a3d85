"""What keras_mp asks of a backend: one class, with the defaults of an eager backend.

`jax/`, `tensorflow/` and `torch/` each have an `Engine` built on it, with its parts in
files of the same names: `step.py`, `batches.py`, `measures.py`. A function there
without a docstring implements the method of the same name here.
"""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras_mp.keras_private as private
from keras_mp.backends.batches import Batches
from keras_mp.backends.measures import Measures
from keras_mp.backends.shards import Shards
from keras_mp.backends.step import Step
from keras_mp.replaced import replaced
from keras_mp.types import Model, Variable

BFLOAT16 = "bfloat16"
HALF = ("float16", BFLOAT16)
# Up to here a half dtype has all whole numbers.
WHOLE = {"float16": 2048, BFLOAT16: 256}

Wrapper = Callable[[Callable], Callable]


def around(
    others: dict[str, Wrapper], names: Iterable[str], wrap: Wrapper
) -> dict[str, Wrapper]:
    """Wrappers by these names: `wrap`, around what `others` has by the same name."""

    def wrapper(name: str) -> Wrapper:
        inner = others.get(name, lambda original: original)
        return lambda original: wrap(inner(original))

    return {name: wrapper(name) for name in names}


class Engine(Step, Batches, Measures, Shards):
    """Loss scaling and everything else that depends on the backend."""

    # Its surroundings --------------------------------------------------------------

    def compiled(self, function: Callable, static: Sequence[int] = ()) -> Callable:
        """Makes eager calls of a function one program, if that helps.

        Its arguments are tensors, and constants at the places `static`.
        """
        return function

    def outside_trace(self) -> contextlib.AbstractContextManager:
        """A context in which variables get their first values, once."""
        return contextlib.nullcontext()

    def set_dtype(self, variable: Variable, dtype: str) -> None:
        """Casts a variable, and its value if it already has one."""
        with self.outside_trace():
            private.set_dtype(variable, dtype)

    def optimizer_scope(self, model: Model) -> contextlib.AbstractContextManager:
        """A context in which the variables of a model's optimizer are created."""
        return contextlib.nullcontext()

    # The train step of `fit` -------------------------------------------------------

    def make_train_function(
        self, model: Model, original: Callable, force: bool, wrap: Wrapper
    ) -> None:
        """Runs `original(model, force)` with `model.train_step` wrapped by `wrap`.

        Keras on JAX and TensorFlow reads `train_step` once, in this call. The user's
        own `train_step`, a method or an attribute of the instance, does not change.
        """
        with replaced("steps", model, {"train_step": wrap}):
            original(model, force)

    def build(self, model: Model, data: Any) -> None:
        """Builds a model now if its first train step would build it."""
        return

    def undo_skipped(self, model: Model, scaling: Any, step: Callable) -> Callable:
        """Wraps a train step so that it leaves no trace if the optimizer skips it.

        Non-trainable variables, metrics and their logs go back to what they were, and
        so does the loss scale if the loss itself was not finite. `scaling` is the
        `LossScaling` of the model's optimizer.
        """
        raise NotImplementedError

    def may_have_skipped(self, scaling: Any) -> bool:
        """May the last train step have been skipped? False if it surely was not."""
        return True

    def calls_python(self) -> bool:
        """Does the step that is being traced call Python back each time it runs?"""
        return False

    def optimizer_values(self, args: Sequence[Any]) -> list[Any] | None:
        """The optimizer's state in the arguments of a train function, only on JAX."""
        return None

    def trainable_values(self, model: Model, args: Sequence[Any]) -> list[Any]:
        """The values of a model's trainable variables, as a train function gets them.

        Args:
            args: the arguments of the train function; on JAX they hold the state.
        """
        return [variable.value for variable in model.trainable_variables]

    # What a model's layers ask -----------------------------------------------------

    float32_in_cudnn: tuple[type, ...] = ()
    """Layers that cuDNN computes only in float32."""

    dtype_errors: tuple[type[Exception], ...] = (TypeError, ValueError, RuntimeError)
    """What the framework and Keras raise if dtypes do not match."""

    def only_shapes(self) -> bool:
        """Are layers called only for shapes, with variables of another dtype?

        On torch Keras tries "meta" tensors, whose variables are float32 in every call,
        and falls back on real ones if that fails.
        """
        return False

    half_dtypes: frozenset[Any] = frozenset(HALF)
    """Half precision as `dtype` of a tensor, or of a variable of Keras, names it."""

    tracing: Any = None
    """What a train step is traced and replayed with: `backends/torch/traces.py`."""

    def of_shards(self) -> dict[str, Wrapper]:
        """Wrappers that only sharded weights need."""
        return {}

    differentiates_in_outputs = True
    """Can a program ask for the gradient of one output of a call in another?"""

    ends_whole: Wrapper | None = None
    """Wraps `fit`, `evaluate` and `predict` if an exception leaves them half done."""
