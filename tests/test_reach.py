"""Policies that reach no layer are named, once: set too late, or with a typo."""

import copy
import pickle
import warnings

import keras
import numpy as np
import pytest
from backends import Chained
from keras import layers

import keras_mp

X, Y = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")


def model():
    return keras.Sequential(
        [keras.Input((2,)), layers.Dense(3, name="early"), layers.Dense(1)]
    )


def subclassed():
    return Chained([layers.Dense(3, name="early"), layers.Dense(1)])


MODELS = {"graph": model, "subclassed": subclassed}


@pytest.fixture
def keras_default():
    keras.utils.clear_session()
    keras_mp.config._of_process = None
    assert keras.config.dtype_policy().name == "float32"


def messages(trained, fits=2, loss="mse"):
    """What is said of a policy while a model is compiled and trained."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained.compile("sgd", loss)
        for _ in range(fits):
            trained.fit(X, Y, verbose=0)
    said = [w for w in caught if "float32" in str(w.message)]
    return [str(w.message) for w in said]


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_policy_that_is_set_after_the_model_is_created_is_named_once(
    make, policy, keras_default
):
    late = make()
    keras_mp.set_global_policy(policy)
    (message,) = messages(late)
    assert f"{late.name} was created before {policy} became" in message
    assert f"keras_mp.convert(model, {policy!r})" in message
    (finding,) = [w for w in keras_mp.inspect(late).warnings if "became" in w.sentence]
    assert f"was created before {policy}" in finding.sentence


def test_a_model_that_is_meant_to_be_float32_is_not_named(keras_default):
    assert messages(model()) == []  # Under float32.
    explicit = keras.Sequential([keras.Input((2,)), layers.Dense(1, dtype="float32")])
    with keras_mp.policy_scope("float32"):
        scoped = model()
    keras_mp.set_global_policy("mixed_float16")
    converted = keras_mp.convert(model(), "float32")
    own = keras.Sequential([keras.Input((2,)), layers.Dense(1, dtype="float32")])
    for meant in (explicit, scoped, converted, own, model()):
        assert messages(meant) == []


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_pattern_that_matches_no_layer_is_named_once(make):
    policy = keras_mp.MixedFloat16(float32=["earl", ".*early"])
    with keras_mp.policy_scope(policy):
        trained = make()
    (message,) = messages(trained)
    assert "has no layer that float32=['earl'] matches" in message
    assert "early'" in message  # A path as it has to be matched.
    assert any(
        "float32=['earl']" in w.sentence for w in keras_mp.inspect(trained).warnings
    )


def said_of(trained, policy):
    """What is said while a model is converted, and the files that are named."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        keras_mp.convert(trained, policy)
    return [str(w.message) for w in caught], {w.filename for w in caught}


def built(make):
    made = make()
    made(X)
    return made


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("compiled_before", [False, True])
def test_convert_names_a_pattern_that_matches_no_layer_and_compile_does_not_again(
    make, compiled_before
):
    trained = built(make)
    if compiled_before:
        assert messages(trained) == []
    policy = keras_mp.MixedFloat16(float32=["decodr/.*", ".*early"])
    (message,), files = said_of(trained, policy)
    assert "has no layer that float32=['decodr/.*'] matches" in message
    assert "early'" in message and files == {__file__}
    assert messages(trained) == []
    assert trained.layers[0].compute_dtype == "float32"


def test_convert_uses_the_words_of_compile():
    def named():
        early = layers.Dense(1, name="early")
        return keras.Sequential([keras.Input((2,)), early], name="same")

    policies = [keras_mp.MixedFloat16(float32=["earl"]) for _ in range(2)]
    with keras_mp.policy_scope(policies[0]):
        (by_compile,) = messages(named())
    converted = named()
    assert said_of(converted, policies[1])[0] == [by_compile]


def test_each_conversion_is_looked_at():
    converted = model()
    for pattern in ("first", "second"):
        policy = keras_mp.MixedBFloat16(float32=[pattern])
        (message,), _ = said_of(converted, policy)
        assert f"float32=[{pattern!r}]" in message
    for fine in (keras_mp.MixedFloat16(float32=[".*early"]), "mixed_float16"):
        assert said_of(converted, fine)[0] == []


def test_convert_looks_at_every_policy_of_a_map_and_at_single_layers():
    converted = model()
    policies = keras.dtype_policies.DTypePolicyMap(
        default_policy=keras_mp.MixedFloat16()
    )
    path = converted.layers[0].path
    policies[path] = keras_mp.MixedFloat16(float32=["in a map"])
    (message,), _ = said_of(converted, policies)
    assert "float32=['in a map']" in message
    (message,), _ = said_of(
        converted.layers[0], keras_mp.MixedFloat16(float32=["earl"])
    )
    assert f"such as {converted.layers[0].name!r}." in message


def test_a_model_that_is_converted_before_it_is_built_is_named_at_its_first_step():
    converted = subclassed()
    policy = keras_mp.MixedFloat16(float32=["earl"])
    assert said_of(converted, policy)[0] == []
    (message,) = messages(converted)
    assert "float32=['earl']" in message


def test_a_pattern_that_another_rule_comes_before_is_not_named():
    policy = keras_mp.MixedFloat16(float32=[layers.Dense, ".*early"])
    with keras_mp.policy_scope(policy):
        assert messages(model()) == []


def test_a_pattern_for_an_earlier_model_is_not_named():
    with keras_mp.policy_scope(keras_mp.MixedFloat16(float32=[".*early"])):
        model()
        other = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
        assert messages(other) == []


def test_a_policy_with_a_pattern_can_be_copied_and_pickled():
    policy = keras_mp.MixedFloat16(float32=["decoder/.*", layers.LayerNormalization])
    for twin in (copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))):
        assert twin == policy and twin.float32 == policy.float32
        with keras_mp.policy_scope(twin):
            assert layers.LayerNormalization().compute_dtype == "float32"
            assert layers.Dense(1).compute_dtype == "float16"
