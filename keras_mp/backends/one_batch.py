"""The steps of a train function, one batch at a time.

Keras' callbacks see no batch, and with `steps_per_execution` one call of the train
function takes several. Here each batch goes by alone, through the very function that
`fit` calls, traced and compiled as ever, so that the results stay the same to the bit.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

# Set on a model: what makes the next call of its train function,
# (train function, its arguments) -> its result. It goes with that call.
ONCE = "_keras_mp_once"

_PARTS = (
    "trainable_variables",
    "non_trainable_variables",
    "optimizer_variables",
    "metrics_variables",
)


def one_at_a_time(
    train_function: Callable,
    args: Sequence[Any],
    count: int,
    before: Callable[[Any, Any], None],
    after: Callable[[Any], None],
) -> Any:
    """Makes one call of a train function, as so many of one batch each.

    Args:
        train_function: Keras' own.
        args: what `fit` calls it with.
        count: how many batches it takes in one call.
        before: is called with each batch, and the state on JAX, before the step. The
            state is what `fit` passes round there in place of variables, else None.
        after: is called with the state after the step.
    """
    steps = {"jax": _jax, "tensorflow": _tensorflow, "torch": _torch}
    run = steps[keras.backend.backend()]
    return run(train_function, args, count, before, after)


def _jax(
    train_function: Callable, args: Any, count: int, before: Callable, after: Callable
) -> Any:
    state, iterator = args
    # All of them first: an error of theirs must not find a state that is given away.
    batches = list(itertools.islice(iterator, count))
    if not batches:
        return train_function(state, iterator)  # Which says that there are no more.
    for batch in batches:
        before(batch, state)
        logs, state = train_function(state, iter([batch]))
        after(state)
    return logs, state


def _tensorflow(
    train_function: Callable, args: Any, count: int, before: Callable, after: Callable
) -> Any:
    import tensorflow as tf

    (iterator,) = args
    if not isinstance(iterator, tf.data.Iterator):
        return train_function(iterator)  # Not that of `fit`.
    batches = list(itertools.islice(iterator, count))
    if not batches:
        return train_function(iterator)  # Which says that there are no more.
    for batch in batches:
        before(keras.tree.map_structure(_value, batch), None)
        # An iterator of the same specification, or the function is traced anew, for
        # the shape of this batch.
        variant = tf.data.experimental.to_variant(tf.data.Dataset.from_tensors(batch))
        alone = tf.data.experimental.from_variant(variant, iterator.element_spec)
        logs = train_function(iter(alone))
        after(None)
    return logs


def _value(x: Any) -> Any:
    import tensorflow as tf

    # How Keras passes a None through tf.data.
    return None if isinstance(x, tf.experimental.Optional) else x


def _torch(
    train_function: Callable, args: Any, count: int, before: Callable, after: Callable
) -> Any:
    ((batch,),) = args
    before(batch, None)
    logs = train_function([batch])
    after(None)
    return logs


@contextlib.contextmanager
def attached(model: Any, state: Any) -> Iterator[None]:
    """On JAX lets the variables hold the state that `fit` passes round, for a while."""
    if state is None:
        yield
        return
    _attach(model, state)
    try:
        yield
    finally:
        # As `fit` has left them: it goes on with the state.
        model._purge_model_variables(**dict.fromkeys(_PARTS, True))
        model._jax_state_synced = False


def _attach(model: Any, state: Any) -> None:
    model._jax_state = dict(zip(_PARTS, state, strict=True))
    model._jax_state_synced = False
    model.jax_state_sync()


def step(model: Any, batch: Any) -> None:
    """Takes one train step outside of `fit`, with a batch in any structure.

    `train_on_batch` knows of `(x, y, sample_weight)` alone, and a `train_step` of the
    user's may want exactly what `fit` has given to it.
    """
    if keras.backend.backend() == "jax":
        model._symbolic_build(data_batch=batch)
        model.make_train_function()
        state = model._get_jax_state(**dict.fromkeys(_PARTS, True))
        _, state = model.train_function(state, iter([batch]))
        _attach(model, state)
        return
    model.make_train_function()
    model.train_function([batch])


def several_workers(model: Any) -> str:
    """What shares the batches of a model with others; empty if nothing does."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        strategy = model.distribute_strategy
        if tf.distribute.has_strategy() or strategy is not tf.distribute.get_strategy():
            return f"a model under {type(strategy).__name__}"
    if keras.backend.backend() == "jax":
        import jax

        if jax.process_count() > 1:
            return f"{jax.process_count()} processes"
    if keras.backend.backend() == "torch":
        from torch import distributed

        if distributed.is_available() and distributed.is_initialized():
            processes = distributed.get_world_size()
            return f"{processes} processes" if processes > 1 else ""
    return ""
