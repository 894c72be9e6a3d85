"""The wrapper: a skipped step leaves no trace, scaling is exact, and what it says."""

import keras
import numpy as np
import pytest
from backends import COMPILED, same_bits, stateful_step, values
from hypothesis import given
from hypothesis import strategies as st
from keras.src.backend.common.variables import AutocastScope

import keras_mp

INF, NAN = np.float32(np.inf), np.float32(np.nan)


def make(inner="sgd", **kwargs):
    if inner == "sgd":
        inner = keras.optimizers.SGD(0.5)
    kwargs.setdefault("initial_scale", 1024.0)
    variables = [
        keras.Variable(np.array([1.0, 2.0], "float32"), name="first"),
        keras.Variable(np.array(3.0, "float32"), name="second"),
    ]
    return keras_mp.LossScaleOptimizer(inner, **kwargs), variables


def scaled(optimizer, *grads, dtype="float32"):
    optimizer.scale_loss(1.0)  # As a loop would, before it takes gradients.
    scale = np.float32(keras.ops.convert_to_numpy(optimizer.loss_scale))
    return [None if g is None else (np.asarray(g) * scale).astype(dtype) for g in grads]


@pytest.mark.parametrize("compiled", COMPILED)
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.sampled
def test_overflow_halves_the_scale_and_skips_the_update(compiled, bad, dtype):
    optimizer, variables = make(keras.optimizers.Adam(0.1))
    step = stateful_step(optimizer, variables, compiled)
    step(scaled(optimizer, [1.0, 2.0], 4.0, dtype=dtype))
    inner = optimizer.inner_optimizer
    before = values(variables + inner.variables)
    step([np.array([1.0, bad], dtype), np.array(1.0, dtype)])
    assert same_bits(before, values(variables + inner.variables))
    assert float(optimizer.loss_scale) == 512.0
    assert int(optimizer.skipped_steps) == int(optimizer.consecutive_skips) == 1
    assert not bool(optimizer.last_step_finite)
    step(scaled(optimizer, [1.0, 2.0], 4.0, dtype=dtype))
    assert int(optimizer.skipped_steps) == 1 and int(optimizer.consecutive_skips) == 0
    assert int(optimizer.iterations) == 2


def test_float16_losses_are_scaled_in_float32():
    optimizer, _ = make(initial_scale=2.0**20)
    loss = keras.ops.convert_to_tensor(np.float16(3.0))
    product = optimizer.scale_loss(loss)
    assert keras.backend.standardize_dtype(product.dtype) == "float32"
    assert float(product) == 3.0 * 2**20


def test_a_scale_above_65504_survives_a_float16_autocast_scope():
    optimizer, _ = make(initial_scale=2.0**20)
    with AutocastScope("float16"):
        assert float(optimizer.scale_loss(1.0)) == 2.0**20


@given(
    exponent=st.integers(-120, 120),
    gradient=st.floats(-1e5, 1e5, width=32, allow_subnormal=False),
)
def test_unscaling_undoes_scaling_exactly_for_powers_of_two(exponent, gradient):
    scale = 2.0**exponent
    with np.errstate(over="ignore", under="ignore"):
        product = np.float32(gradient) * np.float32(scale)
    tiny = np.finfo(np.float32).tiny
    if not np.isfinite(product) or (gradient and abs(product) < tiny):
        return  # The product itself is not exact.
    optimizer, _ = make(initial_scale=scale, min_scale=2.0**-126, max_scale=2.0**126)
    grad = keras.ops.convert_to_tensor(product)
    (unscaled,) = optimizer.unscale([grad])
    assert np.float32(keras.ops.convert_to_numpy(unscaled)) == np.float32(gradient)


def test_the_inner_optimizer_may_be_a_name_a_config_or_an_object():
    config = keras.optimizers.serialize(keras.optimizers.Adam(0.25))
    for inner in ("adam", config, keras.optimizers.Adam(0.25)):
        optimizer = keras_mp.LossScaleOptimizer(inner)
        assert isinstance(optimizer.inner_optimizer, keras.optimizers.Adam)


def test_the_learning_rate_is_the_inner_optimizers():
    optimizer, _ = make(keras.optimizers.SGD(0.5))
    optimizer.learning_rate = 0.25
    assert float(optimizer.inner_optimizer.learning_rate) == 0.25
    assert float(optimizer.learning_rate) == 0.25


def test_max_consecutive_skips_stops_an_eager_loop_and_says_what_to_try():
    optimizer, variables = make(max_consecutive_skips=2)
    step = stateful_step(optimizer, variables, compiled=False)
    optimizer.scale_loss(1.0)
    step([np.array([NAN, 1.0], "float32"), np.float32(1.0)])
    with pytest.raises(keras_mp.TrainingDivergedError, match="2 steps in a row.*256"):
        step([np.array([NAN, 1.0], "float32"), np.float32(1.0)])


def test_its_repr_names_the_inner_optimizer_and_what_is_not_default(monkeypatch):
    plain = keras_mp.LossScaleOptimizer("adam")
    other = keras_mp.LossScaleOptimizer(
        keras.optimizers.SGD(0.1), 8.0, hysteresis=2, max_consecutive_skips=5
    )

    def read(*args):
        raise AssertionError("a repr must not wait for the device")

    monkeypatch.setattr(keras.ops, "convert_to_numpy", read)
    monkeypatch.setattr(keras.Variable, "value", property(read))
    assert repr(plain) == "LossScaleOptimizer(Adam)"
    assert repr(other) == (
        "LossScaleOptimizer(SGD, initial_scale=8.0, hysteresis=2, "
        "max_consecutive_skips=5)"
    )


def test_a_default_that_changes_later_changes_no_old_file():
    class Later(keras_mp.LossScaleOptimizer):
        def __init__(self, *args, hysteresis=2, retake_steps=7, **options):
            options |= {"hysteresis": hysteresis, "retake_steps": retake_steps}
            super().__init__(*args, **options)

    config = keras_mp.LossScaleOptimizer("sgd").get_config()
    assert "hysteresis" not in config and "retake_steps" not in config
    opened = Later.from_config(config)
    assert (opened._loss_scaling.rule.hysteresis, opened.retake_steps) == (1, 100)
    made = Later.from_config(Later("sgd").get_config())
    assert (made._loss_scaling.rule.hysteresis, made.retake_steps) == (2, 7)
