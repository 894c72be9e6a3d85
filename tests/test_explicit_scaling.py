"""Loops of the user's own: stateful, stateless, two-step and three-step."""

import functools
import warnings

import keras
import numpy as np
import pytest
from backends import BACKEND, gradients, tensors, values

import keras_mp
from keras_mp.loss_scaling.stage import train_step

only_jax = pytest.mark.skipif(BACKEND != "jax", reason="stateless loops are JAX's")
only_tensorflow = pytest.mark.skipif(BACKEND != "tensorflow", reason="GradientTape")
only_torch = pytest.mark.skipif(BACKEND != "torch", reason="backward()")

X = np.linspace(-1, 1, 32, dtype="float32").reshape(16, 2)
Y = X @ np.array([[1.0], [-2.0]], "float32") + 0.5


def linear_model():
    """Two variables, and their loss in float32."""
    kernel = keras.Variable(np.array([[0.1], [0.2]], "float32"), name="kernel")
    bias = keras.Variable(np.zeros(1, "float32"), name="bias")

    def loss():
        prediction = keras.ops.add(keras.ops.matmul(X, kernel), bias)
        error = keras.ops.subtract(prediction, Y)
        return keras.ops.mean(keras.ops.square(error))

    return [kernel, bias], loss


def float32_training(steps, clip=None):
    """The same SGD in NumPy."""
    kernel, bias = np.array([[0.1], [0.2]], "float32"), np.zeros(1, "float32")
    for _ in range(steps):
        error = X @ kernel + bias - Y
        grads = [2 * X.T @ error / len(X), 2 * error.mean(0)]
        if clip is not None:
            grads = [np.clip(g, -clip, clip) for g in grads]
        kernel, bias = kernel - 0.1 * grads[0], bias - 0.1 * grads[1]
    return [kernel, bias]


def growing():
    """A scale that grows at every other step, so that a stale one shows at once."""
    return keras_mp.LossScaleOptimizer(
        keras.optimizers.SGD(0.1), initial_scale=4.0, dynamic_growth_steps=2
    )


def growing_model():
    return growing(), *linear_model()


def assert_close(variables, expected):
    for value, wanted in zip(values(variables), expected, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("unscales", "clip"),
    [([False, False], None), ([True, True], 0.5), ([False, True], None)],
    ids=["two steps", "three steps, clipped", "two and three in turns"],
)
def test_a_loop_trains_as_float32_while_the_scale_grows(unscales, clip):
    optimizer, variables, loss = growing_model()
    for step in range(8):
        grads = gradients(lambda: optimizer.scale_loss(loss()), variables)
        if unscales[step % 2]:
            grads = optimizer.unscale(grads)
            if clip:
                grads = [keras.ops.clip(g, -clip, clip) for g in grads]
            optimizer.apply_gradients(zip(grads, variables, strict=True))
        else:
            optimizer.apply(grads, variables)
    assert float(optimizer.loss_scale) == 4.0 * 2**4
    assert_close(variables, float32_training(8, clip))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_loss_that_is_not_finite_has_gradients_that_are_nan(dtype):
    # That of the distance to infinity is -1.
    targets = np.array([np.inf, 1.0], dtype)
    variable = keras.Variable(np.zeros(2, dtype), dtype=dtype)

    def losses():
        return keras.ops.abs(keras.ops.subtract(variable, targets))

    scale_loss = growing().scale_loss
    [each] = gradients(lambda: keras.ops.sum(scale_loss(losses())), [variable])
    np.testing.assert_array_equal(values([each])[0], [np.nan, -4.0])
    [mean] = gradients(lambda: scale_loss(keras.ops.mean(losses())), [variable])
    assert np.isnan(values([mean])[0]).all()


def test_unscaled_gradients_are_float32_and_none_stays_none():
    optimizer = growing()
    optimizer.scale_loss(1.0)
    half = keras.ops.convert_to_tensor(np.array([4.0, 8.0], "float16"))
    none, grad = optimizer.unscale([None, half])
    assert none is None
    assert keras.backend.standardize_dtype(grad.dtype) == "float32"
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(grad), [1.0, 2.0])


def test_clipping_by_value_cannot_hide_an_overflow():
    optimizer, variables, _ = growing_model()
    before = values(variables)
    optimizer.scale_loss(1.0)
    broken = [np.array([[np.inf], [1.0]], "float32"), np.array([1.0], "float32")]
    grads = optimizer.unscale(tensors(broken))
    grads = [keras.ops.clip(g, -1.0, 1.0) for g in grads]
    optimizer.apply_gradients(zip(grads, variables, strict=True))
    assert int(optimizer.skipped_steps) == 1
    np.testing.assert_array_equal(before[0], values(variables)[0])


@pytest.mark.parametrize("unscale", ["unscale", "get_unscaled_gradients"])
def test_unscaling_twice_raises(unscale):
    optimizer = growing()
    optimizer.scale_loss(1.0)
    grads = getattr(optimizer, unscale)([keras.ops.ones(2)])
    with pytest.raises(ValueError, match="unscaled already"):
        getattr(optimizer, unscale)(grads)


def test_gradients_of_several_micro_batches_may_be_unscaled_one_by_one():
    optimizer = growing()
    for _ in range(3):
        optimizer.scale_loss(1.0)
        optimizer.unscale([keras.ops.ones(2)])


def test_applying_gradients_when_nothing_was_scaled_warns_once():
    optimizer, variables, loss = growing_model()
    grads = gradients(loss, variables)
    with pytest.warns(UserWarning, match="no loss was ever scaled"):
        optimizer.apply(grads, variables)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.apply(grads, variables)


def test_a_train_step_that_never_scales_applies_its_gradients_as_they_are():
    optimizer, variables, loss = growing_model()
    for step in range(4):
        with train_step(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.apply(gradients(loss, variables), variables)
        assert len(caught) == (step == 0)
    assert_close(variables, float32_training(4))


def test_a_train_step_that_scales_only_sometimes_is_refused():
    optimizer, variables, loss = growing_model()
    with train_step():
        grads = gradients(lambda: optimizer.scale_loss(loss()), variables)
        optimizer.apply(grads, variables)
    before = values(variables + optimizer.variables)
    with train_step(), pytest.raises(ValueError, match="never called"):
        optimizer.apply(gradients(loss, variables), variables)
    for a, b in zip(before, values(variables + optimizer.variables), strict=True):
        np.testing.assert_array_equal(a, b)


def test_tf_keras_names_do_the_same():
    optimizer, variables, loss = growing_model()
    scaled = optimizer.get_scaled_loss(lambda: 2.0)
    assert float(scaled()) == 8.0
    for _ in range(4):
        grads = gradients(lambda: optimizer.get_scaled_loss(loss()), variables)
        grads = optimizer.get_unscaled_gradients(grads)
        returned = optimizer.apply_gradients(zip(grads, variables, strict=True))
    assert int(returned) == 4
    assert_close(variables, float32_training(4))


@only_tensorflow
@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("clipped", [False, True])
def test_the_loop_of_the_old_tensorflow_guide_runs_as_it_stands(clipped, jit_compile):
    import tensorflow as tf

    import keras_mp as mixed_precision

    optimizer = keras.optimizers.SGD(0.1)
    optimizer = mixed_precision.LossScaleOptimizer(
        optimizer, initial_scale=4.0, dynamic_growth_steps=2
    )
    variables, loss_object = linear_model()

    @tf.function(jit_compile=jit_compile)
    def train_step():
        with tf.GradientTape() as tape:
            loss = loss_object()
            scaled_loss = optimizer.get_scaled_loss(loss)
        scaled_gradients = tape.gradient(scaled_loss, [v.value for v in variables])
        gradients = optimizer.get_unscaled_gradients(scaled_gradients)
        if clipped:
            gradients = [tf.clip_by_value(g, -0.5, 0.5) for g in gradients]
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    for _ in range(8):
        train_step()
    assert float(optimizer.loss_scale) == 4.0 * 2**4
    assert_close(variables, float32_training(8, clip=0.5 if clipped else None))


@only_tensorflow
@pytest.mark.parametrize("unscaled", ["by apply", "inside", "eagerly"])
def test_gradients_may_be_taken_in_a_function_compiled_apart(unscaled):
    import tensorflow as tf

    optimizer, variables, loss = growing_model()

    @tf.function
    def scaled_gradients():
        with tf.GradientTape() as tape:
            scaled = optimizer.scale_loss(loss())
        grads = tape.gradient(scaled, [v.value for v in variables])
        return optimizer.unscale(grads) if unscaled == "inside" else grads

    for _ in range(8):  # The Python of the function runs in the first round only.
        grads = scaled_gradients()
        if unscaled == "eagerly":
            grads = optimizer.unscale(grads)
        optimizer.apply(grads, variables)
    assert_close(variables, float32_training(8))


@only_jax
@pytest.mark.parametrize("three_step", [False, True])
def test_a_jitted_stateless_loop_follows_the_scale_as_it_moves(three_step):
    import jax

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.set_weights([np.array([[0.1], [0.2]], "float32"), np.zeros(1, "float32")])
    optimizer = growing()
    optimizer.build(model.trainable_variables)

    def loss_fn(trainable, non_trainable, state):
        prediction, non_trainable = model.stateless_call(trainable, non_trainable, X)
        loss = keras.ops.mean(keras.ops.square(prediction - Y))
        return optimizer.stateless_scale_loss(state, loss), non_trainable

    @jax.jit
    def step(trainable, non_trainable, state):
        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (_, non_trainable), grads = grad_fn(trainable, non_trainable, state)
        if three_step:
            grads = optimizer.stateless_unscale(state, grads)
            grads = [keras.ops.clip(g, -0.5, 0.5) for g in grads]
        trainable, state = optimizer.stateless_apply(state, grads, trainable)
        return trainable, non_trainable, state

    trainable = [v.value for v in model.trainable_variables]
    non_trainable = [v.value for v in model.non_trainable_variables]
    state = [v.value for v in optimizer.variables]
    for _ in range(8):
        trainable, non_trainable, state = step(trainable, non_trainable, state)
    scale = optimizer.stateless_scale_loss(state, 1.0)
    assert float(scale) == 4.0 * 2**4
    expected = float32_training(8, clip=0.5 if three_step else None)
    for value, wanted in zip(trainable, expected, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-6)


@only_jax
def test_what_would_bake_the_present_scale_into_a_jax_trace_is_refused():
    import jax

    optimizer, variables, _ = growing_model()
    optimizer.build(variables)
    grad = jax.grad(lambda x: optimizer.scale_loss(x))
    ones = [np.ones((2, 1), "float32"), np.ones(1, "float32")]
    for name, function, argument in (
        ("scale_loss", optimizer.scale_loss, 1.0),
        ("scale_loss", grad, 1.0),
        ("unscale", optimizer.unscale, ones),
        ("apply", lambda grads: optimizer.apply(grads, variables), ones),
    ):
        with pytest.raises(ValueError, match=f"stateless_{name}"):
            jax.jit(function)(argument)
    assert float(grad(1.0)) == 4.0


@only_jax
def test_stateful_apply_on_eager_jax_leaks_no_tracers():
    import jax

    optimizer, variables, loss = growing_model()
    with jax.checking_leaks():
        for _ in range(3):
            grads = gradients(lambda: optimizer.scale_loss(loss()), variables)
            optimizer.apply(grads, variables)
    assert all(isinstance(v.value, jax.Array) for v in variables + optimizer.variables)
    assert_close(variables, float32_training(3))


@only_torch
def test_the_usual_torch_loop():
    optimizer, variables, loss = growing_model()
    for _ in range(8):
        for variable in variables:
            variable.value.grad = None
        optimizer.scale_loss(loss()).backward()
        optimizer.apply([v.value.grad for v in variables], variables)
    assert_close(variables, float32_training(8))


@only_torch
def test_the_grad_of_a_variable_is_unscaled_in_place_and_nothing_else_is():
    optimizer, variables, _ = growing_model()
    kernel, bias = (v.value for v in variables)
    for finite in (True, False):
        kernel.grad = kernel.detach().new_full((2, 1), 4.0 if finite else np.inf)
        given = [kernel.grad, bias.detach().new_full((1,), 8.0)]
        optimizer.scale_loss(1.0)
        optimizer.apply(given, variables)
        # The scale is 4. A skipped step leaves all as it was.
        assert kernel.grad is given[0]
        assert (kernel.grad == (1.0 if finite else np.inf)).all()
        assert given[1] == 8.0
    np.testing.assert_allclose(values(variables)[1], [-0.2], rtol=1e-6)


@only_torch
@pytest.mark.parametrize("order", [[0, 1], [1, 0]], ids=["own first", "own last"])
def test_a_gradient_that_two_variables_share_is_divided_once(order):
    optimizer = growing()
    variables = [keras.Variable(np.zeros(2, "float32")) for _ in range(2)]
    first = variables[0].value
    first.grad = first.detach().new_full((2,), 4.0)
    optimizer.scale_loss(1.0)
    optimizer.apply([first.grad, first.grad.view(2)], [variables[i] for i in order])
    for value in values(variables):
        np.testing.assert_allclose(value, [-0.1, -0.1], rtol=1e-6)


@only_torch
def test_a_loss_may_be_a_whole_number():
    optimizer, variables, _ = growing_model()
    grads = [v.value.detach() * 0 + 4.0 for v in variables]
    optimizer.scale_loss(1.0)
    optimizer.apply(grads, variables, loss=1)
    assert int(optimizer.iterations) == 1


@only_torch
def test_unscale_leaves_the_grads_of_variables_alone():
    optimizer, variables, loss = growing_model()
    optimizer.build(variables)
    optimizer.scale_loss(loss()).backward()
    grads = [v.value.grad for v in variables]
    before = [g.clone() for g in grads]
    unscaled = optimizer.unscale(grads)
    for grad, old, new in zip(grads, before, unscaled, strict=True):
        assert (grad == old).all()
        assert (new == old / 4).all()


def test_optimizer_variables_of_another_number_are_refused():
    optimizer = growing()
    with pytest.raises(ValueError, match="Received: 1 values for"):
        optimizer.stateless_scale_loss([1.0], 1.0)


@pytest.mark.skipif(BACKEND != "jax", reason="vmap is of JAX")
@pytest.mark.parametrize("how", ["vmap", "jit of vmap", "vmap of jit"])
def test_an_ensemble_steps_each_member_by_itself(how):
    import jax

    optimizer, variable = growing(), keras.Variable(np.ones(2, "float32"))
    optimizer.build([variable])
    stack = lambda v: jax.numpy.stack([v.value] * 3)  # noqa: E731
    grads = jax.numpy.array([[4.0, 4.0], [np.inf, 4.0], [8.0, 8.0]])

    def step(state, grad, trainable):
        optimizer.stateless_scale_loss(state, 1.0)
        return optimizer.stateless_apply(state, [grad], [trainable])

    transform = {
        "vmap": jax.vmap,
        "jit of vmap": lambda f: jax.jit(jax.vmap(f)),
        "vmap of jit": lambda f: jax.vmap(jax.jit(f)),
    }[how]
    (trainable,), _ = transform(step)(
        [stack(v) for v in optimizer.variables], grads, stack(variable)
    )
    np.testing.assert_allclose(trainable, [[0.9, 0.9], [1.0, 1.0], [0.8, 0.8]])


@pytest.mark.skipif(BACKEND != "jax", reason="XLA divides large results among threads")
@pytest.mark.parametrize("number", [2**13, 2**17])
def test_a_loss_for_each_of_many_elements_is_scaled_in_a_compiled_step(number):
    import jax

    optimizer = keras_mp.LossScaleOptimizer("sgd", initial_scale=4.0)
    optimizer.build([keras.Variable(1.0)])
    state = [v.value for v in optimizer.variables]
    scaled = functools.partial(optimizer.stateless_scale_loss, state)
    losses = np.ones(number, "float32")
    for each in (scaled, jax.vmap(scaled)):
        compiled = jax.jit(jax.grad(lambda x, each=each: each(2 * x).sum()))
        assert (compiled(losses) == 8).all()
        assert (jax.jit(lambda x, each=each: each(2 * x))(losses) == 8).all()
