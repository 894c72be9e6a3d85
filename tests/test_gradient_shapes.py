"""Gradients of every shape and dtype: none, empty, many, in low precision."""

import keras
import numpy as np
import pytest
from backends import (
    BACKEND,
    COMPILED,
    graphs_within,
    same_bits,
    stateful_step,
    tensors,
    values,
)

import keras_mp

# What is told of broken steps is tested in test_skip_watch.py.
pytestmark = pytest.mark.filterwarnings("ignore:.*whatever the loss scale:UserWarning")

SCALE = 8.0


def scaling(inner=None):
    optimizer = keras_mp.LossScaleOptimizer(
        inner or keras.optimizers.SGD(0.5), initial_scale=SCALE
    )
    optimizer.scale_loss(1.0)  # As a loop would, before it takes gradients.
    return optimizer


# Shapes ------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", COMPILED)
def test_gradients_of_all_shapes_update_or_skip_together(compiled):
    shapes = [(), (0,), (3, 0), (2, 3, 4), (1, 1, 1, 1, 1), (), (300, 300)]
    variables = [keras.Variable(np.ones(s, "float32")) for s in shapes]
    optimizer = scaling()
    step = stateful_step(optimizer, variables, compiled)
    step([np.full(s, SCALE, "float32") for s in shapes])
    assert same_bits(values(variables), [np.full(s, 0.5, "float32") for s in shapes])
    for index, shape in enumerate(shapes):
        if 0 in shape:
            continue  # Nothing in it can be infinite.
        grads = [np.ones(s, "float32") for s in shapes]
        grads[index][(-1,) * len(shape)] = np.inf
        step(grads)
        assert not bool(optimizer.last_step_finite)
        step([np.zeros(s, "float32") for s in shapes])
    assert same_bits(values(variables), [np.full(s, 0.5, "float32") for s in shapes])
    counts = [line.count for line in optimizer.nonfinite_report()]
    assert counts == [1] * 5


@pytest.mark.parametrize("compiled", COMPILED)
def test_gradients_without_elements_are_finite(compiled):
    variables = [keras.Variable(np.ones((0, 2), "float32"))]
    optimizer = scaling()
    stateful_step(optimizer, variables, compiled)([np.ones((0, 2), "float32")])
    assert bool(optimizer.last_step_finite) and int(optimizer.iterations) == 1


@pytest.mark.parametrize("compiled", COMPILED)
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_missing_gradients_leave_the_others_to_decide(compiled):
    variables = [keras.Variable(np.ones(2, "float32")) for _ in range(4)]
    optimizer = scaling()
    step = stateful_step(optimizer, variables, compiled)
    good, bad = np.full(2, SCALE, "float32"), np.full(2, np.nan, "float32")
    step([None, good, None, good])
    step([None, good, None, bad])
    assert int(optimizer.skipped_steps) == 1
    assert [v.tolist() for v in values(variables)] == [[1, 1], [0.5, 0.5]] * 2
    (line,) = optimizer.nonfinite_report()
    assert line.path == variables[3].path


# No variables ------------------------------------------------------------------------


def test_no_gradients_at_all_change_nothing():
    optimizer = scaling()
    optimizer.apply([], [])
    optimizer.apply_gradients([])
    assert optimizer.unscale([]) == [] and not optimizer.built
    optimizer.build([])
    optimizer.apply([])
    assert int(optimizer.iterations) == 0 and optimizer.nonfinite_report() == []
    if BACKEND != "tensorflow":  # Where Keras has no stateless_apply.
        before = values(optimizer.variables)
        state = [v.value for v in optimizer.variables]
        trainable, state = optimizer.stateless_apply(state, [], [])
        assert trainable == [] and same_bits(values(state), before)


@pytest.mark.filterwarnings("ignore:The model does not have any trainable weights")
@pytest.mark.parametrize("run_eagerly", [True, False])
def test_a_model_with_no_trainable_weights_goes_through_fit(run_eagerly):
    with keras_mp.policy_scope("mixed_float16"):
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(2)]
        )
    model.trainable = False
    before = values(model.variables)
    model.compile("adam", "mse", run_eagerly=run_eagerly)
    model.fit(np.ones((8, 4)), np.ones((8, 2)), verbose=0)
    assert isinstance(model.optimizer, keras_mp.LossScaleOptimizer)
    assert same_bits(values(model.variables), before)


# Many variables ----------------------------------------------------------------------


def test_a_thousand_variables_are_trained_and_skipped():
    variables = [keras.Variable(np.ones(3, "float32")) for _ in range(1000)]
    optimizer = scaling()
    step = stateful_step(optimizer, variables, compiled=BACKEND == "jax")
    grads = [np.full(3, SCALE, "float32") for _ in variables]
    step(grads)
    grads[777][1] = np.nan
    step(grads)
    assert {v.tobytes() for v in values(variables)} == {
        np.full(3, 0.5, "float32").tobytes()
    }
    assert int(optimizer.skipped_steps) == 1
    (line,) = optimizer.nonfinite_report()
    assert line.path == variables[777].path


@pytest.mark.skipif(BACKEND == "torch", reason="torch has no program to look at")
def test_the_number_of_reductions_does_not_grow_with_the_number_of_variables():
    assert 0 < reductions(2) == reductions(20)


def reductions(count):
    """How many reductions are in the compiled step of so many variables."""
    variables = [keras.Variable(np.ones((3, 2), "float32")) for _ in range(count)]
    optimizer = scaling()
    optimizer.build(variables)
    grads = tensors([np.ones((3, 2), "float32")] * count)
    if BACKEND == "tensorflow":
        import tensorflow as tf

        step = tf.function(lambda grads: optimizer.apply(grads, variables))
        graphs = graphs_within(step.get_concrete_function(grads).graph)
        kinds = [op.type for graph in graphs for op in graph.get_operations()]
        return sum(kind in ("Max", "Min", "Sum", "Any", "All") for kind in kinds)
    import jax

    program = jax.jit(optimizer.stateless_apply).lower(
        [v.value for v in optimizer.variables], grads, [v.value for v in variables]
    )
    return program.as_text().count("stablehlo.reduce(")


# Dtypes of variables -----------------------------------------------------------------

LOW = ["float16", "bfloat16"]
lossy = pytest.mark.filterwarnings("ignore:Optimizer .* updates bfloat16 weights")
FLOAT64 = [] if BACKEND == "jax" else ["float64"]  # JAX has none unless told to.


def low_precision_variable(dtype):
    start = np.array([1.0, -2.0, 0.5], "float32")
    return keras.Variable(start, dtype=dtype, name="kernel")


@lossy
@pytest.mark.parametrize("compiled", COMPILED)
@pytest.mark.parametrize("dtype", [*LOW, *FLOAT64])
def test_variables_of_any_float_dtype_are_trained_and_skipped(dtype, compiled):
    variable = low_precision_variable(dtype)
    step = stateful_step(scaling(), [variable], compiled)
    step([np.full(3, SCALE, "float32")])
    step([np.full(3, np.inf, "float32")])
    assert variable.dtype == dtype
    result = keras.ops.convert_to_numpy(keras.ops.cast(variable, "float32"))
    assert result.tolist() == [0.5, -2.5, 0.0]


@lossy
@pytest.mark.parametrize("dtype", LOW)
def test_gradients_of_low_precision_variables_are_clipped_in_float32(dtype):
    # The sum of squares, 3 * 300**2, is beyond float16.
    variable = low_precision_variable(dtype)
    optimizer = scaling(keras.optimizers.SGD(1.0, global_clipnorm=3.0**0.5))
    grad = keras.ops.cast(tensors([np.full(3, 300 * SCALE, "float32")])[0], dtype)
    optimizer.apply([grad], [variable])
    result = keras.ops.convert_to_numpy(keras.ops.cast(variable, "float32"))
    assert result.tolist() == [0.0, -3.0, -0.5]


@lossy
@pytest.mark.parametrize("compiled", COMPILED)
@pytest.mark.parametrize("dtype", LOW)
def test_low_precision_variables_accumulate_gradients(dtype, compiled):
    variable = low_precision_variable(dtype)
    optimizer = scaling(keras.optimizers.SGD(0.5, gradient_accumulation_steps=2))
    step = stateful_step(optimizer, [variable], compiled)
    for gradient in (2.0, np.nan, 4.0):
        step([np.full(3, gradient * float(optimizer.loss_scale), "float32")])
    result = keras.ops.convert_to_numpy(keras.ops.cast(variable, "float32"))
    assert result.tolist() == [-0.5, -3.5, -1.0]


@pytest.mark.parametrize("compiled", COMPILED)
@pytest.mark.parametrize("kind, accumulated", [("Adam", None), ("SGD", 2)])
def test_a_gradient_beyond_its_variables_or_accumulators_dtype_is_skipped(
    kind, accumulated, compiled
):
    variable = low_precision_variable("float16")
    inner = getattr(keras.optimizers, kind)
    optimizer = scaling(inner(0.5, gradient_accumulation_steps=accumulated))
    step = stateful_step(optimizer, [variable], compiled)
    step([np.full(3, 1e5 * SCALE, "float32")])
    assert int(optimizer.skipped_steps) == 1
    assert np.isfinite(keras.ops.convert_to_numpy(variable)).all()


@pytest.mark.skipif(not FLOAT64, reason="JAX has no float64 unless told to")
@pytest.mark.parametrize("scale", [1.0, 2.0**-20, 2.0**20])
def test_gradients_in_float64_are_unscaled_in_float64(scale):
    optimizer = keras_mp.LossScaleOptimizer(
        "sgd", initial_scale=scale, min_scale=2.0**-20
    )
    optimizer.scale_loss(1.0)
    third = np.array([1 / 3, 1e300])  # The second is infinite in float32.
    (grad,) = optimizer.unscale(tensors([third * scale]))
    assert same_bits(values([grad]), [third])


# Variables that are overwritten with their gradient ----------------------------------


@pytest.mark.parametrize("compiled", COMPILED)
@pytest.mark.parametrize("accumulation", [None, 2])
def test_what_overwrites_a_variable_is_not_divided_and_skips_if_not_finite(
    accumulation, compiled
):
    weight = keras.Variable(np.ones(2, "float32"))
    float8_scale = keras.Variable(np.float32(2.0))
    float8_scale.overwrite_with_gradient = True
    optimizer = scaling(
        keras.optimizers.SGD(0.5, gradient_accumulation_steps=accumulation)
    )
    step = stateful_step(optimizer, [weight, float8_scale], compiled)
    # Only the first and the last are finite. Accumulated, it is their maximum.
    for gradient, new in ((1.0, 7.0), (1.0, np.inf), (np.nan, 9.0), (1.0, 5.0)):
        gradient *= float(optimizer.loss_scale)
        step([np.full(2, gradient, "float32"), np.float32(new)])
    assert int(optimizer.skipped_steps) == 2
    assert values([float8_scale])[0] == (7.0 if accumulation else 5.0)
    assert values([weight])[0].tolist() == [0.5 if accumulation else 0.0] * 2


def test_what_overwrites_a_variable_is_not_unscaled_either():
    weight, float8_scale = keras.Variable(1.0), keras.Variable(2.0)
    float8_scale.overwrite_with_gradient = True
    optimizer = scaling()
    optimizer.build([weight, float8_scale])
    grads = optimizer.unscale(tensors([np.float32(SCALE), np.float32(7.0)]))
    assert [float(g) for g in grads] == [1.0, 7.0]


def test_float8_training_in_fit_equals_the_one_without_its_skipped_step():
    def trained(overflows):
        keras.utils.set_random_seed(0)
        with keras_mp.policy_scope("mixed_float16"):
            model = keras.Sequential(
                [keras.Input((4,)), keras.layers.Dense(4), keras.layers.Dense(1)]
            )
        model.layers[0].quantize("float8")
        model.compile(
            keras_mp.LossScaleOptimizer("adam", initial_scale=256.0),
            "mse",
            jit_compile=BACKEND == "jax",
        )

        def batches():
            # An infinite label, not an input: quantization would make that finite.
            for x, y in ((1.0, 1.0), (2.0, 1.0), *[(2.0, np.inf)] * overflows, (3, 1)):
                yield np.full((8, 4), x, "float32"), np.full((8, 1), y, "float32")

        model.fit(batches(), steps_per_epoch=3 + overflows, verbose=0, shuffle=False)
        assert int(model.optimizer.skipped_steps) == overflows
        return values(model.variables)

    assert same_bits(trained(overflows=1), trained(overflows=0))
