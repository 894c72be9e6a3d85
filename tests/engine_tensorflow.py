"""A sequence of steps under tf.distribute; as a script, one worker of several."""

import functools
import json
import os

import keras
import tensorflow as tf
from step_sequences import SEQUENCES, WEIGHTS, trace_line

import keras_mp


@functools.cache
def mirrored(replicas):
    # TensorFlow's collectives know one group of replicas in a process, once.
    return tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(replicas)],
        tf.distribute.ReductionToOneDevice() if replicas != 2 else None,
    )


def local_values(strategy, variables):
    """The values of variables on each replica of this process: a list each."""
    values = [strategy.experimental_local_results(v.value) for v in variables]
    return [[v.numpy() for v in replica] for replica in zip(*values, strict=True)]


def trace(strategy, sequence, compiled):
    """The lines of `trace_line` of each replica of this process."""
    replicas = strategy.num_replicas_in_sync
    inner = sequence.inner_options()
    accumulated = inner.get("gradient_accumulation_steps", 1)
    if "clipvalue" in inner:
        # Keras clips on each replica, then adds up: a share of the gradient, which is
        # what a replica has here, reaches its share of the bound.
        inner["clipvalue"] /= replicas
    with strategy.scope():
        optimizer = keras_mp.LossScaleOptimizer(
            keras.optimizers.SGD(**inner), **sequence.options()
        )
        variables = [keras.Variable(w) for w in WEIGHTS]
        optimizer.build(variables)

    def replica_step(grads, loss):
        optimizer.scale_loss(loss)  # As a loop would, before it takes gradients.
        optimizer.apply(grads, variables, loss=loss)

    def step(grads, loss):
        strategy.run(replica_step, args=(grads, loss))

    if compiled:
        step = tf.function(step, autograph=False)  # AutoGraph costs a second each.

    def on_each_replica(value_of):
        return strategy.experimental_distribute_values_from_function(
            lambda context: value_of(context.replica_id_in_sync_group, replicas)
        )

    state = [*optimizer._loss_scaling.variables, optimizer.inner_optimizer._iterations]
    lines = []
    for index in range(len(sequence.steps)):
        scale = optimizer.dynamic_scale.numpy()
        grads = [
            on_each_replica(gradient(sequence, index, scale, place))
            for place in range(len(WEIGHTS))
        ]
        step(grads, on_each_replica(loss(sequence, index)))
        lines.append(
            [
                trace_line(own[:-1], own[-1] // accumulated, weights)
                for own, weights in zip(
                    local_values(strategy, state),
                    local_values(strategy, variables),
                    strict=True,
                )
            ]
        )
    return [list(replica) for replica in zip(*lines, strict=True)]


def gradient(sequence, index, scale, place):
    """One scaled gradient as a function of the replica; sparse where it should be."""

    def value_of(replica, replicas):
        if sequence.sparse and place == 0:
            rows, indices = sequence.sparse_gradient(index, replica, replicas)
            shape = tf.constant(WEIGHTS[0].shape)
            return tf.IndexedSlices(
                tf.constant(rows * scale), tf.constant(indices), shape
            )
        return tf.constant(sequence.gradients(index, replica, replicas)[place] * scale)

    return value_of


def loss(sequence, index):
    return lambda replica, replicas: tf.constant(
        sequence.loss(index, replica, replicas)
    )


# What workers run: few sequences, as each takes a second, but one of each kind, with
# the bad values on either worker.
WORKERS = {
    "compiled": [
        "inf",
        "nan on the first replica",
        "broken: the scale stays",
        "broken on the first replica",
        "hysteresis",
        "sparse",
        "clipped by value",
    ],
    # Keras accumulates in a branch on each replica, which a graph cannot have.
    "eager": ["inf on the first replica", "accumulated"],
}


def main():
    """Prints the traces of one worker as JSON: a mode, a sequence, lines each."""
    ports = os.environ["PORTS"].split()
    os.environ["TF_CONFIG"] = json.dumps(
        {
            "cluster": {"worker": [f"127.0.0.1:{port}" for port in ports]},
            "task": {"type": "worker", "index": int(os.environ["RANK"])},
        }
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    traces = {}
    for mode, names in WORKERS.items():
        for name in names:
            (lines,) = trace(strategy, SEQUENCES[name], mode == "compiled")
            traces[f"{mode}: {name}"] = lines
    print(json.dumps(traces))


if __name__ == "__main__":
    main()
