"""A ReLU after a convolution keeps its result alone for the gradient, on JAX."""

import keras
import pytest

if keras.backend.backend() != "jax":
    pytest.skip("a matter of XLA, as JAX calls it", allow_module_level=True)

import re

import jax
import jax.numpy as jnp
import numpy as np
from convolutions import BEFORE, HALVES, OTHERS, SHAPE, network

import keras_mp
from keras_mp.kernels import convolutions
from keras_mp.kernels.jax import activations


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
    def gradients():
        with keras_mp.policy_scope(policy):
            run, arguments = program(network(parts))
            return run(*arguments)

    found = gradients()
    keras_mp.uninstall()  # It comes back with the other one.
    monkeypatch.setattr(activations, "relu", jax.nn.relu)
    try:
        jax.tree.map(np.testing.assert_array_equal, found, gradients())
    finally:
        keras_mp.uninstall()


@pytest.mark.parametrize("half", HALVES.values())
def test_each_derivative_is_that_of_jax(half):
    x = [*np.linspace(-3, 3, 13), np.nan, np.inf, -np.inf, -0.0, 1e-7, -1e-7]
    x = jnp.asarray(x, half)
    for derivative in (lambda f: f, jax.grad, lambda f: jax.grad(jax.grad(f))):
        both = activations.relu, jax.nn.relu
        found, own = (jax.jit(jax.vmap(derivative(f)))(x) for f in both)
        assert found.dtype == half
        np.testing.assert_array_equal(*(np.float64(y) for y in (found, own)))
    for f in (activations.relu, jax.checkpoint(activations.relu)):
        found, own = (jax.jvp(g, (x,), (x,)) for g in (f, jax.nn.relu))
        np.testing.assert_array_equal(*(np.float64(y[1]) for y in (found, own)))
