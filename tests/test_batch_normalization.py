"""BatchNormalization in half precision on torch: one kernel, and Keras' numbers."""

import keras
import numpy as np
import pytest
from backends import values, without_us
from keras import layers

import keras_mp

if keras.backend.backend() != "torch":
    pytest.skip("torch has such a kernel", allow_module_level=True)

import torch
from torch_operations import Operations

pytestmark = pytest.mark.usefixtures("installed")

GENERATOR = np.random.default_rng(0)
SHAPES = {"vectors": (64, 5), "sequences": (8, 9, 5), "images": (4, 6, 7, 5)}
SHAPES["volumes"] = (3, 4, 5, 6, 5)
OPTIONS = {
    "stock": {},
    "no scale": {"scale": False},
    "no offset": {"center": False},
    "other numbers": {"momentum": 0.7, "epsilon": 0.1},
}
# A result of float16 is off by half of its last bit; of two roundings, by one.
ULP = {"float16": 2.0**-10, "bfloat16": 2.0**-7}


def layer_like(shape, axis, dtype, **options):
    layer = layers.BatchNormalization(axis=axis, dtype=f"mixed_{dtype}", **options)
    layer.build(shape)
    generator = np.random.default_rng(1)
    for variable in layer.weights:
        value = generator.uniform(0.5, 2.0, variable.shape)
        variable.assign(value.astype("float32"))
    return layer


def outcome(layer, x, training, factor):
    """The result, the gradients by the input and the weights, and the statistics."""
    x = torch.tensor(x, requires_grad=True)
    with Operations() as kernels:
        y = layer(x, training=training)
    weights = [v.value for v in layer.trainable_variables]
    loss = (y.float() * torch.tensor(factor)).sum()
    grads = torch.autograd.grad(loss, [x, *weights])
    found = [y.detach(), *grads, *(v.value for v in layer.non_trainable_variables)]
    arrays = [x.detach().to(torch.float64).numpy().copy() for x in found]
    return y.dtype, arrays, kernels.names


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.kernels
def test_it_is_one_kernel_and_as_keras(kind, options, axis, training, dtype):
    shape = SHAPES[kind]
    x = (GENERATOR.standard_normal(shape) * 3 + 1).astype("float32")
    factor = GENERATOR.standard_normal(shape).astype("float32")

    def run():
        layer = layer_like(shape, axis, dtype, **OPTIONS[options])
        return outcome(layer, x, training, factor)

    (kept, expected, _), (returned, found, names) = without_us(run), run()
    assert returned == kept == getattr(torch, dtype)
    assert sum("batch_norm" in name for name in names) == 1
    assert "rsqrt" not in names
    y, dx, *rest = zip(found, expected, strict=True)
    np.testing.assert_allclose(*y, rtol=ULP[dtype], atol=ULP[dtype])
    size = np.abs(dx[1]).max()
    np.testing.assert_allclose(*dx, rtol=2 * ULP[dtype], atol=2 * ULP[dtype] * size)
    for pair in rest[:-2]:  # By the weights, of results rounded to half precision.
        size = np.abs(pair[1]).max()
        np.testing.assert_allclose(*pair, rtol=ULP[dtype], atol=ULP[dtype] * size)
    layer = layer_like(shape, axis, dtype, **OPTIONS[options])
    eps = np.finfo("float32").eps
    for average, now in zip(
        statistics_after(layer, x, training), found[-2:], strict=True
    ):
        np.testing.assert_allclose(now, average, rtol=8 * eps, atol=8 * eps)


def statistics_after(layer, x, training):
    """The moving averages after a step, in float64."""
    averages = [v.astype("float64") for v in values(layer.non_trainable_variables)]
    if not training:
        return averages
    # The layer gets its input in half precision.
    x = torch.tensor(x).to(getattr(torch, layer.compute_dtype)).to(torch.float64)
    x = np.moveaxis(x.numpy(), layer.axis, -1).reshape(-1, x.shape[layer.axis])
    batch, share = (x.mean(0), x.var(0)), layer.momentum
    return [
        share * average + (1 - share) * of_batch
        for average, of_batch in zip(averages, batch, strict=True)
    ]


def is_one_kernel(layer, x, **call):
    with Operations() as kernels:
        layer(x, **call)
    return any("batch_norm" in name for name in kernels.names)


class OfTheUser(layers.BatchNormalization):
    """Might compute something else."""


@pytest.mark.kernels
def test_what_torch_does_otherwise_is_left_to_keras():
    x = torch.ones((4, 3, 5), dtype=torch.float16)
    stock = layer_like(x.shape, -1, "float16")
    assert is_one_kernel(stock, x, training=True)
    mask = torch.ones((4, 3), dtype=torch.bool)
    assert not is_one_kernel(stock, x, training=True, mask=mask)
    one = torch.ones((1, 5), dtype=torch.float16)
    assert not is_one_kernel(layer_like(one.shape, -1, "float16"), one, training=True)
    renorm = layer_like(x.shape, -1, "float16", renorm=True)
    assert not is_one_kernel(renorm, x, training=True)
    assert is_one_kernel(renorm, x, training=False)
    for layer, dtype in [
        (OfTheUser(dtype="mixed_float16"), torch.float16),
        (layers.BatchNormalization(dtype="float32"), torch.float32),
        (layers.BatchNormalization(dtype="float16"), torch.float16),
    ]:
        assert not is_one_kernel(layer, x.to(dtype), training=True)
    state = [(v, v.value.clone()) for v in stock.variables]
    with keras.StatelessScope(state):
        assert not is_one_kernel(stock, x, training=True)


def test_a_frozen_layer_learns_no_averages():
    layer = layer_like((4, 5), -1, "float16")
    layer.trainable = False
    before = values(layer.variables)
    layer(torch.ones((4, 5), dtype=torch.float16), training=True)
    for a, b in zip(values(layer.variables), before, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_layer_may_be_called_twice_before_the_gradient():
    # As the discriminator of a GAN is: autograd must not find its averages changed.
    layer = layer_like((4, 5), -1, "float16")
    x = torch.ones((4, 5), dtype=torch.float16, requires_grad=True)
    (layer(x, training=True) + layer(2 * x, training=True)).sum().backward()
    assert x.grad is not None


def test_a_skipped_step_leaves_the_averages():
    keras.utils.set_random_seed(0)
    keras_mp.set_global_policy("mixed_float16")
    model = keras.Sequential([layers.Dense(4), layers.BatchNormalization()])
    model.compile(keras_mp.LossScaleOptimizer("sgd"), "mse")
    x, y = np.ones((4, 3), "float32"), np.ones((4, 4), "float32")
    model.train_on_batch(x, y)
    before = values(model.non_trainable_variables)
    model.train_on_batch(x * np.inf, y)
    assert int(model.optimizer.skipped_steps) == 1
    for a, b in zip(values(model.non_trainable_variables), before, strict=True):
        np.testing.assert_array_equal(a, b)
