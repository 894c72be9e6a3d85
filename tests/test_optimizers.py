"""Every optimizer of Keras in the wrapper: as without it, and skips leave no trace."""

import inspect

import keras
import numpy as np
import pytest
from backends import BACKEND, COMPILED, same_bits, stateful_step, values

import keras_mp

# What is told of broken steps is tested in test_skip_watch.py.
pytestmark = pytest.mark.filterwarnings("ignore:.*whatever the loss scale:UserWarning")

RNG = np.random.default_rng(0)
SHAPES = {"kernel": (4, 3), "bias": (3,), "scalar": ()}
WEIGHTS, *BATCHES = (
    [RNG.normal(size=shape).astype("float32") for shape in SHAPES.values()]
    for _ in range(8)
)
# Before which batches a step overflows, and with what.
OVERFLOWS = {0: np.inf, 3: -np.inf, 4: np.nan}


def exported():
    """The optimizers that Keras exports, one that it gets tomorrow as well."""
    bases = ("Optimizer", "LossScaleOptimizer")
    return {
        name: member
        for name, member in vars(keras.optimizers).items()
        if inspect.isclass(member)
        and issubclass(member, keras.optimizers.Optimizer)
        and name not in bases
    }


def multi_optimizer(**kwargs):
    """SGD for kernels, Adam for the rest."""
    # Keras' callbacks log the learning rates by these names.
    kernels = keras.optimizers.SGD(momentum=0.5, nesterov=True, name="sgd", **kwargs)
    rest = keras.optimizers.Adam(name="adam", **kwargs)
    return keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(rest, {".*kernel": kernels})
    )


OPTIMIZERS = exported() | {
    "MultiOptimizer": multi_optimizer,
    "SGD with momentum": lambda **kwargs: keras.optimizers.SGD(momentum=0.5, **kwargs),
    "Adam with amsgrad": lambda **kwargs: keras.optimizers.Adam(amsgrad=True, **kwargs),
}
SCHEDULE = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
EMA = {"use_ema": True, "ema_momentum": 0.5}
OPTIONS = {
    "none": {},
    "clipnorm": {"clipnorm": 1.0},
    "global_clipnorm": {"global_clipnorm": 1.0},
    "clipvalue": {"clipvalue": 0.5},
    "weight_decay": {"weight_decay": 0.1},
    "use_ema": EMA,
    "ema_overwrite_frequency": {**EMA, "ema_overwrite_frequency": 3},
    "gradient_accumulation_steps": {"gradient_accumulation_steps": 3},
    "schedule": {"learning_rate": SCHEDULE},
}
OPTIONS["all"] = {
    "learning_rate": SCHEDULE,
    "global_clipnorm": 1.0,
    "weight_decay": 0.1,
    **OPTIONS["ema_overwrite_frequency"],
    "gradient_accumulation_steps": 2,
}


def inner_optimizer(name, options):
    inner = OPTIMIZERS[name](**{"learning_rate": 0.1, **OPTIONS[options]})
    for part in getattr(inner, "optimizers", [inner]):
        part.exclude_from_weight_decay(var_names=["bias"])
    return inner


def scale_and_inner(optimizer):
    """The loss scale, and the optimizer in the wrapper; a plain one scales nothing."""
    if isinstance(optimizer, keras_mp.LossScaleOptimizer):
        return np.float32(optimizer.loss_scale), optimizer.inner_optimizer
    return np.float32(1.0), optimizer


class Training:
    """Steps of one optimizer, again and again from the same start."""

    def __init__(self, optimizer, compiled):
        self.optimizer = optimizer
        self.variables = [
            keras.Variable(w, name=n) for w, n in zip(WEIGHTS, SHAPES, strict=True)
        ]
        optimizer.build(self.variables)
        self.step = stateful_step(optimizer, self.variables, compiled)
        self.start = values(self.variables + optimizer.variables)

    def run(self, overflows):
        """Returns weights and all variables of the inner optimizer."""
        state = self.variables + self.optimizer.variables
        for variable, value in zip(state, self.start, strict=True):
            variable.assign(value)
        for index, batch in enumerate(BATCHES):
            if index in overflows:
                self.step([np.full_like(g, overflows[index]) for g in batch])
            scale, inner = scale_and_inner(self.optimizer)
            self.step([g * scale for g in batch])
        return values(self.variables + inner.variables)


def wrapped(inner):
    optimizer = keras_mp.LossScaleOptimizer(
        inner, initial_scale=1024.0, dynamic_growth_steps=2
    )
    optimizer.scale_loss(1.0)  # As a loop would, before it takes gradients.
    return optimizer


def assert_same_but_for_fusion(actual, expected, compiled, name):
    adam = ("Adam", "Adam with amsgrad", "AdamW", "MultiOptimizer")
    fused = BACKEND == "torch" and name in adam
    if compiled == "xla" or (BACKEND == "jax" and compiled) or fused:
        # XLA fuses the product with the scale's reciprocal into what follows it. On
        # torch Adam's update is one kernel (`test_adam_torch.py`).
        eps = np.finfo("float32").eps
        for a, b in zip(actual, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=8 * eps, atol=8 * eps)
    else:
        assert same_bits(actual, expected)


def cases():
    """(optimizer, options, compiled): each optimizer in each mode, with all options.

    And each option alone, in the modes in turn.
    """
    modes = [compiled for compiled in COMPILED if compiled != "xla"]
    for compiled in COMPILED:
        # XLA's compilations are slow; so are eager steps that accumulate on JAX,
        # where Keras compiles them anew each time (`test_step_sequences.py` has one).
        slow = compiled == "xla" or (BACKEND == "jax" and not compiled)
        for name in OPTIMIZERS:
            yield name, "all" if not slow else "none", compiled
        if compiled == "xla":
            yield "Adam", "all", compiled
            continue
        for turn, options in enumerate(OPTIONS):
            accumulates = "accumulation" in str(OPTIONS[options])
            if options == "none" or (accumulates and not slow):
                yield "Adam", options, compiled
            elif not accumulates and modes[turn % len(modes)] == compiled:
                yield "Adam", options, compiled


@pytest.mark.parametrize(("name", "options", "compiled"), sorted({*cases()}, key=str))
@pytest.mark.sampled
def test_an_optimizer_trains_as_if_nothing_were_scaled_or_skipped(
    name, options, compiled
):
    training = Training(wrapped(inner_optimizer(name, options)), compiled)
    scaled = training.run(overflows={})
    assert same_bits(training.run(OVERFLOWS), scaled)
    assert int(training.optimizer.skipped_steps) == len(OVERFLOWS)
    plain = Training(inner_optimizer(name, options), compiled)
    assert_same_but_for_fusion(scaled, plain.run(overflows={}), compiled, name)


# Variables in low precision -----------------------------------------------------------


def low_precision_training(optimizer, dtype):
    """Weights and the inner optimizer's variables, of the given dtype, after a step."""
    variables = [
        keras.Variable(w, dtype=dtype, name=n)
        for w, n in zip(WEIGHTS, SHAPES, strict=True)
    ]
    scale, inner = scale_and_inner(optimizer)
    grads = [keras.ops.cast(g * scale, dtype) for g in BATCHES[0]]
    optimizer.apply(grads, variables)
    state = variables + inner.variables
    return values([keras.ops.cast(v, "float32") for v in state])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_float16_variables_are_updated_from_float32_gradients_as_from_their_own(name):
    # Keras rounds the gradient to the variable's dtype and computes in that. Not so
    # Muon's iterations and torch's own kernels: they take the float32 gradient.
    scaled = low_precision_training(wrapped(OPTIMIZERS[name]()), "float16")
    plain = low_precision_training(OPTIMIZERS[name](), "float16")
    if name == "Muon" or BACKEND == "torch":
        for a, b in zip(scaled, plain, strict=True):
            np.testing.assert_allclose(a, b, rtol=2.0**-9, atol=2.0**-20)
    else:
        assert same_bits(scaled, plain)


@pytest.mark.filterwarnings("ignore:(divide|invalid):RuntimeWarning")
@pytest.mark.usefixtures("installed")
def test_keras_own_schedule_free_adamw_makes_bfloat16_variables_nan():
    # 1 - beta_2 is zero there.
    optimizer = keras.optimizers.ScheduleFreeAdamW()
    with pytest.warns(UserWarning, match="its steps are 0, or nan"):
        weights = low_precision_training(optimizer, "bfloat16")
    assert np.isnan(weights[0]).any()


# In fit ------------------------------------------------------------------------------

X = RNG.normal(size=(64, 4)).astype("float32")
Y = (X[:, :1] - 2 * X[:, 1:2]).astype("float32")


class LowersTheLearningRate(keras.callbacks.Callback):
    """As users do it by hand, in the midst of an epoch."""

    def on_train_batch_end(self, batch, logs=None):
        optimizer = self.model.optimizer
        for part in getattr(optimizer, "optimizers", [optimizer]):
            part.learning_rate = 0.125 / (1 + int(optimizer.iterations))


CALLBACKS = {
    "SwapEMAWeights": lambda: keras.callbacks.SwapEMAWeights(),
    "SwapEMAWeights(swap_on_epoch=True)": lambda: keras.callbacks.SwapEMAWeights(True),
    "LearningRateScheduler": lambda: keras.callbacks.LearningRateScheduler(
        lambda epoch, rate: rate * 0.5
    ),
    "ReduceLROnPlateau": lambda: keras.callbacks.ReduceLROnPlateau(
        monitor="loss", patience=1, min_delta=100.0
    ),
    "a learning rate set by hand": LowersTheLearningRate,
}


def fitted(optimizer, callback, overflows=()):
    """The logs, weights and the inner optimizer's variables after two epochs."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, name="dense")])
    model.set_weights([np.ones((4, 1)), np.zeros(1)])
    model.compile(optimizer, "mse", jit_compile=BACKEND == "jax")

    def batches():
        for index in range(8):
            rows = slice(index * 8, index * 8 + 8)
            yield X[rows], Y[rows]
            if index in overflows:
                yield np.full_like(X[rows], np.inf), Y[rows]

    history = model.fit(
        batches(), epochs=2, steps_per_epoch=4 + len(overflows) // 2, shuffle=False,
        validation_data=(X, Y), callbacks=[CALLBACKS[callback]()], verbose=0,
    ).history  # fmt: skip
    _, inner = scale_and_inner(optimizer)
    logs = [np.array(history[name], "float32") for name in sorted(history)]
    return sorted(history), logs + values(model.variables + inner.variables)


@pytest.mark.parametrize(
    ("name", "callback"),
    [
        *(("SGD with momentum", callback) for callback in CALLBACKS),
        ("MultiOptimizer", "SwapEMAWeights"),
        ("MultiOptimizer", "LearningRateScheduler"),
        ("MultiOptimizer", "ReduceLROnPlateau"),
    ],
)
@pytest.mark.sampled
def test_a_callback_of_keras_works_in_fit_as_if_nothing_were_scaled_or_skipped(
    name, callback
):
    def inner():
        return OPTIMIZERS[name](learning_rate=0.125, **EMA)

    logged, plain = fitted(inner(), callback)
    optimizer = wrapped(inner())
    # After the first batch, and as the last step of all.
    names, skipped = fitted(optimizer, callback, overflows=(0, 7))
    assert int(optimizer.skipped_steps) == 2
    assert names == logged
    assert_same_but_for_fusion(skipped, plain, True, name)


def test_a_multi_optimizer_has_its_parts_learning_rates_through_the_wrapper():
    optimizer = wrapped(multi_optimizer())
    assert optimizer.optimizers is optimizer.inner_optimizer.optimizers
    with pytest.raises(AttributeError, match="individual sub-optimizers"):
        optimizer.learning_rate = 0.5


def test_what_looks_for_a_multi_optimizer_finds_none_in_another():
    assert not hasattr(wrapped(keras.optimizers.SGD()), "optimizers")
