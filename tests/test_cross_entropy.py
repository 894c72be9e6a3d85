"""Sparse cross-entropy of a head's logits, in one pass over them."""

import gc
import re

import keras
import numpy as np
import pytest
from allpairspy import AllPairs

if keras.backend.backend() != "jax":
    pytest.skip("the program that JAX makes", allow_module_level=True)

import jax
import jax.numpy as jnp
from keras import layers
from products import jaxpr_of, lowered

import keras_mp
from keras_mp.kernels.logits import Probabilities
from keras_mp.policies.weights import LARGE
from keras_mp.repairs import logits as known_logits
from keras_mp.repairs.jax import one_pass
from keras_mp.repairs.logits import Head

pytestmark = pytest.mark.usefixtures("installed")

CLASSES = 7
LABELS = np.array([[0, 3, 6], [-1, 7, 2]], "int32")  # Two of them are no classes.
RANDOM = np.random.default_rng(0).normal(size=(2, 3, CLASSES)).astype("float32")
LOGITS = {
    "random": RANDOM,
    "wide": 40 * RANDOM,  # A float32 probability is 0 there, which Keras clips.
    "one certain": np.where(np.arange(CLASSES) == 3, 100, RANDOM).astype("float32"),
    "infinite": np.where(np.arange(CLASSES) == 5, np.inf, RANDOM).astype("float32"),
    "nan": np.where(np.arange(CLASSES) == 5, np.nan, RANDOM).astype("float32"),
}
LOSSES = {
    "mean": {},
    "each": {"reduction": "none"},
    "ignore_class": {"ignore_class": 3},
}


def loss_of(logits, known, probabilities, labels=LABELS, **options):
    """The loss of Keras: of a head, if `known`, else of just any tensor."""
    outputs = jax.nn.softmax(logits) if probabilities else logits
    if known:
        fact = Probabilities(logits) if probabilities else Head()
        known_logits.note(outputs, fact)
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=not probabilities, **options
    )
    return jnp.sum(loss(labels, outputs))


# Every pair of two entries.
TABLE = [[*LOGITS], [*LOSSES], ["logits", "softmax"], ["2 axes", "3 axes"]]
CASES = [*AllPairs(TABLE)]


@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_loss_and_gradient_are_those_of_keras(case):
    logits, options = LOGITS[case[0]], LOSSES[case[1]]
    probabilities = case[2] == "softmax"
    labels = LABELS[..., None] if case[3] == "3 axes" else LABELS
    both = [
        jax.value_and_grad(loss_of)(logits, known, probabilities, labels, **options)
        for known in (True, False)
    ]
    (loss, gradient), (expected, expected_gradient) = both
    np.testing.assert_allclose(loss, expected, rtol=1e-6, atol=1e-6)
    if not np.isfinite(logits).all():
        finite = np.isfinite(expected_gradient)
        assert np.isfinite(gradient).all() == finite.all()
        expected_gradient, gradient = expected_gradient[finite], gradient[finite]
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-6)


DERIVATIVES = {
    "hessian": jax.hessian,
    "forward": lambda f: lambda x: jax.jvp(f, (x,), (x,))[1],
    "vmap": lambda f: lambda x: jax.vmap(jax.grad(f))(x[None]),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
}


@pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=DERIVATIVES)
def test_other_derivatives_are_too(derivative):
    found, expected = (
        jax.jit(derivative(lambda x, known=known: loss_of(x, known, False, LABELS[0])))(
            RANDOM[0]
        )
        for known in (True, False)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_masked_logit_is_no_label_and_no_nan():
    logits = np.where(np.arange(CLASSES) == 5, -np.inf, RANDOM).astype("float32")
    loss, gradient = jax.value_and_grad(loss_of)(logits, True, False)
    expected = loss_of(np.where(logits < -1e4, -1e4, logits), False, False)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert np.isfinite(gradient).all()
    assert np.isnan(loss_of(logits, False, False))  # 0 of the one-hot times infinity.


def test_a_tpu_sums_what_others_gather():
    labels = np.clip(LABELS, 0, CLASSES - 1)
    gathered = one_pass._gathered(RANDOM, labels)
    np.testing.assert_array_equal(one_pass._summed(RANDOM, labels), gathered)
    gathers = {
        platform: "gather" in lowered(one_pass.losses, (RANDOM, LABELS), platform)
        for platform in ("tpu", "cuda", "cpu")
    }
    assert gathers == {"tpu": False, "cuda": True, "cpu": True}


def one_pass_and_one_hot(head, **options):
    """Are they in the traced step of a model that ends so?"""
    inputs = keras.Input((4, 4, 2))
    model = keras.Model(inputs, head(layers.Conv2D(256, 1)(inputs)))
    loss = keras.losses.SparseCategoricalCrossentropy(**options)
    model.compile("sgd", loss)
    model.optimizer.build(model.trainable_variables)
    labels = np.zeros((3, *model.output_shape[1:-1]), "int32")
    text = str(jaxpr_of(model, (np.ones((3, 4, 4, 2), "float32"), labels)))
    gc.collect()
    assert not known_logits.noted.facts  # Nothing of a trace stays behind.
    return "_of_both" in text, "_one_hot" in text


ONE_PASS, KERAS = (True, False), (False, True)


@pytest.mark.parametrize("units", [LARGE // 256, LARGE // 512])
@pytest.mark.kernels
def test_the_loss_of_a_head_has_no_one_hot(units):
    keras_mp.set_global_policy("mixed_float16")
    heads = {
        "dense": layers.Dense(units),
        "convolution": layers.Conv2D(units, 1),
        "resized": keras.Sequential(
            [
                layers.Conv2D(units, 1),
                layers.Resizing(8, 8, data_format="channels_last"),
            ]
        ),
        "flat": keras.Sequential([layers.Flatten(), layers.Dense(units)]),
    }
    for name, head in heads.items():
        assert one_pass_and_one_hot(head, from_logits=True) == ONE_PASS, name
    certain = keras.Sequential([layers.Dense(units), layers.Activation("softmax")])
    assert one_pass_and_one_hot(certain) == ONE_PASS
    # A softmax within a layer shows its logits where its product is ours.
    expected = ONE_PASS if units * 256 >= LARGE else KERAS
    assert one_pass_and_one_hot(layers.Dense(units, "softmax")) == expected


def test_the_loss_of_a_float32_model_is_keras_own():
    head = layers.Dense(LARGE // 256)
    assert one_pass_and_one_hot(head, from_logits=True) == KERAS


@pytest.mark.parametrize("logits", LOGITS.values(), ids=LOGITS)
def test_one_pass_sums_what_two_passes_do_on_cpus(logits):
    logits = np.concatenate([logits, np.full_like(logits, -np.inf)])
    found, expected = one_pass._in_one_pass(logits), one_pass._in_two_passes(logits)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    pair = re.compile(r"stablehlo.reduce\(.* init: .*\), \(")
    pairs = {
        platform: bool(pair.search(lowered(one_pass.log_sums, (logits,), platform)))
        for platform in ("cuda", "tpu", "cpu")
    }
    assert pairs == {"cuda": True, "tpu": True, "cpu": False}
