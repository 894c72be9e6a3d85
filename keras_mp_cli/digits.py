"""Handwritten digits, and a network that reads them: of the demo and the benchmarks."""

import keras
import numpy as np
from keras import layers

from keras_mp.errors import needed

# Images, values 0 to 1, shape (n, 8, 8, 1) float32, and their digits 0 to 9.
Images = tuple[np.ndarray, np.ndarray]


def load_digits() -> tuple[Images, Images]:
    """Scans of handwritten digits, which are part of the scikit-learn package.

    A fixed fifth is held out for the test: 1438 images to train on, 359 to test on.

    Raises:
        MissingPackageError: if scikit-learn is not installed.
    """
    with needed("The demo", "sklearn"):
        from sklearn.datasets import load_digits as load
    data = load()
    images = (data.images[..., None] / 16).astype("float32")
    digits = data.target.astype("int32")
    order = np.random.default_rng(0).permutation(len(images))
    test, train = np.split(order, [len(order) // 5])
    return (images[train], digits[train]), (images[test], digits[test])


def convolutions(*filters: int) -> keras.Model:
    """Convolutions with batch normalisation, and a softmax head."""
    model = keras.Sequential([keras.Input((8, 8, 1))], name="digits")
    for number in filters:
        model.add(layers.Conv2D(number, 3, padding="same", use_bias=False))
        # Faster than Keras' 0.99, so that a test after two epochs means something.
        model.add(layers.BatchNormalization(momentum=0.9))
        model.add(layers.ReLU())
        model.add(layers.MaxPooling2D())
    model.add(layers.Flatten())
    model.add(layers.Dense(10, activation="softmax"))
    return model
