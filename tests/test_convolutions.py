"""A ReLU after a convolution keeps its result alone for the gradient, on JAX."""

import keras
import pytest

if keras.backend.backend() != "jax":
    pytest.skip("elsewhere a ReLU always keeps its result", allow_module_level=True)

import re

import jax
import jax.numpy as jnp
import numpy as np
from keras import layers

import keras_mp
from keras_mp.kernels.jax import convolutions

HALVES = {"mixed_float16": "float16", "mixed_bfloat16": "bfloat16"}
BEFORE = {
    "a convolution": lambda: [layers.Conv2D(4, 3, activation="relu")],
    "a convolution without a bias": lambda: [
        layers.Conv2D(4, 3, activation="relu", use_bias=False)
    ],
    "a ReLU layer": lambda: [layers.Conv2D(4, 3), layers.ReLU()],
    "an Activation layer": lambda: [layers.Conv2D(4, 3), layers.Activation("relu")],
    "a strided one": lambda: [layers.Conv2D(4, 3, strides=2, activation="relu")],
    "channels first": lambda: [
        layers.Conv2D(4, 3, data_format="channels_first", activation="relu")
    ],
    "a transposed one": lambda: [layers.Conv2DTranspose(4, 3, activation="relu")],
    "a depthwise one": lambda: [layers.DepthwiseConv2D(3, activation="relu")],
    "a separable one": lambda: [layers.SeparableConv2D(4, 3, activation="relu")],
}
OTHERS = {
    "a normalization": lambda: [
        layers.Conv2D(4, 3),
        layers.BatchNormalization(),
        layers.ReLU(),
    ],
    "a dense layer": lambda: [layers.Dense(4, activation="relu")],
    "a capped ReLU": lambda: [layers.Conv2D(4, 3), layers.ReLU(6.0)],
    "a leaky ReLU": lambda: [layers.Conv2D(4, 3, activation="leaky_relu")],
    "float32": lambda: [layers.Conv2D(4, 3, activation="relu", dtype="float32")],
}
SHAPE = 8, 8, 3


def network(parts):
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input(SHAPE), *parts(), layers.Conv2D(2, 3)])


def program(model):
    """The gradient by the weights and the batch, as JAX gives it to XLA."""

    def loss(values, x):
        result, _ = model.stateless_call(values, model.non_trainable_variables, x)
        return jnp.sum(jnp.square(result.astype("float32")))

    values = [v.value for v in model.trainable_variables]
    x = np.random.default_rng(0).normal(size=(5, *SHAPE)).astype("float32")
    return jax.jit(jax.grad(loss, (0, 1))), (values, x)


def signs(model):
    """The tensors whose signs the gradient reads: "kept", or another operation's name.

    A tensor is kept if it is behind a barrier, and nothing reads it before.
    """
    run, arguments = program(model)
    text = run.lower(*arguments).as_text()
    made = dict(re.findall(r"(%\S+) = (?:stablehlo\.|call @)(\w+)", text))
    barriers = re.findall(r"(%\S+) = stablehlo.optimization_barrier (%\S+)", text)
    for result, operand in barriers:
        assert made[operand] == "maximum"
        assert len(re.findall(rf"{re.escape(operand)}\b", text)) == 2
        made[result] = "kept"
    compared = re.findall(r"stablehlo.compare +GT, (%\w+),", text)
    return [made.get(name, name) for name in compared]


@pytest.mark.parametrize("policy", HALVES)
@pytest.mark.parametrize("parts", BEFORE.values(), ids=BEFORE)
@pytest.mark.kernels
def test_the_gradient_reads_the_signs_of_the_result(parts, policy):
    with keras_mp.policy_scope(policy):
        assert signs(network(parts)) == ["kept"]
    assert not convolutions._results.facts


def test_without_a_gradient_there_is_no_barrier():
    with keras_mp.policy_scope("mixed_float16"):
        model = network(BEFORE["a convolution"])
    text = jax.jit(model.call).lower(np.zeros((5, *SHAPE), "float32")).as_text()
    assert "stablehlo.maximum" in text and "optimization_barrier" not in text


@pytest.mark.parametrize("parts", OTHERS.values(), ids=OTHERS)
def test_after_anything_else_xla_decides(parts):
    with keras_mp.policy_scope("mixed_float16"):
        assert "kept" not in signs(network(parts))
        assert not convolutions._results.facts


@pytest.mark.parametrize("policy", HALVES)
@pytest.mark.parametrize("parts", BEFORE.values(), ids=BEFORE)
@pytest.mark.sampled
def test_gradients_are_those_of_another_relu(parts, policy, monkeypatch):
    with keras_mp.policy_scope(policy):
        run, arguments = program(network(parts))
        found = run(*arguments)
        monkeypatch.setattr(convolutions, "relu", jax.nn.relu)
        run, _ = program(network(parts))
        other = run(*arguments)
    jax.tree.map(np.testing.assert_array_equal, found, other)


@pytest.mark.parametrize("half", HALVES.values())
def test_each_derivative_is_that_of_jax(half):
    x = [*np.linspace(-3, 3, 13), np.nan, np.inf, -np.inf, -0.0, 1e-7, -1e-7]
    x = jnp.asarray(x, half)
    for derivative in (lambda f: f, jax.grad, lambda f: jax.grad(jax.grad(f))):
        both = convolutions.relu, jax.nn.relu
        found, own = (jax.jit(jax.vmap(derivative(f)))(x) for f in both)
        assert found.dtype == half
        np.testing.assert_array_equal(*(np.float64(y) for y in (found, own)))
    for f in (convolutions.relu, jax.checkpoint(convolutions.relu)):
        found, own = (jax.jvp(g, (x,), (x,)) for g in (f, jax.nn.relu))
        np.testing.assert_array_equal(*(np.float64(y[1]) for y in (found, own)))
