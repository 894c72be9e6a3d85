"""A train step on JAX, outside of `fit`, and the state that `fit` passes round."""

import contextlib
from collections.abc import Iterator
from typing import Any

from keras_mp.keras_seams import private

# What `fit` passes round, in its order.
_PARTS = (
    "trainable_variables",
    "non_trainable_variables",
    "optimizer_variables",
    "metrics_variables",
)


def take_step(model: Any, batch: Any) -> None:
    private.build_from_batch(model, batch)
    model.make_train_function()
    variables = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )
    state = tuple([v.value for v in part] for part in variables)
    _, state = model.train_function(state, iter([batch]))
    private.attach_state(model, dict(zip(_PARTS, state, strict=True)))


@contextlib.contextmanager
def attached(model: Any, state: Any) -> Iterator[None]:
    private.attach_state(model, dict(zip(_PARTS, state, strict=True)))
    try:
        yield
    finally:
        # As `fit` has left them: it goes on with the state.
        private.detach_state(model, _PARTS)
