"""TensorFlow's sparse gradients stay sparse, from the tape to the variable."""

import pathlib

import keras
import numpy as np
import pytest
from backends import BACKEND, graphs_within, same_bits, values

import keras_mp

if BACKEND != "tensorflow":
    pytest.skip("only TensorFlow has sparse gradients", allow_module_level=True)

import tensorflow as tf

TABLE = (1000, 4)
INDICES = [3, 7, 3, 999]  # One of them twice.
ROWS = np.array([[1, -2, 4, 8]] * 4, "float32") / [[1], [2], [4], [8]]
OPTIONS = {
    "none": {},
    "clipnorm": {"clipnorm": 1.0},
    "clipvalue": {"clipvalue": 0.5},
    "global_clipnorm": {"global_clipnorm": 1.0},
    "momentum": {"momentum": 0.5},
}


def sparse(rows):
    return tf.IndexedSlices(rows, tf.constant(INDICES), tf.constant(TABLE))


def two_calls(optimizer, gradient, table):
    optimizer.apply([gradient], [table])


def three_calls(optimizer, gradient, table):
    (gradient,) = optimizer.unscale([gradient])
    optimizer.apply_gradients([(gradient, table)])


def training(apply, wrap, **options):
    """An optimizer, its table, and a step of it from the rows of a gradient."""
    table = keras.Variable(np.ones(TABLE, "float32"))
    optimizer = wrap(keras.optimizers.SGD(0.5, **options))
    optimizer.build([table])

    def step(rows):
        optimizer.scale_loss(1.0)
        apply(optimizer, sparse(rows), table)

    return optimizer, table, step


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("apply", [two_calls, three_calls])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_sparse_gradient_does_what_it_does_without_the_wrapper(
    options, apply, compiled
):
    optimizer, table, step = training(
        apply, keras_mp.LossScaleOptimizer, **OPTIONS[options]
    )
    if compiled:
        step = tf.function(step)
    bad = ROWS.copy()
    bad[2, 1] = np.inf
    for rows in (ROWS, bad, -3 * ROWS):
        step(tf.constant(rows * optimizer.loss_scale))
    assert int(optimizer.skipped_steps) == 1

    plain, expected, step = training(two_calls, lambda inner: inner, **OPTIONS[options])
    for rows in (ROWS, -3 * ROWS):
        step(tf.constant(rows))
    inner = optimizer.inner_optimizer
    assert same_bits(
        values([table, *inner.variables]), values([expected, *plain.variables])
    )


def dense_operations(apply, **options):
    """Names of the operations in a step's graphs that yield more than a few rows."""
    _, _, step = training(apply, keras_mp.LossScaleOptimizer, **options)
    rows = tf.TensorSpec(ROWS.shape)
    graph = tf.function(step).get_concrete_function(rows).graph
    return [
        op.name
        for part in graphs_within(graph)
        for op in part.get_operations()
        for tensor in op.outputs
        # Of a table, a resource has the handle alone.
        if tensor.dtype != tf.resource and not few(tensor.shape)
    ]


def few(shape):
    return shape.is_fully_defined() and shape.num_elements() <= ROWS.size


@pytest.mark.parametrize("apply", [two_calls, three_calls])
@pytest.mark.parametrize("options", ["none", "clipnorm", "clipvalue"])
def test_nothing_in_a_step_is_as_large_as_the_table(options, apply):
    assert dense_operations(apply, **OPTIONS[options]) == []


@pytest.mark.parametrize("options", ["global_clipnorm", "momentum"])
def test_only_keras_own_optimizer_makes_a_sparse_gradient_dense(options):
    names = dense_operations(two_calls, **OPTIONS[options])
    assert names and all("/sgd" in name for name in names)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("apply", [two_calls, three_calls])
def test_a_step_takes_memory_for_its_rows_and_not_for_the_table(apply, compiled):
    table = keras.Variable(tf.zeros((1_000_000, 64)))
    optimizer = keras_mp.LossScaleOptimizer(keras.optimizers.SGD(0.5))
    optimizer.build([table])

    def step(rows, indices):
        optimizer.scale_loss(1.0)
        shape = tf.constant((1_000_000, 64))
        apply(optimizer, tf.IndexedSlices(rows, indices, shape), table)

    if compiled:
        step = tf.function(step)
    rows, indices = tf.ones((128, 64)), tf.range(128) * 7000
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # The peak starts anew.
    # Before the first step: TensorFlow keeps what it has once allocated.
    before = memory("VmRSS")
    step(rows, indices)
    step(rows * np.inf, indices)
    assert int(optimizer.skipped_steps) == 1
    assert memory("VmHWM") - before < 128 * 1024  # KiB. The table has 250,000.


def memory(field):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1])


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_the_gradient_of_an_embedding_is_sparse_in_fit(policy):
    seen = []

    class Watching(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            if "embeddings" in variable.name:
                seen.append(gradient)
            super().update_step(gradient, variable, learning_rate)

    with keras_mp.policy_scope(policy):
        model = keras.Sequential(
            [
                keras.Input((3,), dtype="int32"),
                keras.layers.Embedding(100, 4),
                keras.layers.Flatten(),
                keras.layers.Dense(1),
            ]
        )
    optimizer = keras_mp.LossScaleOptimizer(Watching(0.5), initial_scale=256.0)
    model.compile(optimizer, "mse", jit_compile=False)
    before = values(model.variables)[0]
    x = np.array([[3, 7, 3]] * 8)
    model.fit(x, np.ones((8, 1)), batch_size=8, verbose=0)
    with pytest.warns(UserWarning, match="whatever the loss scale"):
        model.fit(x, np.full((8, 1), np.inf), batch_size=8, verbose=0)
    assert seen and all(isinstance(g, tf.IndexedSlices) for g in seen)
    assert int(optimizer.skipped_steps) == int(optimizer.iterations) == 1
    changed = np.any(values(model.variables)[0] != before, axis=1)
    assert np.flatnonzero(changed).tolist() == [3, 7]
