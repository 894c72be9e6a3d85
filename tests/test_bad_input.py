"""Bad input gets an error that names argument, rule and value, and changes nothing."""

import gc
import inspect

import keras
import numpy as np
import pytest
from backends import same_bits, values

import keras_mp


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("growth_factor", 1),
        ("growth_factor", float("inf")),
        ("backoff_factor", 0),
        ("backoff_factor", 1),
        ("backoff_factor", float("nan")),
        ("initial_scale", 0.5),
        ("initial_scale", 2.0**25),
        ("initial_scale", 0),
        ("initial_scale", -1.0),
        ("initial_scale", float("inf")),
        ("initial_scale", float("nan")),
        ("initial_scale", "2"),
        ("initial_scale", None),
        ("initial_scale", True),
        ("dynamic_growth_steps", 0),
        ("dynamic_growth_steps", 1.5),
        ("hysteresis", 0),
        ("max_consecutive_skips", 0),
        ("max_consecutive_skips", 2.5),
        ("min_scale", 0.0),
        ("max_scale", float("inf")),
        ("dynamic", "no"),
        ("clipnorm", 1.0),
        ("global_clipnorm", 1.0),
        ("gradient_accumulation_steps", 2),
        ("use_ema", True),
        ("momentum", 0.9),
    ],
)
def test_an_argument_outside_its_range_is_refused(name, value):
    inner = keras.optimizers.SGD(0.1, loss_scale_factor=8.0)
    with pytest.raises(ValueError, match=f"`{name}`.*Received: .*{name}"):
        keras_mp.LossScaleOptimizer(inner, **{name: value})
    assert inner.loss_scale_factor == 8.0
    keras_mp.LossScaleOptimizer(inner)  # Nothing holds it.


@pytest.mark.parametrize("inner", [object(), 3, None, [], keras.optimizers.Adam])
def test_what_is_no_optimizer_of_keras_is_refused(inner):
    with pytest.raises(ValueError, match="`inner_optimizer` must be a Keras optimizer"):
        keras_mp.LossScaleOptimizer(inner)


def test_dynamic_in_the_place_of_tf_keras_is_named():
    for dynamic in (True, False):
        with pytest.raises(ValueError, match=f"pass dynamic={dynamic} by its name"):
            keras_mp.LossScaleOptimizer("adam", dynamic)


def test_min_scale_over_max_scale_is_refused():
    with pytest.raises(ValueError, match="min_scale=8.0, max_scale=4.0"):
        keras_mp.LossScaleOptimizer(
            "sgd", min_scale=8.0, max_scale=4.0, initial_scale=8.0
        )


def test_a_fixed_scale_must_be_given():
    with pytest.raises(ValueError, match="`dynamic=False` needs an `initial_scale`"):
        keras_mp.LossScaleOptimizer("sgd", dynamic=False)
    fixed = keras_mp.LossScaleOptimizer("sgd", dynamic=False, initial_scale=2.0**15)
    assert float(fixed.loss_scale) == 2.0**15


@pytest.mark.parametrize(
    "wrapper", [keras_mp.LossScaleOptimizer, keras.optimizers.LossScaleOptimizer]
)
def test_a_wrapper_round_a_wrapper_is_refused(wrapper):
    with pytest.raises(ValueError, match="must not scale the loss itself"):
        keras_mp.LossScaleOptimizer(wrapper(keras.optimizers.SGD()))


def test_one_inner_optimizer_in_two_wrappers_is_refused():
    inner = keras.optimizers.SGD()
    first = keras_mp.LossScaleOptimizer(inner)
    with pytest.raises(ValueError, match="in one wrapper only"):
        keras_mp.LossScaleOptimizer(inner)
    assert first.inner_optimizer is inner
    del first
    gc.collect()
    keras_mp.LossScaleOptimizer(inner)


def ones(*shape):
    return keras.ops.ones(shape)


@pytest.mark.parametrize(
    ("grads", "message"),
    [
        ([ones(2)], "1 gradients for 2 variables"),
        ([ones(2), ones(), ones()], "3 gradients for 2 variables"),
        ([ones(3), ones()], r"shape \(3,\) for variable .*first.* of shape \(2,\)"),
        ([ones(2), ones(1)], r"shape \(1,\) for variable"),
        ([None, None], "all of `grads` are None"),
    ],
)
@pytest.mark.parametrize("built", [False, True])
def test_gradients_that_do_not_fit_are_refused(grads, message, built):
    optimizer = keras_mp.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    variables = [
        keras.Variable(np.ones(2, "float32"), name="first"),
        keras.Variable(np.float32(1), name="second"),
    ]
    if built:
        optimizer.build(variables)
    optimizer.scale_loss(1.0)
    before = values(variables + optimizer.variables)
    with pytest.raises(ValueError, match=message):
        optimizer.apply(grads, variables)
    assert same_bits(before, values(variables + optimizer.variables))
    assert optimizer.built == built


def test_gradients_without_variables_need_a_built_optimizer():
    with pytest.raises(ValueError, match="`trainable_variables` must be given"):
        keras_mp.LossScaleOptimizer("sgd").apply([ones(2)])


def test_an_inner_optimizer_built_for_other_variables_is_refused():
    inner = keras.optimizers.SGD()
    inner.build([keras.Variable(np.ones(2))])
    with pytest.raises(ValueError, match="Unknown variable"):
        keras_mp.LossScaleOptimizer(inner).build([keras.Variable(np.ones(2))])


def test_no_gradients_at_all_do_nothing_as_in_keras():
    optimizer = keras_mp.LossScaleOptimizer("sgd")
    optimizer.apply([])
    assert int(optimizer.iterations) == 0


def test_a_variable_that_the_optimizer_does_not_know_is_named():
    known, unknown = (keras.Variable(np.ones(2, "float32"), name=n) for n in "ab")
    optimizer = keras_mp.LossScaleOptimizer("sgd")
    optimizer.build([known])
    optimizer.scale_loss(1.0)
    with pytest.raises(ValueError, match="Unknown variable.*path=b"):
        optimizer.apply([keras.ops.ones(2)], [unknown])
    assert int(optimizer.iterations) == int(optimizer.step_counter) == 0


@pytest.mark.parametrize("name", ["init_scale", "learning_rate"])
def test_an_argument_that_no_wrapper_has_is_refused_with_those_it_has(name):
    with pytest.raises(ValueError, match=f"`{name}`.*initial_scale.*backoff_factor"):
        keras_mp.LossScaleOptimizer("sgd", **{name: 0.1})


def test_that_error_has_every_argument():
    with pytest.raises(ValueError) as error:
        keras_mp.LossScaleOptimizer("sgd", scale=2.0)
    named = str(error.value).partition("It takes ")[2].partition(";")[0]
    takes = inspect.signature(keras_mp.LossScaleOptimizer.__init__).parameters
    expected = {*takes} - {"self", "inner_optimizer", "kwargs"}
    assert {*named.replace(" and ", ", ").split(", ")} == expected


def test_a_stateless_step_wants_a_value_for_each_variable():
    optimizer = keras_mp.LossScaleOptimizer("sgd")
    with pytest.raises(
        ValueError, match="`stateless_apply` needs an optimizer that is"
    ):
        optimizer.stateless_apply([], [], [])
    optimizer.build([keras.Variable(1.0)])
    state = [v.value for v in optimizer.variables]
    with pytest.raises(ValueError, match="`optimizer_variables` must.*Received: 1 val"):
        optimizer.stateless_apply(state[:1], [1.0], [1.0])
    with pytest.raises(ValueError, match="`trainable_variables` must.*Received: 2 val"):
        optimizer.stateless_apply(state, [1.0], [1.0, 2.0])
