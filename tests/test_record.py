"""What keras_mp remembers of a layer stands beside the layer, and goes with it."""

import copy
import gc
import pickle

import keras
import numpy as np
import pytest
from backends import BACKEND, Chained
from keras import layers

import keras_mp
from keras_mp.policies.choosing import decision_for
from keras_mp.policies.record import records

X, Y = np.ones((4, 3), "float32"), np.ones((4, 2), "float32")


def functional():
    inputs = keras.Input((3,))
    hidden = layers.Activation("softmax")(layers.Dropout(0.1)(layers.Dense(4)(inputs)))
    return keras.Model(inputs, layers.Dense(2)(hidden))


def subclassed():
    return Chained([functional()])


def trained(make):
    keras_mp.set_global_policy("mixed_float16")
    model = make()
    model.compile("sgd", "mse")
    monitor = keras_mp.callbacks.LossScaleMonitor()
    model.fit(X, Y, verbose=0, callbacks=[monitor])
    return model


def within(model):
    return keras_mp.keras_private.layers_in(model)


@pytest.mark.parametrize("make", [functional, subclassed])
def test_a_layer_shows_nothing_of_it(make):
    model = keras_mp.convert(
        keras_mp.convert(trained(make), "float32"), "mixed_float16"
    )
    shown = {n for x in within(model) for n in (*dir(x), *vars(x)) if "keras_mp" in n}
    assert not shown


def by_pickle(model):
    return pickle.loads(pickle.dumps(model))


COPIES = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": by_pickle,
    "clone": keras.models.clone_model,
}


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_keeps_what_was_decided(way):
    keras_mp.set_global_policy("mixed_float16")
    model = functional()
    model(X)
    keras_mp.set_global_policy("float32")
    copied = COPIES[way](model)
    outputs = copied(X)
    assert keras.backend.standardize_dtype(outputs.dtype) == "float32"
    for ours, other in zip(model.layers[1:], copied.layers[1:], strict=True):
        assert other.dtype_policy == ours.dtype_policy
        before, after = decision_for(ours), decision_for(other)
        if after is None:  # A clone is made of configs: of float32 they say no more.
            assert way == "clone" and other.compute_dtype == "float32"
            continue
        names = [decision.rule and decision.rule.name for decision in (before, after)]
        assert names[0] == names[1]


def test_a_copy_of_a_model_that_keras_made_mixed_is_keras_own():
    keras.config.set_dtype_policy("mixed_float16")
    copied = copy.deepcopy(functional())
    keras.config.set_dtype_policy("float32")
    assert keras.backend.standardize_dtype(copied(X).dtype) == "float16"


def test_it_goes_with_the_layer():
    gc.collect()
    before = len(records)
    model = trained(functional)
    assert len(records) > before
    del model
    if BACKEND == "torch":
        keras.utils.clear_session()
    gc.collect()
    assert len(records) <= before


def test_converting_there_and_back_leaves_nothing_behind():
    keras_mp.set_global_policy("float32")
    model = functional()

    def there_and_back():
        keras_mp.convert(model, "mixed_float16")
        keras_mp.convert(model, "float32")
        gc.collect()
        return len(gc.get_objects())

    there_and_back()
    sizes = [there_and_back() for _ in range(3)]
    assert sizes[-1] - sizes[0] < 4


def test_inspecting_a_model_leaves_it_as_it_was():
    keras_mp.set_global_policy("mixed_float16")
    inputs = keras.Input((None, 3))
    model = keras.Model(inputs, layers.Dense(2)(layers.LSTM(4)(inputs)))
    names = ("first_input", "path", "chosen", "decision")

    def remembered():
        found = [records[id(layer)] for layer in within(model)[2:]]
        return [[getattr(record, name) for name in names] for record in found]

    before = remembered()
    keras_mp.inspect(model)
    assert remembered() == before
