"""What keras_mp asks of a backend: one class, with the defaults of an eager backend.

`jax/`, `tensorflow/` and `torch/` each have an `Engine` built on it; a function there
that has no docstring is the method of its name here. A gradient passes `unscale` and
`check` on its way to `update_if`, which writes or does not.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

import keras_mp.keras_private as private

# What a gradient holds beside numbers: the highest code that applies.
FINITE, INFINITE, NAN = 0, 1, 2

BFLOAT16 = "bfloat16"
HALF = ("float16", BFLOAT16)

Wrapper = Callable[[Callable], Callable]

# The name of a scope, with its number.
SCOPE = r"keras_mp_(\d+)_"


class Constant(NamedTuple):
    """A floating-point number that stands in a traced program."""

    scope: str  # The number of the innermost scope; empty if there is none.
    value: float
    dtype: str


class Update(NamedTuple):
    """An update of variables that may be skipped.

    Attributes:
        run: applies gradients to variables.
        written: returns the variables that `run` writes; None if not all of them are
            known.
        branches: whether Keras puts conditionals into `run`.
    """

    run: Callable[[list[Any]], None]
    written: Callable[[], Sequence[Any] | None]
    branches: bool = False


class Engine:
    """Loss scaling and all else that depends on the backend."""

    # A step ------------------------------------------------------------------------

    def is_tracing(self) -> bool:
        """Are we inside a function that is being compiled?"""
        raise NotImplementedError

    def unscale(self, grads: Sequence[Any], inverse_scale: Any) -> list[Any]:
        """Multiplies each gradient by `inverse_scale` in float32; None stays None."""
        raise NotImplementedError

    def unscale_in_place(
        self, grads: Sequence[Any], scale: Any, variables: Sequence[Any]
    ) -> tuple[list[Any], Any] | None:
        """Divides gradients by the scale where they are, and checks them on the way.

        Returns:
            The gradients and, for `check`, what was found. None where that is no
            faster than `unscale`.
        """
        return None

    @staticmethod
    def nonfinite_to_nan(grads: Sequence[Any]) -> list[Any]:
        """Turns infinities into nan, which clipping by value cannot make finite."""
        return [
            None if g is None else ops.where(ops.isfinite(g), g, float("nan"))
            for g in grads
        ]

    def check(self, tensors: Sequence[Any], found: Any = None) -> tuple[Any, Any]:
        """Looks for what is not finite.

        Args:
            tensors: gradients and what else must be finite, None where there is
                nothing; last the loss, which is looked at and decides nothing.
            found: what `unscale_in_place` found in the gradients, if nothing else but
                the loss is among `tensors`.

        Returns:
            A bool scalar, is all but the loss finite? And the code of each tensor:
            int8, (len(tensors),). Both are the same on all replicas.
        """
        codes = self.nonfinite(tensors)
        return self.all_finite(codes[:-1]), codes

    def nonfinite(self, grads: Sequence[Any]) -> Any:
        """The codes of `check`."""
        raise NotImplementedError

    def all_finite(self, codes: Any) -> Any:
        """Bool scalar: is each of the codes FINITE?"""
        raise NotImplementedError

    def update_if(self, finite: Any, update: Update, grads: list[Any]) -> bool | None:
        """Runs an update, whose writes take effect only if `finite`, a bool scalar.

        Returns:
            Whether it ran, where Python knows.
        """
        if finite:
            update.run(grads)
            return True
        return False

    def faster_updates(
        self, optimizers: Sequence[Any]
    ) -> contextlib.AbstractContextManager:
        """A context in which these optimizers of Keras update as fast as they can."""
        return contextlib.nullcontext()

    def stochastic_rounding(self, seed: Any, step: Any) -> Callable[[Any], Any]:
        """A function that rounds float32 tensors to bfloat16, see `rounding.py`.

        Args:
            seed, step: integer scalars. Of the same two, the tensors of a step get the
                same bits in the same order; each tensor has bits of its own.
        """
        raise NotImplementedError

    def plain_updates(
        self, optimizers: Sequence[Any]
    ) -> contextlib.AbstractContextManager:
        """A context in which optimizers of Keras write each variable by `assign`."""
        return contextlib.nullcontext()

    def refuse_replicas(self, what: str) -> None:
        """Raises a ValueError under a strategy of several replicas, on TensorFlow."""
        return

    def agreed(self, value: Any) -> Any:
        """A scalar of this process, or on torch that of the first of all processes."""
        return value

    # Weights that several processes share ------------------------------------------

    def fully_shard(
        self, model: Any, groups: Sequence[tuple[Any, Sequence[Any]]], mesh: Any
    ) -> None:
        """Shards the weights of a built model over the processes of a mesh, on torch.

        Args:
            model: it has no weights in other processes yet.
            groups: layers that hold no layer of another group, each with the weights
                that are gathered while it computes; last the model itself.
            mesh: a `DeviceMesh` of torch, or None for all processes.
        """
        raise ValueError(
            "`fully_shard` is for the backend torch. Received: backend="
            f"{keras.backend.backend()!r}. On JAX, `keras.distribution.ModelParallel` "
            "shards the weights of a model."
        )

    def shards_in_vain(self, layer: Any) -> bool:
        """Was torch's own `fully_shard` called on a layer? Its variables stay whole."""
        return False

    def shard_like(self, reference: Any, variable: Any) -> None:
        """Shards an optimizer's new variable as its weight is, if that is sharded."""
        return

    def among_shards(
        self, variables: Sequence[Any]
    ) -> contextlib.AbstractContextManager:
        """A context in which an optimizer updates variables, sharded or not.

        Shards meet tensors there that each process has as a whole.

        Raises:
            ValueError: if some of the variables are sharded, and others are not.
        """
        return contextlib.nullcontext()

    def write_file(self, model: Any, write: Callable[[], Any]) -> Any:
        """Calls `write`, which reads a model's variables: in the first process alone.

        If the model is sharded, that is, and once all processes are here.
        """
        return write()

    # Its surroundings --------------------------------------------------------------

    def compiled(self, function: Callable, static: Sequence[int] = ()) -> Callable:
        """A function of tensors, and of constants at the places `static`.

        It becomes one program where it is called eagerly, if that helps.
        """
        return function

    def outside_trace(self) -> contextlib.AbstractContextManager:
        """A context in which variables get their first values, once."""
        return contextlib.nullcontext()

    def set_dtype(self, variable: Any, dtype: str) -> None:
        """Casts a variable, with its value if it has one by now."""
        with self.outside_trace():
            private.set_dtype(variable, dtype)

    def optimizer_scope(self, model: Any) -> contextlib.AbstractContextManager:
        """A context in which the variables of a model's optimizer are created."""
        return contextlib.nullcontext()

    def refuse_baking(self, what: str, remedy: str) -> None:
        """Raises a ValueError where JAX would make a constant of a variable's value."""
        return  # AutoGraph warns of a function that is a docstring alone.

    def check_strategy(self, variables: Sequence[Any], built: bool) -> None:
        """Raises a ValueError where replicas would disagree on `variables`."""
        return

    # The train step of `fit` -------------------------------------------------------

    def make_train_function(
        self, model: Any, original: Callable, force: bool, wrap: Wrapper
    ) -> None:
        """Runs `original(model, force)` with `model.train_step` wrapped by `wrap`.

        Keras on JAX and TensorFlow reads `train_step` once, in this call. The user's
        own `train_step`, a method or an attribute of the instance, stays as it was.
        """
        attributes = vars(model)
        before = {k: v for k, v in attributes.items() if k == "train_step"}
        attributes["train_step"] = wrap(model.train_step)
        try:
            original(model, force)
        finally:
            del attributes["train_step"]
            attributes.update(before)

    def build(self, model: Any, data: Any) -> None:
        """Builds a model that its first train step would build; else does nothing."""
        return

    def undo_skipped(self, model: Any, scaling: Any, step: Callable) -> Callable:
        """Wraps a train step so that one which the optimizer skips leaves no trace.

        Non-trainable variables, metrics and the logs made of them are what they were,
        and so is the loss scale if the loss itself was not finite. `scaling` is the
        `LossScaling` of the model's optimizer.
        """
        raise NotImplementedError

    def may_have_skipped(self, scaling: Any) -> bool:
        """May the last train step have been skipped? False where Python knows."""
        return True

    def calls_python(self) -> bool:
        """Does the step that is being traced call Python back each time it runs?"""
        return False

    def optimizer_values(self, args: Sequence[Any]) -> list[Any] | None:
        """The optimizer's state in the arguments of a train function, on JAX alone."""
        return None

    # One batch at a time -----------------------------------------------------------

    def run_by_batch(
        self,
        train_function: Callable,
        args: Sequence[Any],
        count: int,
        take: Callable[[Any, Any, Callable[[Any], tuple[Any, Any]]], tuple[Any, Any]],
    ) -> Any:
        """Makes one call of a train function, as so many of one batch each.

        Keras' callbacks see no batch, and with `steps_per_execution` one call takes
        several. Here each batch goes by alone, through the very function that `fit`
        calls, traced and compiled as ever: results stay the same to the bit.

        Args:
            train_function: Keras' own.
            args: what `fit` calls it with.
            count: how many batches it takes in one call.
            take: takes a step with one batch, and returns what came of it. It gets the
                batch, the state that `fit` passes round on JAX in place of variables,
                elsewhere None, and a function: state -> what the train function
                returns for this batch, and the state after it.
        """
        state, iterator = args if len(args) == 2 else (None, *args)
        # All of them first: their errors must not find a state that is given away.
        batches = list(itertools.islice(iterator, count))
        if not batches:
            return train_function(*args)  # Which says that there are no more.
        for batch in batches:
            once = functools.partial(self._once, train_function, batch, iterator)
            result, state = take(self.contents(batch), state, once)
        return result

    def _once(
        self, train_function: Callable, batch: Any, iterator: Any, state: Any
    ) -> tuple[Any, Any]:
        alone = self.only(batch, iterator)
        if state is None:
            return train_function(alone), None
        result = train_function(state, alone)
        return result, result[1]

    def contents(self, batch: Any) -> Any:
        """A batch as `train_step` will see it."""
        return batch

    def only(self, batch: Any, iterator: Any) -> Any:
        """What a train function takes in place of `iterator` for one of its batches."""
        return [batch]

    def attached(self, model: Any, state: Any) -> contextlib.AbstractContextManager:
        """A context in which variables hold such a state."""
        return contextlib.nullcontext()

    def take_step(self, model: Any, batch: Any) -> None:
        """Takes one train step outside of `fit`, with a batch in any structure.

        `train_on_batch` knows of `(x, y, sample_weight)` alone, and a `train_step` of
        the user's may want exactly what `fit` has given to it.
        """
        model.make_train_function()
        model.train_function([batch])

    def other_workers(self, model: Any) -> str:
        """What shares a model's batches with others, in words; empty if nothing."""
        raise NotImplementedError

    def generator_states(self) -> dict[str, np.ndarray]:
        """The states of torch's generators, from which a Dropout without seed draws."""
        return {}

    def set_generator_states(self, states: Mapping[str, np.ndarray]) -> None:
        """Sets what `generator_states` returned, as far as the devices are here."""
        return

    # What diagnostics ask ----------------------------------------------------------

    def differentiate(
        self,
        function: Callable,
        arguments: Any,
        variables: Any,
        state: Any,
        compiled: bool,
    ) -> tuple[Any, list, list, list]:
        """See `differentiation.differentiate`."""
        raise NotImplementedError

    traces = True
    """Does the backend trace a model into a program?"""

    def constants(
        self, function: Callable, variables: Sequence[Any], arguments: Any
    ) -> list[Constant]:
        """The floating-point scalars in the program of a function, which is not run.

        Args:
            function: takes `arguments`, and reads `variables`.
            arguments: symbolic tensors of Keras, or structures of them.
        """
        raise NotImplementedError

    def scope(self, name: str) -> contextlib.AbstractContextManager:
        """A context whose name the constants in it have."""
        return contextlib.nullcontext()

    def note_logits(self, outputs: Any) -> None:
        """Remembers what a head returned, for the loss that will read it."""
        return

    half_products = ""
    """Where products in half precision have float32 results, if not everywhere.

    The end of a sentence, which begins with a space.
    """

    keeps_logits = False
    """Are the logits of a loss in chunks there as a whole all the same?"""

    def number_of_chunks(
        self, size: int, width: int, logits: str, classes: bool
    ) -> int:
        """In how many a large head and its cross-entropy are differentiated, or 0.

        Args:
            size: bytes of its logits.
            width: of its inputs.
            logits, classes: as in `HalfOperands`.
        """
        return 0

    float32_in_cudnn: tuple[type, ...] = ()
    """Layers that cuDNN computes in float32 alone, where it computes them."""

    def list_devices(self) -> list[Any]:
        """The devices that the framework sees, each a `devices.Device`."""
        raise NotImplementedError

    def measure_memory(self) -> Callable[[], int | None]:
        """Begins to measure what a training takes; no other may go on beside it.

        Call it before the model is built.

        Returns:
            A function to call after the training: the peak in bytes, on all devices of
            this process, less what was taken before; on JAX what the compiled train
            step needs. None where it is not counted: see `why_no_memory`.
        """
        raise NotImplementedError

    dtype_errors: tuple[type[Exception], ...] = (TypeError, ValueError, RuntimeError)
    """What the framework, and Keras, raise where dtypes do not fit."""

    def only_shapes(self) -> bool:
        """Are layers called for shapes alone, where variables have another dtype?

        On torch Keras tries "meta" tensors, whose variables are float32 in every call,
        and falls back on real ones where that fails.
        """
        return False

    why_no_memory = ""
    """Why `measure_memory` may return None on this backend, as a clause."""

    def repairs(self) -> dict[str, Wrapper]:
        """Wrappers of what fails in half precision in Keras' backend.

        By name: operations, and methods of its variables.
        """
        return {}

    def repaired_layers(self) -> dict[type, Wrapper]:
        """Wrappers of the `call` of layers of Keras."""
        return {}
