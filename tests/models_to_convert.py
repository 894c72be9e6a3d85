"""Models of every kind that `convert` takes, small, each with an input for it."""

import keras
import numpy as np
from keras import ops

layers = keras.layers


@keras.saving.register_keras_serializable(package="tests")
class Registered(layers.Layer):
    """A custom layer that Keras can open: a dense layer with a scale of its own."""

    def __init__(self, units=4, **kwargs):
        super().__init__(**kwargs)
        self.units = units

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], self.units))
        self.scale = self.add_weight(shape=(), initializer="ones", trainable=False)
        self.built = True

    def call(self, x):
        return ops.matmul(x, self.kernel) * self.scale

    def get_config(self):
        return {**super().get_config(), "units": self.units}


class Unregistered(layers.Layer):
    """A custom layer of layers with no config, which Keras can not clone."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.inner = layers.Dense(units, activation="relu")
        self.blocks = [layers.Dense(units), layers.LayerNormalization()]

    def call(self, x):
        x = self.inner(x)
        for block in self.blocks:
            x = block(x)
        return x


class Subclassed(keras.Model):
    """Dropout, a list of layers, and one layer that is called twice."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hidden = [layers.Dense(4, activation="relu") for _ in range(2)]
        self.dropout = layers.Dropout(0.1)
        self.norm = layers.BatchNormalization()
        self.head = layers.Dense(2)

    def call(self, x, training=False):
        x = self.hidden[0](x)
        x = self.hidden[1](self.hidden[1](x))
        return self.head(self.norm(self.dropout(x, training=training)))


class Lazy(keras.Model):
    """Its layers do not exist before its first call."""

    def build(self, shape):
        self.dense = layers.Dense(4, activation="relu")
        self.head = layers.Dense(2, activation="softmax")

    def call(self, x):
        return self.head(self.dense(x))


def array(*shape):
    return np.random.default_rng(0).normal(size=shape).astype("float32")


def sequential():
    model = keras.Sequential(
        [
            keras.Input((5,)),
            layers.Dense(4, activation="relu"),
            layers.BatchNormalization(),
            layers.Dense(2, activation="softmax"),
        ]
    )
    return model, array(8, 5)


def sequential_without_input():
    model = keras.Sequential([layers.Dense(4, activation="relu"), layers.Dense(2)])
    return model, array(8, 5)


def functional():
    """Several inputs and outputs, a shared layer, plain operations."""
    a, b = keras.Input((5,), name="a"), keras.Input((5,), name="b")
    shared = layers.Dense(4, activation="relu", name="shared")
    x = layers.Concatenate()([shared(a), shared(b)])
    x = ops.tanh(x) * 2.0 + 1.0
    outputs = [
        layers.Dense(2, name="one")(x),
        layers.Dense(3, activation="softmax", name="two")(x),
    ]
    return keras.Model([a, b], outputs), [array(8, 5), array(8, 5)]


def dictionaries():
    inputs = {"a": keras.Input((5,), name="a"), "b": keras.Input((3,), name="b")}
    x = layers.Concatenate()([inputs["a"], inputs["b"]])
    x = layers.Dense(4)(x)
    outputs = {"one": layers.Dense(2)(x), "two": layers.Dense(1)(x) + 1.0}
    return keras.Model(inputs, outputs), {"a": array(8, 5), "b": array(8, 3)}


def subclassed():
    return Subclassed(), array(8, 5)


def lazy():
    return Lazy(), array(8, 5)


def nested():
    """A Functional model round a Functional, a Sequential and a subclassed one."""
    a = keras.Input((5,))
    inner = keras.Model(a, layers.Dense(4, name="in_inner")(a) * 2.0, name="inner")
    block = keras.Sequential([layers.Dense(4), layers.LayerNormalization()])
    x = keras.Input((5,))
    y = block(inner(x))
    y = inner(layers.Dense(5)(y)) + y  # Called twice.
    return keras.Model(x, layers.Dense(2)(Subclassed()(y))), array(8, 5)


def convolutional():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(4, 3, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.SeparableConv2D(4, 3),
            layers.GlobalAveragePooling2D(),
            layers.Dense(2),
        ]
    )
    return model, array(4, 8, 8, 3)


def recurrent():
    """An embedding with a mask, stacked cells, Bidirectional."""
    ids = keras.Input((6,), dtype="int32")
    x = layers.Embedding(10, 4, mask_zero=True)(ids)
    x = layers.Bidirectional(layers.LSTM(3, return_sequences=True))(x)
    x = layers.RNN([layers.GRUCell(3), layers.SimpleRNNCell(3)])(x)
    return keras.Model(ids, layers.Dense(2)(x)), np.arange(24).reshape(4, 6) % 10


def attention():
    x = keras.Input((6, 8))
    y = layers.MultiHeadAttention(2, 4, dropout=0.1)(x, x)
    y = layers.GroupQueryAttention(4, 2, 1)(y, y)
    y = layers.LayerNormalization()(layers.Add()([x, y]))
    return keras.Model(x, layers.Dense(2)(y)), array(4, 6, 8)


def time_distributed():
    x = keras.Input((3, 5))
    y = layers.TimeDistributed(layers.Dense(4, activation="relu"))(x)
    y = layers.TimeDistributed(keras.Sequential([layers.Dense(4)]))(y)
    return keras.Model(x, layers.Dense(2)(y)), array(4, 3, 5)


def with_lambda():
    x = keras.Input((5,))
    y = layers.Lambda(lambda t: t * 2.0 + 1.0)(layers.Dense(4)(x))
    return keras.Model(x, layers.Dense(2)(y)), array(8, 5)


def custom_layers():
    x = keras.Input((5,))
    y = Unregistered(4)(Registered()(x))
    return keras.Model(x, layers.Dense(2)(y)), array(8, 5)


BUILDERS = {
    build.__name__: build
    for build in (
        sequential,
        sequential_without_input,
        functional,
        dictionaries,
        subclassed,
        lazy,
        nested,
        convolutional,
        recurrent,
        attention,
        time_distributed,
        with_lambda,
        custom_layers,
    )
}
