"""A plain optimizer that is applied to float16 layers in a loop is named once."""

import warnings

import keras
import numpy as np
import pytest
from backends import BACKEND, gradients, guide_model
from keras import layers, ops

import keras_mp

X = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
Y = X[:, :1] * 2


def model_of(policy):
    keras_mp.set_global_policy(policy)
    model = keras.Sequential([layers.Dense(4, name="hidden"), layers.Dense(1)])
    model(X)
    return model


def loop(model, optimizer, steps=3, scaled=False, factor=1e-9):
    """A loop of the user's, as Keras' guides have it on each backend.

    Returns:
        How many variables have moved.
    """
    x, y = ops.convert_to_tensor(X), ops.convert_to_tensor(Y)
    variables = model.trainable_variables
    before = [ops.convert_to_numpy(v).copy() for v in variables]

    def loss():
        value = ops.mean(ops.square(ops.cast(model(x), "float32") - y)) * factor
        return optimizer.scale_loss(value) if scaled else value

    for _ in range(steps):
        apply(optimizer, gradients(loss, variables), variables)
    after = [ops.convert_to_numpy(v) for v in variables]
    return sum((a != b).any() for a, b in zip(after, before, strict=True))


def apply(optimizer, grads, variables):
    if BACKEND == "tensorflow":
        optimizer.apply_gradients(zip(grads, variables, strict=True))
    elif BACKEND == "torch":
        import torch

        with torch.no_grad():
            optimizer.apply(grads, variables)
    else:
        optimizer.build(variables)
        values, state = optimizer.stateless_apply(
            [v.value for v in optimizer.variables], grads, [v.value for v in variables]
        )
        for variable, value in [
            *zip(variables, values, strict=True),
            *zip(optimizer.variables, state, strict=True),
        ]:
            variable.assign(value)


def test_a_plain_optimizer_is_named_once_with_the_lines_that_mend_it():
    model, optimizer = model_of("mixed_float16"), keras.optimizers.SGD(1e8, name="mine")
    with pytest.warns(UserWarning, match="'mine' updates layers") as seen:
        assert loop(model, optimizer) == 0
    (warning,) = [w for w in seen if w.category is UserWarning]
    for part in (
        "(dense",
        "hidden",
        "LossScaleOptimizer(optimizer)",
        "scale_loss",
    ):
        assert part in str(warning.message)


def test_it_reads_variables_that_can_be_read_once():
    model = model_of("mixed_float16")
    optimizer = keras.optimizers.SGD(0.1)
    variables = model.trainable_variables
    optimizer.build(variables)
    grads = [ops.ones(v.shape) for v in variables]
    with pytest.warns(UserWarning, match="updates layers"):
        optimizer.apply(grads, (v for v in variables))
    # A bias is 0 before.
    np.testing.assert_allclose(ops.convert_to_numpy(variables[1]), -0.1)


def test_the_lines_that_it_names_mend_it():
    model = model_of("mixed_float16")
    optimizer = keras_mp.LossScaleOptimizer(keras.optimizers.SGD(1e8))
    assert loop(model, optimizer, scaled=True) == 4


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_without_float16_nothing_is_said(policy):
    assert loop(model_of(policy), keras.optimizers.SGD(1e8)) == 4


@pytest.mark.usefixtures("installed")
def test_layers_under_keras_own_policy_count_too():
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential([layers.Dense(1)])
    model(X)
    with pytest.warns(UserWarning, match="'mine' updates layers"):
        loop(model, keras.optimizers.SGD(name="mine"))


def test_a_model_that_turns_to_float16_later_is_told_of_then():
    model, optimizer = model_of("float32"), keras.optimizers.SGD(1e-3, name="mine")
    loop(model, optimizer)
    keras_mp.convert(model, "mixed_float16")
    with pytest.warns(UserWarning, match="'mine' updates layers"):
        loop(model, optimizer)


def test_an_optimizer_of_float32_layers_beside_float16_ones_is_left_alone():
    model_of("mixed_float16")
    loop(model_of("float32"), keras.optimizers.SGD(name="mine"))


def test_whoever_sets_a_loss_scale_factor_is_not_told():
    optimizer = keras.optimizers.SGD(loss_scale_factor=1.0)
    loop(model_of("mixed_float16"), optimizer)


@pytest.mark.parametrize("wrapper", ["keras_mp", "keras"])
def test_an_optimizer_inside_a_scale_is_not_told_of(wrapper):
    package = {"keras_mp": keras_mp, "keras": keras.optimizers}[wrapper]
    model, inner = model_of("mixed_float16"), keras.optimizers.SGD(name="mine")
    optimizer = package.LossScaleOptimizer(inner)
    if wrapper == "keras" and BACKEND == "jax":
        optimizer.scale_loss(1.0)
        optimizer = inner  # Its `apply` has a branch, which eager JAX leaks from.
    loop(model, optimizer, scaled=optimizer is not inner)


def test_whoever_says_auto_scale_loss_false_is_not_told():
    model = model_of("mixed_float16")
    model.compile("sgd", "mse", auto_scale_loss=False)
    model.fit(X, Y, verbose=0)
    loop(model, model.optimizer)


@pytest.mark.parametrize("built", [False, True])
def test_in_fit_only_optimizers_that_fit_does_not_know_are_named(built):
    keras_mp.set_global_policy("mixed_float16")
    inputs = keras.Input((3,))

    class Net(guide_model()):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(1)

        def call(self, x, training=False):
            return self.dense(x)

    hidden = layers.Dense(4)(inputs)
    model = guide_model()(inputs, layers.Dense(1)(hidden)) if built else Net()
    if BACKEND == "jax":
        model(X)  # Its `train_step` takes a model that is built.
    model.compile("sgd", "mse", metrics=["mae"])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model.fit(X, Y, verbose=0)
    assert isinstance(model.optimizer, keras_mp.LossScaleOptimizer)
    (message,) = {str(w.message) for w in seen if "ptimizer" in str(w.message)}
    assert message.startswith("This `train_step` never calls `scale_loss`")


def test_an_optimizer_that_a_train_step_brings_along_is_named():
    keras_mp.set_global_policy("mixed_float16")
    own = keras.optimizers.SGD(name="brought")

    class Net(keras.Sequential):
        def train_step(self, *args):
            if BACKEND == "jax":
                (trainable, *_), _ = args
                optimizer = [v.value for v in own.variables]
                zeros = [ops.zeros_like(v) for v in trainable]
                own.stateless_apply(optimizer, zeros, trainable)
                return {"loss": ops.zeros(())}, args[0]
            zeros = [ops.zeros_like(v) for v in self.trainable_variables]
            own.apply(zeros, self.trainable_variables)
            return {"loss": ops.zeros(())}

    model = Net([layers.Dense(4), layers.Dense(1)])
    model(X)
    own.build(model.trainable_variables)
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="'brought' updates layers"):
        model.fit(X, Y, verbose=0)
