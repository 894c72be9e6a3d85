"""Every sequence of the table, on one device, against the oracle to the bit."""

import keras
import pytest
from backends import BACKEND, COMPILED, stateful_step, values
from step_sequences import SEQUENCES, WEIGHTS, trace_line

import keras_mp


def trace(sequence, compiled):
    optimizer = keras_mp.LossScaleOptimizer(
        keras.optimizers.SGD(**sequence.inner_options()), **sequence.options()
    )
    variables = [keras.Variable(w) for w in WEIGHTS]
    step = stateful_step(optimizer, variables, compiled)
    lines = []
    for index in range(len(sequence.steps)):
        scale = values([optimizer.dynamic_scale])[0]
        grads = [g * scale for g in sequence.gradients(index)]
        if sequence.sparse and BACKEND == "tensorflow":
            grads[0] = indexed_slices(sequence, index, scale)
        optimizer.scale_loss(1.0)  # As a loop would, before it takes gradients.
        step(grads, sequence.loss(index))
        lines.append(
            trace_line(
                values(optimizer._loss_scaling.variables),
                optimizer.iterations,
                values(variables),
            )
        )
    return lines


def indexed_slices(sequence, index, scale):
    import tensorflow as tf

    rows, indices = sequence.sparse_gradient(index)
    shape = tf.constant(WEIGHTS[0].shape)
    return tf.IndexedSlices(tf.constant(rows * scale), tf.constant(indices), shape)


@pytest.mark.filterwarnings("ignore:.*whatever the loss scale:UserWarning")
@pytest.mark.parametrize("compiled", COMPILED)
@pytest.mark.parametrize("name", SEQUENCES)
def test_a_sequence_of_steps_follows_the_oracle_to_the_bit(name, compiled):
    sequence = SEQUENCES[name]
    assert trace(sequence, compiled) == sequence.expected()


def test_the_table_holds_what_an_engine_may_do_wrong():
    # What the oracle says of each sequence is not the same as if nothing had happened.
    plain = SEQUENCES["all finite: the scale grows"].expected()
    for name, sequence in SEQUENCES.items():
        assert sequence.expected()[: len(plain)] != plain or name.startswith("all")
