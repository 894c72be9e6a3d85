"""What replicas of a `tf.distribute` strategy must agree on, and how they do."""

import tensorflow as tf

from keras_mp.backends.step import INFINITE, NAN
from keras_mp.types import Variables


def check_strategy(variables: Variables, built: bool) -> None:
    context = tf.distribute.get_replica_context()
    if context is None:
        raise ValueError(
            "The optimizer must be applied in a replica context: call it within "
            "`strategy.run`. Received: a call in a cross-replica context."
        )
    if context.num_replicas_in_sync == 1:
        return
    # One variable for all replicas would be moved once by each of them.
    mirrored = context.strategy.extended.variable_created_in_scope
    for variable in variables:
        if not mirrored(variable.value):
            raise ValueError(
                "The optimizer must be created, and built, within "
                f"`strategy.scope()`. Received: its variable {variable.path} was "
                "created outside."
            )
    if not built and not tf.executing_eagerly():
        raise ValueError(
            "The optimizer must be built before a tf.function calls `strategy.run`. "
            "Received: one that is not. Within `strategy.scope()` call "
            "`optimizer.build(variables)`."
        )


def refuse_replicas(what: str) -> None:
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    if replicas > 1:
        raise ValueError(
            f"`{what}` must have one replica: while it updates bfloat16 variables, "
            "other threads would see them as float32. Received: a `tf.distribute` "
            f"strategy of {replicas} replicas. Train under mixed_bfloat16 there."
        )


def highest_of_all_replicas(codes: tf.Tensor) -> tf.Tensor:
    """The highest of all replicas' codes."""
    if tf.distribute.get_replica_context().num_replicas_in_sync == 1:
        return codes
    # One message of flags: replicas can sum, but cannot take a maximum.
    flags = on_any_replica(tf.stack([codes == INFINITE, codes == NAN]))
    infinite, nan = tf.unstack(tf.cast(flags, tf.int8))
    return tf.maximum(INFINITE * infinite, NAN * nan)


def on_any_replica(flags: tf.Tensor) -> tf.Tensor:
    """Whether a flag is set on any replica.

    Flags are summed over all replicas before any of them decides, and outside any
    branch. Replicas that disagreed would wait for each other forever.
    """
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return flags
    count = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.cast(flags, tf.float32))
    return count > 0
