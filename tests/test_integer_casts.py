"""A layer that makes integers of numbers which half precision has rounded is named."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_mp

POLICIES = {"mixed_float16": "float16", "mixed_bfloat16": "bfloat16"}
IDS = np.array([[2049, 0.5], [70000, 1.5]], "float32")
SMALL = np.array([[255, 0.5], [12, 1.5]], "float32")


class Cut(layers.Layer):
    """The first column of a table as ids, the rest as numbers."""

    def call(self, table, flip=False):
        return ops.cast(ops.cast(table[:, :1], "int32") % 7, table.dtype)


class Looked(layers.Layer):
    """The ids of a table, by a layer inside."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.cut, self.dropout = Cut(), layers.Dropout(0.5, seed=1)

    def call(self, table):
        self.add_loss(ops.mean(table))
        return self.dropout(self.cut(table), training=True)


class Numbers(layers.Layer):
    """Casts nothing to integers."""

    def call(self, table):
        return table * 2


class Bytes(layers.Layer):
    def call(self, table):
        return ops.cast(ops.cast(table % 2, "uint8"), table.dtype)


def cut_by_function(**kwargs):
    return layers.Lambda(
        lambda t: ops.cast(ops.cast(t[:, :1], "int32"), t.dtype), **kwargs
    )


def told_of(layer, table, caught):
    layer(table)
    return [str(w.message) for w in caught if " casts " in str(w.message)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", [Cut, Looked, cut_by_function])
def test_it_is_told_at_the_first_call_with_a_number(kind, policy, recwarn):
    with keras_mp.policy_scope(policy):
        layer = kind(name="cut")
        (message,) = told_of(layer, IDS, recwarn)
        layer(IDS)
    assert message.startswith(f"cut casts {POLICIES[policy]} to int32, and 2049 of")
    assert "of its input is 2048 in" in message
    assert message.endswith('give it dtype="float32".')
    assert len([w for w in recwarn if " casts " in str(w.message)]) == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_the_remedy_gives_the_ids_of_float32(policy, recwarn):
    expected = ops.convert_to_numpy(Cut()(IDS))
    with keras_mp.policy_scope(policy):
        half, kept = Cut(), Cut(dtype="float32")
        assert not told_of(kept, IDS, recwarn)
        np.testing.assert_array_equal(ops.convert_to_numpy(kept(IDS)), expected)
        assert told_of(half, IDS, recwarn)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("kind", "table"),
    [(Cut, SMALL), (Cut, IDS.astype("int32")), (Numbers, IDS), (Bytes, IDS)],
    ids=["small ids", "integers", "no cast", "bytes"],
)
def test_what_loses_nothing_is_not_told(kind, table, policy, recwarn):
    with keras_mp.policy_scope(policy):
        assert not told_of(kind(), table, recwarn)
    assert not told_of(kind(), table, recwarn)


def test_a_model_of_yours_has_its_ids_whole_and_is_not_told(recwarn):
    class Model(keras.Model):
        def call(self, table):
            return ops.cast(table[:, :1], "int32")

    with keras_mp.policy_scope("mixed_float16"):
        assert not told_of(Model(), IDS, recwarn)


def test_a_layer_of_a_functional_model_is_told_when_it_first_runs(recwarn):
    with keras_mp.policy_scope("mixed_float16"):
        inputs = keras.Input((2,))
        model = keras.Model(inputs, layers.Dense(1)(Cut(name="cut")(inputs)))
    assert not [w for w in recwarn if " casts " in str(w.message)]
    (message,) = told_of(model, IDS, recwarn)
    assert message.startswith("cut casts float16")


def test_the_look_leaves_the_layer_as_it_was(recwarn):
    with keras_mp.policy_scope("mixed_float16"):
        layer, other = Looked(), Looked()
        first = ops.convert_to_numpy(layer(IDS))
        assert len(layer.losses) == 1
        # Without a look: these numbers are exact.
        other(SMALL)
    again, expected = layer(IDS), other(IDS)
    np.testing.assert_array_equal(*map(ops.convert_to_numpy, (again, expected)))
    assert first.shape == (2, 1) and len(layer.losses) == len(other.losses) == 1
    seeds = [ops.convert_to_numpy(v) for x in (layer, other) for v in x.variables]
    np.testing.assert_array_equal(*seeds)


def test_a_layer_that_runs_once_only_is_not_told(recwarn):
    class Once(Cut):
        ran = False

        def call(self, table):
            if self.ran:
                raise RuntimeError("it has run")
            self.ran = True
            return super().call(table)

    with keras_mp.policy_scope("mixed_float16"):
        assert not told_of(Once(), IDS, recwarn)
