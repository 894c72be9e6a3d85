"""What keras_mp takes for granted of each private name of Keras, one test a name.

When an upgrade of Keras moves one, the test with its name fails here first.
"""

import contextlib
import pathlib
import re

import keras
import numpy as np
import pytest
from backends import BACKEND, dtype_of
from keras import layers, ops

import keras_mp.keras_private as private
from keras_mp.backends import engine

X, Y = np.ones((2, 3), "float32"), np.ones((2, 1), "float32")


def small_model():
    inputs = keras.Input((3,))
    return keras.Model(inputs, layers.Dense(1)(layers.Dense(4)(inputs)))


def trained_model(optimizer="adam"):
    model = small_model()
    model.compile(optimizer, "mse")
    model.fit(X, Y, verbose=0)
    return model


def seen_in_a_call(look, **options):
    """What `look` returns while a layer is called."""
    seen = []

    class Look(layers.Layer):
        def call(self, x):
            seen.append(look())
            return x

    Look(**options)(ops.convert_to_tensor(X))
    return seen[-1]


def built(optimizer, *values):
    variables = [keras.Variable(value) for value in values]
    optimizer.build(variables)
    return optimizer, variables


class Nested(layers.Layer):
    """A layer made of a layer, with a variable of its own."""

    def __init__(self):
        super().__init__()
        self.outer = keras.Sequential([layers.Dense(2)])
        self.gain = self.add_weight(shape=(), trainable=False)

    def call(self, x):
        return self.outer(x)


def names_in_private():
    return [
        name
        for name, value in vars(private).items()
        if not name.startswith("_")
        and (getattr(value, "__module__", "").startswith("keras_mp") or name.isupper())
    ] + [
        "backend_core backend_nn backend_numpy backend_random backend_rnn",
        "get_keras_mask set_keras_mask get_stateless_scope policy_module current_path",
        "Functional untracked PartialBatches ops_nn",
    ]


def test_each_name_has_its_test():
    tested = pathlib.Path(__file__).read_text()
    for names in names_in_private():
        for name in names.split():
            assert f"private.{name}" in tested, f"private.{name} has no test"


def test_a_name_that_moved_is_an_error_of_one_sentence():
    message = "needs keras.src.gone.name, which Keras .* does not have: run `pip"
    gone = private._find("keras.src.gone:name")
    assert isinstance(gone, private.Missing)
    with pytest.raises(ImportError, match=message):
        gone()
    with pytest.raises(ImportError, match=message):
        gone.anything  # noqa: B018
    with pytest.raises(ImportError, match=message):
        isinstance(3, gone)


@pytest.mark.once("It reads files of the repository.")
def test_the_newest_keras_is_the_newest_release_that_the_table_of_versions_has():
    # For `private.moved`, which recommends it.
    contributing = pathlib.Path(__file__).parents[1] / "CONTRIBUTING.md"
    rows = re.findall(
        r"^\| \S+ \| 3\.\d+ \| (\d+)\.(\d+)\.\d+ \|", contributing.read_text(), re.M
    )
    newest = max((int(major), int(minor)) for major, minor in rows)
    assert private.NEWEST_KERAS == "{}.{}".format(*newest)


def test_the_first_path_that_keras_has_is_taken():
    assert private._find("keras.src.gone:name", "keras.ops:add") is ops.add


@pytest.mark.parametrize(
    "module, call",
    [
        (private.backend_core, lambda: ops.convert_to_numpy(ops.ones(()))),
        (private.backend_nn, lambda: ops.relu(X)),
        (private.backend_numpy, lambda: ops.arange(3)),
        (private.backend_random, lambda: keras.random.normal((2,))),
    ],
    ids=["convert_to_numpy", "relu", "arange", "normal"],
)
def test_operations_look_themselves_up_in_their_backend_module(
    module, call, monkeypatch, request
):
    name = request.node.callspec.id
    monkeypatch.setattr(module, name, lambda *args, **kwargs: "replaced")
    assert call() == "replaced"


def test_recurrent_layers_look_their_kernels_up_in_the_backend(monkeypatch):
    def lstm(*args, **kwargs):
        raise ZeroDivisionError

    monkeypatch.setattr(private.backend_rnn, "lstm", lstm)
    with pytest.raises(ZeroDivisionError):
        layers.LSTM(2)(np.ones((2, 3, 4), "float32"))


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="a fact about JAX")
def test_from_keras_3_16_on_the_batches_of_one_call_come_together():
    model, seen = keras.Sequential([layers.Dense(1)]), []
    model.compile("sgd", "mse", steps_per_execution=2)
    model.fit(X, X[:, :1], batch_size=1, verbose=0)
    function = vars(model)["train_function"]

    def spied(state, iterator):
        return function(state, (seen.append(item) or item for item in iterator))

    model.train_function = spied
    model.fit(np.ones((3, 3)), np.ones((3, 1)), batch_size=1, verbose=0)
    if private.PartialBatches is None:
        assert [item[0].shape for item in seen] == [(1, 3)] * 3
    else:
        assert seen[0][0].shape == (2, 1, 3)
        assert isinstance(seen[1], private.PartialBatches) and len(seen[1]) == 1


def test_a_mask_is_attached_to_a_tensor():
    tensor, mask = ops.ones((2,)), ops.ones((2,), "bool")
    assert private.get_keras_mask(tensor) is None
    private.set_keras_mask(tensor, mask)
    assert private.get_keras_mask(tensor) is mask


def test_a_stateless_scope_holds_the_values_that_updates_write():
    variable = keras.Variable(1, dtype="int32", trainable=False)
    with keras.StatelessScope() as scope:
        variable.assign(2)
        assert private.get_stateless_scope() is scope
        assert int(scope.get_current_value(variable)) == 2
    assert int(variable.value) == 1


def test_the_current_path_is_that_of_the_open_name_scopes():
    with keras.name_scope("outer"), keras.name_scope("inner"):
        assert private.current_path() == "outer/inner"


def test_models_with_a_graph_are_functional():
    assert isinstance(small_model(), private.Functional)
    assert not isinstance(keras.Sequential(), private.Functional)


def test_an_attribute_that_is_set_untracked_is_no_part_of_the_layer():
    class Holder(layers.Layer):
        @private.untracked
        def hold(self, inner):
            self.inner = inner

    layer, inner = Holder(), layers.Dense(1)
    layer.hold(inner)
    assert layer.inner is inner
    assert private.layers_in(layer, itself=False) == []
    layer.inner = inner
    assert private.layers_in(layer, itself=False) == [inner]


def test_automatic_names_are_counted_and_can_be_counted_again():
    before = private.names_given()
    first = layers.Dense(1).name
    assert layers.Dense(1).name != first
    private.set_names_given(before)
    assert layers.Dense(1).name == first


def test_a_thread_has_no_policy_until_somebody_asks_or_sets_it():
    keras.utils.clear_session()
    assert private.policy_of_thread() is None
    first, second = (keras.DTypePolicy("mixed_bfloat16") for _ in range(2))
    keras.config.set_dtype_policy(first)
    assert private.policy_of_thread() is first
    private.set_policy_of_thread(second)
    assert keras.config.dtype_policy() is second


def test_keras_looks_the_global_policy_up_in_one_module(monkeypatch):
    monkeypatch.setattr(private.policy_module, "dtype_policy", lambda: "mine")
    assert keras.dtype_policies.get(None) == "mine"


@pytest.mark.skipif(BACKEND != "jax", reason="there Keras 3.11 keeps shardings")
def test_shardings_of_variables_are_recorded_anew_where_keras_does():
    model = trained_model()
    calls = []
    model._record_training_state_sharding_spec = lambda: calls.append(1)
    private.record_shardings(model)
    del model._record_training_state_sharding_spec
    assert calls == [1]
    private.record_shardings(small_model())  # Nothing where there is no such method.


def test_classes_of_keras_are_told_from_those_of_users():
    assert private.is_keras_own(layers.Dense)
    assert not private.is_keras_own(Nested)


def test_an_optimizer_of_another_backend_is_recognized_by_its_module():
    adam = type("Adam", (), {"__module__": "keras.src.backend.torch.optimizers.adam"})
    assert private.backend_of(adam) == "torch"
    assert private.backend_of(layers.Dense) is None
    here = BACKEND if BACKEND == "torch" else None
    assert private.backend_of(type(keras.optimizers.Adam())) == here


def test_preprocessing_layers_have_a_base_without_an_export():
    classes = private.preprocessing_classes()
    assert layers.RandomCrop in classes and layers.Hashing in classes
    assert layers.Dense not in classes and layers.Layer not in classes


def test_keras_has_a_context_while_a_layer_is_called():
    assert seen_in_a_call(private.call_under_way)
    assert private.call_under_way() is None


@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "mixed_bfloat16"])
def test_a_layer_in_half_precision_casts_its_variables(policy):
    in_a_call = seen_in_a_call(private.is_autocast_to_half, dtype=policy)
    assert in_a_call == (policy != "float32")
    assert not private.is_autocast_to_half()


def test_a_graph_is_run_by_a_method_that_wraps_each_operation():
    inputs = keras.Input((2,))
    model = keras.Model(inputs, ops.relu(keras.layers.Dense(3)(inputs)))
    run = []

    def noted(operation):
        run.append(type(operation).__name__)
        return operation

    x = ops.ones((1, 2))
    result = getattr(model, private.RUN)([x], operation_fn=noted)
    np.testing.assert_array_equal(*map(ops.convert_to_numpy, (result, model(x))))
    assert run == ["Dense", "Relu"]


def test_a_cast_output_keeps_its_mask_and_logits():
    x = ops.cast(ops.convert_to_tensor(X), "bfloat16")
    mask = ops.ones((2,), "bool")
    private.set_keras_mask(x, mask)
    cast = private.cast_output(x)
    assert dtype_of(cast) == "float32"
    assert private.get_keras_mask(cast) is mask
    if BACKEND == "tensorflow":
        probabilities = ops.softmax(x)
        logits = private.cast_output(probabilities)._keras_logits
        assert dtype_of(logits) == "float32"
        assert ops.convert_to_numpy(logits).tolist() == X.tolist()


def test_the_policy_of_a_layer_is_an_attribute():
    layer = layers.Dense(1, dtype="mixed_bfloat16")
    assert vars(layer)[private.DTYPE_POLICY] is layer.dtype_policy
    private.set_policy(layer, keras.DTypePolicy("float32"))
    assert layer.compute_dtype == "float32"


def test_a_policy_that_is_set_is_written_into_the_map_of_a_built_layer():
    policies = keras.dtype_policies.DTypePolicyMap("float32")
    layer = layers.Dense(1, dtype=policies)
    layer.build((None, 2))
    layer.dtype_policy = keras.DTypePolicy("mixed_float16")
    assert vars(layer)[private.DTYPE_POLICY] is policies
    assert policies[layer.path].name == "mixed_float16"


def test_a_layer_casts_its_inputs_unless_the_attribute_says_no():
    layer = layers.Identity(dtype="mixed_bfloat16")
    assert dtype_of(layer(X)) == "bfloat16"
    setattr(layer, private.CONVERT_INPUTS, False)
    output = layer(ops.convert_to_tensor(X))
    assert dtype_of(output) == "float32"


def test_a_layer_lists_the_layers_that_it_is_made_of_parents_first():
    layer = Nested()
    layer(X)
    dense = layer.outer.layers[0]
    found = private.layers_in(layer)
    assert found[0] is layer and layer.outer in found
    assert len(found) == len({id(each) for each in found})
    assert found.index(layer.outer) < found.index(dense)
    assert private.layers_in(layer, itself=False, nested=False) == [layer.outer]


def test_a_layer_lists_its_own_variables_without_those_of_its_children():
    layer = Nested()
    layer(X)
    assert private.own_trainable(layer) == []
    assert [v is layer.gain for v in private.own_variables(layer)] == [True]
    assert [v is layer.gain for v in private.own_state(layer)] == [True]
    frozen = layers.Dense(1)
    frozen.build((None, 3))
    frozen.trainable = False
    assert private.own_trainable(frozen) == frozen.weights
    assert private.own_state(frozen) == []


def test_a_layer_builds_again():
    layer = layers.Normalization(mean=1.0, variance=4.0)
    layer.build((None, 3))
    layer.input_mean = 2.0
    private.build_again(layer)
    assert float(np.max(ops.convert_to_numpy(layer.mean))) == 2


def test_a_path_can_be_set():
    layer = layers.Dense(1)
    private.set_path(layer, "model/dense")
    assert layer.path == "model/dense"


def test_the_default_of_a_map_is_none_where_the_global_policy_stands_in():
    maps = keras.dtype_policies.DTypePolicyMap
    assert private.default_in_map(maps()) is None
    given = keras.DTypePolicy("mixed_bfloat16")
    assert private.default_in_map(maps(given)) is given


def test_losses_that_layers_added_are_forgotten():
    model = keras.Sequential([layers.ActivityRegularization(l2=1.0)])
    model(X)
    assert model.losses
    private.clear_losses(model)
    assert not model.losses


def test_a_layer_has_losses_of_its_own():
    layer = layers.ActivityRegularization(l2=1.0)
    model = keras.Sequential([layer])
    model(X)
    assert private.own_losses(model) == [] and len(private.own_losses(layer)) == 1
    with keras.StatelessScope():
        assert private.own_losses(layer) == []


def test_a_variable_says_whether_it_is_read_in_the_compute_dtype():
    assert private.is_autocast(keras.Variable(1.0))
    assert not private.is_autocast(keras.Variable(1.0, autocast=False))


def test_in_an_autocast_scope_of_none_an_embedding_is_read_as_it_is():
    """So `AutocastScope` does; without it Keras autocasts what says it does not."""
    embedding = layers.Embedding(3, 2, dtype="mixed_float16")
    dtypes = []
    embedding.call = lambda ids: dtypes.append(embedding.embeddings.dtype) or ids
    embedding.build()
    embedding(np.zeros((1,), "int32"))
    with private.AutocastScope(None):
        embedding(np.zeros((1,), "int32"))
    assert not embedding.autocast
    assert dtypes[0] == "float16" and dtypes[1] == "float32"


def test_remat_looks_its_function_up_in_the_backend(monkeypatch):
    seen = []
    monkeypatch.setattr(private.backend_remat, "remat", seen.append)
    keras.remat(seen)
    assert seen == [seen]


def test_normalize_is_looked_up_in_its_module(monkeypatch):
    monkeypatch.setattr(private.ops_nn, private.NORMALIZE, lambda x, **options: "mine")
    assert ops.normalize(X) == ops.nn.normalize(X) == "mine"


def test_the_autocast_dtype_is_that_of_the_layer_in_call():
    policy = keras.DTypePolicy("mixed_bfloat16")
    assert seen_in_a_call(private.autocast_dtype, dtype=policy) == "bfloat16"
    assert private.autocast_dtype() is None
    with private.AutocastScope(None):
        assert private.autocast_dtype() is None


def test_the_raw_value_keeps_its_dtype_in_an_autocast_scope():
    from keras_mp.policies.policy import MixedFloat16

    variable = keras.Variable(1.0)

    def look():
        dtypes = variable.value.dtype, private.raw_value(variable).dtype
        return [keras.backend.standardize_dtype(dtype) for dtype in dtypes]

    assert seen_in_a_call(look, dtype=MixedFloat16()) == ["float16", "float32"]


def values_of(variable):
    return ops.convert_to_numpy(variable.value).tolist()


def test_variables_hold_other_tensors_for_a_while():
    variables = [keras.Variable(np.full(3, i, "float32")) for i in (1, 2)]
    others = [ops.zeros(3), ops.zeros(3), "another"]
    with private.holding(variables, others):
        assert [values_of(v) for v in variables] == [[0, 0, 0]] * 2
    assert [values_of(v) for v in variables] == [[1, 1, 1], [2, 2, 2]]


def test_a_variable_is_given_another_tensor_as_it_is():
    variable = keras.Variable([1.0, 2.0])
    part = ops.convert_to_tensor([3.0])
    private.set_raw_value(variable, part)
    assert private.raw_value(variable) is part
    assert variable.shape == (2,)


def test_every_assignment_goes_through_one_method(monkeypatch):
    written = []
    original = getattr(keras.Variable, private.WRITE)

    def write(self, value):
        written.append(self)
        return original(self, value)

    monkeypatch.setattr(keras.Variable, private.WRITE, write)
    variable = keras.Variable(1.0)
    written.clear()
    variable.assign(2.0)
    variable.assign_add(1.0)
    assert [v is variable for v in written] == [True, True]


def test_the_dtype_of_a_symbolic_tensor_can_be_set():
    tensor = keras.Input((3,))
    private.set_symbolic_dtype(tensor, "float16")
    assert tensor.dtype == "float16"


def test_a_sequential_model_has_a_graph_once_it_is_built():
    model = keras.Sequential([layers.Dense(1)])
    assert private.graph_of(model) is None
    model.build((None, 3))
    assert isinstance(private.graph_of(model), private.Functional)


def test_a_graph_lists_its_calls_by_depth_to_be_made_again_with_other_tensors():
    model = small_model()
    depths = private.nodes_by_depth(model)
    (last,), (first,) = depths[0], depths[max(depths)]
    assert (first.operation, last.operation) == (model.layers[0], model.layers[-1])
    assert first.is_input and last.outputs[0] is model.outputs[0]
    other = keras.KerasTensor(last.input_tensors[0].shape)
    args, kwargs = last.arguments.fill_in({id(last.input_tensors[0]): other})
    assert args[0] is other and not kwargs


def test_a_layer_knows_its_symbolic_calls_and_a_tensor_its_operation():
    layer = layers.Dense(3)
    first = layer(keras.Input((3,)))
    second = layer(first)
    assert len(private.calls_of(layer)) == 2
    assert private.calls_of(layer)[0].output_tensors[0] is first
    assert private.origin(second) == (layer, 1)


def test_a_sequential_model_keeps_its_input_among_its_layers():
    dense = layers.Dense(1)
    model = keras.Sequential([keras.Input((3,)), dense])
    assert len(private.sequential_layers(model)) == 2
    private.set_sequential_layers(model, [dense])
    assert private.sequential_layers(model) == [dense] == model.layers


def test_a_model_is_built_from_one_batch_with_metrics_and_optimizer():
    model = keras.Sequential([layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
    private.build_from_batch(model, (X, Y))
    assert model.built and model.optimizer.built
    assert "mae" in [metric.name for metric in model.metrics[1].metrics]


def test_the_arguments_of_compile_are_kept_for_files():
    model = small_model()
    model.compile("adam", "mse")
    assert private.compile_config(model)["loss"] == "mse"
    private.compile_config(model)["loss"] = "mae"
    assert model.get_compile_config()["loss"] == "mae"


@pytest.mark.skipif(BACKEND != "jax", reason="`fit` passes its state round on JAX only")
def test_the_state_of_fit_is_attached_and_detached():
    model = trained_model()
    first, *others = [v.value for v in model.trainable_variables]
    state = {
        "trainable_variables": [ops.ones_like(first) * 7, *others],
        "non_trainable_variables": [],
        "optimizer_variables": [v.value for v in model.optimizer.variables],
        "metrics_variables": [v.value for v in model.metrics_variables],
    }
    private.note_state(model, state)
    assert private.noted_state(model) is state
    private.attach_state(model, state)
    assert float(ops.max(model.trainable_variables[0].value)) == 7
    private.detach_state(model, ["trainable_variables"])
    assert private.raw_value(model.trainable_variables[0]) is None


def test_the_steps_of_an_optimizer_that_accumulates_are_counted_undivided():
    model = trained_model(keras.optimizers.SGD(gradient_accumulation_steps=2))
    model.fit(X, Y, verbose=0)
    assert int(ops.copy(private.applied_steps(model.optimizer).value)) == 2
    assert int(ops.copy(model.optimizer.iterations)) == 1


def test_an_optimizer_knows_its_variables_and_their_places_and_refuses_others():
    optimizer, variables = built(keras.optimizers.SGD(), 0.0, 1.0)
    assert [private.index_in(optimizer, v) for v in variables] == [0, 1]
    private.check_known(optimizer, variables)
    with pytest.raises(ValueError, match="Unknown variable"):
        private.check_known(optimizer, [keras.Variable(0.0)])
    private.track(optimizer, another := keras.Variable(0.0))
    assert any(v is another for v in optimizer.variables)


def test_moving_averages_are_kept_in_the_order_of_the_variables():
    model = trained_model(keras.optimizers.SGD(use_ema=True))
    averages = private.averages(model.optimizer)
    assert [a.shape for a in averages] == [v.shape for v in model.trainable_variables]


def test_a_schedule_stays_a_schedule():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    assert private.learning_rate(keras.optimizers.SGD(schedule)) is schedule
    assert private.learning_rate(object()) is None


@pytest.mark.skipif(BACKEND != "torch", reason="torch alone updates all at once")
def test_an_update_step_takes_gradients_variables_and_a_rate():
    optimizer, (variable,) = built(keras.optimizers.Adam(), [1.0])
    seen = []
    vars(optimizer)[private.UPDATE_STEP] = lambda *args: seen.append(args)
    gradient = ops.ones(1)
    optimizer.apply([gradient], [variable])
    ((grads, variables, rate),) = seen
    assert grads[0] is gradient
    assert variables[0] is variable
    assert float(rate) == pytest.approx(1e-3)


@pytest.mark.parametrize("amsgrad", [False, True])
def test_adam_slots_are_its_moments(amsgrad):
    adam = keras.optimizers.Adam(amsgrad=amsgrad)
    optimizer, variables = built(adam, [1.0], [2.0, 3.0])
    optimizer.apply([ops.ones(1), ops.ones(2)], variables)
    first, second, largest = private.adam_slots(optimizer, variables[::-1])
    assert [x.shape for x in first] == [(2,), (1,)]
    np.testing.assert_allclose(first[0], 0.1, rtol=1e-6)
    np.testing.assert_allclose(second[1], 0.001, rtol=1e-5)
    assert len(largest) == (2 if amsgrad else 0)


def test_a_variable_names_another_dtype_for_a_while():
    variable = keras.Variable([1.0], dtype="bfloat16")
    with private.as_dtype([variable], "float32"):
        assert variable.dtype == "float32"
        assert "bfloat16" in str(private.raw_value(variable).dtype)
    assert variable.dtype == "bfloat16"


def test_the_dtype_in_which_a_variable_is_read():
    variable = keras.Variable([1.0], dtype="bfloat16")
    for scope, dtype in ((None, "bfloat16"), ("float16", "float16")):
        with private.AutocastScope(scope):
            read = dtype_of(variable.value)
            assert private.dtype_when_read(variable) == read == dtype
    assert private.dtype_when_read(variable) == "bfloat16"


@pytest.mark.parametrize("set_dtype", [private.set_dtype, engine.set_dtype])
@pytest.mark.parametrize("deferred", [False, True])
def test_a_variable_becomes_one_of_another_dtype(deferred, set_dtype):
    with keras.StatelessScope() if deferred else contextlib.nullcontext():
        variable = keras.Variable(keras.initializers.Ones(), (2,), dtype="bfloat16")
        assert private.stored_dtype(variable) == "bfloat16"
        set_dtype(variable, "float32")
    assert private.stored_dtype(variable) == variable.dtype == "float32"
    assert dtype_of(variable.value) == "float32"
    np.testing.assert_array_equal(variable, [1.0, 1.0])
    variable.assign([3.0, 4.0])
    np.testing.assert_array_equal(variable, [3.0, 4.0])


def test_the_innermost_layer_in_a_call_is_known():
    seen = []

    class Inner(layers.Layer):
        def call(self, x):
            seen.append(private.layer_in_call())
            return x

    class Outer(Inner):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def call(self, x):
            return super().call(self.inner(x))

    outer = Outer()
    for _ in range(2):
        outer(X)
        assert (seen.pop(0), seen.pop(0)) == (outer.inner, outer)
    assert private.layer_in_call() is None


def test_a_wrapper_shares_the_count_of_updates():
    wrapper, inner = keras.optimizers.SGD(), keras.optimizers.SGD()
    private.share_steps(wrapper, inner)
    inner.apply([ops.ones(1)], [keras.Variable([1.0])])
    assert int(wrapper.iterations) == 1


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Nadam", "Lamb"])
def test_plain_methods_write_by_assign(name):
    optimizer = getattr(keras.optimizers, name)(weight_decay=0.1)
    _, (variable,) = built(optimizer, np.ones((2, 3), "float32"))
    methods = private.plain_methods(optimizer)
    assert bool(methods) == (BACKEND != "jax")  # Which writes so anyway.
    vars(optimizer).update(methods)
    no_grad = contextlib.nullcontext()
    if BACKEND == "torch":
        import torch

        no_grad = torch.no_grad()
    with keras.StatelessScope() as scope, no_grad:  # It notes what is assigned to.
        optimizer.apply([ops.ones((2, 3))], [variable])
    assert scope.get_current_value(variable) is not None
    np.testing.assert_array_equal(variable, np.ones((2, 3)))


def test_the_filter_of_tracebacks_asks_of_each_file_and_makes_a_traceback():
    # private.tracebacks, private.INCLUDE_FRAME
    assert vars(private.tracebacks)[private.INCLUDE_FRAME](__file__)
    try:
        raise ValueError
    except ValueError as error:
        private.drop_internal_frames(error)
        assert error.__traceback__.tb_frame.f_code.co_filename == __file__


def test_an_interrupt_at_an_instruction_without_a_line_keeps_its_traceback():
    def interrupted():
        raise KeyboardInterrupt

    interrupted.__code__ = interrupted.__code__.replace(co_linetable=b"")
    with pytest.raises(KeyboardInterrupt) as caught:
        interrupted()
    before = caught.value.__traceback__
    assert before.tb_next.tb_lineno is None
    private.drop_internal_frames(caught.value)
    assert caught.value.__traceback__ is before


def test_keras_asks_for_its_setter_where_a_thread_has_no_policy(monkeypatch):
    private.set_policy_of_thread(None)
    asked = []
    monkeypatch.setattr(
        private.policy_module,
        "set_dtype_policy",
        lambda policy: asked.append(private.is_default_being_set()),
    )
    keras.config.dtype_policy()
    private.policy_module.set_dtype_policy("float32")
    assert asked == [True, False]


def test_each_compile_leaves_an_object_of_its_own():
    model = trained_model()
    first = private.last_compile(model)
    assert first.config is private.compile_config(model)
    model.compile("sgd", "mse")
    assert private.last_compile(model) is not first


def test_keras_has_what_all_else_stands_on():
    private.check()


@pytest.mark.skipif(BACKEND != "torch", reason="torch has generators")
def test_a_seeded_draw_gets_its_generator_by_this_name(monkeypatch):
    asked = []
    monkeypatch.setattr(private.backend_random, private.SEEDED, asked.append)
    keras.random.uniform((2,), seed=7)
    assert asked == [7]


@pytest.mark.skipif(BACKEND != "torch", reason="a kernel of torch wraps it")
def test_keras_converts_numbers_here(monkeypatch):
    place, name = private.backend_conversions, "convert_to_tensor"
    monkeypatch.setattr(place, name, lambda x, *args, **kwargs: f"{x} here")
    assert ops.convert_to_tensor(1.0) == "1.0 here"
    assert ops.cast(2, "float32") == "2 here"


def test_operations_are_where_keras_looks_them_up():
    for name in ("add", "relu", "normalize", "Variable.assign", "Orthogonal.__call__"):
        place, attribute = private.place_of(name)
        assert callable(vars(place)[attribute])
    assert private.place_of("nonsense") is None
