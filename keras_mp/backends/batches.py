"""One batch at a time, as the breakpoint and repeated steps need it."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from keras_mp.types import Model


class Batches:
    """Takes train steps on batches that somebody keeps, on an eager backend."""

    def run_by_batch(
        self,
        train_function: Callable,
        args: Sequence[Any],
        count: int,
        take: Callable[[Any, Any, Callable[[Any], tuple[Any, Any]]], tuple[Any, Any]],
    ) -> Any:
        """Splits a call of a train function into `count` calls of one batch each.

        Keras' callbacks see no batch, and with `steps_per_execution` one call takes
        several. Here each batch goes alone through the same function that `fit` calls,
        traced and compiled as before: results stay the same to the bit.

        Args:
            train_function: Keras' own.
            args: what `fit` calls it with.
            count: how many batches it takes in one call.
            take: takes a step with one batch, and returns its result. It gets the
                batch, the state that `fit` passes around on JAX in place of variables
                (None elsewhere), and a function: state -> what the train function
                returns for this batch, and the state after it.
        """
        state, iterator = args if len(args) == 2 else (None, *args)
        # Read all batches first: if that raises, the state must not be donated yet.
        batches = self.read(iterator, count)
        if not batches:
            return train_function(*args)  # It reports that no batch is left.
        for batch in batches:
            alone = functools.partial(self.only, batch, iterator, count)
            once = functools.partial(self._once, train_function, alone)
            result, state = take(self.contents(batch), state, once)
        return result

    def _once(
        self, train_function: Callable, alone: Callable[[], Any], state: Any
    ) -> tuple[Any, Any]:
        if state is None:
            return train_function(alone()), None
        result = train_function(state, alone())
        return result, result[1]

    def read(self, iterator: Any, count: int) -> list[Any]:
        """The batches, `count` or fewer, that one call of a train function takes."""
        return list(itertools.islice(iterator, count))

    def contents(self, batch: Any) -> Any:
        """A batch as `train_step` will see it."""
        return batch

    def only(self, batch: Any, iterator: Any, count: int) -> Any:
        """What a train function takes in place of `iterator` for one of its batches."""
        return [batch]

    def keeping_state(self, model: Model, train_function: Callable) -> Callable:
        """The train function; on JAX its calls note the state that they return."""
        return train_function

    def repeatable(self, model: Model, batches: Any) -> Callable[[], Any]:
        """Returns what `predict` gives its function as batches, as often as called."""
        return lambda: batches

    def attaching(self, model: Model, step: Callable) -> Callable:
        """The function; on JAX variables have their values if it raises.

        They get those of the newest state that was noted. Keras would go back to a
        state that a step has donated.
        """
        return step

    def attached(self, model: Model, state: Any) -> contextlib.AbstractContextManager:
        """A context in which variables hold such a state."""
        return contextlib.nullcontext()

    def take_step(self, model: Model, batch: Any) -> None:
        """Takes one train step outside of `fit`, with a batch in any structure.

        `train_on_batch` takes only `(x, y, sample_weight)`, and a custom `train_step`
        may need exactly what `fit` gave it.
        """
        model.make_train_function()
        model.train_function([batch])

    def other_workers(self, model: Model) -> str:
        """Says what a model's batches are shared between; empty if nothing."""
        raise NotImplementedError

    def generator_states(self) -> dict[str, np.ndarray]:
        """The states of torch's generators; a Dropout without a seed uses them."""
        return {}

    def set_generator_states(self, states: Mapping[str, np.ndarray]) -> None:
        """Sets what `generator_states` returned, for the devices that are here."""
        return
