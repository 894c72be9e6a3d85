"""One batch at a time on JAX, where `fit` passes the state of a model around."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax

import keras_mp.keras_private as private
from keras_mp import interrupts
from keras_mp.backends.batches import Batches
from keras_mp.types import Model

# The variables whose values `fit` passes around, in its order.
_PARTS = (
    "trainable_variables",
    "non_trainable_variables",
    "optimizer_variables",
    "metrics_variables",
)
# `evaluate` passes these, and `predict` the first two.
_PARTS_OF_TESTS = tuple(name for name in _PARTS if name != "optimizer_variables")


class JaxBatches(Batches):
    """`fit` passes the state of a model around."""

    def read(self, iterator: Any, count: int) -> list[Any]:
        if not _are_together(count):
            return super().read(iterator, count)
        for together in iterator:
            if isinstance(together, private.PartialBatches):
                return list(together)
            number = len(jax.tree.leaves(together)[0])
            return [jax.tree.map(lambda x, i=i: x[i], together) for i in range(number)]
        return []

    def only(self, batch: Any, iterator: Any, count: int) -> Any:
        return iter(
            [private.PartialBatches([batch]) if _are_together(count) else batch]
        )

    def take_step(self, model: Model, batch: Any) -> None:
        private.build_from_batch(model, batch)
        model.make_train_function()
        state = tuple([v.value for v in variables] for variables in _parts(model))
        alone = self.only(batch, None, model.steps_per_execution)
        _, state = model.train_function(state, alone)
        private.attach_state(model, _by_part(state))

    def keeping_state(self, model: Model, train_function: Callable) -> Callable:
        def keeping(state: Any, iterator: Any) -> Any:
            batches = self.repeatable(model, iterator)  # It may wait for ever.
            with interrupts.held():
                result = train_function(state, batches())
                # As Keras does, but while interrupts wait.
                private.note_state(model, _by_part(result[1]))
            return result

        return keeping

    def repeatable(self, model: Model, batches: Any) -> Callable[[], Any]:
        count = model.steps_per_execution
        items = 1 if _are_together(count) else count
        read = list(itertools.islice(batches, items))
        return lambda: iter(read)

    def attaching(self, model: Model, step: Callable) -> Callable:
        def attaching(state: Any, iterator: Any) -> Any:
            private.note_state(model, _by_part(state))
            try:
                return step(state, iterator)
            except BaseException:
                newest = private.noted_state(model)
                # A step that fails on the device leaves no state, neither old nor new.
                if not any(value.is_deleted() for value in jax.tree.leaves(newest)):
                    private.attach_state(model, newest)
                raise

        return attaching

    @contextlib.contextmanager
    def attached(self, model: Model, state: Any) -> Iterator[None]:
        parts = _by_part(state)
        try:
            private.attach_state(model, parts)
            yield
        finally:
            # `fit` had detached the variables, and goes on with the state.
            private.detach_state(model, parts)

    def other_workers(self, model: Model) -> str:
        processes = jax.process_count()
        return f"{processes} processes" if processes > 1 else ""


def _are_together(count: int) -> bool:
    """Does an iterator yield all batches of one call as one item?"""
    return count > 1 and private.PartialBatches is not None


def _by_part(state: Any) -> dict[str, Any]:
    """A state that Keras passes around, by the names that it has for the parts."""
    names = _PARTS if len(state) == len(_PARTS) else _PARTS_OF_TESTS
    return dict(zip(names, state, strict=False))


def _parts(model: Model) -> tuple[list[Any], ...]:
    """The variables whose values make up the state."""
    return (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )
