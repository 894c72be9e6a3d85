"""A ReLU after a convolution keeps its result for the gradient, on TensorFlow."""

import numpy as np
import pytest
from backends import BACKEND

if BACKEND != "tensorflow":
    pytest.skip("a matter of XLA, as TensorFlow calls it", allow_module_level=True)

import tensorflow as tf
from convolutions import BEFORE, HALVES, OTHERS, SHAPE, network

import keras_mp
from keras_mp.kernels.tensorflow import activations

X = np.random.default_rng(0).normal(size=(5, *SHAPE)).astype("float32")
# TensorFlow has no convolution with channels first on CPUs, and its separable one is an
# operation of its own.
LEFT_OUT = "channels first", "a separable one"
PARTS = {name: parts for name, parts in BEFORE.items() if name not in LEFT_OUT}


def gradients(parts, policy, jit_compile=True):
    """A function of the gradients by the weights."""
    with keras_mp.policy_scope(policy):
        model = network(parts)

    @tf.function(jit_compile=jit_compile)
    def run(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(tf.cast(model(x), "float32")))
        return tape.gradient(loss, [v.value for v in model.trainable_variables])

    return run


def kept(run):
    """How many results are behind barriers in the program that XLA is given."""
    text = run.experimental_get_compiler_ir(tf.constant(X))(stage="hlo")
    return text.count(" opt-barrier(")


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
@pytest.mark.kernels
def test_the_gradient_reads_the_signs_of_the_result(parts):
    assert kept(gradients(parts, "mixed_float16")) == 1


@pytest.mark.parametrize("parts", OTHERS.values(), ids=OTHERS)
def test_after_anything_else_xla_decides(parts):
    assert not kept(gradients(parts, "mixed_float16"))


def test_without_xla_it_is_tensorflows():
    run = gradients(BEFORE["a convolution"], "mixed_float16", jit_compile=False)
    graph = run.get_concrete_function(tf.constant(X)).graph
    assert not any("Barrier" in op.type for op in graph.get_operations())


@pytest.mark.parametrize("policy", HALVES)
@pytest.mark.parametrize("name", ["a convolution", "a ReLU layer"])
def test_gradients_are_those_of_another_relu(name, policy, monkeypatch):
    found = gradients(BEFORE[name], policy)(X)
    keras_mp.uninstall()  # It comes back with the other one.
    monkeypatch.setattr(activations, "relu", tf.nn.relu)
    try:
        expected = gradients(BEFORE[name], policy)(X)
    finally:
        keras_mp.uninstall()
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("half", HALVES.values())
def test_each_derivative_is_that_of_tensorflow(half):
    x = [*np.linspace(-3, 3, 13), np.nan, np.inf, -np.inf, -0.0, 1e-7, -1e-7]
    x = tf.constant(x, half)

    def derivatives(relu):
        @tf.function(jit_compile=True)
        def run(x):
            with tf.GradientTape() as outer:
                outer.watch(x)
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    y = relu(x) * x
                slope = tape.gradient(y, x)
            return y, slope, outer.gradient(slope, x)

        return [np.asarray(tf.cast(found, "float64")) for found in run(x)]

    np.testing.assert_array_equal(
        derivatives(activations.relu), derivatives(tf.nn.relu)
    )
