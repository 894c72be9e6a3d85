"""A plan says what layers become, and changes none; then they become it."""

import keras
import numpy as np
import pytest
from models_to_convert import BUILDERS
from test_conversion import snapshot

import keras_mp
from keras_mp import conversion
from keras_mp.policies.choosing import Plan, carry_out, decision_for
from keras_mp.policies.layers import policy_of

layers = keras.layers
POLICIES = {
    "float16": keras_mp.MixedFloat16,
    "by path": lambda: keras_mp.MixedFloat16(float32=[".*dense.*"]),
    "by class": lambda: keras_mp.MixedBFloat16(float32=[layers.LayerNormalization]),
    "map": lambda: keras.dtype_policies.DTypePolicyMap(keras_mp.MixedBFloat16()),
    "float32": lambda: keras.DTypePolicy("float32"),
}


def become(plan, within):
    """Carries out a plan, and looks whether layers are what it says."""
    before = {id(layer): policy_of(layer) for layer in within}
    planned = [(plan.policy_of(layer), plan.decision_for(layer)) for layer in within]
    changed = set(map(id, carry_out(plan)))
    assert [(policy_of(layer), decision_for(layer)) for layer in within] == planned
    assert changed == {
        id(layer)
        for layer in within
        if (layer.compute_dtype, layer.variable_dtype)
        != (before[id(layer)].compute_dtype, before[id(layer)].variable_dtype)
    }
    return changed


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", BUILDERS)
def test_it_changes_nothing_and_is_carried_out_to_the_letter(name, policy):
    model, *inputs = BUILDERS[name]()
    model(*inputs)
    keras_mp.install()
    within = [layer for layer in model._flatten_layers() if conversion.converts(layer)]
    before = snapshot(model)
    plan = conversion.planned(model, within, POLICIES[policy]())
    assert snapshot(model) == before
    assert bool(become(plan, within)) == (policy != "float32")
    back = conversion.planned(model, within, keras.DTypePolicy("float32"))
    become(back, within)


def test_what_is_planned_counts_for_what_is_planned_after_it(mixed_float16):
    """A wrapper follows the layer that it wraps, which is no head any more."""
    head = layers.Dense(2)
    wrapper = layers.TimeDistributed(head)
    wrapper(np.ones((2, 3, 4), "float32"))
    plan = Plan()
    plan.head(wrapper)
    assert plan.policy_of(head).compute_dtype == "float32"
    plan.no_head(wrapper)
    assert {plan.policy_of(x).compute_dtype for x in (wrapper, head)} == {"float16"}
    assert plan.changes
    assert carry_out(plan) == []


def test_weights_are_planned_as_well():
    with keras_mp.policy_scope("bfloat16"):
        head, norm = layers.Dense(1024), layers.BatchNormalization()
        norm(head(np.ones((2, 512), "float32")))
        plan = Plan()
        plan.head(head)
        plan.choose(norm)
    assert plan.changes[id(head)].weights == ("float32", "bfloat16")
    assert {str(w.dtype) for w in head.weights} == {"bfloat16"}
    assert carry_out(plan) == [head]
    kernel, bias = head.weights
    assert (str(kernel.dtype), str(bias.dtype)) == ("bfloat16", "float32")


class Attending(layers.Layer):
    """What it returns is made two layers further in."""

    def __init__(self):
        super().__init__()
        self.attention = layers.MultiHeadAttention(2, 2)

    def call(self, x):
        return self.attention(x, x)


def test_an_output_layer_stays_one_when_the_layers_around_it_are_called_again():
    """A conversion calls them on symbols, and their first calls choose once more."""
    model = keras.Sequential([keras.Input((3, 4)), layers.Dense(4), Attending()])
    keras_mp.convert(model, "mixed_bfloat16")
    ends = [x for x in model._flatten_layers() if x.name == "attention_output"]
    model(np.ones((2, 3, 4), "float32"))
    assert [decision_for(x).head for x in ends] == [True]
    assert [x.compute_dtype for x in ends] == ["float32"]
