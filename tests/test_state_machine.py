"""Scale, unscale, apply, save and load in any order, against the oracle."""

import warnings

import keras
import numpy as np
import pytest
from backends import COMPILED, stateful_step, tensors, values
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from oracle import SGD, LossScaleOracle, ScaledTraining

import keras_mp

RULE = {
    "initial_scale": 64.0,
    "dynamic_growth_steps": 2,
    "hysteresis": 2,
    "min_scale": 8.0,
    "max_scale": 512.0,
}
WEIGHTS = [np.array([1.0, -2.0], "float32"), np.array(0.5, "float32")]
# Few bits, so that every product and sum is exact.
NUMBERS = st.sampled_from([0.0, 1.0, -2.0, 4.0, -0.5])
BAD = st.sampled_from([np.inf, -np.inf, np.nan])


class Training(RuleBasedStateMachine):
    """A loop of the user's, that may do anything in any order."""

    compiled: bool | str = False

    def __init__(self):
        super().__init__()
        self.start()
        self.oracle = ScaledTraining(
            LossScaleOracle(**RULE), SGD(0.5, 0.5), WEIGHTS, np.float32
        )
        self.scaled = None  # The gradients of a scaled loss, and as they should be.
        self.unscaled = None
        self.saved = None

    def start(self):
        self.optimizer = keras_mp.LossScaleOptimizer(
            keras.optimizers.SGD(0.5, 0.5), **RULE
        )
        self.variables = [keras.Variable(w) for w in WEIGHTS]
        self.optimizer.build(self.variables)
        self.step = stateful_step(self.optimizer, self.variables, self.compiled)

    @rule(first=NUMBERS, second=st.one_of(NUMBERS, BAD), bad_loss=st.booleans())
    def scale_a_loss(self, first, second, bad_loss):
        grads = [np.array([first, second], "float32"), np.array(first, "float32")]
        factor = self.optimizer.scale_loss(1.0)
        assert float(factor) == self.oracle.loss_scale.scale
        self.scaled = [g * np.float32(float(factor)) for g in grads]
        self.loss = np.float32("nan" if bad_loss and not np.isfinite(second) else 1)
        self.unscaled = None

    @precondition(lambda self: self.scaled is not None and self.unscaled is None)
    @rule()
    def unscale(self):
        scale = np.float32(self.oracle.loss_scale.scale)
        self.unscaled = values(self.optimizer.unscale(tensors(self.scaled)))
        for grad, product in zip(self.unscaled, self.scaled, strict=True):
            expected = np.where(np.isfinite(product), product / scale, np.nan)
            np.testing.assert_array_equal(grad, expected)

    @precondition(lambda self: self.unscaled is not None)
    @rule()
    def unscaling_again_is_refused(self):
        with pytest.raises(ValueError, match="unscaled already"):
            self.optimizer.unscale(tensors(self.unscaled))

    @precondition(lambda self: self.scaled is not None)
    @rule()
    def apply(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # Of broken steps.
            if self.unscaled is not None:
                self.optimizer.apply(
                    tensors(self.unscaled), self.variables, loss=self.loss
                )
            else:
                self.step(self.scaled, self.loss)
        self.oracle.step(self.scaled, bool(np.isfinite(self.loss)))
        self.scaled = self.unscaled = None

    @rule()
    def save(self):
        self.saved = {}
        self.optimizer.save_own_variables(self.saved)
        oracle = self.oracle
        self.saved_oracle = (
            dict(vars(oracle.loss_scale)),
            dict(vars(oracle.optimizer)),
            oracle.weights,
        )

    @precondition(lambda self: self.saved is not None)
    @rule(anew=st.booleans())
    def load(self, anew):
        if anew:  # As in another process.
            self.start()
        scale, optimizer, weights = self.saved_oracle
        self.optimizer.load_own_variables(dict(self.saved))
        for variable, value in zip(self.variables, weights, strict=True):
            variable.assign(value.astype("float32"))
        vars(self.oracle.loss_scale).update(scale)
        vars(self.oracle.optimizer).update(optimizer)
        self.oracle.weights = weights
        self.scaled = self.unscaled = None

    @invariant()
    def equals_the_oracle(self):
        scale, *counters = values(self.optimizer._loss_scaling.variables)
        assert (scale, *map(int, counters)) == self.oracle.loss_scale.state
        assert int(self.optimizer.iterations) == self.oracle.optimizer.iterations
        for weight, right in zip(
            values(self.variables), self.oracle.weights, strict=True
        ):
            np.testing.assert_array_equal(weight, right.astype("float32"))


@pytest.mark.parametrize("compiled", [c for c in COMPILED if c != "xla"])
def test_any_order_of_calls_follows_the_oracle(compiled):
    machine = type("Training", (Training,), {"compiled": compiled})
    machine.TestCase.settings = settings(max_examples=15, stateful_step_count=25)
    machine.TestCase("runTest").runTest()
