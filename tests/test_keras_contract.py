"""The facts about Keras that keras_mp stands on, one small test a fact.

When an upgrade of Keras breaks one, the failure is the sentence in the test's
docstring, and `grep` for its nouns finds the seam that stands on it.

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
from keras import ops
from keras.src import backend as keras_backend

# Variable.__array__ of Keras 3.15 takes no `copy`, which NumPy 2 warns about
# wherever Keras itself reads a variable with `Variable.numpy()`: in the config of
# an optimizer, or on saving.
pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"
)

BACKEND = keras.backend.backend()

only_on_jax = pytest.mark.skipif(BACKEND != "jax", reason="a fact about JAX")
only_on_tensorflow = pytest.mark.skipif(
    BACKEND != "tensorflow", reason="a fact about TensorFlow"
)
only_on_torch = pytest.mark.skipif(BACKEND != "torch", reason="a fact about torch")
not_on_tensorflow = pytest.mark.skipif(
    BACKEND == "tensorflow", reason="a fact about JAX and torch"
)
not_on_jax = pytest.mark.skipif(
    BACKEND == "jax", reason="there its stateful apply leaks tracers"
)
not_on_torch = pytest.mark.skipif(
    BACKEND == "torch", reason="a fact about JAX and TensorFlow"
)
mended_in_3_16 = pytest.mark.skipif(
    tuple(map(int, keras.__version__.split(".")[:2])) >= (3, 16),
    reason="Keras 3.16 has mended it; nothing of ours stands on it there",
)


def fact(test):
    """Makes the docstring of a test the message of its failure.

    Other exceptions count as failures too: a private attribute that is gone
    raises an AttributeError, and the sentence says more.
    """

    @functools.wraps(test)
    def holds(*args, **kwargs):
        try:
            return test(*args, **kwargs)
        except Exception as failure:
            sentence = " ".join(test.__doc__.split())
            raise AssertionError(
                f"Not so in Keras {keras.__version__} on {BACKEND}: {sentence} "
                f"({type(failure).__name__}: {failure})"
            ) from failure

    return holds


@pytest.fixture(autouse=True)
def the_global_policy_is_float32():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("float32")
    yield
    keras.config.set_dtype_policy(before)


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


def numpy_of(variable):
    return keras.ops.convert_to_numpy(variable)


def tensor(values, dtype="float32"):
    return keras.ops.convert_to_tensor(np.asarray(values, dtype))


def dense_model(dtype=None):
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, dtype=dtype)])


def functional_model(dtype=None):
    inputs = keras.Input((3,))
    return keras.Model(inputs, keras.layers.Dense(2, dtype=dtype)(inputs))


def data():
    return np.ones((4, 3), "float32"), np.zeros((4, 2), "float32")


def built_keras_scaler(inner="sgd", **kwargs):
    scaler = keras.optimizers.LossScaleOptimizer(keras.optimizers.get(inner), **kwargs)
    variable = keras.Variable(np.ones(2, "float32"))
    scaler.build([variable])
    return scaler, variable


class CustomPolicy(keras.DTypePolicy):
    """A policy of someone else's, as keras_mp's own are."""


# Variables and stateless scopes: what the select-on-write scope stands on ----------


@fact
def test_a_write_in_a_stateless_scope_calls_add_update_with_one_pair():
    """Variable.assign, assign_add and assign_sub in a stateless scope call the scope's
    add_update with one argument, the pair (variable, value)."""
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


@fact
def test_assign_in_a_stateless_scope_converts_to_the_variables_dtype_first():
    """What add_update receives already has the variable's dtype."""
    variable = keras.Variable(1.0, dtype="float32")
    with keras.StatelessScope() as scope:
        variable.assign(tensor(2.0, "float16"))
    value = scope.get_current_value(variable)
    assert keras.backend.standardize_dtype(value.dtype) == "float32"


@fact
def test_a_stateless_scope_has_the_values_of_the_variables_that_it_knows():
    """StatelessScope.state_mapping is a dict from id(variable) to the value.
    get_current_value returns it, and None for a variable that is not there."""
    known, unknown = keras.Variable(1.0), keras.Variable(1.0)
    with keras.StatelessScope([(known, tensor(5.0))]) as scope:
        pass
    assert isinstance(scope.state_mapping, dict)
    assert list(scope.state_mapping) == [id(known)]
    assert float(scope.get_current_value(known)) == 5.0
    assert scope.get_current_value(unknown) is None


@fact
def test_a_nested_stateless_scope_and_the_outer_one_do_not_see_each_others_values():
    """Inside a nested StatelessScope a variable has its real value, not the one that
    the outer scope maps it to, which does not know what the nested one is assigned."""
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
@fact
def test_stateless_apply_calls_apply_inside_a_stateless_scope():
    """The base class' stateless_apply calls self.apply(grads) inside a
    StatelessScope, and gathers the values from that scope."""
    calls = []

    class AssignsSeven(keras.optimizers.SGD):
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
@fact
def test_stateless_apply_raises_on_tensorflow():
    """On TensorFlow stateless_apply of any optimizer raises a ValueError."""
    optimizer, variable = keras.optimizers.SGD(), keras.Variable(1.0)
    optimizer.build([variable])
    with pytest.raises(ValueError, match="stateless_apply is not supported"):
        optimizer.stateless_apply(
            [v.value for v in optimizer.variables], [tensor(0.0)], [tensor(1.0)]
        )


@only_on_jax
@fact
def test_an_optimizer_assigns_through_the_stateless_scope_on_jax():
    """On JAX an optimizer's assign, assign_add and assign_sub go through the
    StatelessScope's add_update."""
    optimizer, variable = keras.optimizers.SGD(), keras.Variable(1.0)
    with keras.StatelessScope() as scope:
        optimizer.assign(variable, tensor(2.0))
        optimizer.assign_add(variable, tensor(2.0))
        optimizer.assign_sub(variable, tensor(1.0))
    assert float(scope.get_current_value(variable)) == 3.0
    assert numpy_of(variable) == 1.0


@only_on_tensorflow
@fact
def test_an_optimizer_assigns_past_the_stateless_scope_on_tensorflow():
    """On TensorFlow an optimizer's assign writes the tf.Variable itself, past any
    StatelessScope: a scope that selects in add_update never hears of it."""
    optimizer, variable = keras.optimizers.SGD(), keras.Variable(1.0)
    with keras.StatelessScope() as scope:
        optimizer.assign(variable, tensor(2.0))
    assert scope.get_current_value(variable) is None
    assert numpy_of(variable) == 2.0


@fact
def test_apply_gradients_calls_apply_with_gradients_and_variables():
    """BaseOptimizer.apply_gradients calls self.apply(grads, variables)."""
    calls = []

    class Recording(keras.optimizers.SGD):
        def apply(self, grads, trainable_variables=None):
            calls.append((list(grads), list(trainable_variables)))

    variable, gradient = keras.Variable(1.0), tensor(2.0)
    Recording().apply_gradients([(gradient, variable)])
    (((seen_gradient,), (seen_variable,)),) = calls
    assert seen_gradient is gradient
    assert seen_variable is variable


@fact
def test_the_scalers_own_variables_come_first_and_in_this_order():
    """LossScaleOptimizer's own variables are iteration, learning_rate,
    step_counter, dynamic_scale, followed by the inner optimizer's."""
    scaler, _ = built_keras_scaler("adam")
    names = [variable.name for variable in scaler.variables]
    assert names[:4] == ["iteration", "learning_rate", "step_counter", "dynamic_scale"]
    inner = scaler.inner_optimizer.variables
    assert [id(v) for v in scaler.variables[4:]] == [id(v) for v in inner]


@fact
def test_the_scaler_has_two_variables_before_it_is_built():
    """An unbuilt LossScaleOptimizer has iteration and learning_rate of its own,
    and the scale and its counter are made by build."""
    scaler = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    own = scaler.variables[: -len(scaler.inner_optimizer.variables)]
    assert [variable.name for variable in own] == ["iteration", "learning_rate"]


@fact
def test_the_scalers_config_has_these_four_keys():
    """LossScaleOptimizer.get_config has the keys name, inner_optimizer,
    initial_scale and dynamic_growth_steps, and no other."""
    scaler, _ = built_keras_scaler()
    assert set(scaler.get_config()) == {
        "name",
        "inner_optimizer",
        "initial_scale",
        "dynamic_growth_steps",
    }


@fact
def test_the_scaler_switches_the_inner_optimizers_fixed_scale_off():
    """LossScaleOptimizer sets loss_scale_factor of its inner optimizer to None."""
    inner = keras.optimizers.SGD(loss_scale_factor=8.0)
    keras.optimizers.LossScaleOptimizer(inner)
    assert inner.loss_scale_factor is None


@fact
def test_the_scalers_iterations_and_learning_rate_are_the_inner_optimizers():
    """LossScaleOptimizer.iterations and learning_rate are the inner optimizer's."""
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


@fact
def test_the_growth_step_itself_doubles_the_scale():
    """Keras' scale doubles at the step of dynamic_growth_steps, and the counter
    returns to 0."""
    scaler, variable = built_keras_scaler(dynamic_growth_steps=3)
    counter, scale = step_counter_and_scale_after(3, scaler, variable)
    assert (counter, scale) == (0, 2 * scaler.initial_scale)


@fact
def test_one_step_past_the_growth_step_keras_never_grows_again():
    """Keras' scale grows when step_counter == dynamic_growth_steps - 1, so that
    it never grows again once the counter is past it."""
    scaler, variable = built_keras_scaler(dynamic_growth_steps=3)
    scaler.step_counter.assign(3)
    counter, scale = step_counter_and_scale_after(5, scaler, variable)
    assert (counter, scale) == (8, scaler.initial_scale)


@only_on_jax
@fact
def test_the_scalers_stateful_apply_leaks_tracers_on_eager_jax():
    """On eager JAX the stateful apply of Keras' LossScaleOptimizer raises, and
    leaves tracers in the variables, which are lost."""
    import jax

    scaler, variable = built_keras_scaler()
    with pytest.raises(jax.errors.UnexpectedTracerError):
        scaler.apply([tensor([1.0, 1.0])], [variable])
    for lost in (variable, scaler.step_counter, scaler.dynamic_scale):
        assert isinstance(lost._value, jax.core.Tracer)


@not_on_jax
@fact
def test_the_scaler_halves_its_scale_down_to_zero_and_doubles_it_up_to_infinity():
    """The scaler's scale has no bounds: skips bring it to 0, growth to infinity."""
    variable = keras.Variable(np.ones(1, "float32"))
    scaler = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(), dynamic_growth_steps=1
    )
    scaler.build([variable])
    for _ in range(170):
        scaler.apply([ops.array([np.nan], "float32")], [variable])
    assert float(ops.convert_to_numpy(scaler.dynamic_scale)) == 0
    scaler.dynamic_scale.assign(2.0**127)
    scaler.apply([ops.array([1.0], "float32")], [variable])
    assert float(ops.convert_to_numpy(scaler.dynamic_scale)) == np.inf


def fit_on_infinities(optimizer):
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(2),
        ]
    )
    model.compile(keras.optimizers.LossScaleOptimizer(optimizer), "mse")
    x = np.full((4, 3), np.inf, "float32")
    loss = model.fit(x, np.ones((4, 2)), batch_size=2, verbose=0).history["loss"]
    return model, loss


@fact
def test_a_skipped_step_leaves_nan_in_statistics_and_in_the_loss_of_the_epoch():
    """fit with the scaler puts nothing back of a step that it skips."""
    model, loss = fit_on_infinities(keras.optimizers.SGD())
    assert np.isnan(loss).all()
    statistics = model.layers[0].non_trainable_variables
    assert not np.isfinite([np.asarray(v) for v in statistics]).all()


@fact
def test_a_fit_of_skipped_steps_ends_with_averages_of_zero_in_the_weights():
    """Averages of use_ema start at zero, and fit writes them into the weights at its
    end, whether or not a step was applied."""
    model, _ = fit_on_infinities(keras.optimizers.SGD(use_ema=True))
    assert not any(np.any(np.asarray(v)) for v in model.trainable_variables)


@not_on_torch
@fact
def test_an_unbuilt_scaler_multiplies_a_float16_loss_in_float16():
    """Before it is built, Keras' LossScaleOptimizer scales a float16 loss in
    float16, where 4 times 32768 is infinite."""
    scaler = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    scaled = scaler.scale_loss(tensor(4.0, "float16"))
    assert keras.backend.standardize_dtype(scaled.dtype) == "float16"
    assert np.isinf(numpy_of(scaled))


@only_on_torch
@fact
def test_dividing_a_float16_gradient_by_the_scale_stays_in_float16_on_torch():
    """On torch a float16 gradient divided by the float32 scale is float16."""
    scaler, _ = built_keras_scaler()
    unscaled = keras.ops.divide(tensor([1.0], "float16"), scaler.dynamic_scale)
    assert keras.backend.standardize_dtype(unscaled.dtype) == "float16"


# Trainer.compile: what the compile seam stands on ----------


@fact
def test_compile_is_defined_on_trainer():
    """The class that defines keras.Model.compile, found by scanning
    keras.Model.__mro__, is Trainer (BaseTrainer from Keras 3.16 on)."""
    assert defining_class("compile").__name__ in ("Trainer", "BaseTrainer")


@fact
def test_compile_of_every_model_class_in_keras_reaches_trainers():
    """Sequential, Functional and every other Model class of Keras inherit compile
    from Trainer, or (Distiller) call super().compile."""
    trainers = defining_class("compile")
    models = subclasses_in_keras(keras.Model)
    assert {"Sequential", "Functional"} <= {model.__name__ for model in models}
    for model in models:
        definer = defining_class("compile", model)
        if definer is not trainers:
            assert "super().compile(" in inspect.getsource(definer.compile), model


@fact
def test_compile_keeps_the_optimizer_it_was_handed():
    """model._compile_config.config["optimizer"], and so what a file says, is the
    optimizer that compile was handed, not the wrapper that compile put round it."""
    model = dense_model("mixed_float16")
    model.dtype_policy = "mixed_float16"
    handed = keras.optimizers.SGD()
    compile_as_keras(model, handed, "mse")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert model.optimizer.inner_optimizer is handed
    assert model._compile_config.config["optimizer"] is handed
    assert model.get_compile_config()["optimizer"]["class_name"] == "SGD"


@fact
def test_the_compile_config_forgets_auto_scale_loss():
    """model._compile_config.config has no auto_scale_loss, so that a saved model
    forgets that the user said no."""
    model = dense_model()
    compile_as_keras(model, "sgd", "mse", auto_scale_loss=False)
    assert "auto_scale_loss" not in model._compile_config.config
    assert "auto_scale_loss" not in model.get_compile_config()


@fact
def test_compile_from_config_passes_every_key_to_compile(monkeypatch):
    """compile_from_config hands every key of its config to compile, ones that
    Keras did not write as well."""
    received = {}
    monkeypatch.setattr(
        defining_class("compile"),
        "compile",
        lambda self, **kwargs: received.update(kwargs),
    )
    model = keras.Sequential()
    model.compile_from_config({"loss": "mse", "auto_scale_loss": False, "novel": 1})
    assert received == {"loss": "mse", "auto_scale_loss": False, "novel": 1}


@fact
def test_wrapping_compile_on_its_defining_class_leaves_loading_alone(monkeypatch):
    """compile_from_config compiles as ever when Trainer.compile itself is
    wrapped."""
    config = compiled_config()
    trainer = defining_class("compile")
    original = trainer.compile
    monkeypatch.setattr(
        trainer,
        "compile",
        lambda self, *args, **kwargs: original(self, *args, **kwargs),
    )
    model = dense_model()
    model.compile_from_config(config)
    assert model.compiled


@fact
def test_wrapping_compile_on_model_breaks_loading(monkeypatch):
    """compile_from_config compares the class' compile with Trainer.compile, and
    gives up with a warning when keras.Model has one of its own."""
    config = compiled_config()
    original = keras.Model.compile
    monkeypatch.setattr(
        keras.Model,
        "compile",
        lambda self, *args, **kwargs: original(self, *args, **kwargs),
    )
    model = dense_model()
    with pytest.warns(UserWarning, match="`compile\\(\\)` method is custom"):
        model.compile_from_config(config)
    assert not model.compiled


def compiled_config():
    model = dense_model()
    model.compile("sgd", "mse")
    return model.get_compile_config()


@fact
def test_compile_wraps_by_the_name_of_the_models_policy():
    """Keras' compile goes by the name of the model's own policy, so that a model
    whose only layer computes in float16 is left unscaled."""
    model, handed = dense_model("mixed_float16"), keras.optimizers.SGD()
    compile_as_keras(model, handed, "mse")
    assert model.layers[0].compute_dtype == "float16"
    assert model.optimizer is handed


@fact
def test_compile_forgets_the_functions_it_made():
    """compile sets train_function, test_function and predict_function to None."""
    model = dense_model()
    model.train_function = model.test_function = model.predict_function = len
    compile_as_keras(model, "sgd", "mse")
    assert model.train_function is None
    assert model.test_function is None
    assert model.predict_function is None


@fact
def test_a_compiled_loss_is_float32_for_float16_predictions():
    """A compiled loss is computed in float32, also from float16 predictions."""
    model = dense_model()
    model.compile("sgd", "mse")
    model.build((None, 3))
    loss = model.compute_loss(
        y=tensor([[0.0, 0.0]]), y_pred=tensor([[1.0, 1.0]], "float16")
    )
    assert keras.backend.standardize_dtype(loss.dtype) == "float32"


# The train step: what the roll-back seam stands on ----------


def step_that_counts(calls):
    """A train step of the backend's own shape."""
    if BACKEND == "jax":
        return lambda state, data: (calls.append(1), ({}, state))[1]
    return lambda data: (calls.append(1), {"loss": tensor(0.0)})[1]


def call_train_function(model):
    batch = tensor([1.0])
    if BACKEND == "jax":
        model.train_function((), iter([batch]))
    elif BACKEND == "tensorflow":
        model.train_function(iter([batch]))
    else:
        model.train_function([batch])


def make_train_function_as_keras(model):
    keras_own(type(model).make_train_function)(model)


@pytest.mark.parametrize("run_eagerly", [True, False])
@fact
def test_make_train_function_uses_the_train_step_of_the_instance(run_eagerly):
    """make_train_function reads self.train_step, so that one put into
    model.__dict__ before the call is the one that train_function runs."""
    model, calls = dense_model(), []
    model.compile("sgd", "mse", run_eagerly=run_eagerly)
    model.__dict__["train_step"] = step_that_counts(calls)
    make_train_function_as_keras(model)
    call_train_function(model)
    assert len(calls) == 1


@not_on_torch
@fact
def test_make_train_function_keeps_the_train_step_it_read():
    """On JAX and TensorFlow train_function keeps the train_step that
    make_train_function read, also when the instance no longer has it."""
    model, calls = dense_model(), []
    model.compile("sgd", "mse")
    model.__dict__["train_step"] = step_that_counts(calls)
    make_train_function_as_keras(model)
    del model.__dict__["train_step"]
    call_train_function(model)
    assert len(calls) == 1


@only_on_torch
@fact
def test_train_function_looks_the_train_step_up_at_each_call_on_torch():
    """On torch train_function reads self.train_step anew at each call."""
    model, early, late = dense_model(), [], []
    model.compile("sgd", "mse")
    model.__dict__["train_step"] = step_that_counts(early)
    make_train_function_as_keras(model)
    model.__dict__["train_step"] = step_that_counts(late)
    call_train_function(model)
    assert (early, late) == ([], [1])


@fact
def test_make_train_function_keeps_a_function_that_is_there():
    """make_train_function does nothing when train_function is there, unless
    force=True."""
    model = dense_model()
    model.compile("sgd", "mse")
    make_train_function_as_keras(model)
    first = model.train_function
    make_train_function_as_keras(model)
    assert model.train_function is first
    keras_own(type(model).make_train_function)(model, force=True)
    assert model.train_function is not first


@fact
def test_make_train_function_is_defined_on_the_backends_trainer():
    """make_train_function is defined on one class that every model inherits, the
    backend's trainer."""
    trainer = defining_class("make_train_function")
    assert f"backend.{BACKEND}." in trainer.__module__
    for model in subclasses_in_keras(keras.Model):
        assert defining_class("make_train_function", model) is trainer, model


@fact
def test_fit_takes_the_logs_of_an_epoch_from_get_metrics_result(monkeypatch):
    """At the end of an epoch fit asks get_metrics_result, outside of a step, for
    what goes into the history."""
    model = dense_model()
    model.compile("sgd", "mse")
    result = keras_own(type(model).get_metrics_result)
    monkeypatch.setattr(
        type(model),
        "get_metrics_result",
        lambda self: {name: 7.0 for name in result(self)},
    )
    history = model.fit(np.ones((2, 3)), np.ones((2, 2)), verbose=0).history
    assert history["loss"] == [7.0]


@fact
def test_get_metrics_result_is_defined_on_the_trainer_of_all_backends():
    """get_metrics_result is defined where compile is, and no model of Keras overrides
    it."""
    trainer = defining_class("get_metrics_result")
    assert trainer is defining_class("compile")
    for model in subclasses_in_keras(keras.Model):
        assert defining_class("get_metrics_result", model) is trainer, model


@fact
def test_a_metric_that_measured_nothing_is_all_zeros():
    """The variables of a metric that was reset are zero, and none that measured is."""
    for metric in (keras.metrics.Mean(), keras.metrics.AUC(), keras.metrics.F1Score()):
        metric.update_state(np.ones((2, 2)), np.ones((2, 2)))
        assert any(np.any(np.asarray(v)) for v in metric.variables)
        metric.reset_state()
        assert not any(np.any(np.asarray(v)) for v in metric.variables)


class Spy(keras.optimizers.SGD):
    """Writes down which of its methods are called, and in what state."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def write_down(self, name):
        scope = "stateless" if keras_backend.in_stateless_scope() else "stateful"
        self.calls.append((name, scope))

    def scale_loss(self, loss):
        self.write_down("scale_loss")
        return super().scale_loss(loss)

    def stateless_apply(self, *args):
        self.write_down("stateless_apply")
        return super().stateless_apply(*args)

    def apply_gradients(self, *args):
        self.write_down("apply_gradients")
        return super().apply_gradients(*args)

    def apply(self, *args):
        self.write_down("apply")
        return super().apply(*args)


def calls_of_one_step():
    model, spy = dense_model(), Spy()
    # Eagerly, so that nothing is written down by a second trace.
    model.compile(spy, "mse", run_eagerly=True)
    spy.build(model.trainable_variables)
    model.build((None, 3))
    spy.calls.clear()
    model.train_on_batch(*data())
    return spy.calls


@only_on_jax
@fact
def test_the_train_step_on_jax_scales_and_updates_statelessly():
    """On JAX train_step scales by optimizer.scale_loss inside a StatelessScope and
    updates by optimizer.stateless_apply."""
    calls = [call for call in calls_of_one_step() if call[0] != "apply"]
    # Keras first traces the step once to build what is not built: only the
    # order of the two matters.
    assert calls[-2:] == [("scale_loss", "stateless"), ("stateless_apply", "stateful")]


@only_on_tensorflow
@fact
def test_the_train_step_on_tensorflow_scales_and_applies_gradients():
    """On TensorFlow train_step scales by optimizer.scale_loss and updates by
    optimizer.apply_gradients."""
    assert calls_of_one_step()[-3:] == [
        ("scale_loss", "stateful"),
        ("apply_gradients", "stateful"),
        ("apply", "stateful"),
    ]


@only_on_torch
@fact
def test_the_train_step_on_torch_scales_and_applies():
    """On torch train_step scales by optimizer.scale_loss and updates by
    optimizer.apply, not by apply_gradients."""
    assert calls_of_one_step()[-2:] == [
        ("scale_loss", "stateful"),
        ("apply", "stateful"),
    ]


class ValuesDuringFit(keras.callbacks.Callback):
    """Writes down which variables have no value, before and after `read`."""

    def __init__(self, read):
        super().__init__()
        self.read, self.before, self.after = read, [], []

    def on_train_batch_end(self, batch, logs=None):
        self.before.append(self.without_value())
        self.read(self)
        self.after.append(self.without_value())

    def without_value(self):
        model = self._model  # not self.model, which syncs
        variables = model.variables + model.optimizer.variables
        return [variable._value is None for variable in variables]


def values_during_fit(read):
    model, seen = dense_model(), ValuesDuringFit(read)
    model.compile("adam", "mse")
    model.fit(*data(), verbose=0, callbacks=[seen])
    return seen


@only_on_jax
@fact
def test_fit_purges_the_variables_on_jax_and_jax_state_sync_restores_them():
    """On JAX the _value of every model and optimizer variable is None during an
    epoch of fit, and model.jax_state_sync() puts the values back."""
    seen = values_during_fit(lambda callback: callback._model.jax_state_sync())
    assert all(seen.before[0])
    assert not any(seen.after[0])


@only_on_jax
@fact
def test_reading_the_model_of_a_callback_syncs_the_state_on_jax():
    """On JAX reading self.model in a callback calls jax_state_sync, so that the
    variables have their values there, at the price of a sync."""
    seen = values_during_fit(lambda callback: callback.model)
    assert all(seen.before[0])
    assert not any(seen.after[0])


# Layer.__call__: what the policy seam stands on ----------


@fact
def test_every_layer_of_keras_reaches_the_call_of_layer():
    """No layer class of Keras overrides __call__ without calling the inherited
    one, except FeatureSpace, which has nothing to compute in float16."""
    layers = subclasses_in_keras(keras.layers.Layer)
    assert len(layers) > 100
    past_it = {
        layer.__name__
        for layer in layers
        if "__call__" in vars(layer)
        and "super().__call__(" not in inspect.getsource(vars(layer)["__call__"])
    }
    assert past_it == {"FeatureSpace"}


@fact
def test_a_model_is_called_through_the_call_of_layer():
    """Model, Sequential and Functional inherit __call__ from Layer."""
    for model in (keras.Model, *subclasses_in_keras(keras.Model)):
        assert defining_class("__call__", model) is keras.layers.Layer, model


@fact
def test_a_policy_set_before_the_first_call_decides_the_symbolic_dtype():
    """The dtype_policy that a layer has at its first call decides the dtype of
    its symbolic output."""
    inputs = keras.Input((3,))
    layer = keras.layers.Dense(2, dtype="mixed_float16")
    layer.dtype_policy = keras.DTypePolicy("float32")
    assert layer(inputs).dtype == "float32"


@fact
def test_a_policy_set_on_a_built_model_leaves_the_symbolic_output_as_it_was():
    """Setting dtype_policy on a layer of a built Functional model leaves
    model.output.dtype as it was."""
    model = functional_model("mixed_float16")
    model.layers[-1].dtype_policy = "float32"
    assert model.layers[-1].compute_dtype == "float32"
    assert model.output.dtype == "float16"


@not_on_torch
@fact
def test_a_policy_set_on_a_built_model_leaves_the_traced_functions_as_they_were():
    """Setting dtype_policy on a layer leaves functions that are traced already in
    the old dtype."""
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


@fact
def test_flatten_layers_has_the_model_itself_and_every_nested_layer():
    """model._flatten_layers() has the model itself first, and every layer however
    deep it is nested, once each."""
    inner = dense_model()
    model = keras.Sequential([keras.Input((3,)), inner])
    layers = list(model._flatten_layers())
    assert layers[0] is model
    assert len(layers) == len({id(layer) for layer in layers})
    assert {id(inner), id(inner.layers[0])} <= {id(layer) for layer in layers}


# Policies ----------


@fact
def test_a_child_built_with_its_parents_policy_shares_the_instance():
    """A layer built with dtype=parent.dtype_policy has the very instance of its
    parent."""
    parent = keras.layers.Dense(2, dtype=CustomPolicy("mixed_float16"))
    child = keras.layers.Dense(2, dtype=parent.dtype_policy)
    assert child.dtype_policy is parent.dtype_policy


@fact
def test_the_global_policy_is_the_very_object_that_was_set():
    """keras.config.set_dtype_policy takes an instance of a DTypePolicy subclass,
    and keras.config.dtype_policy() and new layers have that very object."""
    policy = CustomPolicy("mixed_float16")
    keras.config.set_dtype_policy(policy)
    assert keras.config.dtype_policy() is policy
    assert keras.layers.Dense(2).dtype_policy is policy


@fact
def test_policies_are_equal_when_type_and_name_are():
    """DTypePolicy.__eq__ compares the type and the name and nothing else."""
    assert keras.DTypePolicy("mixed_float16") == keras.DTypePolicy("mixed_float16")
    assert keras.DTypePolicy("mixed_float16") != keras.DTypePolicy("mixed_bfloat16")
    assert keras.DTypePolicy("mixed_float16") != CustomPolicy("mixed_float16")
    assert CustomPolicy("mixed_float16") != keras.DTypePolicy("mixed_float16")
    one, other = CustomPolicy("mixed_float16"), CustomPolicy("mixed_float16")
    one.float32, other.float32 = (), ("head",)
    assert one == other


@fact
def test_a_policy_cannot_be_hashed():
    """DTypePolicy defines __eq__ without __hash__, so that a policy is neither in
    a set nor a key of a dict."""
    with pytest.raises(TypeError, match="unhashable"):
        hash(keras.DTypePolicy("float32"))


@fact
def test_from_config_replaces_a_policy_by_its_name():
    """Layer.from_config replaces any policy that is neither a map nor quantized by
    the stock policy of its name, a registered subclass too."""
    layer = keras.layers.Dense(2, dtype=CustomPolicy("mixed_float16"))
    with keras.saving.CustomObjectScope({"CustomPolicy": CustomPolicy}):
        reopened = keras.layers.Dense.from_config(layer.get_config())
    assert type(reopened.dtype_policy) is keras.DTypePolicy
    assert reopened.dtype_policy.name == "mixed_float16"


@fact
def test_from_config_needs_a_custom_policy_to_be_registered():
    """A layer's config names the class of its policy, and from_config raises where
    that class is not known: a file with such a policy would not open without
    keras_mp."""
    layer = keras.layers.Dense(2, dtype=CustomPolicy("mixed_float16"))
    assert layer.get_config()["dtype"]["class_name"] == "CustomPolicy"
    # An AttributeError: what Keras deserializes such a policy to is the class'
    # name. A TypeError that says so where the class comes from __main__.
    with pytest.raises((AttributeError, TypeError)):
        keras.layers.Dense.from_config(layer.get_config())


@fact
def test_from_config_keeps_a_policy_map():
    """Layer.from_config keeps a DTypePolicyMap as it is."""
    policies = keras.dtype_policies.DTypePolicyMap("mixed_float16")
    layer = keras.layers.Dense(2, dtype=policies)
    reopened = keras.layers.Dense.from_config(layer.get_config())
    assert isinstance(reopened.dtype_policy, keras.dtype_policies.DTypePolicyMap)


@fact
def test_from_config_keeps_a_quantized_policy():
    """Layer.from_config keeps a quantized policy as it is."""
    policy = keras.dtype_policies.QuantizedDTypePolicy("int8", "float32")
    layer = keras.layers.Dense(2, dtype=policy)
    assert layer.from_config(layer.get_config()).dtype_policy == policy


@mended_in_3_16
@fact
def test_a_policy_map_without_a_default_strips_its_live_policies_of_their_names():
    """DTypePolicyMap.get_config sets _name to None on the live policies when the
    map has no default policy."""
    policy = keras.DTypePolicy("mixed_float16")
    policies = keras.dtype_policies.DTypePolicyMap()
    policies["dense"] = policy
    policies.get_config()
    assert policy.name is None
    assert policy.compute_dtype == "float16"


@fact
def test_a_layer_asks_its_policy_map_by_its_path():
    """A layer under a DTypePolicyMap computes in the dtype that the map has for
    the layer's path."""
    policies = keras.dtype_policies.DTypePolicyMap("float32", {})
    policies["half"] = keras.DTypePolicy("mixed_float16")
    layer = keras.layers.Dense(2, dtype=policies, name="half")
    layer.build((None, 3))
    assert layer.path == "half"
    assert layer.compute_dtype == "float16"


@pytest.mark.parametrize("build", [dense_model, functional_model])
@fact
def test_a_reopened_model_forgets_its_own_policy(build):
    """A Sequential or Functional config does not keep the model's own policy:
    reopened under float32 the model is float32 and its layers are float16."""
    keras.config.set_dtype_policy("mixed_float16")
    config = build().get_config()
    keras.config.set_dtype_policy("float32")
    model = build().__class__.from_config(config)
    assert model.compute_dtype == "float32"
    assert model.layers[-1].compute_dtype == "float16"
    handed = keras.optimizers.SGD()
    compile_as_keras(model, handed, "mse")
    assert model.optimizer is handed


# Symbolic tensors: what the float32 output layers stand on ----------


@only_on_tensorflow
@fact
def test_a_float16_softmax_loses_its_logits_when_it_is_cast():
    """On TensorFlow softmax leaves its logits on its output, for the loss to use,
    and they are lost when the loss casts a float16 output to float32."""
    for dtype, kept in (("float16", False), ("float32", True)):
        probabilities = keras.activations.softmax(tensor([[1.0, 2.0]], dtype))
        assert hasattr(probabilities, "_keras_logits")
        in_the_loss = keras.ops.convert_to_tensor(probabilities, dtype="float32")
        assert hasattr(in_the_loss, "_keras_logits") is kept


# Names: what `compare` and `inspect` stand on ----------


@fact
def test_the_operation_of_a_symbolic_sum_is_of_a_class_named_sum():
    """The class of a sum in a graph is named Sum, and is one of Keras' modules."""
    total = keras.ops.sum(keras.Input((3,)), axis=-1)
    kind = type(total._keras_history.operation)
    assert kind.__name__ == "Sum" and kind.__module__.split(".")[0] == "keras"


@fact
def test_the_kernel_of_a_layer_is_a_weight_named_kernel():
    """A Dense, EinsumDense or convolution names its weight "kernel", with LoRA too."""
    for layer, shape in (
        (keras.layers.Dense(4), (2, 8, 3)),
        (keras.layers.EinsumDense("abc,cd->abd", (None, 4)), (2, 8, 3)),
        (keras.layers.Conv1D(4, 3), (2, 8, 3)),
        (keras.layers.Conv2DTranspose(4, 3), (2, 8, 8, 3)),
    ):
        layer.build(shape)
        kernel = tuple(layer.kernel.shape)
        if hasattr(layer, "enable_lora"):
            layer.enable_lora(2)
        (found,) = [tuple(w.shape) for w in layer.weights if w.name == "kernel"]
        assert found == kernel


# Files ----------


@fact
def test_a_file_has_the_scaled_optimizers_variables_twice(tmp_path):
    """A .keras file has the variables of a LossScaleOptimizer by number, all of
    them, and the inner optimizer's again under inner_optimizer."""
    h5py = pytest.importorskip("h5py")
    model = dense_model()
    scaler = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())
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


@fact
def test_a_layers_config_names_its_policy_and_the_policys_class():
    """Layer.get_config stores the policy under "dtype", by class and name, and the
    get_config of a layer such as Dense builds on it."""
    layer = keras.layers.Dense(2, dtype=CustomPolicy("mixed_float16"))
    for config in (keras_own(keras.layers.Layer.get_config)(layer), layer.get_config()):
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
    keras_mp.seams.uninstall()
    yield
    keras_mp.seams.install()


plain_keras = pytest.mark.usefixtures("without_seams")


class Returns(keras.layers.Layer):
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


def dtype_of(x):
    return keras.backend.standardize_dtype(x.dtype)


@plain_keras
@fact
def test_the_arguments_of_layers_init_are_keywords_only():
    """Layer.__init__ takes keyword arguments alone, so a seam can too."""
    kinds = {
        p.kind
        for p in inspect.signature(keras.layers.Layer.__init__).parameters.values()
    }
    parameter = inspect.Parameter
    assert kinds == {
        parameter.POSITIONAL_OR_KEYWORD,
        parameter.KEYWORD_ONLY,
        parameter.VAR_KEYWORD,
    }
    with pytest.raises(TypeError):
        keras.layers.Layer("name")


@plain_keras
@fact
def test_a_subclassed_model_rounds_what_it_is_called_with():
    """A subclassed model casts its inputs to its compute dtype, whatever its first
    layer computes in, and `_convert_input_args = False` stops that."""
    for converts, expected in ((True, 2048.0), (False, 2049.0)):
        model = Door(dtype="mixed_float16")
        assert model._convert_input_args
        model._convert_input_args = converts
        assert (
            float(np.array(ops.convert_to_numpy(model(tensor([2049.0]))))[0])
            == expected
        )


@plain_keras
@fact
def test_functional_models_do_not_convert_their_arguments():
    """Functional.__init__ sets `_convert_input_args = False`: its graph casts."""
    assert functional_model("mixed_float16")._convert_input_args is False


@plain_keras
@fact
def test_a_sequential_model_builds_an_input_of_its_first_layers_compute_dtype():
    """Sequential.build puts an InputLayer of the first layer's compute dtype in front,
    and none where one is there."""
    model = keras.Sequential([keras.layers.Dense(1, dtype="mixed_float16")])
    model.build((None, 2))
    assert isinstance(model._layers[0], keras.layers.InputLayer)
    assert model._layers[0].dtype == "float16"
    model = keras.Sequential([keras.layers.Dense(1, dtype="mixed_float16")])
    own = keras.layers.InputLayer(batch_shape=(None, 2), dtype="float32")
    model._layers = [own, *model._layers]
    model.build((None, 2))
    assert model._layers[0] is own
    assert model._functional.inputs[0].dtype == "float32"


@plain_keras
@fact
def test_a_graph_keeps_its_nodes_by_depth_and_fills_in_their_arguments():
    """`Functional._nodes_by_depth` has the nodes of a graph, the inputs deepest, and
    `node.arguments.fill_in` gives a call's arguments with other tensors in them."""
    model = functional_model()
    depths = sorted(model._nodes_by_depth, reverse=True)
    assert all(node.is_input for node in model._nodes_by_depth[depths[0]])
    (last,) = model._nodes_by_depth[0]
    assert last.outputs[0] is model.outputs[0]
    other = keras.KerasTensor(last.input_tensors[0].shape)
    args, kwargs = last.arguments.fill_in({id(last.input_tensors[0]): other})
    assert args[0] is other and not kwargs


@plain_keras
@fact
def test_a_graph_casts_its_inputs_to_its_symbolic_dtypes():
    """Functional models cast what they are called with to their inputs' dtypes."""
    x = keras.Input((1,), dtype="float16")
    model = keras.Model(x, Returns(dtype="float32")(x))
    assert (
        float(np.array(ops.convert_to_numpy(model(tensor([[2049.0]]))))[0, 0]) == 2048
    )


@plain_keras
@fact
def test_a_layer_keeps_its_policy_in_a_private_attribute():
    """`layer._dtype_policy` is the policy, and the setter writes into a map that a
    built layer has there."""
    policy = keras.dtype_policies.DTypePolicyMap("float32")
    layer = keras.layers.Dense(1, dtype=policy)
    assert layer._dtype_policy is policy
    layer.build((None, 2))
    layer.dtype_policy = keras.DTypePolicy("mixed_float16")
    assert layer._dtype_policy is policy
    assert policy[layer.path].name == "mixed_float16"


@mended_in_3_16
@plain_keras
@fact
def test_a_reopened_layer_has_a_path_without_its_models_name(tmp_path):
    """Keras builds the layers of a file outside of their model, so a policy map finds
    none of them."""
    model = keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(1, name="dense")], name="model"
    )
    assert model.layers[0].path == "model/dense"
    model.save(tmp_path / "model.keras")
    opened = keras.models.load_model(tmp_path / "model.keras")
    assert opened.layers[0].path == "dense"


@plain_keras
@fact
def test_what_stands_beside_the_config_of_an_object_is_passed_over():
    """Keras opens the config of an optimizer that has keys of others beside it."""
    config = keras.saving.serialize_keras_object(keras.optimizers.SGD())
    config["keras_mp_heads"] = [3]
    opened = keras.saving.deserialize_keras_object(config)
    assert isinstance(opened, keras.optimizers.SGD)


@fact
def test_normalization_casts_its_constants_once():
    """Normalization casts mean and variance in `build`, or in `finalize_state` after
    `adapt`, and keeps `_build_input_shape` for it."""
    layer = keras.layers.Normalization(mean=[1.0], variance=[1.0], dtype="float16")
    layer.build((None, 1))
    layer.dtype_policy = "float32"
    assert dtype_of(layer.mean) == "float16"
    type(layer).build(layer, layer._build_input_shape)
    assert dtype_of(layer.mean) == "float32"
    layer = keras.layers.Normalization(dtype="float16")
    layer.adapt(np.ones((2, 1), "float32"))
    layer.dtype_policy = "float32"
    assert layer.input_mean is None and dtype_of(layer.mean) == "float16"
    layer.finalize_state()
    assert dtype_of(layer.mean) == "float32"


@plain_keras
@fact
def test_a_time_distributed_layer_calls_the_call_of_its_layer():
    """TimeDistributed calls `layer.call`, not the layer: its policy is never asked."""
    inner = Returns(dtype="mixed_float16")
    wrapper = keras.layers.TimeDistributed(inner)
    wrapper(tensor(np.ones((1, 2, 3))))
    assert not inner._called and dtype_of(inner.given) == "float32"


@plain_keras
@fact
def test_bidirectional_copies_its_layers_and_their_cells():
    """Bidirectional makes its layers anew of a config, with policies of their own."""
    layer = keras.layers.LSTM(1)
    wrapper = keras.layers.Bidirectional(layer)
    default = keras.config.dtype_policy()
    assert layer.dtype_policy is default
    for copy in (wrapper.forward_layer, wrapper.backward_layer):
        assert copy is not layer
        for part in (copy, copy.cell):
            assert part.dtype_policy is not default
            assert part.dtype_policy == default


@plain_keras
@fact
def test_attention_asks_the_backend_for_its_product_at_each_call(monkeypatch):
    """ops.dot_product_attention, and with it MultiHeadAttention, looks
    `backend.nn.dot_product_attention` up at each call."""
    calls = []
    nn = keras_backend.nn if hasattr(keras_backend, "nn") else keras_backend.ops.nn
    original = nn.dot_product_attention

    def counted(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(nn, "dot_product_attention", counted)
    x = tensor(np.ones((1, 2, 4)))
    keras.layers.MultiHeadAttention(1, 4)(x, x)
    q = tensor(np.ones((1, 2, 1, 4)))
    ops.dot_product_attention(q, q, q)
    assert len(calls) == 2


@plain_keras
@only_on_tensorflow
@fact
def test_attention_on_tensorflow_scales_its_logits_after_their_product():
    """q·k beyond 65504 is inf in float16, though it is not once it is scaled."""
    q = tensor(np.full((1, 2, 1, 16), 100.0), "float16")
    result = ops.convert_to_numpy(ops.dot_product_attention(q, q, q))
    assert not np.all(np.isfinite(result))


@plain_keras
@only_on_jax
@fact
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
@fact
def test_a_half_loss_of_a_layer_stops_fit_on_tensorflow(options):
    """TensorFlow adds no float16 to a float32: add_loss and activity_regularizer of a
    half layer raise in `fit`."""

    class Adds(keras.layers.Layer):
        def call(self, x):
            if not options:
                self.add_loss(ops.mean(x))
            return x

    model = keras.Sequential(
        [
            keras.Input((2,)),
            Adds(dtype="mixed_float16", **options),
            keras.layers.Dense(1),
        ]
    )
    model.compile("sgd", "mse")
    with pytest.raises((TypeError, ValueError)):
        model.fit(np.ones((2, 2)), np.ones((2, 1)), verbose=0)


@plain_keras
@only_on_torch
@fact
def test_a_variable_is_not_autocast_in_a_symbolic_call_on_torch():
    """On the meta device a torch Variable's value has the variable's dtype, so that
    custom layers of a half policy are symbolically float32."""

    class Multiplies(keras.layers.Layer):
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
@fact
def test_a_biass_gradient_stalls():
    """Keras' `add` sums the gradient of a bias in bfloat16 on CPUs."""
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
    assert ops.convert_to_numpy(gradient)[0] < 0.5 * 16 * 62 * 62


@plain_keras
@only_on_tensorflow
@fact
def test_arange_has_no_float16_in_graphs():
    """`arange` raises for float16 inside a `tf.function`, and not outside."""
    import tensorflow as tf

    numbers = functools.partial(ops.arange, 3, dtype="float16")
    numbers()
    with pytest.raises(ValueError, match="range"):
        tf.function(numbers)()


@fact
def test_a_layer_that_builds_itself_has_no_path():
    """Keras sets `_path` when `build` is called, so a Dropout never has a path."""
    layer = keras.layers.Dropout(0.5, name="dropout")
    layer(np.ones((2, 2), "float32"))
    assert layer.path is None
    assert layer._path is None


# What a breakpoint stands on ----------------------------------------------------------


@fact
def test_a_file_holds_no_random_seeds(tmp_path):
    """Keras saves a layer's variables, and not the state of its seed generators."""
    dropout = keras.layers.Dropout(0.5, seed=3)
    model = keras.Sequential([keras.Input((2,)), dropout])
    model(np.ones((2, 2), "float32"), training=True)
    (seed,) = [g.state for g in dropout._seed_generators]
    assert seed.numpy().tolist() == [3, 1]
    model.save(tmp_path / "model.keras")
    (opened,) = keras.models.load_model(tmp_path / "model.keras").layers
    assert opened._seed_generators[0].state.numpy().tolist() == [3, 0]


@fact
def test_the_variables_of_a_model_are_its_weights_and_the_states_of_its_seeds():
    """`variables` has what `weights` has, and the states of all seed generators."""
    inner = keras.Sequential([keras.layers.Dropout(0.5), keras.layers.Dense(2)])
    normalized = [keras.layers.BatchNormalization(), keras.layers.GaussianNoise(1.0)]
    model = keras.Sequential([keras.Input((2,)), inner, *normalized])
    model.compile("sgd", "mse", metrics=["mae"])
    model.fit(np.ones((2, 2), "float32"), np.ones((2, 2), "float32"), verbose=0)
    weights = {id(weight) for weight in model.weights}
    seeds = [v for v in model.variables if id(v) not in weights]
    generators = [g for x in model._flatten_layers() for g in x._seed_generators]
    assert len(seeds) == len(generators) == 2
    assert {id(seed) for seed in seeds} == {id(g.state) for g in generators}


@fact
def test_fit_makes_the_train_function_and_calls_it_with_these_arguments():
    """`fit` calls `make_train_function`, then the function with what has the batch."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
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
