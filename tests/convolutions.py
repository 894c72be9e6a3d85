"""Networks of convolutions and activations, for the tests of what a ReLU keeps."""

import keras
from keras import layers

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
