"""The products of heads on TensorFlow: what XLA is given, and what stays in float32."""

import keras
import numpy as np
import pytest
from backends import BACKEND

if BACKEND != "tensorflow":
    pytest.skip("products of TensorFlow", allow_module_level=True)

import tensorflow as tf
from keras import layers, ops
from products import counted, in_hlo, products_of
from test_heads import CLASSES, HEADS, KEPT, WIDTH, compiled, data_for, ending_in

import keras_mp
from keras_mp.repairs.products import HalfOperands, half_operands


@pytest.fixture(autouse=True)
def policy():
    keras_mp.set_global_policy("mixed_float16")


def given_to_xla(model):
    step = tf.function(model.train_step, jit_compile=True)
    batch = keras.tree.map_structure(tf.convert_to_tensor, data_for(model))
    return counted(in_hlo(step, batch))


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.kernels
def test_every_product_has_half_operands_and_the_head_float32_results(name):
    make, wide = HEADS[name]
    found = given_to_xla(compiled(make()))
    assert set(found) == {"float16", "float16 -> float32"}
    assert found["float16 -> float32"] == wide


@pytest.mark.parametrize("name", ["small", "a dtype of the user's", "convolution"])
def test_products_of_other_heads_stay_in_float32(name):
    found = given_to_xla(compiled(KEPT[name]()))
    assert set(found) == {"float16", "float32"}


def test_so_they_do_without_xla():
    model = compiled(ending_in(layers.Dense(CLASSES)))
    assert products_of(model, *data_for(model)) == {"float16": 2, "float32": 3}


@pytest.mark.kernels
def test_a_float16_gradient_is_half_only_where_the_loss_is_scaled():
    model = compiled(ending_in(layers.Dense(CLASSES)), auto_scale_loss=False)
    assert given_to_xla(model) == {"float16": 2, "float16 -> float32": 1, "float32": 2}


@pytest.mark.parametrize("name", ["Dense", "1x1 convolution"])
def test_it_trains_as_float32_does(name):
    make, _ = HEADS[name]
    keras.utils.set_random_seed(0)
    model = compiled(make(), jit_compile=True)
    with keras_mp.policy_scope("float32"):
        reference = compiled(make())
    reference.set_weights(model.get_weights())
    batch = data_for(model)
    for _ in range(3):
        loss, expected = (float(m.train_on_batch(*batch)) for m in (model, reference))
        assert loss == pytest.approx(expected, rel=2.0**-10)


def gradient(f):
    def derivative(a, b):
        with tf.GradientTape() as tape:
            tape.watch([a, b])
            y = f(a, b)
        da, db = tape.gradient(y, [a, b])
        return tf.reduce_sum(da**2) + tf.reduce_sum(db**3)

    return derivative


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
def test_derivatives_agree_with_float32(tied, half, order):
    generator = np.random.default_rng(0)
    a, b = (
        tf.constant(generator.normal(size=s), "float32") / 4 for s in ((4, 8), (8, 3))
    )

    def plain(a, b):
        return ops.sum(ops.matmul(a, b) ** 2)

    def rounded(a, b):
        with half_operands(HalfOperands(half, half, tied)):
            return plain(a, b)

    expected, found = plain, rounded
    for _ in range(order):
        expected, found = gradient(expected), gradient(found)
    found = tf.function(found, jit_compile=True)(a, b)
    unit = 2.0 ** (-11 if half == "float16" else -8)
    assert float(found) == pytest.approx(float(expected(a, b)), rel=8 * unit)


def test_a_function_that_is_traced_within_xla_is_called_outside_too():
    head = ending_in(layers.Dense(CLASSES))
    compiled(head)
    head = head.layers[-1]
    x = tf.cast(tf.random.normal((4, WIDTH)), "float16")
    inner = tf.function(lambda x: head(x))
    within = tf.function(lambda x: inner(x), jit_compile=True)(x)
    np.testing.assert_allclose(inner(x), within, atol=1e-5)
    np.testing.assert_allclose(head(x), within, atol=1e-2)
    assert inner.experimental_get_tracing_count() == 1
