"""One batch at a time on JAX, where `fit` passes the state of a model around."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

import keras_mp.keras_private as private
from keras_mp.backends.batches import Batches


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

    def take_step(self, model: Any, batch: Any) -> None:
        private.build_from_batch(model, batch)
        model.make_train_function()
        parts = _parts(model)
        state = tuple([v.value for v in variables] for variables in parts.values())
        alone = self.only(batch, None, model.steps_per_execution)
        _, state = model.train_function(state, alone)
        private.attach_state(model, dict(zip(parts, state, strict=True)))

    @contextlib.contextmanager
    def attached(self, model: Any, state: Any) -> Iterator[None]:
        parts = _parts(model)
        private.attach_state(model, dict(zip(parts, state, strict=True)))
        try:
            yield
        finally:
            # `fit` had detached the variables, and goes on with the state.
            private.detach_state(model, parts)

    def other_workers(self, model: Any) -> str:
        processes = jax.process_count()
        return f"{processes} processes" if processes > 1 else ""


def _are_together(count: int) -> bool:
    """Does an iterator yield all batches of one call as one item?"""
    return count > 1 and private.PartialBatches is not None


def _parts(model: Any) -> dict[str, list[Any]]:
    """The variables whose values `fit` passes around, in its order."""
    return {
        "trainable_variables": model.trainable_variables,
        "non_trainable_variables": model.non_trainable_variables,
        "optimizer_variables": model.optimizer.variables,
        "metrics_variables": model.metrics_variables,
    }
