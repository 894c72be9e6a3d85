"""One batch at a time: what the breakpoint and the retaking of steps ask for."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np


class Batches:
    """Takes train steps with batches that somebody keeps; of an eager backend."""

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
