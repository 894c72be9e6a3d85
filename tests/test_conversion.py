"""`convert`: models of every kind, to half precision and back to the bit."""

import contextlib
import functools
import itertools
import types

import keras
import numpy as np
import pytest
from backends import BACKEND, POLICIES, computes, dtype_of, same_bits, values
from models_to_convert import BUILDERS

import keras_mp
from keras_mp import unseen
from keras_mp.policies import choosing, symbolic
from keras_mp.policies.layers import is_graph

layers = keras.layers
# Half a unit in the last place, of the largest activation; a few layers add up.
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8}


def arrays(outputs):
    return [keras.ops.convert_to_numpy(x) for x in keras.tree.flatten(outputs)]


def assert_the_very_same(before, after):
    assert all(a is b for a, b in zip(before, after, strict=True))


@contextlib.contextmanager
def dtypes_within(model):
    """What every layer really returns while the model is called: {id: dtype}."""
    seen = {}

    def record(layer, call, *args, **kwargs):
        result = call(*args, **kwargs)
        seen[id(layer)] = dtype_of(keras.tree.flatten(result)[0])
        return result

    all_layers = model._flatten_layers()
    for layer in all_layers:
        vars(layer)["call"] = functools.partial(record, layer, layer.call)
    try:
        yield seen
    finally:
        for layer in all_layers:
            del vars(layer)["call"]


def symbolic_dtypes(model):
    """What the graphs in a model say: {id of the layer: dtype}."""
    said = {}
    for layer in model._flatten_layers():
        if is_graph(layer) and layer.built:
            graph = layer._functional if isinstance(layer, keras.Sequential) else layer
            for nodes in graph._nodes_by_depth.values():
                for node in nodes:
                    said[id(node.operation)] = node.outputs[0].dtype
            said[id(layer)] = graph.outputs[0].dtype
    return said


@functools.cache
def original(name):
    """A float32 model, its input, what it predicts, and its values."""
    keras.utils.set_random_seed(0)
    model, x = BUILDERS[name]()
    predicted = arrays(model.predict(x, verbose=0))
    return model, x, predicted, list(model.weights), values(model.weights)


@functools.cache
def round_trip(name, policy):
    """A model before a conversion, after it, and after its inverse."""
    trip = types.SimpleNamespace()
    model, x, trip.before, trip.weights, trip.values = original(name)
    trip.model = model
    trip.returned = keras_mp.convert(model, policy)
    with dtypes_within(model) as trip.real:  # A stale trace would call no layer.
        trip.predicted = arrays(model.predict(x, verbose=0))
    trip.said = symbolic_dtypes(model)
    trip.layers = {id(x): (x, x.compute_dtype) for x in model._flatten_layers()}
    trip.half_weights = list(model.weights)
    trip.dtypes = [w.dtype for w in model.weights]
    keras_mp.convert(model, "float32")
    with dtypes_within(model) as real:
        trip.after = arrays(model.predict(x, verbose=0))
    trip.real_after = set(real.values())
    trip.said_after = set(symbolic_dtypes(model).values())
    return trip


# Each model under one of the two policies in turn; under both where nothing is
# compiled, which is most of the time that this takes.
TRIPS = [*itertools.product(BUILDERS, POLICIES)]
if BACKEND != "torch":
    TRIPS = [*zip(BUILDERS, itertools.cycle(POLICIES), strict=False)]
every_model = pytest.mark.parametrize("name, policy", TRIPS)
both = pytest.mark.parametrize("policy", POLICIES)


@every_model
@pytest.mark.sampled
def test_a_conversion_keeps_the_very_same_variables_in_float32(name, policy):
    trip = round_trip(name, policy)
    assert trip.returned is trip.model
    assert_the_very_same(trip.weights, trip.half_weights)
    assert {d for d in trip.dtypes if "float" in d} == {"float32"}
    assert same_bits(trip.values, values(trip.weights))


def symbolically_wrong(layer):
    """On torch Keras does not autocast variables in a symbolic call: see the contract.

    It shows in layers and models that do not say their output's shape themselves.
    """
    unsaid = getattr(layer.compute_output_shape, "_is_default", False)
    return BACKEND == "torch" and unsaid


@every_model
def test_layers_return_what_they_say_and_what_the_graph_says(name, policy):
    trip = round_trip(name, policy)
    for key, (layer, compute_dtype) in trip.layers.items():
        dtype = trip.real.get(key)
        if dtype and "float" in dtype and not isinstance(layer, keras.Model):
            assert dtype == compute_dtype, layer.path
        if dtype and key in trip.said and not symbolically_wrong(layer):
            assert dtype == trip.said[key], layer.path
    assert POLICIES[policy] in trip.real.values()


@every_model
def test_what_is_predicted_is_rounded_and_not_more(name, policy):
    trip = round_trip(name, policy)
    bound = 8 * ROUNDING[POLICIES[policy]]
    for want, got in zip(trip.before, trip.predicted, strict=True):
        assert np.max(np.abs(want - got)) <= bound * max(1, np.max(np.abs(want)))
        assert np.any(want != got)


@every_model
def test_the_way_back_predicts_the_original_to_the_bit(name, policy):
    trip = round_trip(name, policy)
    assert same_bits(trip.before, trip.after)
    assert {d for d in trip.real_after if "float" in d} == {"float32"}
    assert {d for d in trip.said_after if "float" in d} <= {"float32"}
    assert {x.compute_dtype for x in trip.model._flatten_layers()} == {"float32"}


# Training on ----------------------------------------------------------------------


# All of them where nothing is compiled, again.
TRAINED = (
    list(BUILDERS)
    if BACKEND == "torch"
    else ["sequential", "functional", "subclassed", "lazy", "nested", "attention"]
)


def targets(model, x):
    outputs = model(keras.tree.map_structure(keras.ops.convert_to_tensor, x))
    return keras.tree.map_structure(lambda t: np.ones(t.shape, "float32"), outputs)


@functools.cache
def trained(name):
    """A model that has trained in float32, was converted, and has trained on."""
    keras.utils.set_random_seed(0)
    model, x = BUILDERS[name]()
    y = targets(model, x)
    model.compile(keras.optimizers.Adam(1e-2), "mse")
    train(model, x, y)
    trip = types.SimpleNamespace(model=model, x=x, y=y)
    trip.adam = model.optimizer
    trip.moments = list(trip.adam.variables)
    keras_mp.convert(model, "mixed_float16")
    trip.wrapper = model.optimizer
    trip.before = values(model.trainable_variables)
    trip.loss = train(model, x, y, epochs=3)
    trip.after = values(model.trainable_variables)
    return trip


def train(model, x, y, epochs=1):
    history = model.fit(x, y, batch_size=8, epochs=epochs, verbose=0, shuffle=False)
    return history.history["loss"]


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.sampled
def test_a_compiled_model_trains_on_with_its_optimizers_state(name):
    trip = trained(name)
    assert np.all(np.isfinite(trip.loss))
    assert not any(
        same_bits([a], [b]) for a, b in zip(trip.before, trip.after, strict=True)
    )
    assert isinstance(trip.wrapper, keras_mp.LossScaleOptimizer)
    assert trip.wrapper.inner_optimizer is trip.adam
    assert_the_very_same(trip.moments, trip.adam.variables)
    assert int(trip.adam.iterations) == 1 + 3


@pytest.mark.parametrize("name", ["sequential", "functional", "subclassed"])
def test_loss_scaling_goes_and_comes_back_with_its_scale(name):
    trip = trained(name)
    model, wrapper = trip.model, trip.wrapper
    wrapper.dynamic_scale.assign(512.0)
    scaling = list(wrapper.variables)
    keras_mp.convert(model, "float32")
    assert model.optimizer is trip.adam
    done = int(trip.adam.iterations)
    assert np.isfinite(train(model, trip.x, trip.y)[0])
    assert int(trip.adam.iterations) == done + 1
    keras_mp.convert(model, "mixed_bfloat16")
    assert model.optimizer is trip.adam
    assert np.isfinite(train(model, trip.x, trip.y)[0])
    keras_mp.convert(model, "mixed_float16")
    assert model.optimizer is wrapper
    assert_the_very_same(scaling, wrapper.variables)
    assert float(wrapper.loss_scale) == 512.0
    assert np.isfinite(train(model, trip.x, trip.y)[0])
    assert int(trip.adam.iterations) == done + 3


def small(activation=None, dtype=None, name="small"):
    return keras.Sequential(
        [
            keras.Input((3,)),
            layers.Dense(4, activation="relu", name="hidden", dtype=dtype),
            layers.Dense(2, activation=activation, name="head", dtype=dtype),
        ],
        name=name,
    )


X, Y = np.ones((4, 3), "float32"), np.zeros((4, 2), "float32")


def hidden_dtype(model, run):
    """The dtype in which a run really computes the hidden layer, None if traced."""
    with dtypes_within(model) as seen:
        run()
    return seen.get(id(model.get_layer("hidden")))


RUNS = {
    "train": lambda model: model.train_on_batch(X, Y),
    "test": lambda model: model.test_on_batch(X, Y),
    "predict": lambda model: model.predict_on_batch(X),
    "fit": lambda model: model.fit(X, Y, verbose=0),
    "evaluate": lambda model: model.evaluate(X, Y, verbose=0),
}
HOW = [{}, {"run_eagerly": True}]
if BACKEND == "tensorflow":  # JAX compiles anyway, and torch.compile is not tested.
    HOW.append({"jit_compile": True})


@pytest.mark.parametrize(
    ("run", "options"),
    # With options fit and evaluate have the same functions as train and test.
    [(r, how) for r in RUNS for how in HOW if not how or r not in ("fit", "evaluate")],
)
@pytest.mark.sampled
def test_no_function_traced_before_is_used_after(run, options):
    model = small()
    model.compile("sgd", "mse", **options)
    run = functools.partial(RUNS[run], model)
    assert hidden_dtype(model, run) == "float32"
    keras_mp.convert(model, "mixed_float16")
    assert hidden_dtype(model, run) == "float16"
    keras_mp.convert(model, "float32")
    assert hidden_dtype(model, run) == "float32"


def test_a_conversion_between_compile_and_the_first_fit():
    for build in (BUILDERS["sequential_without_input"], BUILDERS["lazy"]):
        model, x = build()
        model.compile("adam", "mse")
        keras_mp.convert(model, "mixed_float16")
        loss = train(model, x, np.ones((8, 2), "float32"))
        assert np.isfinite(loss[0])
        assert isinstance(model.optimizer, keras_mp.LossScaleOptimizer)
        half = [x for x in model._flatten_layers() if x.compute_dtype == "float16"]
        assert len(half) >= 1 and half != [model]


def test_a_scaler_of_the_users_own_stays_in_its_place():
    model = small()
    scaler = keras_mp.LossScaleOptimizer("adam", initial_scale=64.0)
    model.compile(scaler, "mse")
    train(model, X, Y)
    moments = list(scaler.variables)
    keras_mp.convert(model, "mixed_float16")
    assert model.optimizer is scaler
    train(model, X, Y)
    assert_the_very_same(moments, scaler.variables)
    assert (int(scaler.iterations), float(scaler.loss_scale)) == (2, 64.0)


@pytest.mark.parametrize(
    "scaled", [True, False], ids=["by Keras", "auto_scale_loss=False"]
)
@pytest.mark.usefixtures("installed")
def test_an_optimizer_that_is_not_ours_to_scale_stays_where_it_is(scaled):
    optimizer = keras.optimizers.SGD()
    if scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    model = small()
    model.compile(optimizer, "mse", auto_scale_loss=scaled)
    for policy in ("mixed_float16", "float32"):
        keras_mp.convert(model, policy)
        assert model.optimizer is optimizer
        assert np.isfinite(train(model, X, Y)[0])
        assert model.optimizer is optimizer


def test_a_model_within_another_is_compiled_for_itself():
    inner = small(name="inner")
    inner.compile("adam", "mse")
    inner.fit(X, Y, verbose=0)
    x = keras.Input((3,))
    outer = keras.Model(x, layers.Dense(2)(inner(x)))
    outer.compile("sgd", "mse")
    keras_mp.convert(outer, "mixed_float16")
    for model in (inner, outer):
        assert isinstance(model.optimizer, keras_mp.LossScaleOptimizer)
        assert hidden_dtype(inner, lambda m=model: m.fit(X, Y, verbose=0)) == "float16"
        assert int(model.optimizer.skipped_steps) == 0
    keras_mp.convert(outer, "float32")
    for model in (inner, outer):
        assert not isinstance(model.optimizer, keras_mp.LossScaleOptimizer)


# What a policy says ---------------------------------------------------------------


def ours(*float32):
    return functools.partial(keras_mp.MixedFloat16, float32=list(float32))


def a_map(default, hidden):
    entries = {"small/hidden": keras.DTypePolicy(hidden)}
    return keras.dtype_policies.DTypePolicyMap(default, entries)


FULL, MIXED = ["float32"] * 2, ["float16", "float32"]
SAYINGS = {
    "our object": (ours(), MIXED),
    "a class": (ours(layers.Dense), FULL),
    "a path": (ours("small/hidden"), FULL),
    "a path in the model": (ours("hidden"), FULL),
    "no path": (ours("hidd"), MIXED),
    "a predicate": (ours(lambda x: getattr(x, "units", 0) == 4), FULL),
    # The user's own words: not even the outputs are ours to choose.
    "Keras' own": (lambda: keras.DTypePolicy("mixed_bfloat16"), ["bfloat16"] * 2),
    "a map of Keras' own": (lambda: a_map("float32", "mixed_float16"), MIXED),
    "a map of ours": (lambda: a_map(ours()(), "float32"), FULL),
}


# That "no path" matches no layer is a warning, which tests/test_reach.py looks at.
@pytest.mark.filterwarnings("ignore:small has no layer that float32=:UserWarning")
@pytest.mark.parametrize("saying", SAYINGS)
@pytest.mark.parametrize("scope", ["float32", "mixed_float16", "mixed_bfloat16"])
def test_layers_get_what_the_policy_says_under_any_global_policy(saying, scope):
    make, expected = SAYINGS[saying]
    with keras_mp.policy_scope(scope):
        model = small()
        keras_mp.convert(model, make())
        assert computes(model) == expected
        assert model.outputs[0].dtype == expected[-1]
        assert dtype_of(model(X)) == expected[-1]
        assert computes(model) == expected
    assert dtype_of(model(X)) == expected[-1]
    keras_mp.convert(model, "float32")
    assert computes(model) == ["float32"] * 2
    assert model.outputs[0].dtype == "float32"


def test_whatever_a_layer_had_before_the_policy_replaces():
    model = small(dtype="mixed_bfloat16")
    assert computes(model) == ["bfloat16"] * 2
    keras_mp.convert(model, "mixed_float16")
    assert computes(model) == ["float16", "float32"]
    keras_mp.convert(model, "mixed_bfloat16")
    keras_mp.convert(model, "mixed_bfloat16")
    assert computes(model) == ["bfloat16", "float32"]


def test_a_single_layer_is_converted_too():
    layer = layers.Bidirectional(layers.LSTM(2))
    x = np.ones((1, 3, 2), "float32")
    before = values([layer(x)])
    keras_mp.convert(layer, "mixed_float16")
    assert dtype_of(layer(x)) == "float16"
    keras_mp.convert(layer, "float32")
    assert same_bits(before, values([layer(x)]))


def test_layers_that_do_not_compute_in_float32_are_left_alone():
    wide = "float32" if BACKEND == "jax" else "float64"  # JAX has no float64 here.
    inputs = keras.Input((3,))
    x = layers.Dense(4, dtype=wide, name="wide")(inputs)
    x = layers.Dense(8, name="int8")(x)
    x = layers.Dense(2, name="plain")(x)
    model = keras.Model(inputs, layers.Dense(2, name="head")(x))
    model.get_layer("int8").quantize("int8")
    before = arrays(model.predict(X, verbose=0))
    keras_mp.convert(model, "mixed_float16")
    kept = "float16" if BACKEND == "jax" else "float64"
    assert computes(model)[1:] == [kept, "float32", "float16", "float32"]
    assert model.get_layer("int8").quantization_mode == "int8"
    assert np.all(np.isfinite(model.predict(X, verbose=0)))
    keras_mp.convert(model, "float32")
    assert model.get_layer("wide").compute_dtype == wide
    assert same_bits(before, arrays(model.predict(X, verbose=0)))
    if BACKEND == "tensorflow":
        lookup = layers.StringLookup(vocabulary=["a"])
        before = lookup.compute_dtype
        assert "float" not in before
        keras_mp.convert(lookup, "mixed_float16")
        assert lookup.compute_dtype == before


# Agreement afterwards -------------------------------------------------------------


@both
def test_a_converted_model_is_saved_and_opened_in_the_same_precision(policy, tmp_path):
    model = small()
    model.compile("adam", "mse")
    train(model, X, Y)
    keras_mp.convert(model, policy)
    train(model, X, Y)
    model.save(tmp_path / "model.keras")
    opened = keras.models.load_model(tmp_path / "model.keras")
    assert computes(opened) == computes(model)
    assert type(opened.optimizer) is type(model.optimizer)
    want, got = (arrays(m.predict(X, verbose=0)) for m in (model, opened))
    assert same_bits(want, got)
    assert same_bits(
        values(model.optimizer.variables), values(opened.optimizer.variables)
    )
    assert train(model, X, Y) == train(opened, X, Y)
    keras_mp.convert(opened, "float32")
    assert computes(opened) == ["float32"] * 2


def test_the_summary_is_printed_and_counts_the_same_weights():
    model, before, after = small(), [], []
    model.summary(print_fn=before.append)
    keras_mp.convert(model, "mixed_float16")
    model.summary(print_fn=after.append)
    assert before == after


# Conversions that cannot be made --------------------------------------------------


class Float32Inputs(layers.Layer):
    """Works in float32 alone, as some custom layers do."""

    def call(self, x):
        if dtype_of(x) != "float32":
            raise TypeError("no kernel for " + dtype_of(x))
        return x * 1.0


class OnlyFloat32(layers.Layer):
    """No framework raises such an error for dtypes: it is not called again."""

    def call(self, x):
        if dtype_of(x) != "float32":
            raise ArithmeticError("no kernel for so few bits")
        return x * 1.0


ATTRIBUTES = (
    "_dtype_policy _convert_input_args built train_function test_function "
    "predict_function optimizer"
).split()


def snapshot(model):
    """All that a conversion changes, of a model and what is in it."""
    state = []
    for layer in model._flatten_layers():
        record = keras_mp.policies.record.record_of(layer)
        decision = keras_mp.policies.choosing.decision_for(layer)
        compiled = getattr(layer, "_compile_config", None)
        state += [
            (layer.name, layer.compute_dtype, layer.variable_dtype),
            [id(vars(layer).get(name)) for name in ATTRIBUTES],
            (id(record.chosen), record.keeps_input_dtypes, decision and decision.rule),
            (len(layer._inbound_nodes), [id(v) for v in layer.variables]),
            compiled and dict(compiled.config),
        ]
    return state, symbolic_dtypes(model)


@contextlib.contextmanager
def refused(model, error, message=None):
    """Nothing is changed by what raises within."""
    keras_mp.install()
    unseen.make_up(model)  # It only remembers: see `test_doors.py`.
    state = snapshot(model)
    with pytest.raises(error, match=message):
        yield
    assert snapshot(model) == state


def impossible():
    x = keras.Input((3,))
    block = keras.Sequential(
        [layers.Dense(3), OnlyFloat32(name="careful")], name="block"
    )
    y = layers.Dense(2)(block(layers.Dense(4, name="hidden")(x)))
    return keras.Model(x, layers.Dense(2)(OnlyFloat32(name="other")(y)))


@pytest.mark.parametrize("before", ["float32", "kept"])
def test_a_conversion_that_fails_names_the_layer_and_changes_nothing(before):
    model = impossible()
    model.compile("adam", "mse")
    if before == "kept":
        keras_mp.convert(model, keras_mp.MixedFloat16(float32=[OnlyFloat32]))
    train(model, X, Y)
    want = arrays(model.predict(X, verbose=0))
    message = (
        "(?s)`model` must be able.*careful.*OnlyFloat32.*no kernel for so few bits"
    )
    with refused(model, ValueError, message):
        keras_mp.convert(model, "mixed_bfloat16")
    assert same_bits(want, arrays(model.predict(X, verbose=0)))
    train(model, X, Y)


@pytest.mark.parametrize("moment", [(symbolic, "refresh"), (choosing, "record_of")])
def test_an_interrupt_changes_nothing(moment, monkeypatch):
    model = impossible()
    model.compile("adam", "mse")
    train(model, X, Y)
    keras_mp.install()
    unseen.make_up(model)
    place, name = moment
    original, calls = getattr(place, name), itertools.count()

    def interrupted_once(*args):
        result = original(*args)
        if next(calls) == (0 if name == "refresh" else 2):
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(place, name, interrupted_once)
    with refused(model, KeyboardInterrupt):
        keras_mp.convert(model, keras_mp.MixedFloat16(float32=[OnlyFloat32]))
    train(model, X, Y)


def test_a_layer_without_state_that_fails_for_its_dtypes_is_kept_in_float32():
    x = keras.Input((3,))
    y = Float32Inputs(name="careful")(layers.Dense(4, name="hidden")(x))
    model = keras.Model(x, layers.Dense(2)(y))
    model.compile("adam", "mse")
    with pytest.warns(UserWarning, match="careful mixes dtypes in half precision"):
        keras_mp.convert(model, "mixed_bfloat16")
    assert model.get_layer("hidden").compute_dtype == "bfloat16"
    assert model.get_layer("careful").output.dtype == "float32"
    train(model, X, Y)


class WithoutGraph(keras.Model):
    """A subclassed model, one of whose layers computes in float32 only."""

    def __init__(self):
        super().__init__(name="outer")
        self.hidden = layers.Dense(4, name="hidden")
        self.careful = OnlyFloat32(name="careful")

    def call(self, x):
        return self.hidden(self.careful(x))


def test_so_does_one_of_a_subclassed_model_that_was_called_before():
    model = WithoutGraph()
    want = arrays(model.predict(X, verbose=0))
    with refused(model, ValueError, r"'careful' \(OnlyFloat32\) raises"):
        keras_mp.convert(model, "mixed_bfloat16")
    assert same_bits(want, arrays(model.predict(X, verbose=0)))
    keras_mp.convert(model, keras_mp.MixedBFloat16(float32=[OnlyFloat32]))
    model.predict(X, verbose=0)


class NotSymbolic(keras.Model):
    """A subclassed model that looks at values: it cannot be called symbolically."""

    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(4)

    def call(self, x):
        y = self.hidden(x) * 2
        return y if np.sum(keras.ops.convert_to_numpy(x)) > 0 else -y


def test_a_model_that_cannot_be_called_symbolically_is_converted_all_the_same():
    model = NotSymbolic()
    model(X)
    keras_mp.convert(model, "mixed_float16")
    assert dtype_of(model(X)) == "float32"
    assert dtype_of(model.call(keras.ops.convert_to_tensor(X))) == "float16"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_model_whose_variables_are_half_is_refused(dtype):
    model = small(dtype=dtype)
    for policy in ("mixed_float16", "mixed_bfloat16", "float32"):
        with refused(model, ValueError, f"hidden.*Dense.*is {dtype}"):
            keras_mp.convert(model, policy)


KEEPS = "`policy` must keep variables.*hidden.*Dense"
IS_ONE = "`policy` must be.*Received: policy="


@pytest.mark.parametrize(
    ("sentence", "policy"),
    [
        *((KEEPS, policy) for policy in ("float16", "bfloat16", "float64")),
        *((IS_ONE, policy) for policy in ("mixed_float32", "int8", "", None, 16)),
    ],
)
def test_a_policy_that_will_not_do_is_refused(sentence, policy):
    model = small()
    with refused(model, ValueError, sentence):
        keras_mp.convert(model, policy)


@pytest.mark.parametrize("model", [None, "model", layers.Dense, object()])
def test_what_is_no_model_is_refused(model):
    with pytest.raises(TypeError, match="`model` must be a keras.Model or a layer"):
        keras_mp.convert(model, "mixed_float16")


def test_a_predicate_that_raises_leaves_the_model_as_it_was():
    def predicate(layer):
        if layer.name == "head":
            raise ZeroDivisionError("mine")
        return False

    model = small()
    with refused(model, ZeroDivisionError, "mine"):
        keras_mp.convert(model, keras_mp.MixedFloat16(float32=[predicate]))


@pytest.mark.parametrize("name", BUILDERS)
def test_every_layer_has_the_policy_on_the_way_there_and_back(name):
    model, _ = BUILDERS[name]()
    before = [layer.compute_dtype for layer in model._flatten_layers()]
    for policy in ("mixed_float16", "float32", "mixed_bfloat16", "float32"):
        keras_mp.convert(model, policy)
        dtypes = {
            layer.compute_dtype
            for layer, dtype in zip(model._flatten_layers(), before, strict=True)
            if dtype == "float32"
        }
        assert dtypes <= {"float32", POLICIES.get(policy)}
        found = model._flatten_layers()
        inputs = [x for x in found if isinstance(x, layers.InputLayer)]
        assert {x.dtype_policy.name for x in inputs} <= {policy}


# In plain Keras as well.
@pytest.mark.filterwarnings("ignore:Layer InputLayer does not have a `quantize`")
@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_a_model_that_was_converted_to_float32_can_be_quantized(mode, mixed_float16):
    inputs = keras.Input((8,))
    outputs = layers.Dense(4)(layers.Dense(8, activation="relu")(inputs))
    model = keras.Model(inputs, outputs)
    x = np.random.default_rng(0).normal(size=(3, 8)).astype("float32")
    (expected,) = arrays(keras_mp.convert(model, "float32")(x))
    model.quantize(mode)
    (found,) = arrays(model(x))
    assert found.dtype == "float32"
    error = np.max(np.abs(found - expected)) / np.max(np.abs(expected))
    assert error < {"int8": 0.05, "int4": 0.5}[mode]


def test_the_output_layer_of_a_subclassed_model_is_float32_on_the_way_back(
    mixed_float16,
):
    class Two(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.last = layers.Dense(4), layers.Dense(2)

        def call(self, x):
            return self.last(self.first(x))

    model = Two()
    model(np.ones((1, 3), "float32"))
    for policy in ("mixed_float16", "float32", "mixed_float16"):
        keras_mp.convert(model, policy)
    assert [x.compute_dtype for x in (model.first, model.last)] == [
        "float16",
        "float32",
    ]
