"""Threads train models of their own at the same time."""

import sys
import threading

import keras
import numpy as np
import pytest
from backends import BACKEND, same_bits, values
from keras import layers

import keras_mp

X, Y = np.ones((32, 4), "float32"), np.zeros((32, 2), "float32")


@pytest.fixture
def busy():
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def in_threads(number, work):
    """Runs `work(index)` in threads, and returns what they raised."""
    raised = []

    def run(index):
        try:
            work(index)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def test_five_threads_fit_models_with_an_optimizer_that_nobody_scales(busy):
    def work(index):
        for _ in range(3):
            inner = [layers.Dense(4) for _ in range(8 if BACKEND == "torch" else 2)]
            model = keras.Sequential([keras.Input((4,)), *inner, layers.Dense(2)])
            # Not scaled at the user's wish: each update looks for float16 layers.
            optimizer = keras.optimizers.SGD(1e-3, loss_scale_factor=1.0)
            model.compile(optimizer, "mse")
            model.fit(X, Y, batch_size=8, verbose=0)
            model(X)

    keras_mp.set_global_policy("mixed_float16")
    assert in_threads(5, work) == []


def test_layers_come_while_an_optimizer_looks_for_them(busy):
    """The set of float16 layers, which each new optimizer reads, grows meanwhile."""
    from keras_mp.loss_scaling import unwrapped
    from keras_mp.policies.record import record_of

    kept = []
    stop = threading.Event()

    def work(index):
        if index:
            for _ in range(2000):
                kept.append(layers.Identity(dtype="mixed_float16"))
                record_of(kept[-1]).chosen = kept[-1].dtype_policy
            stop.set()
            return
        variable = keras.Variable(np.ones(2))
        while not stop.is_set():
            optimizer = keras.optimizers.SGD()
            unwrapped.look(optimizer, [variable])

    assert in_threads(2, work) == []


@pytest.mark.skipif(BACKEND != "torch", reason="elsewhere no write is noted")
def test_threads_that_share_a_frozen_backbone_leave_it_as_it_was(busy):
    keras_mp.set_global_policy("mixed_float16")
    parts = [layers.Dense(4) for _ in range(5)]
    backbone = keras.Sequential([keras.Input((4,)), *parts])
    backbone.trainable = False
    before = values(backbone.variables)

    models = []  # Made here: Keras' own graphs cannot grow in several threads at once.
    for _ in range(3):
        model = keras.Sequential([keras.Input((4,)), backbone, layers.Dense(2)])
        model.compile(keras_mp.LossScaleOptimizer("sgd"), "mse")
        model.fit(X, Y, verbose=0)
        models.append(model)

    def work(index):
        models[index].fit(X, Y, batch_size=2, verbose=0, epochs=3)

    assert in_threads(3, work) == []
    assert all("_direct_assign" not in vars(v) for v in backbone.variables)
    assert same_bits(before, values(backbone.variables))
