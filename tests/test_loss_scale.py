"""The rule of the loss scale, alone: against an oracle, and by its properties."""

import dataclasses
import functools

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import SGD, Adam, LossScaleOracle, ScaledTraining

from keras_mp.loss_scaling.schedule import LossScaleRule, LossScaleState

# What a step was: (were its gradients finite?, was its loss?)
FINITE, OVERFLOW, BROKEN = (True, True), (False, True), (False, False)

# --- how the rule is run ------------------------------------------------------------


@functools.cache
def compiled(rule):
    """`rule.next`, traced once by the backend's compiler."""
    if keras.backend.backend() == "jax":
        import jax

        return jax.jit(rule.next)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.function(rule.next)
    return rule.next


def flags(step):
    return [keras.ops.convert_to_tensor(flag, dtype="bool") for flag in step]


MODES = {
    "eager": lambda rule, state, step: rule.next(state, *flags(step)),
    "compiled": lambda rule, state, step: compiled(rule)(state, *flags(step)),
}


@pytest.fixture(params=MODES)
def next_state(request):
    """A function `(rule, state, step) -> state`, eager and compiled."""
    return MODES[request.param]


def plain(state):
    """The state as NumPy and Python numbers, to be compared exactly."""
    # float() and int(): NumPy 2 warns when it converts a torch tensor itself.
    scale, *counters = state
    return np.float32(float(scale)), *(int(counter) for counter in counters)


def of_python_flags(rule, state, step):
    return rule.next(state, *step)


def follow(rule, steps, next_state=of_python_flags, state=None):
    """All states that `rule` goes through, the first one left out."""
    state = rule.initial_state() if state is None else state
    states = []
    for step in steps:
        state = next_state(rule, state, step)
        states.append(plain(state))
    return states


def follow_oracle(rule, steps):
    oracle = LossScaleOracle(**dataclasses.asdict(rule))
    states = []
    for step in steps:
        oracle.step(*step)
        states.append(oracle.state)
    return states


def scales(states):
    return [float(scale) for scale, *_ in states]


# --- single steps -------------------------------------------------------------------


def test_the_initial_state_is_the_initial_scale_and_zeros():
    start = LossScaleRule(initial_scale=1024.0).initial_state()
    assert plain(start) == (1024, 0, 0, 0, 0)


def test_the_next_state_is_a_float32_scalar_and_int32_counters(next_state):
    for step in (FINITE, OVERFLOW, BROKEN):
        rule = LossScaleRule(dynamic_growth_steps=1)
        state = next_state(rule, rule.initial_state(), step)
        dtypes = [keras.backend.standardize_dtype(value.dtype) for value in state]
        assert dtypes == ["float32", "int32", "int32", "int32", "int32"]
        assert all(tuple(value.shape) == () for value in state)


def test_a_finite_step_counts_and_leaves_the_scale(next_state):
    states = follow(LossScaleRule(), [FINITE], next_state)
    assert states == [(2**15, 1, 0, 0, 0)]


def test_overflow_halves_the_scale_and_counts_the_skip(next_state):
    states = follow(LossScaleRule(), [OVERFLOW], next_state)
    assert states == [(2**14, 0, 1, 1, 0)]


def test_enough_finite_steps_in_a_row_double_the_scale(next_state):
    states = follow(LossScaleRule(dynamic_growth_steps=3), [FINITE] * 4, next_state)
    seen = [state[:2] for state in states]
    assert seen == [(2**15, 1), (2**15, 2), (2**16, 0), (2**16, 1)]


def test_overflow_starts_the_count_towards_growth_anew():
    rule = LossScaleRule(dynamic_growth_steps=2)
    states = follow(rule, [FINITE, OVERFLOW, FINITE, FINITE])
    assert scales(states) == [2**15, 2**14, 2**14, 2**15]


def test_the_scale_stops_at_its_bounds(next_state):
    rule = LossScaleRule(
        initial_scale=4, min_scale=3, max_scale=6, dynamic_growth_steps=1
    )
    assert follow(rule, [FINITE], next_state) == [(6, 0, 0, 0, 0)]
    down = follow(rule, [OVERFLOW, OVERFLOW], next_state)
    assert down == [(3, 0, 1, 1, 0), (3, 0, 2, 2, 1)]


def test_a_minimum_below_one_lets_the_scale_go_below_one():
    rule = LossScaleRule(initial_scale=1.0, min_scale=2.0**-3)
    assert scales(follow(rule, [OVERFLOW] * 5)) == [0.5, 0.25, 0.125, 0.125, 0.125]


def test_hysteresis_forgives_the_first_skips_of_a_row_and_no_later_ones(next_state):
    steps = [*[OVERFLOW] * 4, FINITE, OVERFLOW]
    states = follow(LossScaleRule(hysteresis=3), steps, next_state)
    assert scales(states) == [2**15, 2**15, 2**14, 2**13, 2**13, 2**13]
    assert states[-1] == (2**13, 0, 5, 1, 0)


def test_a_static_scale_never_moves_but_counts_its_skips(next_state):
    rule = LossScaleRule(initial_scale=128.0, dynamic=False, dynamic_growth_steps=1)
    states = follow(rule, [FINITE, FINITE, OVERFLOW, OVERFLOW, BROKEN], next_state)
    assert scales(states) == [128] * 5
    assert states[-1][2:] == (3, 3, 3)


def test_a_loss_that_is_not_finite_is_no_fault_of_the_scale(next_state):
    rule = LossScaleRule(dynamic_growth_steps=3)
    steps = [FINITE, BROKEN, FINITE, BROKEN, FINITE]
    *_, broken, grown = follow(rule, steps, next_state)
    # The count towards growth goes on too: a bad sample in every epoch of 1000 steps
    # would keep the scale from growing for ever.
    assert broken == (2**15, 2, 2, 1, 2)
    assert grown == (2**16, 0, 2, 0, 2)


def test_overflow_at_the_floor_is_no_fault_of_the_scale(next_state):
    rule = LossScaleRule(initial_scale=2.0, min_scale=1.0)
    states = follow(rule, [OVERFLOW] * 3, next_state)
    assert [(state[0], state[-1]) for state in states] == [(1, 0), (1, 1), (1, 2)]


def test_fewer_growth_steps_than_were_counted_already_grow_at_the_next_finite_step(
    next_state,
):
    # Keras tests `counter == steps - 1`, which never fires again past that point.
    state = LossScaleState(np.float32(8), *np.int32([50, 4, 0, 0]))
    grown = next_state(LossScaleRule(dynamic_growth_steps=10), state, FINITE)
    assert plain(grown) == (16, 0, 4, 0, 0)


def test_a_state_of_python_numbers_works_as_well():
    state = LossScaleState(8.0, 0, 0, 0, 0)
    assert plain(LossScaleRule().next(state, True)) == (8, 1, 0, 0, 0)
    assert plain(LossScaleRule().next(state, False)) == (4, 0, 1, 1, 0)
    assert plain(LossScaleRule().next(state, False, False)) == (8, 0, 1, 1, 1)


# --- properties ---------------------------------------------------------------------

# Powers of ten as well as of two: the scale must be right when it is not exact too.
SCALES = st.one_of(
    st.integers(-20, 30).map(lambda exponent: 2.0**exponent),
    st.floats(1e-6, 1e9),
)
STEPS = st.lists(st.sampled_from([FINITE, OVERFLOW, BROKEN]), max_size=40)


@st.composite
def rules(draw):
    low, initial, high = sorted(draw(st.tuples(SCALES, SCALES, SCALES)))
    return LossScaleRule(
        initial_scale=initial,
        dynamic_growth_steps=draw(st.integers(1, 8)),
        dynamic=draw(st.booleans()),
        growth_factor=draw(st.one_of(st.just(2.0), st.floats(1.001, 1e30))),
        backoff_factor=draw(st.one_of(st.just(0.5), st.floats(1e-30, 0.999))),
        min_scale=low,
        max_scale=high,
        hysteresis=draw(st.integers(1, 4)),
    )


@settings(max_examples=60)
@given(rules(), STEPS)
def test_any_rule_and_any_steps_equal_the_oracle(rule, steps):
    assert follow(rule, steps) == follow_oracle(rule, steps)


COMPILED_RULES = [
    LossScaleRule(),
    LossScaleRule(dynamic_growth_steps=2, hysteresis=2, growth_factor=1.5),
    LossScaleRule(dynamic_growth_steps=1, max_scale=2.0**17, backoff_factor=0.1),
    LossScaleRule(dynamic_growth_steps=3, dynamic=False),
]


@pytest.mark.parametrize("rule", COMPILED_RULES)
@settings(max_examples=20)
@given(steps=STEPS)
def test_a_compiled_rule_equals_the_oracle(rule, steps):
    assert follow(rule, steps, MODES["compiled"]) == follow_oracle(rule, steps)


@settings(max_examples=60)
@given(rules(), STEPS)
def test_the_scale_stays_within_its_bounds_and_is_never_zero_or_infinite(rule, steps):
    for scale in scales(follow(rule, steps)):
        assert np.float32(rule.min_scale) <= scale <= np.float32(rule.max_scale)
        assert 0 < scale < np.inf


@settings(max_examples=60)
@given(rules(), STEPS)
def test_skips_are_counted_whatever_the_rule(rule, steps):
    *_, (_, _, skipped, consecutive, broken) = [(0,) * 5, *follow(rule, steps)]
    in_this_row = next(
        (i for i, step in enumerate(reversed(steps)) if step == FINITE), len(steps)
    )
    assert skipped == steps.count(OVERFLOW) + steps.count(BROKEN)
    assert consecutive == in_this_row
    assert steps.count(BROKEN) <= broken <= skipped


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.integers(1, 10_000))
def test_the_scale_grows_as_soon_as_the_counter_has_reached_the_steps(counted, steps):
    rule = LossScaleRule(dynamic_growth_steps=steps)
    grown, *_ = plain(rule.next(LossScaleState(2.0**10, counted, 0, 0, 0), True))
    assert (grown == 2**11) == (counted + 1 >= steps)


# --- bad values ---------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")
NOT_A_SCALE = (0.0, -1.0, NAN, INF, -INF, "1024", None, True)
NOT_A_COUNT = (0, -1, 1.5, 2000.0, NAN, "3", None, True)

BAD_VALUES = [
    *(("growth_factor", value) for value in (1, 1.0, 0.5, 0, -2, NAN, INF, "2", None)),
    *(("backoff_factor", value) for value in (0, 1, 1.5, -1, NAN, INF, "0.5", None)),
    *(("initial_scale", value) for value in NOT_A_SCALE),
    *(("min_scale", value) for value in NOT_A_SCALE),
    *(("max_scale", value) for value in NOT_A_SCALE),
    *(("dynamic_growth_steps", value) for value in NOT_A_COUNT),
    *(("hysteresis", value) for value in NOT_A_COUNT),
]


@pytest.mark.parametrize("name, value", BAD_VALUES)
def test_a_bad_value_is_named_and_shown(name, value):
    with pytest.raises(ValueError) as error:
        LossScaleRule(**{name: value})
    message = str(error.value).rstrip(".")
    assert message.startswith(f"`{name}` must ")
    assert message.endswith(f"Received: {name}={value!r}")


@pytest.mark.parametrize(
    "scales, message",
    [
        ((4.0, 8.0, 4.0), "min_scale.*max_scale.*Received: .*8.0.*4.0"),
        ((0.5,), "initial_scale.*Received: initial_scale="),
        ((2.0**25,), "initial_scale.*Received: initial_scale="),
        ((1e-50, 1e-30), "Received: initial_scale=1e-50"),
        ((2.0**15, 1e-50), "Received: min_scale=1e-50"),
        ((2.0**15, 1.0, 1e39), r"Received: max_scale=1e\+39"),
    ],
)
def test_scales_out_of_order_and_beyond_float32_are_refused(scales, message):
    names = ("initial_scale", "min_scale", "max_scale")
    with pytest.raises(ValueError, match=message):
        LossScaleRule(**dict(zip(names, scales, strict=False)))


def test_numpy_numbers_are_numbers_and_become_pythons():
    rule = LossScaleRule(
        initial_scale=np.float16(1024),
        dynamic_growth_steps=np.int64(3),
        growth_factor=np.float32(2),
        hysteresis=np.int32(1),
    )
    assert rule == LossScaleRule(initial_scale=1024.0, dynamic_growth_steps=3)
    assert {type(v) for v in vars(rule).values()} == {float, int, bool}


@pytest.mark.parametrize("name", ["dynamic_growth_steps", "hysteresis"])
def test_more_steps_than_an_integer_tensor_counts_are_never(next_state, name):
    steps = [FINITE, OVERFLOW if name == "hysteresis" else FINITE]
    *_, last = follow(LossScaleRule(**{name: 10**12}), steps, next_state)
    assert last[0] == 2**15


def test_a_rule_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        LossScaleRule().growth_factor = 3.0


# --- the oracle itself, by hand -----------------------------------------------------


def test_the_oracle_unscales_by_the_scale_that_was_in_force_before_the_move():
    scale = LossScaleOracle(initial_scale=8.0, dynamic_growth_steps=1)
    training = ScaledTraining(scale, SGD(learning_rate=0.5), [np.array([1.0])])
    assert training.step([np.array([8.0])])
    assert training.weights[0] == 0.5 and scale.scale == 16
    assert training.step([np.array([16.0])])
    assert training.weights[0] == 0.0 and scale.scale == 32


@pytest.mark.parametrize("make", [lambda: SGD(0.1, momentum=0.9), lambda: Adam(0.1)])
def test_the_oracle_leaves_weights_and_slots_alone_at_a_skipped_step(make):
    optimizer = make()
    clean = np.array([4.0, -2.0])
    torn = np.array([np.inf, 1.0])
    training = ScaledTraining(LossScaleOracle(4.0), optimizer, [np.zeros(2)])
    training.step([clean])
    weights, slots = training.weights, optimizer.__dict__.copy()
    assert not training.step([torn])
    assert training.weights is weights and optimizer.__dict__ == slots
    assert training.loss_scale.last_step_finite is False


@pytest.mark.parametrize(
    "oracle, options", [(SGD, {}), (SGD, {"momentum": 0.9}), (Adam, {})]
)
def test_the_oracle_steps_as_keras_does(oracle, options):
    right = oracle(0.1, **options)
    keras_optimizer = getattr(keras.optimizers, oracle.__name__)(0.1, **options)
    variable = keras.Variable(np.array([1.0, -2.0, 3.0], "float32"))
    weights = [np.array([1.0, -2.0, 3.0])]
    for seed in range(4):
        gradient = np.random.default_rng(seed).normal(size=3).astype("float32")
        keras_optimizer.apply([keras.ops.convert_to_tensor(gradient)], [variable])
        weights = right.step(weights, [gradient.astype("float64")])
    ended = [float(value) for value in keras.ops.stop_gradient(variable.value)]
    np.testing.assert_allclose(ended, weights[0], rtol=1e-5)
