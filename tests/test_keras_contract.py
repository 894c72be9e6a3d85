"""The facts about Keras that keras_mp stands on, one small test a fact.

When an upgrade of Keras breaks one, the failure is a sentence, the test's name with
its docstring, and `grep` for its nouns finds the seam that stands on it.

Only Keras is imported here. The facts hold whether or not some other test has
imported keras_mp, which wraps methods of Keras: where a test looks at one of
those it unwraps it first, with `keras_own`.
"""

import functools
import inspect
import io
import pathlib
import sys
import zipfile

import keras
import numpy as np
import pytest
from keras import layers, ops, optimizers
from keras.src import backend as keras_backend

# Variable.__array__ of Keras 3.15 takes no `copy`, which NumPy 2 warns about
# wherever Keras itself reads a variable with `Variable.numpy()`: in the config of
# an optimizer, or on saving.
pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"
)

BACKEND = keras.backend.backend()


def only_on(*backends):
    about = " and ".join(backends)
    return pytest.mark.skipif(BACKEND not in backends, reason=f"a fact about {about}")


only_on_jax, only_on_tensorflow = only_on("jax"), only_on("tensorflow")
only_on_torch = only_on("torch")
not_on_tensorflow = only_on("jax", "torch")
not_on_torch = only_on("jax", "tensorflow")
mended_in_3_16 = pytest.mark.skipif(
    tuple(map(int, keras.__version__.split(".")[:2])) >= (3, 16),
    reason="Keras 3.16 has mended it; nothing of ours stands on it there",
)


def as_fact(test):
    """Makes the name and the docstring of a test the message of its failure.

    Other exceptions count as failures too: a private attribute that is gone
    raises an AttributeError, and the sentence says more.
    """
    name = test.__name__.removeprefix("test_").replace("_", " ")
    sentence = " ".join(f"{name}. {test.__doc__ or ''}".split())

    @functools.wraps(test)
    def holds(*args, **kwargs):
        try:
            return test(*args, **kwargs)
        except Exception as failure:
            raise AssertionError(
                f"Not so in Keras {keras.__version__} on {BACKEND}: {sentence} "
                f"({type(failure).__name__}: {failure})"
            ) from failure

    return holds


# What the tests look at ----------

KERAS_FOLDER = str(pathlib.Path(keras.__file__).parent)


def keras_own(function):
    """Takes off what others have wrapped round a function of Keras."""
    return inspect.unwrap(
        function, stop=lambda f: f.__code__.co_filename.startswith(KERAS_FOLDER)
    )


def defining_class(name, cls=keras.Model):
    return next(base for base in cls.__mro__ if name in vars(base))


def all_subclasses(cls):
    for subclass in cls.__subclasses__():
        yield subclass
        yield from all_subclasses(subclass)


def subclasses_in_keras(cls):
    return {
        subclass
        for subclass in all_subclasses(cls)
        if subclass.__module__.startswith("keras.")
    }


def compile_as_keras(model, *args, **kwargs):
    keras_own(defining_class("compile").compile)(model, *args, **kwargs)


def numpy_of(x):
    return ops.convert_to_numpy(x)


def dtype_of(x):
    return keras.backend.standardize_dtype(x.dtype)


def tensor(values, dtype="float32"):
    return ops.convert_to_tensor(np.asarray(values, dtype))


def dense_model(dtype=None):
    return keras.Sequential([keras.Input((3,)), layers.Dense(2, dtype=dtype)])


def functional_model(dtype=None):
    inputs = keras.Input((3,))
    return keras.Model(inputs, layers.Dense(2, dtype=dtype)(inputs))


def data():
    return np.ones((4, 3), "float32"), np.zeros((4, 2), "float32")


def built_keras_scaler(inner="sgd", **kwargs):
    scaler = optimizers.LossScaleOptimizer(optimizers.get(inner), **kwargs)
    variable = keras.Variable(np.ones(2, "float32"))
    scaler.build([variable])
    return scaler, variable


class CustomPolicy(keras.DTypePolicy):
    """A policy of someone else's, as keras_mp's own are."""


# Variables and stateless scopes: what the select-on-write scope stands on ----------


def test_a_write_in_a_stateless_scope_calls_add_update_with_one_pair():
    """Of the variable and its value: assign, assign_add and assign_sub alike."""
    received = []

    class Recording(keras.StatelessScope):
        def add_update(self, update):
            received.append(update)
            super().add_update(update)

    variable = keras.Variable(1.0)
    with Recording():
        variable.assign(2.0)
        variable.assign_add(2.0)
        variable.assign_sub(1.0)
    assert all(seen is variable for seen, _ in received)
    assert [float(numpy_of(value)) for _, value in received] == [2.0, 4.0, 3.0]


def test_assign_in_a_stateless_scope_converts_to_the_variables_dtype_first():
    variable = keras.Variable(1.0, dtype="float32")
    with keras.StatelessScope() as scope:
        variable.assign(tensor(2.0, "float16"))
    value = scope.get_current_value(variable)
    assert dtype_of(value) == "float32"


def test_a_stateless_scope_has_the_values_of_the_variables_that_it_knows():
    """In a dict by id(variable); of others get_current_value returns None."""
    known, unknown = keras.Variable(1.0), keras.Variable(1.0)
    with keras.StatelessScope([(known, tensor(5.0))]) as scope:
        pass
    assert isinstance(scope.state_mapping, dict)
    assert list(scope.state_mapping) == [id(known)]
    assert float(scope.get_current_value(known)) == 5.0
    assert scope.get_current_value(unknown) is None


def test_a_nested_stateless_scope_and_the_outer_one_do_not_see_each_others_values():
    """A variable has its real value inside the nested one."""
    variable, assigned = keras.Variable(1.0), keras.Variable(1.0)
    with keras.StatelessScope([(variable, tensor(5.0))]) as outer:
        assert numpy_of(variable) == 5.0
        with keras.StatelessScope():
            assert numpy_of(variable) == 1.0
            assigned.assign(5.0)
        assert numpy_of(variable) == 5.0
    assert outer.get_current_value(assigned) is None


# Optimizers: what the wrapper stands on ----------


@not_on_tensorflow
def test_stateless_apply_calls_apply_inside_a_stateless_scope():
    """The base class' method, which gathers the values from that scope."""
    calls = []

    class AssignsSeven(optimizers.SGD):
        def apply(self, *args, **kwargs):
            calls.append((len(args), kwargs, keras_backend.in_stateless_scope()))
            variable.assign(7.0)
            self.iterations.assign(9)

    variable = keras.Variable(1.0)
    optimizer = AssignsSeven()
    optimizer.build([variable])
    (new_variable,), new_state = optimizer.stateless_apply(
        [v.value for v in optimizer.variables], [tensor(0.0)], [tensor(1.0)]
    )
    assert calls == [(1, {}, True)]
    assert float(new_variable) == 7.0
    assert int(new_state[0]) == 9
    assert numpy_of(variable) == 1.0
    assert numpy_of(optimizer.iterations) == 0


@only_on_tensorflow
def test_stateless_apply_raises_on_tensorflow():
    optimizer, variable = optimizers.SGD(), keras.Variable(1.0)
    optimizer.build([variable])
    with pytest.raises(ValueError, match="stateless_apply is not supported"):
        optimizer.stateless_apply(
            [v.value for v in optimizer.variables], [tensor(0.0)], [tensor(1.0)]
        )


@only_on_jax
def test_an_optimizer_assigns_through_the_stateless_scope_on_jax():
    optimizer, variable = optimizers.SGD(), keras.Variable(1.0)
    with keras.StatelessScope() as scope:
        optimizer.assign(variable, tensor(2.0))
        optimizer.assign_add(variable, tensor(2.0))
        optimizer.assign_sub(variable, tensor(1.0))
    assert float(scope.get_current_value(variable)) == 3.0
    assert numpy_of(variable) == 1.0


@only_on_tensorflow
def test_an_optimizer_assigns_past_the_stateless_scope_on_tensorflow():
    """A scope that selects in add_update never hears of it."""
    optimizer, variable = optimizers.SGD(), keras.Variable(1.0)
    with keras.StatelessScope() as scope:
        optimizer.assign(variable, tensor(2.0))
    assert scope.get_current_value(variable) is None
    assert numpy_of(variable) == 2.0


def test_apply_gradients_calls_apply_with_gradients_and_variables():
    calls = []

    class Recording(optimizers.SGD):
        def apply(self, grads, trainable_variables=None):
            calls.append((list(grads), list(trainable_variables)))

    variable, gradient = keras.Variable(1.0), tensor(2.0)
    Recording().apply_gradients([(gradient, variable)])
    (((seen_gradient,), (seen_variable,)),) = calls
    assert seen_gradient is gradient
    assert seen_variable is variable


def test_the_scalers_own_variables_come_first_and_in_this_order():
    scaler, _ = built_keras_scaler("adam")
    names = [variable.name for variable in scaler.variables]
    assert names[:4] == ["iteration", "learning_rate", "step_counter", "dynamic_scale"]
    inner = scaler.inner_optimizer.variables
    assert [id(v) for v in scaler.variables[4:]] == [id(v) for v in inner]


def test_an_optimizer_starts_with_its_iterations_an_integer():
    adam = optimizers.Adam()
    assert [variable.name for variable in adam.variables[:1]] == ["iteration"]
    assert keras.backend.is_int_dtype(adam.variables[0].dtype)


def test_an_optimizer_loads_by_number_from_as_many_entries_as_it_has_variables():
    load = keras_own(keras.optimizers.Optimizer.load_own_variables)
    sgd = optimizers.SGD()
    load(sgd, {"0": np.int32(3), "1": np.float32(0.5)})
    assert int(sgd.iterations) == 3
    with pytest.warns(UserWarning, match="has 2 variables whereas .* has 3 variables"):
        load(sgd, {"0": np.int32(5), "1": np.float32(0.5), "2": np.float32(0.5)})
    assert int(sgd.iterations) == 3


def test_the_scaler_has_two_variables_before_it_is_built():
    """The scale and its counter are made by build."""
    scaler = optimizers.LossScaleOptimizer(optimizers.SGD())
    own = scaler.variables[: -len(scaler.inner_optimizer.variables)]
    assert [variable.name for variable in own] == ["iteration", "learning_rate"]


def test_the_scalers_config_has_these_four_keys():
    scaler, _ = built_keras_scaler()
    keys = {"name", "inner_optimizer", "initial_scale", "dynamic_growth_steps"}
    assert set(scaler.get_config()) == keys


def test_the_scaler_switches_the_inner_optimizers_fixed_scale_off():
    inner = optimizers.SGD(loss_scale_factor=8.0)
    optimizers.LossScaleOptimizer(inner)
    assert inner.loss_scale_factor is None


def test_the_scalers_iterations_and_learning_rate_are_the_inner_optimizers():
    scaler, _ = built_keras_scaler()
    assert scaler.iterations is scaler.inner_optimizer.iterations
    assert scaler.learning_rate is scaler.inner_optimizer.learning_rate


def step_counter_and_scale_after(steps, scaler, variable):
    """Takes finite steps the way that each backend's Trainer does."""
    values, state = [variable.value], [v.value for v in scaler.variables]
    for _ in range(steps):
        gradients = [tensor([1.0, 1.0])]
        if BACKEND == "jax":
            values, state = scaler.stateless_apply(state, gradients, values)
        else:
            scaler.apply(gradients, [variable])
            state = scaler.variables
    return int(numpy_of(state[2])), float(numpy_of(state[3]))


@pytest.mark.parametrize(
    ("counter", "steps", "expected"),
    [(0, 3, (0, 2)), (3, 5, (8, 1))],
    ids=["up to the growth step", "from past it"],
)
def test_the_growth_step_itself_doubles_the_scale_and_none_past_it(
    counter, steps, expected
):
    """It grows when step_counter == dynamic_growth_steps - 1, and starts again at 0."""
    scaler, variable = built_keras_scaler(dynamic_growth_steps=3)
    scaler.step_counter.assign(counter)
    counter, scale = step_counter_and_scale_after(steps, scaler, variable)
    assert (counter, scale / scaler.initial_scale) == expected


@only_on_jax
def test_the_scalers_stateful_apply_leaks_tracers_on_eager_jax():
    """It raises, and the values of the variables are lost."""
    import jax

    scaler, variable = built_keras_scaler()
    with pytest.raises(jax.errors.UnexpectedTracerError):
        scaler.apply([tensor([1.0, 1.0])], [variable])
    for lost in (variable, scaler.step_counter, scaler.dynamic_scale):
        assert isinstance(lost._value, jax.core.Tracer)


@only_on("tensorflow", "torch")  # On JAX its stateful apply leaks tracers.
def test_the_scaler_halves_its_scale_down_to_zero_and_doubles_it_up_to_infinity():
    scaler, variable = built_keras_scaler(dynamic_growth_steps=1)
    for _ in range(170):
        scaler.apply([tensor([np.nan, np.nan])], [variable])
    assert numpy_of(scaler.dynamic_scale) == 0
    scaler.dynamic_scale.assign(2.0**127)
    scaler.apply([tensor([1.0, 1.0])], [variable])
    assert numpy_of(scaler.dynamic_scale) == np.inf


def fit_on_infinities(optimizer):
    stack = layers.BatchNormalization(), layers.Dense(2)
    model = keras.Sequential([keras.Input((3,)), *stack])
    model.compile(optimizers.LossScaleOptimizer(optimizer), "mse")
    x = np.full((4, 3), np.inf, "float32")
    loss = model.fit(x, np.ones((4, 2)), batch_size=2, verbose=0).history["loss"]
    return model, loss


def test_a_skipped_step_leaves_nan_in_statistics_and_in_the_loss_of_the_epoch():
    model, loss = fit_on_infinities(optimizers.SGD())
    assert np.isnan(loss).all()
    statistics = model.layers[0].non_trainable_variables
    assert not np.isfinite([np.asarray(v) for v in statistics]).all()


def test_a_fit_of_skipped_steps_ends_with_averages_of_zero_in_the_weights():
    """Averages of use_ema start at zero, and fit writes them at its end."""
    model, _ = fit_on_infinities(optimizers.SGD(use_ema=True))
    assert not any(np.any(np.asarray(v)) for v in model.trainable_variables)


@not_on_torch
def test_an_unbuilt_scaler_multiplies_a_float16_loss_in_float16():
    """There 4 times 32768 is infinite."""
    scaler = optimizers.LossScaleOptimizer(optimizers.SGD())
    scaled = scaler.scale_loss(tensor(4.0, "float16"))
    assert dtype_of(scaled) == "float16"
    assert np.isinf(numpy_of(scaled))


@only_on_torch
def test_dividing_a_float16_gradient_by_the_scale_stays_in_float16_on_torch():
    scaler, _ = built_keras_scaler()
    unscaled = ops.divide(tensor([1.0], "float16"), scaler.dynamic_scale)
    assert dtype_of(unscaled) == "float16"


# Trainer.compile: what the compile seam stands on ----------


def test_compile_is_defined_on_trainer():
    """BaseTrainer from Keras 3.16 on."""
    assert defining_class("compile").__name__ in ("Trainer", "BaseTrainer")


def test_compile_of_every_model_class_in_keras_reaches_trainers():
    """They inherit it or (Distiller) call super().compile."""
    trainers = defining_class("compile")
    models = subclasses_in_keras(keras.Model)
    assert {"Sequential", "Functional"} <= {model.__name__ for model in models}
    for model in models:
        definer = defining_class("compile", model)
        if definer is not trainers:
            assert "super().compile(" in inspect.getsource(definer.compile), model


def test_compile_keeps_the_optimizer_it_was_handed():
    """So a file has that, not the wrapper that compile put round it."""
    model = dense_model("mixed_float16")
    model.dtype_policy = "mixed_float16"
    handed = optimizers.SGD()
    compile_as_keras(model, handed, "mse")
    assert isinstance(model.optimizer, optimizers.LossScaleOptimizer)
    assert model.optimizer.inner_optimizer is handed
    assert model._compile_config.config["optimizer"] is handed
    assert model.get_compile_config()["optimizer"]["class_name"] == "SGD"


def test_the_compile_config_forgets_auto_scale_loss():
    """So a saved model forgets that the user said no."""
    model = dense_model()
    compile_as_keras(model, "sgd", "mse", auto_scale_loss=False)
    assert "auto_scale_loss" not in model._compile_config.config
    assert "auto_scale_loss" not in model.get_compile_config()


def test_compile_from_config_passes_every_key_to_compile(monkeypatch):
    """Ones that Keras did not write as well."""
    received = {}
    config = {"loss": "mse", "auto_scale_loss": False, "novel": 1}

    def compile(self, **kwargs):
        received.update(kwargs)

    monkeypatch.setattr(defining_class("compile"), "compile", compile)
    keras.Sequential().compile_from_config(config)
    assert received == config


def load_with_compile_wrapped_on(owner, monkeypatch):
    model = dense_model()
    model.compile("sgd", "mse")
    config = model.get_compile_config()
    original = owner.compile

    def wrapper(self, *args, **kwargs):
        return original(self, *args, **kwargs)

    monkeypatch.setattr(owner, "compile", wrapper)
    loaded = dense_model()
    loaded.compile_from_config(config)
    return loaded


def test_wrapping_compile_on_its_defining_class_leaves_loading_alone(monkeypatch):
    trainer = defining_class("compile")
    assert load_with_compile_wrapped_on(trainer, monkeypatch).compiled


def test_wrapping_compile_on_model_breaks_loading(monkeypatch):
    """compile_from_config compares the class' compile with Trainer.compile."""
    with pytest.warns(UserWarning, match="`compile\\(\\)` method is custom"):
        model = load_with_compile_wrapped_on(keras.Model, monkeypatch)
    assert not model.compiled


def test_compile_wraps_by_the_name_of_the_models_policy():
    """A model whose only layer computes in float16 is left unscaled."""
    model, handed = dense_model("mixed_float16"), optimizers.SGD()
    compile_as_keras(model, handed, "mse")
    assert model.layers[0].compute_dtype == "float16"
    assert model.optimizer is handed


def test_compile_forgets_the_functions_it_made():
    model = dense_model()
    model.train_function = model.test_function = model.predict_function = len
    compile_as_keras(model, "sgd", "mse")
    assert model.train_function is None
    assert model.test_function is None
    assert model.predict_function is None


def test_a_compiled_loss_is_float32_for_float16_predictions():
    model = dense_model()
    model.compile("sgd", "mse")
    model.build((None, 3))
    loss = model.compute_loss(
        y=tensor([[0.0, 0.0]]), y_pred=tensor([[1.0, 1.0]], "float16")
    )
    assert dtype_of(loss) == "float32"


# The train step: what the roll-back seam stands on ----------


def step_that_counts(calls):
    """A train step of the backend's own shape."""
    if BACKEND == "jax":
        return lambda state, data: (calls.append(1), ({}, state))[1]
    return lambda data: (calls.append(1), {"loss": tensor(0.0)})[1]


def model_with_step(calls, **how):
    model = dense_model()
    model.compile("sgd", "mse", **how)
    model.__dict__["train_step"] = step_that_counts(calls)
    make_train_function_as_keras(model)
    return model


def call_train_function(model):
    batch = tensor([1.0])
    if BACKEND == "jax":
        model.train_function((), iter([batch]))
    else:
        model.train_function([batch] if BACKEND == "torch" else iter([batch]))


def make_train_function_as_keras(model):
    keras_own(type(model).make_train_function)(model)


@pytest.mark.parametrize("run_eagerly", [True, False])
def test_make_train_function_uses_the_train_step_of_the_instance(run_eagerly):
    """One put into model.__dict__ before the call."""
    calls = []
    call_train_function(model_with_step(calls, run_eagerly=run_eagerly))
    assert len(calls) == 1


@not_on_torch
def test_make_train_function_keeps_the_train_step_it_read():
    """Also when the instance no longer has it."""
    model = model_with_step(calls := [])
    del model.__dict__["train_step"]
    call_train_function(model)
    assert len(calls) == 1


@only_on_torch
def test_train_function_looks_the_train_step_up_at_each_call_on_torch():
    early, late = [], []
    model = model_with_step(early)
    model.__dict__["train_step"] = step_that_counts(late)
    call_train_function(model)
    assert (early, late) == ([], [1])


def test_make_train_function_keeps_a_function_that_is_there():
    """Unless force=True."""
    model = dense_model()
    model.compile("sgd", "mse")
    make_train_function_as_keras(model)
    first = model.train_function
    make_train_function_as_keras(model)
    assert model.train_function is first
    keras_own(type(model).make_train_function)(model, force=True)
    assert model.train_function is not first


@pytest.mark.parametrize(
    "name", ["make_train_function", "get_metrics_result", "__call__"]
)
def test_every_model_of_keras_inherits_this_method_from_one_class(name):
    """From the backend's trainer, from where compile is, and from Layer."""
    definer = defining_class(name)
    if name == "make_train_function":
        assert f"backend.{BACKEND}." in definer.__module__
    elif name == "get_metrics_result":
        assert definer is defining_class("compile")
    else:
        assert definer is layers.Layer
    for model in subclasses_in_keras(keras.Model):
        assert defining_class(name, model) is definer, model


def test_fit_takes_the_logs_of_an_epoch_from_get_metrics_result(monkeypatch):
    """At its end, outside of a step."""
    model = dense_model()
    model.compile("sgd", "mse")
    result = keras_own(type(model).get_metrics_result)

    def sevens(self):
        return {name: 7.0 for name in result(self)}

    monkeypatch.setattr(type(model), "get_metrics_result", sevens)
    history = model.fit(np.ones((2, 3)), np.ones((2, 2)), verbose=0).history
    assert history["loss"] == [7.0]


def test_a_metric_that_measured_nothing_is_all_zeros():
    for metric in (keras.metrics.Mean(), keras.metrics.AUC(), keras.metrics.F1Score()):
        metric.update_state(np.ones((2, 2)), np.ones((2, 2)))
        assert any(np.any(np.asarray(v)) for v in metric.variables)
        metric.reset_state()
        assert not any(np.any(np.asarray(v)) for v in metric.variables)


def calls_of_one_step():
    """Which methods of the optimizer are called, and in what state."""
    model, optimizer, calls = dense_model(), optimizers.SGD(), []
    # Eagerly, so that nothing is written down by a second trace.
    model.compile(optimizer, "mse", run_eagerly=True)
    optimizer.build(model.trainable_variables)
    model.build((None, 3))

    def spied(method):
        def call(*args):
            scope = "stateless" if keras_backend.in_stateless_scope() else "stateful"
            calls.append((method.__name__, scope))
            return method(*args)

        return call

    for name in ("scale_loss", "stateless_apply", "apply_gradients", "apply"):
        vars(optimizer)[name] = spied(getattr(optimizer, name))
    model.train_on_batch(*data())
    return calls


def test_the_train_step_scales_and_updates_by_these_methods_of_the_optimizer():
    """Inside a StatelessScope where it scales on JAX; on torch not by
    apply_gradients."""
    calls = calls_of_one_step()
    if BACKEND == "jax":
        # Keras first traces the step once to build what is not built: only the
        # order of the two matters.
        calls = [call for call in calls if call[0] != "apply"]
    expected = {
        "jax": [("scale_loss", "stateless"), ("stateless_apply", "stateful")],
        "tensorflow": [
            (n, "stateful") for n in ("scale_loss", "apply_gradients", "apply")
        ],
        "torch": [("scale_loss", "stateful"), ("apply", "stateful")],
    }[BACKEND]
    assert calls[-len(expected) :] == expected


@only_on_jax
@pytest.mark.parametrize(
    "read",
    [
        lambda callback: callback._model.jax_state_sync(),
        lambda callback: callback.model,
    ],
    ids=["jax_state_sync", "self.model"],
)
def test_fit_purges_the_variables_on_jax_until_a_callback_reads_them(read):
    """The _value of every model and optimizer variable is None during an epoch, and
    model.jax_state_sync() puts the values back, which reading self.model calls."""
    model, seen = dense_model(), []

    def look():
        variables = model.variables + model.optimizer.variables
        seen.append([variable._value is None for variable in variables])

    class Reads(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            look()
            read(self)
            look()

    model.compile("adam", "mse")
    model.fit(*data(), verbose=0, callbacks=[Reads()])
    before, after = seen
    assert all(before)
    assert not any(after)


# Layer.__call__: what the policy seam stands on ----------


def test_every_layer_of_keras_reaches_the_call_of_layer():
    """Except FeatureSpace, which has nothing to compute in float16."""
    classes = subclasses_in_keras(layers.Layer)
    assert len(classes) > 100
    past_it = {
        layer.__name__
        for layer in classes
        if "__call__" in vars(layer)
        and "super().__call__(" not in inspect.getsource(vars(layer)["__call__"])
    }
    assert past_it == {"FeatureSpace"}


def test_a_policy_set_before_the_first_call_decides_the_symbolic_dtype():
    inputs = keras.Input((3,))
    layer = layers.Dense(2, dtype="mixed_float16")
    layer.dtype_policy = keras.DTypePolicy("float32")
    assert layer(inputs).dtype == "float32"


def test_a_policy_set_on_a_built_model_leaves_the_symbolic_output_as_it_was():
    model = functional_model("mixed_float16")
    model.layers[-1].dtype_policy = "float32"
    assert model.layers[-1].compute_dtype == "float32"
    assert model.output.dtype == "float16"


@not_on_torch
def test_a_policy_set_on_a_built_model_leaves_the_traced_functions_as_they_were():
    model = functional_model("mixed_float16")
    model.compile("sgd", "mse", auto_scale_loss=False, jit_compile=BACKEND == "jax")
    model.make_predict_function()
    traced = model.predict_on_batch(data()[0]).dtype
    model.layers[-1].dtype_policy = (
        "float32" if traced == np.float16 else "mixed_float16"
    )
    assert model.predict_on_batch(data()[0]).dtype == traced
    model.make_predict_function(force=True)
    assert model.predict_on_batch(data()[0]).dtype != traced


# Policies ----------


def test_a_policy_is_shared_and_never_copied():
    """The global one by keras.config and new layers, a parent's by its children."""
    policy = CustomPolicy("mixed_float16")
    keras.config.set_dtype_policy(policy)
    assert keras.config.dtype_policy() is policy
    assert layers.Dense(2).dtype_policy is policy
    parent = layers.Dense(2, dtype=CustomPolicy("mixed_float16"))
    child = layers.Dense(2, dtype=parent.dtype_policy)
    assert child.dtype_policy is parent.dtype_policy


def test_policies_are_equal_when_type_and_name_are():
    """Nothing else is compared."""
    assert keras.DTypePolicy("mixed_float16") == keras.DTypePolicy("mixed_float16")
    assert keras.DTypePolicy("mixed_float16") != keras.DTypePolicy("mixed_bfloat16")
    assert keras.DTypePolicy("mixed_float16") != CustomPolicy("mixed_float16")
    assert CustomPolicy("mixed_float16") != keras.DTypePolicy("mixed_float16")
    one, other = CustomPolicy("mixed_float16"), CustomPolicy("mixed_float16")
    one.float32, other.float32 = (), ("head",)
    assert one == other


def test_a_policy_cannot_be_hashed():
    """So it is neither in a set nor a key of a dict."""
    with pytest.raises(TypeError, match="unhashable"):
        hash(keras.DTypePolicy("float32"))


def test_from_config_replaces_a_policy_by_its_name():
    """By Keras' own, unless it is a map or quantized; a registered subclass too."""
    layer = layers.Dense(2, dtype=CustomPolicy("mixed_float16"))
    with keras.saving.CustomObjectScope({"CustomPolicy": CustomPolicy}):
        reopened = layers.Dense.from_config(layer.get_config())
    assert type(reopened.dtype_policy) is keras.DTypePolicy
    assert reopened.dtype_policy.name == "mixed_float16"


def test_from_config_needs_a_custom_policy_to_be_registered():
    """A file that names such a policy would not open without keras_mp."""
    layer = layers.Dense(2, dtype=CustomPolicy("mixed_float16"))
    # An AttributeError: what Keras deserializes such a policy to is the class'
    # name. A TypeError that says so where the class comes from __main__.
    with pytest.raises((AttributeError, TypeError)):
        layers.Dense.from_config(layer.get_config())


@pytest.mark.parametrize(
    "policy",
    [
        keras.dtype_policies.DTypePolicyMap("mixed_float16"),
        keras.dtype_policies.QuantizedDTypePolicy("int8", "float32"),
    ],
    ids=["map", "quantized"],
)
def test_from_config_keeps_policies_of_this_kind(policy):
    layer = layers.Dense(2, dtype=policy)
    reopened = layers.Dense.from_config(layer.get_config())
    assert type(reopened.dtype_policy) is type(policy)
    assert reopened.dtype_policy.get_config() == policy.get_config()


@mended_in_3_16
def test_a_policy_map_without_a_default_strips_its_live_policies_of_their_names():
    """Its get_config sets their _name to None."""
    policy = keras.DTypePolicy("mixed_float16")
    policies = keras.dtype_policies.DTypePolicyMap()
    policies["dense"] = policy
    policies.get_config()
    assert policy.name is None
    assert policy.compute_dtype == "float16"


def test_a_layer_asks_its_policy_map_by_its_path():
    policies = keras.dtype_policies.DTypePolicyMap("float32", {})
    policies["half"] = keras.DTypePolicy("mixed_float16")
    layer = layers.Dense(2, dtype=policies, name="half")
    layer.build((None, 3))
    assert layer.path == "half"
    assert layer.compute_dtype == "float16"


@pytest.mark.parametrize("build", [dense_model, functional_model])
def test_a_reopened_model_forgets_its_own_policy(build):
    """A graph's: under float32 the model is float32 and its layers are float16."""
    keras.config.set_dtype_policy("mixed_float16")
    config = build().get_config()
    keras.config.set_dtype_policy("float32")
    model = build().__class__.from_config(config)
    assert model.compute_dtype == "float32"
    assert model.layers[-1].compute_dtype == "float16"
    handed = optimizers.SGD()
    compile_as_keras(model, handed, "mse")
    assert model.optimizer is handed


# Symbolic tensors: what the float32 output layers stand on ----------


@only_on_tensorflow
def test_a_float16_softmax_loses_its_logits_when_it_is_cast():
    """On TensorFlow softmax leaves them on its output, for the loss to use."""
    for dtype, kept in (("float16", False), ("float32", True)):
        probabilities = keras.activations.softmax(tensor([[1.0, 2.0]], dtype))
        assert hasattr(probabilities, "_keras_logits")
        in_the_loss = ops.convert_to_tensor(probabilities, dtype="float32")
        assert hasattr(in_the_loss, "_keras_logits") is kept


# Names: what `compare` and `inspect` stand on ----------


def test_the_operation_of_a_symbolic_sum_is_of_a_class_named_sum():
    total = ops.sum(keras.Input((3,)), axis=-1)
    kind = type(total._keras_history.operation)
    assert kind.__name__ == "Sum" and kind.__module__.split(".")[0] == "keras"


def test_the_kernel_of_a_layer_is_a_weight_named_kernel():
    """With LoRA too."""
    for layer, shape in (
        (layers.Dense(4), (2, 8, 3)),
        (layers.EinsumDense("abc,cd->abd", (None, 4)), (2, 8, 3)),
        (layers.Conv1D(4, 3), (2, 8, 3)),
        (layers.Conv2DTranspose(4, 3), (2, 8, 8, 3)),
    ):
        layer.build(shape)
        kernel = tuple(layer.kernel.shape)
        if hasattr(layer, "enable_lora"):
            layer.enable_lora(2)
        (found,) = [tuple(w.shape) for w in layer.weights if w.name == "kernel"]
        assert found == kernel


# Files ----------


def test_a_file_has_the_scaled_optimizers_variables_twice(tmp_path):
    """By number, all of them, and the inner optimizer's under inner_optimizer."""
    h5py = pytest.importorskip("h5py")
    model = dense_model()
    scaler = optimizers.LossScaleOptimizer(optimizers.Adam())
    model.compile(scaler, "mse")
    scaler.build(model.trainable_variables)
    model.save(tmp_path / "model.keras")
    with zipfile.ZipFile(tmp_path / "model.keras") as archive:
        weights = h5py.File(io.BytesIO(archive.read("model.weights.h5")))
    optimizer = weights["optimizer"]

    def numbers(count):
        return {str(number) for number in range(count)}

    inner = scaler.inner_optimizer
    assert set(optimizer["vars"]) == numbers(len(scaler.variables))
    assert set(optimizer["inner_optimizer/vars"]) == numbers(len(inner.variables))
    assert optimizer["vars/3"][()] == scaler.initial_scale


# Files: what the seam in Layer.get_config stands on ---------------------------------


def test_a_layers_config_names_its_policy_and_the_policys_class():
    """Under "dtype", where Dense and others that build on Layer.get_config keep it."""
    layer = layers.Dense(2, dtype=CustomPolicy("mixed_float16"))
    for config in (keras_own(layers.Layer.get_config)(layer), layer.get_config()):
        assert config["dtype"]["class_name"] == "CustomPolicy"
        assert config["dtype"]["config"] == {"name": "mixed_float16"}


# What `convert`, the model's door and the repaired attention stand on -----------------


@pytest.fixture
def without_seams():
    """Keras as it is, also where another test has imported keras_mp."""
    keras_mp = sys.modules.get("keras_mp")
    if keras_mp is None:
        yield
        return
    keras_mp.uninstall()
    yield
    keras_mp.install()


plain_keras = pytest.mark.usefixtures("without_seams")


class Returns(layers.Layer):
    """Keeps what its `call` was given, and returns it."""

    def call(self, x):
        self.given = x
        return x


class Door(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first = Returns(dtype="float32")

    def call(self, x):
        return self.first(x)


@plain_keras
def test_the_arguments_of_layers_init_are_keywords_only():
    """So a seam can take keywords alone too."""
    signature = inspect.signature(layers.Layer.__init__)
    kinds = {parameter.kind.name for parameter in signature.parameters.values()}
    assert kinds == {"POSITIONAL_OR_KEYWORD", "KEYWORD_ONLY", "VAR_KEYWORD"}
    with pytest.raises(TypeError):
        layers.Layer("name")


@plain_keras
def test_a_subclassed_model_rounds_what_it_is_called_with():
    """Whatever its first layer computes in, unless `_convert_input_args = False`."""
    for converts, expected in ((True, 2048.0), (False, 2049.0)):
        model = Door(dtype="mixed_float16")
        assert model._convert_input_args
        model._convert_input_args = converts
        assert float(numpy_of(model(tensor([2049.0])))[0]) == expected


@plain_keras
def test_functional_models_do_not_convert_their_arguments():
    """Functional.__init__ sets `_convert_input_args = False`: its graph casts."""
    assert functional_model("mixed_float16")._convert_input_args is False


@plain_keras
def test_a_sequential_model_builds_an_input_of_its_first_layers_compute_dtype():
    """An InputLayer in front, where none is there."""
    model = keras.Sequential([layers.Dense(1, dtype="mixed_float16")])
    model.build((None, 2))
    assert isinstance(model._layers[0], layers.InputLayer)
    assert model._layers[0].dtype == "float16"
    model = keras.Sequential([layers.Dense(1, dtype="mixed_float16")])
    own = layers.InputLayer(batch_shape=(None, 2), dtype="float32")
    model._layers = [own, *model._layers]
    model.build((None, 2))
    assert model._layers[0] is own
    assert model._functional.inputs[0].dtype == "float32"


@plain_keras
def test_a_graph_casts_its_inputs_to_its_symbolic_dtypes():
    x = keras.Input((1,), dtype="float16")
    model = keras.Model(x, Returns(dtype="float32")(x))
    assert float(numpy_of(model(tensor([[2049.0]])))[0, 0]) == 2048


@mended_in_3_16
@plain_keras
def test_a_reopened_layer_has_a_path_without_its_models_name(tmp_path):
    """Keras builds it outside of its model, so a policy map does not find it."""
    model = keras.Sequential(
        [keras.Input((2,)), layers.Dense(1, name="dense")], name="model"
    )
    assert model.layers[0].path == "model/dense"
    model.save(tmp_path / "model.keras")
    opened = keras.models.load_model(tmp_path / "model.keras")
    assert opened.layers[0].path == "dense"


@plain_keras
def test_what_stands_beside_the_config_of_an_object_is_passed_over():
    config = keras.saving.serialize_keras_object(optimizers.SGD())
    config["keras_mp_heads"] = [3]
    opened = keras.saving.deserialize_keras_object(config)
    assert isinstance(opened, optimizers.SGD)


def test_normalization_casts_its_constants_once():
    """In `build`, given `_build_input_shape`, or after `adapt` in `finalize_state`."""
    layer = layers.Normalization(mean=[1.0], variance=[1.0], dtype="float16")
    layer.build((None, 1))
    layer.dtype_policy = "float32"
    assert dtype_of(layer.mean) == "float16"
    type(layer).build(layer, layer._build_input_shape)
    assert dtype_of(layer.mean) == "float32"
    layer = layers.Normalization(dtype="float16")
    layer.adapt(np.ones((2, 1), "float32"))
    layer.dtype_policy = "float32"
    assert layer.input_mean is None and dtype_of(layer.mean) == "float16"
    layer.finalize_state()
    assert dtype_of(layer.mean) == "float32"


@plain_keras
def test_a_time_distributed_layer_calls_the_call_of_its_layer():
    """Not the layer: its policy is never asked."""
    inner = Returns(dtype="mixed_float16")
    wrapper = layers.TimeDistributed(inner)
    wrapper(tensor(np.ones((1, 2, 3))))
    assert not inner._called and dtype_of(inner.given) == "float32"


@plain_keras
def test_bidirectional_copies_its_layers_and_their_cells():
    """It makes them anew of a config, with policies of their own."""
    layer = layers.LSTM(1)
    wrapper = layers.Bidirectional(layer)
    default = keras.config.dtype_policy()
    assert layer.dtype_policy is default
    for copy in (wrapper.forward_layer, wrapper.backward_layer):
        assert copy is not layer
        for part in (copy, copy.cell):
            assert part.dtype_policy is not default
            assert part.dtype_policy == default


@plain_keras
def test_attention_asks_the_backend_for_its_product_at_each_call(monkeypatch):
    """`backend.nn.dot_product_attention`, of ops and of MultiHeadAttention."""
    calls = []
    nn = keras_backend.nn if hasattr(keras_backend, "nn") else keras_backend.ops.nn
    original = nn.dot_product_attention

    def counted(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(nn, "dot_product_attention", counted)
    x = tensor(np.ones((1, 2, 4)))
    layers.MultiHeadAttention(1, 4)(x, x)
    q = tensor(np.ones((1, 2, 1, 4)))
    ops.dot_product_attention(q, q, q)
    assert len(calls) == 2


@plain_keras
@only_on_tensorflow
def test_attention_on_tensorflow_scales_its_logits_after_their_product():
    """q·k beyond 65504 is inf in float16, though it is not once it is scaled."""
    q = tensor(np.full((1, 2, 1, 16), 100.0), "float16")
    result = numpy_of(ops.dot_product_attention(q, q, q))
    assert not np.all(np.isfinite(result))


@plain_keras
@only_on_jax
def test_attention_on_jax_has_no_float16_kernel_for_cpus():
    """jax.nn.dot_product_attention asks for a precision that CPUs do not have."""
    import jax

    if jax.devices()[0].platform != "cpu":
        pytest.skip("a fact about CPUs")
    q = tensor(np.ones((1, 2, 1, 16)), "float16")
    with pytest.raises(Exception, match="F16_F16_F32"):
        jax.jit(ops.dot_product_attention)(q, q, q)


@plain_keras
@only_on_tensorflow
@pytest.mark.parametrize("options", [{"activity_regularizer": "l2"}, {}])
def test_a_half_loss_of_a_layer_stops_fit_on_tensorflow(options):
    """TensorFlow adds no float16 of add_loss or activity_regularizer to a float32."""

    class Adds(layers.Layer):
        def call(self, x):
            if not options:
                self.add_loss(ops.mean(x))
            return x

    adds = Adds(dtype="mixed_float16", **options)
    model = keras.Sequential([keras.Input((2,)), adds, layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises((TypeError, ValueError)):
        model.fit(np.ones((2, 2)), np.ones((2, 1)), verbose=0)


@plain_keras
@only_on_torch
def test_a_variable_is_not_autocast_in_a_symbolic_call_on_torch():
    """So custom layers of a half policy are symbolically float32."""

    class Multiplies(layers.Layer):
        def build(self, shape):
            self.factor = self.add_weight(shape=(shape[-1],))

        def call(self, x):
            return x * self.factor

    layer = Multiplies(dtype="mixed_float16")
    assert layer(keras.Input((2,))).dtype == "float32"
    assert dtype_of(layer(tensor(np.ones((1, 2))))) == "float16"


# What is summed, and counted, in half precision ---------------------------------------


@plain_keras
@not_on_torch
def test_a_biass_gradient_stalls():
    """Keras' `add` sums it in bfloat16 on CPUs."""
    dtype = "bfloat16"
    x = ops.ones((16, 62, 62, 4), dtype)
    bias = keras.Variable(np.zeros(4), dtype="float32")

    def loss(value):
        y = ops.add(x, ops.cast(value, dtype))
        return ops.sum(ops.cast(y, "float32"))

    if BACKEND == "jax":
        import jax

        gradient = jax.grad(loss)(bias.value)
    else:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            total = loss(bias.value)
        gradient = tape.gradient(total, bias.value)
    assert numpy_of(gradient)[0] < 0.5 * 16 * 62 * 62


@plain_keras
@only_on_tensorflow
def test_arange_has_no_float16_in_graphs():
    import tensorflow as tf

    numbers = functools.partial(ops.arange, 3, dtype="float16")
    numbers()
    with pytest.raises(ValueError, match="range"):
        tf.function(numbers)()


def test_a_layer_that_builds_itself_has_no_path():
    """Keras sets `_path` when `build` is called, which no Dropout is."""
    layer = layers.Dropout(0.5, name="dropout")
    layer(np.ones((2, 2), "float32"))
    assert layer.path is None
    assert layer._path is None


# What a breakpoint stands on ----------------------------------------------------------


def test_a_file_holds_no_random_seeds(tmp_path):
    """Of a layer's seed generators it has no state."""
    dropout = layers.Dropout(0.5, seed=3)
    model = keras.Sequential([keras.Input((2,)), dropout])
    model(np.ones((2, 2), "float32"), training=True)
    (seed,) = [g.state for g in dropout._seed_generators]
    assert seed.numpy().tolist() == [3, 1]
    model.save(tmp_path / "model.keras")
    (opened,) = keras.models.load_model(tmp_path / "model.keras").layers
    assert opened._seed_generators[0].state.numpy().tolist() == [3, 0]


def test_the_variables_of_a_model_are_its_weights_and_the_states_of_its_seeds():
    inner = keras.Sequential([layers.Dropout(0.5), layers.Dense(2)])
    normalized = [layers.BatchNormalization(), layers.GaussianNoise(1.0)]
    model = keras.Sequential([keras.Input((2,)), inner, *normalized])
    model.compile("sgd", "mse", metrics=["mae"])
    model.fit(np.ones((2, 2), "float32"), np.ones((2, 2), "float32"), verbose=0)
    weights = {id(weight) for weight in model.weights}
    seeds = [v for v in model.variables if id(v) not in weights]
    generators = [g for x in model._flatten_layers() for g in x._seed_generators]
    assert len(seeds) == len(generators) == 2
    assert {id(seed) for seed in seeds} == {id(g.state) for g in generators}


def test_fit_makes_the_train_function_and_calls_it_with_these_arguments():
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    x, calls = np.ones((2, 2), "float32"), []
    model.fit(x, x[:, :1], verbose=0)
    made, function = model.make_train_function, model.train_function
    model.make_train_function = lambda *args: (calls.append("made"), made(*args))[1]
    model.train_function = lambda *args: (calls.append(args), function(*args))[1]
    model.fit(x, x[:, :1], verbose=0)
    first, args = calls
    assert first == "made"
    if BACKEND == "torch":
        ((batch,),) = args
        assert [tuple(part.shape) for part in batch] == [(2, 2), (2, 1)]
    elif BACKEND == "jax":
        (_, _, optimizer, _), iterator = args
        assert len(optimizer) == len(model.optimizer.variables)
        assert next(iterator, None) is None
    else:
        import tensorflow as tf

        (iterator,) = args
        assert isinstance(iterator, tf.data.Iterator)


for name, value in list(globals().items()):
    if name.startswith("test_"):
        globals()[name] = as_fact(value)
