"""`find_float32_layers`: what is planted is found, and nothing that can be spared."""

import importlib.util
import json
import math
import types

import keras
import numpy as np
import pytest
from backends import Batches, same_bits, values
from hypothesis import given
from hypothesis import strategies as st
from keras import layers
from test_diagnosis import (
    Fault,
    Loud,
    Muted,
    Normalized,
    Residual,
    Squared,
    Subclassed,
    X,
    Y,
    nested,
)

import keras_mp
from keras_mp.backends.random_draws import same_draws_in_every_dtype
from keras_mp.policies.layers import policy_of
from keras_mp.tools.display.progress_bar import _can_show
from keras_mp.tools.float32_search.smallest_set import smallest_set

find = keras_mp.find_float32_layers


def mixed(*made, policy="mixed_float16", optimizer="sgd", loss="mse"):
    keras.utils.set_random_seed(0)
    head = layers.Dense(8, name="head")  # In float32, being the output.
    model = keras.Sequential([keras.Input((8,)), *made, head], name="model")
    keras_mp.convert(model, policy)
    model.compile(optimizer, loss, run_eagerly=True)
    return model


def planted(fault):
    keras.utils.set_random_seed(0)
    made = [Residual(name=f"block_{i}") for i in range(4)]
    made.insert(2, fault(name="fault"))
    if fault is not Loud:
        return mixed(*made, policy=keras_mp.MixedFloat16())
    made.insert(3, layers.Rescaling(1e-6, name="quiet"))
    return mixed(*made, policy=keras_mp.MixedFloat16(float32=[".*/quiet"]))


# The search ---------------------------------------------------------------------------


@given(st.data())
def test_the_smallest_set_holds_and_none_of_it_can_be_spared(data):
    count = data.draw(st.integers(0, 40))
    one_of = st.sets(st.integers(0, max(count - 1, 0)), min_size=1, max_size=3)
    needed = data.draw(st.lists(one_of, max_size=4 if count else 0))

    def holds(chosen):
        return all(options & set(chosen) for options in needed)

    counts = []
    found = smallest_set(range(count), holds, counts.append)
    assert holds(found) and found == sorted(set(found))
    assert not any(holds([m for m in found if m != spared]) for spared in found)
    assert counts == sorted(counts) and counts[-1] == count


@given(st.sets(st.integers(0, 199), max_size=5))
def test_few_of_many_are_found_by_few_questions(needed):
    asked = []

    def holds(chosen):
        asked.append(chosen)
        return needed <= set(chosen)

    assert smallest_set(range(200), holds) == sorted(needed)
    k = len(needed)
    assert len(asked) <= 1 + (2 * k * math.log2(200 / k) + 2 * k if k else 0)


# What is found ------------------------------------------------------------------------


@pytest.mark.trains_many
@pytest.mark.parametrize("fault", [Loud, Muted, Squared, Normalized])
def test_a_planted_fault_is_found_and_it_alone(fault):
    found = find(planted(fault), (X, Y), verbose=0)
    assert found.paths == ("fault",)
    assert found.agrees and not found.before.agrees
    assert not found.contributions[0].without.agrees
    assert found.candidates == 5


@pytest.mark.parametrize(
    ("build", "path"), [(nested, "inner/fault"), (Subclassed, "fault")]
)
def test_so_it_is_inside_of_other_models(build, path):
    with keras_mp.policy_scope("mixed_float16"):
        model = build(Muted)
    model.compile("sgd", "mse", run_eagerly=True)
    assert find(model, (X, Y), verbose=0).paths == (path,)


def test_two_faults_are_found_with_what_each_contributes():
    model = mixed(
        Muted(name="first"), layers.Dense(8), Residual(), Squared(name="second")
    )
    found = find(model, (X, Y), verbose=0)
    assert set(found.paths) == {"first", "second"}
    without = {c.path: c.without for c in found.contributions}
    assert without["first"].name == "first/weight"
    assert without["first"].error == pytest.approx(1, abs=0.01)
    assert without["second"].error == float("inf")


class Block(layers.Layer):
    """Holds a fault among other layers."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = [layers.Dense(8, name="a"), Squared(name="fault")]
        self.inner.append(layers.Dense(8, name="b"))

    def build(self, shape):
        for layer in self.inner:
            layer.build(shape)

    def call(self, x):
        for layer in self.inner:
            x = layer(x)
        return x


class Whole(Block):
    """At fault itself, not by the layers that it holds."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        del self.inner[1]

    def call(self, x):
        return Squared.wrong(self, keras.ops.cast(super().call(x), self.compute_dtype))


def test_of_a_layer_made_of_layers_the_one_within_is_found_or_the_whole_of_it():
    found = find(mixed(layers.Dense(8), Block(name="block")), (X, Y), verbose=0)
    assert found.paths == ("block/fault",)
    assert found.candidates == 2
    found = find(mixed(layers.Dense(8), Whole(name="block")), (X, Y), verbose=0)
    assert found.paths == ("block",)


def test_the_policy_that_it_gives_does_what_was_found():
    model = planted(Muted)
    found = find(model, (X, Y), verbose=0)
    keras_mp.convert(model, found.float32_policy)
    kept = [x.name for x in model.layers if x.compute_dtype == "float32"]
    assert kept == ["fault", "head"]  # And the output.
    again = find(model, (X, Y), verbose=0)
    assert again.paths == () and again.before.agrees


def test_a_model_in_float32_is_judged_as_if_mixed_and_its_loss_scaled():
    model = planted(Muted)
    keras_mp.convert(model, "float32")
    found = find(model, (X, Y), verbose=0)
    assert found.policy == "mixed_float16" and found.paths == ("fault",)
    healthy = mixed(layers.Dense(8), policy="float32")
    assert find(healthy, (X, Y), verbose=0).scale == 2.0**15


@pytest.mark.trains_many
def test_bfloat16_has_a_fault_of_its_own_and_no_scale():
    # 1000 ones added one after another: bfloat16 counts to 256.
    class Count(Fault):
        def wrong(self, x):
            total = x * 0
            for _ in range(300):
                total = total + 1
            return x * total / 300

    model = mixed(Residual(), Count(name="fault"), policy="mixed_bfloat16")
    found = find(model, (X, Y), verbose=0)
    assert found.paths == ("fault",) and found.scale == 1
    assert "MixedBFloat16" in str(found)


@pytest.mark.trains_many
def test_a_healthy_model_needs_none():
    model = mixed(
        layers.Dense(16, activation="gelu"),
        layers.BatchNormalization(),
        layers.Dropout(0.2),
        layers.Dense(16, activation="relu"),
        layers.GaussianNoise(0.1),
        layers.LayerNormalization(),
        layers.Dense(8),
    )
    found = find(model, (X, Y), verbose=0)
    assert found.paths == () and found.agrees
    assert "No layer has to be in float32" in str(found)
    for shown in (str(found), found._repr_html_()):
        assert "layer in float32" not in shown and "<table" not in shown


@pytest.mark.trains_many
def test_a_gradient_that_is_rounding_errors_alone_is_nobodys_fault():
    model = mixed(layers.Dense(8, name="a"), layers.BatchNormalization(), Residual())
    found = find(model, (X, Y), verbose=0)
    assert "a/bias" in found.undetermined
    assert found.paths == ()


def test_a_dynamic_scale_goes_where_gradients_fit_and_a_fixed_one_stays():
    def scaled(dynamic):
        optimizer = keras_mp.LossScaleOptimizer("sgd", 2.0**24, dynamic=dynamic)
        return mixed(Residual(), optimizer=optimizer)

    found = find(scaled(dynamic=True), (X, Y), verbose=0)
    assert found.paths == () and found.scale < 2.0**24
    fixed = find(scaled(dynamic=False), (X, Y), verbose=0)
    assert fixed.scale == 2.0**24 and not fixed.before.agrees


class Own(keras.Model):
    """At fault itself, outside of its layers."""

    def __init__(self):
        super().__init__(name="own")
        self.dense = layers.Dense(8)

    def call(self, x):
        x = keras.ops.cast(self.dense(x), self.compute_dtype)
        return keras.ops.cast(x * 1e4 * 1e4 * 1e-4 * 1e-4, "float32")


def test_what_no_layer_is_to_blame_for_is_said():
    model = Own()
    model(X)
    keras_mp.convert(model, "mixed_float16")
    model.compile("sgd", "mse", run_eagerly=True)
    found = find(model, (X, Y), verbose=0)
    assert found.paths == () and not found.agrees
    assert "No choice of layers is enough" in str(found)


# What it costs ------------------------------------------------------------------------


def test_the_model_stays_as_it_was():
    model = planted(Muted)
    model.fit(X, Y, verbose=0)
    state = values(model.variables)
    policies = [policy_of(layer) for layer in model._flatten_layers()]
    find(model, (X, Y), verbose=0)
    assert same_bits(state, values(model.variables))
    assert [policy_of(layer) for layer in model._flatten_layers()] == policies
    model.fit(X, Y, verbose=0)


def test_a_progress_bar_goes_to_a_terminals_stderr(capsys, monkeypatch):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    model = mixed(layers.Dense(8))
    find(model, (X, Y))
    shown = capsys.readouterr()
    assert shown.out == "" and "layers decided" in shown.err
    find(model, (X, Y), verbose=0)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("found", [object(), None])
def test_in_a_notebook_there_is_a_bar_only_with_ipywidgets(found, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", {"ipywidgets": found}.get)
    notebook = types.SimpleNamespace(is_jupyter=True, is_terminal=False)
    assert _can_show(notebook) == (found is not None)
    assert _can_show(types.SimpleNamespace(is_jupyter=False, is_terminal=True))


@pytest.mark.parametrize("shape", [(64,), (8, 8)])
def test_in_half_precision_the_same_is_drawn(shape):
    draws = {
        "normal": lambda d: keras.random.normal(shape, dtype=d, seed=3),
        "uniform": lambda d: keras.random.uniform(shape, dtype=d, seed=3),
        "cut": lambda d: keras.random.truncated_normal(shape, dtype=d, seed=3),
        "dropout": lambda d: keras.random.dropout(
            keras.ops.ones(shape, dtype=d), 0.5, seed=3
        ),
    }
    for draw in draws.values():
        with same_draws_in_every_dtype():
            wide, half = values(draw(d) for d in ("float32", "bfloat16"))
        np.testing.assert_allclose(wide, half.astype("float32"), atol=0.01)
        assert len(set(wide.ravel())) > 1


# What it takes and tells --------------------------------------------------------------


@pytest.mark.parametrize(
    "data", [(X, Y), [X, Y, np.ones(16)], Batches((X, Y)), iter([(X, Y)])]
)
def test_every_kind_of_data(data):
    assert find(mixed(layers.Dense(8)), data, verbose=0).agrees


def test_it_prints_within_80_columns_and_is_json():
    found = find(planted(Squared), (X, Y), verbose=0)
    assert max(map(len, str(found).splitlines())) <= 80
    found_as_json = json.loads(json.dumps(found.to_dict()))
    assert found_as_json["float32"] == ["fault"]
    assert found_as_json["contributions"][0]["without"]["error"] is None  # Not finite.
    assert "<table" in found._repr_html_()


@pytest.mark.parametrize("tolerance", [0, 0.5, float("nan"), float("inf")])
def test_a_tolerance_below_1_is_refused(tolerance):
    with pytest.raises(ValueError, match="`tolerance` must be .* Received: tolerance"):
        find(mixed(layers.Dense(8)), (X, Y), tolerance=tolerance)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("data.csv", "`x` must be .x, y., .* Received: x='data.csv'"),
        (3, "Received: x=3"),
        ((X[:0], Y[:0]), "`x` must hold at least one example. Received: arrays of"),
        (iter([]), "at least one example. Received: no batch"),
    ],
)
def test_what_is_no_batch_is_refused(data, message):
    with pytest.raises((TypeError, ValueError), match=message):
        find(mixed(layers.Dense(8)), data)
    with pytest.raises(ValueError, match="`verbose` must be 0 or 1"):
        find(mixed(layers.Dense(8)), (X, Y), verbose="loud")


@pytest.mark.parametrize("variables_move_it", [True, False])
def test_inputs_alone_are_a_batch_of_a_model_whose_layers_bring_its_loss(
    variables_move_it,
):
    made = [Squared(name="fault"), layers.ActivityRegularization(1e-3)]
    if variables_move_it:
        made.insert(0, layers.Dense(8))
    assert find(mixed(*made, loss=None), X, verbose=0).paths == ("fault",)


def test_a_compute_loss_of_before_keras_had_training_is_called_as_it_is():
    class Older(keras.Sequential):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
            return keras.ops.mean((y - y_pred) ** 2)

    model = Older([keras.Input((8,)), Squared(name="fault"), layers.Dense(8)])
    keras_mp.convert(model, "mixed_float16")
    model.compile("sgd", run_eagerly=True)
    assert find(model, (X, Y), verbose=0).paths == ("fault",)


def test_other_models_are_refused():
    with pytest.raises(TypeError, match="`model` must be a keras.Model"):
        find(layers.Dense(8), (X, Y))
    with pytest.raises(ValueError, match="`model` must be compiled"):
        find(keras.Sequential([layers.Dense(8)]), (X, Y))
    with pytest.raises(ValueError, match="must have layers that could compute"):
        find(mixed(layers.Dense(8, activation="softmax")), (X, Y))
    with pytest.raises(ValueError, match="output is not"):
        find(mixed(layers.Dense(8)), (X * np.nan, Y))
