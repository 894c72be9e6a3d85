"""The gradient of what is broadcast is summed in float32, on every backend."""

import keras
import numpy as np
import pytest
from backends import BACKEND
from keras import ops

import keras_mp
from sweeps.layer_errors import tolerance
from sweeps.layer_gradients import MODES, called

pytestmark = pytest.mark.usefixtures("installed")

# More terms than half precision can count, in a shape whose sum is made in one row.
SHAPE = (16, 62, 62, 4)
DTYPES = ["float16", "bfloat16"]


class Broadcast(keras.layers.Layer):
    """An operation with a weight of shape (channels,)."""

    def __init__(self, operation, **options):
        super().__init__(**options)
        self.operation = getattr(ops, operation)

    def build(self, shape):
        self.weight = self.add_weight(
            name="weight", shape=shape[-1:], initializer="ones"
        )

    def call(self, x):
        return self.operation(x, self.weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operation", ["add", "subtract", "multiply"])
@pytest.mark.parametrize("mode", MODES)
def test_a_sum_of_61504_gradients_is_rounded_once(operation, dtype, mode):
    def gradient(policy):
        layer = Broadcast(operation, dtype=policy)
        layer.build(SHAPE)
        _, gradients = called(layer, [np.ones(SHAPE, "float32")], {}, mode, True)
        return next(g for name, g in gradients.items() if "weight" in name)

    expected, found = gradient("float32"), gradient(f"mixed_{dtype}")
    limit = tolerance(dtype, np.abs(expected).max())
    assert np.abs(found - expected).max() < limit


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_computed_is_the_same(dtype):
    shapes = [((3, 4), (4,)), ((4,), (3, 4)), ((3, 1), (1, 4)), ((3, 4), (3, 4))]
    random = np.random.default_rng(1)
    for pair in shapes:
        halves = [ops.cast(random.normal(size=s), dtype) for s in pair]
        wide = [ops.cast(x, "float32") for x in halves]
        for name in ("add", "subtract", "multiply"):
            operation = getattr(ops, name)
            got = run(operation, *halves)
            assert keras.backend.standardize_dtype(got.dtype) == dtype
            # A result of float32, which is exact, rounded once.
            expected = ops.cast(operation(*wide), dtype)
            assert ops.convert_to_numpy(ops.all(got == expected))


RECURRENT = [keras.layers.LSTM, keras.layers.GRU, keras.layers.SimpleRNN]


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("kind", RECURRENT)
def test_a_loop_takes_a_batch_of_unknown_size(kind, policy):
    # The last batch is shorter: TensorFlow does not know the size of any.
    x = np.random.default_rng(0).normal(size=(12, 5, 6)).astype("float32")

    def losses(policy):
        keras.utils.set_random_seed(0)
        with keras_mp.policy_scope(policy):
            model = keras.Sequential([keras.Input((5, 6)), kind(8)])
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=BACKEND != "torch")
        y = np.ones((12, 8), "float32")
        return model.fit(x, y, batch_size=5, epochs=2, verbose=0).history["loss"]

    assert losses(policy) == pytest.approx(losses("float32"), rel=2.0**-7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_that_are_broadcast_keep_their_signs(dtype):
    zeros, ones = ops.cast([-0.0, 0.0], dtype), ops.ones((3, 2), dtype)
    found = ops.convert_to_numpy(ops.cast(run(ops.multiply, zeros, ones), "float32"))
    np.testing.assert_array_equal(np.signbit(found), [[True, False]] * 3)


def test_shapes_that_do_not_fit_are_told_in_the_backends_words():
    a, b = (ops.zeros(s, "bfloat16") for s in ((3, 4), (5,)))
    with pytest.raises(Exception, match="(?i)incompatible|must match"):
        run(ops.add, a, b)


@pytest.mark.skipif(BACKEND != "jax", reason="elsewhere the value is broadcast")
@pytest.mark.parametrize("operation", ["add", "subtract", "multiply"])
def test_nothing_is_broadcast_but_for_the_gradient(operation):
    import jax

    x, bias = ops.zeros((3, 4), "float16"), ops.zeros((4,), "float16")
    combined = getattr(ops, operation)
    assert "f32" not in str(jax.make_jaxpr(combined)(x, bias))
    gradient = jax.grad(lambda bias: combined(x, bias).sum())
    sums = [
        line
        for line in str(jax.make_jaxpr(gradient)(bias)).splitlines()
        if "reduce_sum" in line and "f32[4]" in line
    ]
    assert sums


def run(operation, *arguments):
    """Traced on JAX, where nothing is changed outside of a trace."""
    if BACKEND != "jax":
        return operation(*arguments)
    import jax

    return jax.jit(operation)(*arguments)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="only graphs have unknown sizes")
@pytest.mark.parametrize("rows", [(5, 1), (1, 5), (5, 5), (1, 1)])
@pytest.mark.parametrize("operation", ["add", "subtract", "multiply"])
def test_sizes_that_a_graph_does_not_know_may_differ(operation, rows):
    import tensorflow as tf

    shapes = [(None, 1), (None, 3)]

    @tf.function(input_signature=[tf.TensorSpec(s, tf.float16) for s in shapes])
    def traced(x1, x2):
        return getattr(ops, operation)(x1, x2)

    pair = [
        np.full((n, s[1]), n + 1, "float16") for n, s in zip(rows, shapes, strict=True)
    ]
    expected = getattr(np, operation)(*pair)
    assert np.array_equal(traced(*pair).numpy(), expected)
