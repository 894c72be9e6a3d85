"""keras_mp can be taken out of Keras, and put back."""

import re

import keras
import numpy as np
from keras import layers

import keras_mp
import keras_mp.keras_private as private
from keras_mp import seams

X, Y = np.ones((8, 4), "float32"), np.ones((8, 2), "float32")


def in_place():
    return {(owner, name): vars(owner)[name] for name, owner, _ in seams._seams()}


def test_each_is_in_the_list_that_users_read():
    private_names = {private.WRITE: "write", private.NORMALIZE: "normalize"}
    names = {private_names.get(name, name) for _, name in in_place()}
    assert names - {*re.findall(r"\w+", seams.__doc__)} == set()


def test_it_is_taken_out_whole_and_put_back():
    keras_mp.install()
    ours = in_place()
    originals = {place: method._keras_mp_original for place, method in ours.items()}
    keras_mp.uninstall()
    keras_mp.uninstall()
    assert in_place() == originals
    keras_mp.install()
    again = in_place()
    keras_mp.install()
    assert in_place() == again
    for place, method in again.items():
        assert method._keras_mp_original is originals[place], place


def test_what_was_made_before_goes_on_and_what_comes_is_keras_own():
    keras_mp.set_global_policy("mixed_float16")
    model = keras.Sequential([keras.Input((4,)), layers.Dense(8), layers.Dense(2)])
    model.compile("adam", "mse")
    keras_mp.uninstall()
    assert model.layers[0].compute_dtype == "float16"
    before = model.evaluate(X, Y, verbose=0)
    model.fit(X, Y, epochs=3, verbose=0)
    assert isinstance(model.optimizer, keras_mp.LossScaleOptimizer)
    assert model.evaluate(X, Y, verbose=0) < before
    keras.config.set_dtype_policy("mixed_float16")
    # Ours would keep it in float32.
    assert layers.Softmax().compute_dtype == "float16"
    keras_mp.install()
    keras_mp.set_global_policy("mixed_float16")
    softmax = layers.Softmax()
    softmax(X)
    assert softmax.compute_dtype == "float32"


def test_without_it_a_skipped_step_of_fit_moves_statistics():
    keras_mp.set_global_policy("mixed_float16")
    normalization = layers.BatchNormalization()
    model = keras.Sequential([keras.Input((4,)), normalization, layers.Dense(2)])
    model.compile(keras_mp.LossScaleOptimizer("sgd", 2.0**24), "mse")
    keras_mp.uninstall()
    before = [v.numpy() for v in (model.layers[-1].kernel, normalization.moving_mean)]
    model.fit(X, Y * 1e6, verbose=0)
    kernel, mean = model.layers[-1].kernel.numpy(), normalization.moving_mean.numpy()
    assert int(model.optimizer.skipped_steps) == 1
    assert (kernel == before[0]).all() and (mean != before[1]).all()
