"""Keras' Adam and AdamW on torch in one kernel: the same numbers, and when."""

import keras
import numpy as np
import pytest
from backends import values
from keras.optimizers import SGD, Adam, AdamW

import keras_mp

if keras.backend.backend() != "torch":
    pytest.skip("torch has such a kernel", allow_module_level=True)

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch_operations import Operations

SHAPES = [(3, 4), (4,), (3, 3, 2, 5), ()]
GENERATOR = np.random.default_rng(0)
WEIGHTS = [GENERATOR.standard_normal(s).astype("float32") for s in SHAPES]
STEPS = 50
BATCHES = [
    [GENERATOR.standard_normal(s).astype("float32") for s in SHAPES]
    for _ in range(STEPS)
]
OPTIMIZERS = {
    "Adam": lambda: Adam(0.01),
    "amsgrad": lambda: Adam(0.01, amsgrad=True),
    "large epsilon": lambda: Adam(0.01, epsilon=1e-3),
    "other betas": lambda: Adam(0.01, beta_1=0.5, beta_2=0.9),
    "AdamW": lambda: AdamW(0.01, weight_decay=0.1),
    "clipnorm": lambda: Adam(0.01, clipnorm=0.5),
    "global_clipnorm": lambda: Adam(0.01, global_clipnorm=0.5),
    "averages": lambda: Adam(0.01, use_ema=True, ema_overwrite_frequency=7),
    "accumulation": lambda: Adam(0.01, gradient_accumulation_steps=2),
    "a schedule": lambda: Adam(keras.optimizers.schedules.CosineDecay(0.01, 100)),
}


def variables_of(weights=WEIGHTS, dtype="float32"):
    return [keras.Variable(w, dtype=dtype) for w in weights]


def trained(optimizer, variables, scale=1.0, steps=STEPS):
    """Weights and what the inner optimizer remembers, after so many steps."""
    optimizer.build(variables)
    for batch in BATCHES[:steps]:
        grads = [torch.tensor(g * np.float32(scale)) for g in batch]
        with torch.no_grad():
            optimizer.apply(grads[: len(variables)], variables)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return values(variables + inner.variables)


def scaled(inner, **options):
    optimizer = keras_mp.LossScaleOptimizer(inner, **options)
    optimizer.scale_loss(1.0)  # As a loop would, before it takes gradients.
    return optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_weights_and_moments_are_those_of_keras(name):
    expected = trained(OPTIMIZERS[name](), variables_of())
    optimizer = scaled(OPTIMIZERS[name](), initial_scale=1024.0)
    found = trained(optimizer, variables_of(), scale=1024.0)
    assert int(optimizer.inner_optimizer.iterations) > 0
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=4e-7, atol=1.2e-7)


def kernels_of_a_step(optimizer, variables, grads):
    optimizer.build(variables)
    with torch.no_grad(), Operations() as kernels:
        optimizer.apply(grads, variables)
    assert not vars(optimizer.inner_optimizer).get("_parallel_update_step")
    return kernels.names


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.kernels
def test_the_update_is_one_kernel(name):
    variables = variables_of()
    grads = [torch.tensor(g) for g in BATCHES[0]]
    names = kernels_of_a_step(scaled(OPTIMIZERS[name]()), variables, grads)
    if name == "accumulation":  # The first step of a window updates nothing.
        assert "_fused_adam_" not in names
    else:
        assert names.count("_fused_adam_") == 1
        assert "_foreach_sqrt" not in names


class OfTheUser(Adam):
    """Takes half steps."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate / 2)


@pytest.mark.parametrize(
    ("inner", "dtype"),
    [(Adam, "float16"), (Adam, "bfloat16"), (OfTheUser, "float32"), (SGD, "float32")],
)
@pytest.mark.filterwarnings("ignore:Optimizer .* updates bfloat16 weights")
def test_others_are_left_to_keras(inner, dtype):
    variables = variables_of(dtype=dtype)
    grads = [torch.tensor(g, dtype=getattr(torch, dtype)) for g in BATCHES[0]]
    assert "_fused_adam_" not in kernels_of_a_step(scaled(inner()), variables, grads)


@pytest.mark.parametrize("transposed", ["gradient", "weight"])
def test_memory_in_another_order_makes_the_same_weights(transposed):
    # The kernel would read it in the wrong order, without a word.
    weights = [GENERATOR.standard_normal((3, 4)).astype("float32")]
    expected = trained(Adam(0.01), variables_of(weights), steps=1)
    variables = variables_of(weights)
    grad = torch.tensor(BATCHES[0][0])
    if transposed == "gradient":
        grad = grad.T.contiguous().T
    else:
        parameter = variables[0].value
        parameter.data = parameter.data.T.contiguous().T
    optimizer = scaled(Adam(0.01), initial_scale=1.0)
    with torch.no_grad():
        optimizer.apply([grad], variables)
    found = values(variables + optimizer.inner_optimizer.variables)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=4e-7, atol=1.2e-7)


def test_after_an_error_the_optimizer_is_as_it_was():
    optimizer = scaled(Adam(0.01))
    variables = variables_of()
    optimizer.build(variables)
    before = values(variables)
    inner = optimizer.inner_optimizer
    inner.epsilon = "no number"
    with pytest.raises(TypeError), torch.no_grad():
        optimizer.apply([torch.tensor(g) for g in BATCHES[0]], variables)
    assert "_parallel_update_step" not in vars(inner)
    inner.epsilon = 1e-7
    np.testing.assert_array_equal(values(variables)[0], before[0])


@pytest.mark.kernels
def test_no_copy_of_the_weights_is_made():
    variables = [keras.Variable(np.ones((256, 256), "float32")) for _ in range(4)]
    optimizer = scaled(Adam(0.01))
    optimizer.build(variables)

    class Largest(TorchDispatchMode):
        bytes = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            given = {id(x) for x in keras.tree.flatten((args, kwargs))}
            for x in keras.tree.flatten(result):
                if isinstance(x, torch.Tensor) and id(x) not in given:
                    self.bytes += x.untyped_storage().nbytes()
            return result

    for v in variables:
        v.value.grad = torch.ones_like(v.value)
    with torch.no_grad(), Largest() as made:
        optimizer.apply([v.value.grad for v in variables], variables)
    # In place, as by torch's own GradScaler: but for numbers, nothing new.
    assert made.bytes < 4096
