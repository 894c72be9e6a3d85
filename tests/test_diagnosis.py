"""`diagnose`: planted faults are found, and the model stays as it was."""

import dataclasses
import json

import keras
import numpy as np
import pytest
from backends import BACKEND, Chained, same_bits, values
from keras import layers, ops

import keras_mp
from keras_mp.loss_scaling.one_batch import gradients_of
from keras_mp.policies.layers import policy_of

X = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")
Y = np.random.default_rng(1).normal(size=(16, 8)).astype("float32")
LAYERS = 100
# JAX makes the constants of float16 with NumPy, which warns of those that overflow.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


class Fault(layers.Layer):
    """Returns small numbers, by way of something that precision does not survive."""

    def call(self, x):
        return self.wrong(x)


class Loud(Fault):
    def wrong(self, x):
        return x * 1e3 * 1e3


class Muted(Fault):
    """Passes its input on; of its weight's gradient next to nothing is left."""

    def build(self, shape):
        self.weight = self.add_weight(name="weight", shape=shape[-1:])

    def wrong(self, x):
        return x + x * self.weight * 1e-4 * 1e-4 * 1e-4 * 1e-4


class Squared(Fault):
    """Infinity less infinity in float16, nothing in float32."""

    def wrong(self, x):
        square = (x * 0 + 300) ** 2
        return x + (square - square)


class Divided(Fault):
    """Divides by infinity in float16: 0, which is finite and in range."""

    def wrong(self, x):
        return x / ops.cast(70000, x.dtype)


class Rescaled(Divided):
    def wrong(self, x):
        return super().wrong(x) * 3e4


class Logarithm(Fault):
    """nan in any dtype."""

    def wrong(self, x):
        return x + ops.log(x * 0 - 1)


class Normalized(Fault):
    epsilon = 1e-9

    def wrong(self, x):
        zero = x * 0
        return x + zero / (ops.abs(zero) + self.epsilon)


class Residual(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(8, name="dense")

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        return x + self.dense(x) * 0.01


def chain(fault, count=20):
    """So many layers, two in each block, with a fault among them."""
    made = [Residual(name=f"block_{i}") for i in range(count // 2)]
    made.insert(count // 3, fault(name="fault"))
    if fault is Loud:
        quiet = layers.Rescaling(1e-6, name="quiet", dtype="float32")
        made.insert(count // 3 + 1, quiet)
    return made


def flat(fault, count=20, name="flat"):
    return keras.Sequential([keras.Input((8,)), *chain(fault, count)], name=name)


def long(fault):
    return flat(fault, LAYERS, "long")


def nested(fault):
    inner = keras.Sequential([keras.Input((8,)), *chain(fault)], name="inner")
    inputs = keras.Input((8,))
    return keras.Model(inputs, layers.Dense(8, name="head")(inner(inputs)))


class Subclassed(Chained):
    def __init__(self, fault):
        super().__init__(chain(fault), name="own")


def compiled(build, fault, policy="mixed_float16"):
    keras.utils.set_random_seed(0)
    with keras_mp.policy_scope(policy):
        model = build(fault)
    # Without a compilation of 100 layers for each of them.
    model.compile(keras.optimizers.SGD(1e-3), "mse", run_eagerly=True)
    return model


def functional(call, *shape, policy="mixed_float16"):
    """A model of what `call` makes of an input."""
    inputs = keras.Input(shape)
    model = keras_mp.convert(keras.Model(inputs, call(inputs)), policy)
    model.compile("sgd", "mse")
    return model


def paths_of(report, kind):
    return [m.path for m in report.measured if m.kind == kind]


on_torch = pytest.mark.trains_many
OTHERS = [pytest.param(build, marks=on_torch) for build in (nested, Subclassed)]
every_way = pytest.mark.parametrize("build", [flat, *OTHERS])


LONG = pytest.param(long, marks=pytest.mark.slow("A hundred layers, where 20 do too."))


@pytest.mark.parametrize("build", [flat, LONG, nested, Subclassed])
def test_an_output_past_65504_is_found(build):
    report = keras_mp.diagnose(compiled(build, Loud), X, Y)
    path = fault_of(report)
    assert report.verdict.overflowing[0].path == path
    assert path in report.sentences[0] and "65504" in report.sentences[0]
    assert path in report.kept
    assert not report.verdict.fits


@pytest.mark.trains_many
@every_way
def test_a_gradient_that_is_all_below_float16_is_found(build):
    report = keras_mp.diagnose(compiled(build, Muted), X, Y)
    path = fault_of(report)
    lost = {m.path: m.range for m in report.verdict.too_small}
    assert f"{path}/weight" in lost
    assert lost[f"{path}/weight"].largest * report.scale < 2.0**-25
    assert any(f"{path}/weight loses 100%" in s for s in report.sentences)
    assert path in report.kept


@every_way
def test_a_nan_that_is_born_in_half_precision_is_found(build):
    report = keras_mp.diagnose(compiled(build, Squared), X, Y)
    path = fault_of(report)
    assert report.broken == path and not report.broken_in_float32
    assert path in report.sentences[0]
    assert report.kept == (path,)
    assert report.cured


@every_way
def test_an_output_that_is_0_in_float16_alone_is_found(build):
    report = keras_mp.diagnose(compiled(build, Divided), X, Y)
    path = fault_of(report)
    assert report.verdict.fits and not report.broken  # All is finite and in range.
    assert (report.departure.path, report.departure.layer) == (path, path)
    assert report.departure.error.error == pytest.approx(1)
    assert report.sentences[0].startswith(f"{path} is the first that departs")
    assert report.suits == report.recommended == "bfloat16"
    assert not any(s.startswith("float16 suits") for s in report.sentences)
    assert report.kept == (path,) and report.cured


@pytest.mark.trains_many
def test_the_line_for_it_can_be_pasted_and_brings_float32s_outputs_back():
    expected = compiled(flat, Divided, "float32").predict(X, verbose=0)

    def off(model):
        found = model.predict(X, verbose=0)
        return np.abs(found - expected).max() / np.abs(expected).max()

    report = keras_mp.diagnose(compiled(flat, Divided), X, Y)
    assert off(compiled(flat, Divided)) > 0.99
    model = compiled(flat, Divided, eval(report.line, {"keras_mp": keras_mp}))
    assert off(model) < 0.01
    precisions = {x.name: policy_of(x).compute_dtype for x in model.layers}
    # And nothing else: the output is a block, no head.
    assert [name for name, x in precisions.items() if x == "float32"] == ["fault"]


def test_a_loss_that_departs_alone_is_found():
    class OwnLoss(keras.Sequential):
        def compute_loss(self, x, y, y_pred, sample_weight, training=True):
            x = self.layers[0].compute_dtype
            error = ops.cast(ops.mean(ops.square(y - y_pred)), x)
            return error / ops.cast(70000, x)

    with keras_mp.policy_scope("mixed_float16"):
        hidden, head = layers.Dense(8), layers.Dense(8)
        model = OwnLoss([keras.Input((8,)), hidden, head])
    model.compile("sgd", "mse", run_eagerly=True)
    report = keras_mp.diagnose(model, X, Y)
    assert report.departure.path == "loss"
    assert report.suits == "bfloat16" and report.line == ""


def test_layers_of_a_second_fault_are_kept_too():
    def two(fault):
        made = fault(name="a"), layers.Dense(8), fault(name="b"), layers.Dense(8)
        return keras.Sequential([keras.Input((8,)), *made], name="two")

    report = keras_mp.diagnose(compiled(two, Rescaled), X, Y)
    assert report.departure.path == "a"
    assert report.kept == ("a", "b") and report.cured


@every_way
def test_a_nan_that_is_born_in_float32_is_no_matter_of_precision(build):
    report = keras_mp.diagnose(compiled(build, Logarithm), X, Y)
    path = fault_of(report)
    assert report.broken_in_float32 == path and not report.broken
    assert "precision is not the cause" in report.sentences[0]
    assert path in report.sentences[0]


@pytest.mark.trains_many
@every_way
def test_an_epsilon_that_float16_turns_into_0_is_found(build):
    report = keras_mp.diagnose(compiled(build, Normalized), X, Y)
    path = fault_of(report)
    assert [e.paths for e in report.epsilons] == [(path,)]
    assert report.broken == path
    assert report.kept == (path,) and report.cured


@pytest.mark.trains_many
@every_way
def test_a_model_in_float32_is_judged_as_if_it_were_in_float16(build):
    model = compiled(build, Squared, "float32")
    report = keras_mp.diagnose(model, X, Y)
    assert report.policy == "float32"
    assert report.broken == fault_of(report)
    assert {x.compute_dtype for x in model._flatten_layers()} == {"float32"}


def fault_of(report):
    """The path of the layer at fault, which the whole line must match."""
    (path,) = {m.layer for m in report.measured if m.layer.endswith("fault")}
    least = LAYERS if report.model == "long" else 20
    assert len(paths_of(report, "output")) >= least
    return path


# What is left behind ------------------------------------------------------------------


def small(policy="mixed_float16"):
    keras.utils.set_random_seed(0)
    with keras_mp.policy_scope(policy):
        stack = [
            layers.Dense(8, name="hidden", activity_regularizer="l2"),
            layers.BatchNormalization(name="norm"),
            layers.Dropout(0.5, name="dropout"),
            layers.Dense(8, name="head"),
        ]
        model = keras.Sequential([keras.Input((8,)), *stack], name="small")
    model.compile("adam", "mse", metrics=["mae"])
    return model


def state_of_torch():
    """What a Dropout without a seed draws from, on torch alone."""
    if BACKEND != "torch":
        return None
    import torch

    return bytes(torch.get_rng_state())


@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "mixed_bfloat16"])
def test_the_model_stays_as_it_was(policy):
    model, twin = small(policy), small(policy)
    for each in (model, twin):
        keras.utils.set_random_seed(1)
        each.fit(X, Y, shuffle=False, verbose=0)
    function = model.train_function
    state = values([*model.variables, *model.metrics_variables])
    drawn = state_of_torch()
    policies = [vars(x)["_dtype_policy"] for x in model._flatten_layers()]
    keras_mp.diagnose(model, X, Y)
    assert same_bits(state, values([*model.variables, *model.metrics_variables]))
    after = [vars(x)["_dtype_policy"] for x in model._flatten_layers()]
    assert all(a is b for a, b in zip(policies, after, strict=True))
    assert model.train_function is function
    assert state_of_torch() == drawn
    losses = []
    for each in (model, twin):
        keras.utils.set_random_seed(2)
        history = each.fit(X, Y, shuffle=False, verbose=0).history
        losses.append(history["loss"])
    assert losses[0] == losses[1]


@pytest.mark.slow("Whole searches through a loop; other models stay.")
def test_the_state_of_a_stateful_lstm_stays_as_it_was():
    with keras_mp.policy_scope("mixed_float16"):
        inputs = keras.Input(batch_shape=(16, 3, 2))
        lstm = layers.LSTM(4, stateful=True)
        model = keras.Model(inputs, layers.Dense(8)(lstm(inputs)))
    model.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(16, 3, 2)).astype("float32")
    for state in lstm.states:
        state.assign(np.full(state.shape, 0.25, "float32"))
    before = values(lstm.states)
    report = keras_mp.diagnose(model, x, Y)
    assert report.verdict.fits
    assert len(paths_of(report, "gradient")) == len(model.trainable_variables)
    assert same_bits(before, values(lstm.states))
    # What is rounded at each of its steps adds up.
    found = keras_mp.find_float32_layers(model, x, Y, tolerance=16, verbose=0)
    assert found.paths == () and found.agrees
    assert same_bits(before, values(lstm.states))
    # The ranges are those of a step that starts from this state.
    for state in lstm.states:
        state.assign(np.zeros(state.shape, "float32"))
    assert keras_mp.diagnose(model, x, Y).measured != report.measured


def test_losses_that_layers_add_are_part_of_the_loss():
    class Penalty(layers.Layer):
        def call(self, x):
            self.add_loss(1e3 * ops.mean(x**2))
            return x

    dense = layers.Dense(8, name="dense")
    model = functional(
        lambda x: layers.Dense(8)(Penalty()(dense(x))), 8, policy="float32"
    )
    found = gradients_of(model, (X, Y, None), 1.0)
    outputs = X @ values([dense.kernel])[0]
    penalty = 1e3 * (outputs**2).mean()
    error = ((model.predict(X, verbose=0) - Y) ** 2).mean()
    np.testing.assert_allclose(found.loss, error + penalty, rtol=1e-4)
    # The penalty is nearly all of the loss, and of its gradient by the kernel.
    expected = X.T @ (2e3 / outputs.size * outputs)
    atol = 0.01 * np.abs(expected).max()
    np.testing.assert_allclose(found.by_variable[0], expected, rtol=0.1, atol=atol)


def test_a_map_of_policies_that_layers_share_stays_as_it_was():
    policies = keras.dtype_policies.DTypePolicyMap(default_policy="mixed_float16")
    policies["dense"] = keras.DTypePolicy("mixed_bfloat16")
    dense = layers.Dense(8, name="dense", dtype=policies)
    model = keras.Sequential([keras.Input((8,)), dense])
    model.compile("sgd", "mse", run_eagerly=True)
    keras_mp.diagnose(model, X, Y)
    assert dense.dtype_policy is policies
    names = {path: policy.name for path, policy in policies.items()}
    assert names == {"dense": "mixed_bfloat16"}


def test_an_error_in_the_middle_leaves_it_so_too():
    model = small()
    model.fit(X, Y, verbose=0)
    state = values(model.variables)
    call = vars(keras.Operation)["__call__"]
    with pytest.raises(ValueError, match="incompatible"):
        keras_mp.diagnose(model, X[:, :3], Y)
    assert same_bits(state, values(model.variables))
    assert vars(keras.Operation)["__call__"] is call
    model.fit(X, Y, verbose=0)


@pytest.mark.trains_many
@pytest.mark.parametrize("ask", [keras_mp.diagnose, keras_mp.find_float32_layers])
def test_one_batch_is_given_in_parts_or_as_one(ask):
    quiet = {} if ask is keras_mp.diagnose else {"verbose": 0}
    in_parts = ask(small(), X, Y, **quiet).to_dict()
    assert ask(small(), (X, Y), **quiet).to_dict() == in_parts
    assert ask(small(), [(X, Y)].__iter__(), **quiet).to_dict() == in_parts
    weights = np.ones(len(X), "float32")
    in_parts = ask(small(), X, Y, weights, **quiet).to_dict()
    assert ask(small(), (X, Y, weights), **quiet).to_dict() == in_parts
    with pytest.raises(ValueError, match="`y` must hold the targets .* y=None"):
        ask(small(), X, **quiet)


def test_a_model_that_was_never_called_is_diagnosed():
    with keras_mp.policy_scope("mixed_float16"):
        model = keras.Sequential([layers.Dense(4), layers.Dense(8)])
    model.compile("sgd", "mse")
    report = keras_mp.diagnose(model, X, Y)
    assert report.verdict.fits
    assert "float16 suits this model" in str(report)


@pytest.mark.parametrize("compile", [{"jit_compile": False}, {"run_eagerly": True}, {}])
def test_compiled_or_not_the_ranges_are_the_same(compile):
    model = small("float32")
    model.compile("sgd", "mse", **compile)
    found = keras_mp.diagnose(model, X, Y).to_dict()["tensors"]
    model.compile("sgd", "mse", run_eagerly=True)
    expected = keras_mp.diagnose(model, X, Y).to_dict()["tensors"]
    for a, b in zip(found, expected, strict=True):
        assert a["path"] == b["path"] and a["kind"] == b["kind"]
        assert a["largest"] == pytest.approx(b["largest"], rel=1e-3, abs=1e-6)


def test_layers_within_loops_are_seen_from_outside():
    def loops(x):
        forward = layers.LSTM(4, return_sequences=True, name="lstm")
        x = layers.Bidirectional(forward, name="both")(x)
        x = layers.TimeDistributed(layers.Dense(4))(x)
        return layers.Dense(8)(layers.RNN(layers.GRUCell(3), name="rnn")(x))

    model = functional(loops, 5, 3)
    report = keras_mp.diagnose(model, np.ones((16, 5, 3), "float32"), Y)
    assert {"both/forward_lstm", "rnn"} <= {*paths_of(report, "output")}
    assert len(paths_of(report, "gradient")) == len(model.trainable_variables)


def test_operations_of_a_graph_are_named():
    def large(x):
        x = ops.multiply(layers.Dense(8, name="dense")(x), 1e3)
        return layers.Dense(8, name="head", dtype="float32")(ops.multiply(x, 1e3))

    report = keras_mp.diagnose(functional(large, 8), X, Y)
    first = report.verdict.overflowing[0]
    assert first.path.startswith("multiply")
    # An operation computes in the dtype of its inputs, which is that of the layer.
    assert report.kept == ("dense",) and report.cured


@pytest.mark.parametrize(
    ("batch", "name"),
    [
        ((X * np.nan, Y), "`x`"),
        ((X, Y * np.inf), "`y`"),
        ((X, np.full_like(Y, 1e30)), "the loss"),
    ],
)
def test_a_batch_or_a_loss_that_is_not_finite_is_no_matter_of_precision(batch, name):
    report = keras_mp.diagnose(small(), *batch)
    assert report.broken_in_float32 == name
    if name != "the loss":
        assert len(report.sentences) == 1 and report.sentences[0].startswith(name)
        assert report.kept == ()


def test_a_frozen_model_has_outputs_alone():
    model = small()
    model.trainable = False
    model.compile("sgd", "mse")
    kinds = {m.kind for m in keras_mp.diagnose(model, X, Y).measured}
    assert "gradient" not in kinds and "output" in kinds


def test_a_shared_layer_is_reported_for_each_of_its_calls():
    shared = layers.Dense(8, name="shared")
    model = functional(lambda x: shared(shared(x)), 8, policy="float32")
    outputs = paths_of(keras_mp.diagnose(model, X, Y), "output")
    assert outputs == ["shared", "shared (output 2)"]


# What it says -------------------------------------------------------------------------


def test_gradients_are_judged_at_the_present_loss_scale():
    model = small()
    model.optimizer.dynamic_scale.assign(2.0**24)
    report = keras_mp.diagnose(model, X, Y)
    assert report.scale == 2.0**24
    assert report.verdict.too_large
    assert any("overflows first" in s for s in report.sentences)
    window = report.verdict.window
    for exponent, overflows in ((window.highest, False), (window.highest + 1, True)):
        model.optimizer.dynamic_scale.assign(2.0**exponent)
        report = keras_mp.diagnose(model, X, Y)
        assert bool(report.verdict.too_large) == overflows


def test_it_is_json():
    report = keras_mp.diagnose(small(), X, Y)
    found = json.loads(json.dumps(report.to_dict()))
    assert found["model"] == "small" and found["recommended"] == "float16"
    assert found["window"][0] <= found["window"][1]
    outputs = [t for t in found["tensors"] if t["kind"] == "output"]
    (hidden,) = [t for t in outputs if t["path"].endswith("hidden")]
    assert hidden["size"] == 16 * 8 == sum(hidden["histogram"].values())


def test_the_plot_has_axes_units_and_a_sentence():
    figure = keras_mp.diagnose(small(), X, Y).plot()
    (axes,) = figure.axes
    assert "exponent" in axes.get_xlabel() and "%" in axes.get_ylabel()
    assert "loss scale" in figure.texts[0].get_text()


@pytest.mark.parametrize("fault", [Loud, Squared])
def test_the_output_that_overflowed_is_drawn_and_heads_the_table(fault):
    report = keras_mp.diagnose(compiled(nested, fault), X, Y)
    path = fault_of(report)
    assert (report.worst[0].path, report.worst[0].kind) == (path, "output")
    cell = report._row(report.worst[0])[-1]
    assert cell == {Loud: "inf", Squared: "nan"}[fault]
    outputs, gradients = report.plot().axes
    assert outputs.get_title().startswith("Outputs")
    labels = [text.get_text() for text in outputs.get_legend().get_texts()]
    assert labels[0] == path
    assert gradients.get_title().startswith("Gradients")


def test_a_line_that_is_not_enough_is_not_printed():
    report = keras_mp.diagnose(compiled(nested, Squared), X, Y)
    report = dataclasses.replace(report, cured=False)
    assert report.line == "" and "MixedFloat16(" not in str(report)
    assert report.sentences[-1] == (
        "Keeping inner/fault in float32 is not enough. Run "
        "keras_mp.find_float32_layers(model, x, y)."
    )


# What is refused ----------------------------------------------------------------------


def test_what_is_no_model_or_has_no_loss_and_a_batch_of_nothing_are_refused():
    with pytest.raises(TypeError, match="`model` must be a keras.Model"):
        keras_mp.diagnose(layers.Dense(2), X, Y)
    model = keras.Sequential([layers.Dense(8)])
    with pytest.raises(ValueError, match="`model` must be compiled"):
        keras_mp.diagnose(model, X, Y)
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="`x` must hold at least one example"):
        keras_mp.diagnose(model, X[:0], Y[:0])
