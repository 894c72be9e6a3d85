"""What waits for the device in a step of `fit` on torch: one look at the gradients."""

import gc
import math

import keras
import numpy as np
import pytest
from backends import dtype_of, state_of, without_us
from keras import layers, ops

import keras_mp

if keras.backend.backend() != "torch":
    pytest.skip("counts what torch runs", allow_module_level=True)

import torch
from torch_operations import Waits

from keras_mp.kernels.torch import seeds

GENERATOR = np.random.default_rng(0)
BATCH, STEPS, CLASSES = 4, 5, 10
THE_LOOK_AT_THE_GRADIENTS = ["_local_scalar_dense"]


def decoder():
    ids = keras.Input((6,), dtype="int32")
    x = layers.Embedding(CLASSES, 8)(ids)
    attended = layers.MultiHeadAttention(2, 4, dropout=0.1)(x, x, use_causal_mask=True)
    x = layers.LayerNormalization()(x + attended)
    return keras.Model(ids, layers.Dense(CLASSES)(layers.Dense(16, "gelu")(x)))


def convolutions():
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(8, 3),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Dropout(0.2, seed=1),
            layers.MaxPooling2D(),
            layers.GlobalAveragePooling2D(),
            layers.Dense(CLASSES),
        ]
    )


def compiled(make, rate=1e-3):
    model = make()
    model.compile(
        keras.optimizers.Adam(rate),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def batches(make):
    """Tensors, which torch need not make."""
    number = BATCH * STEPS
    if make is decoder:
        ids = GENERATOR.integers(0, CLASSES, (number, 7))
        return torch.tensor(ids[:, :-1]), torch.tensor(ids[:, 1:])
    x = GENERATOR.standard_normal((number, 8, 8, 3), "float32")
    return torch.tensor(x), torch.tensor(GENERATOR.integers(0, CLASSES, number))


def waits_of_a_step(model, x, y):
    """What waits in the last step of a second `fit`: the first one builds."""
    waits = []

    def counted(step):
        def counting(data):
            with Waits() as counts:
                result = step(data)
            waits[:] = counts.noted()
            return result

        return counting

    model.fit(x, y, batch_size=BATCH, verbose=0)
    model.train_function = counted(model.train_function)
    model.fit(x, y, batch_size=BATCH, verbose=0)
    return waits


RATES = {
    "a number": lambda: 1e-3,
    "a schedule": lambda: keras.optimizers.schedules.CosineDecay(1e-3, 100),
}


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("make", [decoder, convolutions])
@pytest.mark.kernels
def test_a_step_of_fit_waits_for_one_look_at_the_gradients(make, rate):
    keras_mp.set_global_policy("mixed_float16")
    model = compiled(make, RATES[rate]())
    assert waits_of_a_step(model, *batches(make)) == THE_LOOK_AT_THE_GRADIENTS


def test_what_is_counted():
    x = torch.ones(3)
    with Waits() as waits:
        x + 1  # A number beside a tensor is no tensor.
        torch.full((), 2.0)
    assert waits.noted() == []
    with Waits() as waits:
        torch.as_tensor(1.0)
        torch.tensor([1, 2])
        torch.from_numpy(np.ones(2)).cpu()
    assert waits.noted() == ["lift_fresh", "lift_fresh", "lift_fresh", "cpu"]
    with Waits() as waits:
        float(x.sum())
        x.tolist()
        x[x > 0]
        ops.convert_to_numpy(x)
    assert waits.noted() == ["_local_scalar_dense", "tolist", "nonzero", "__array__"]


# Numbers ---------------------------------------------------------------------------

NUMBERS = [
    *(True, False, 0, 1, -1, 2, 127, 128, 300, 2**24 + 1, 2**31 - 1, 2**31, -(2**31)),
    *(2**53 + 1, 2**63 - 1, 2**63, -(2**63), 2**70, 0.0, -0.0, 1.5, -1.5, 0.1, 2.7),
    *(1e-8, 1e-40, 65504.0, 65519.0, 65520.0, 1e9, -1e9, 1e38, 3.4028235e38, 1e40),
    *(1e300, math.inf, -math.inf, math.nan, 1j, np.float32(0.1), np.int64(7)),
]
DTYPES = [
    *(None, "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32"),
    *("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "complex64"),
    *("int", "float", torch.float16, "nonsense"),
]


def converted(function, dtype):
    """The dtype and the bits of each tensor, or the kind of the error."""
    found = []
    for number in NUMBERS:
        try:
            x = function(number, dtype)
        except Exception as error:
            found.append(type(error))
        else:
            bits = x.reshape(1).view(torch.uint8).tolist()
            found.append((x.dtype, x.device, x.shape, x.requires_grad, bits))
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "function",
    [
        ops.convert_to_tensor,
        ops.array,
        lambda x, dtype: ops.cast(x, dtype or "float32"),
        lambda x, dtype: ops.convert_to_tensor((x, 1), dtype)[:1],
        lambda x, dtype: keras.Variable(2, dtype="int32") + x,
        lambda x, dtype: keras.Variable(2.0, dtype="float16") + x,
    ],
    ids=[
        "convert_to_tensor",
        "array",
        "cast",
        "a tuple",
        "a count + x",
        "variable + x",
    ],
)
def test_a_number_becomes_the_tensor_that_keras_makes(function, dtype, installed):
    expected = without_us(lambda: converted(function, dtype))
    assert converted(function, dtype) == expected


OPERATIONS = {
    "subtract": ops.subtract,
    "from a number": lambda x, number: ops.subtract(number, x),
    "multiply": ops.multiply,
    "maximum": ops.maximum,
    "minimum": ops.minimum,
    "where": lambda x, number: ops.where(x > 0, x, number),
    "elsewhere": lambda x, number: ops.where(x > 0, number, x),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int32", "bool"])
@pytest.mark.parametrize("shape", [(4,), (1,), ()])
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_with_a_number_is_that_of_keras(name, shape, dtype, installed):
    x = ops.cast(torch.linspace(0, 3, math.prod(shape)).reshape(shape), dtype)

    def results():
        found = []
        for number in NUMBERS[:-3]:  # Of complex32 torch warns.
            try:
                y = OPERATIONS[name](x, number)
            except Exception as error:
                found.append(type(error))
            else:
                found.append((y.dtype, str(y.tolist())))
        return found

    assert results() == without_us(results)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (1,) * 9, (2, 2.5), (2, True)])
@pytest.mark.parametrize("dtype", [None, "int32", "float16"])
def test_a_shape_becomes_the_tensor_that_keras_makes(shape, dtype, installed):
    def made():
        return ops.convert_to_tensor(shape, dtype)

    found, expected = made(), without_us(made)
    assert found.dtype == expected.dtype
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("kind", ["sparse", "ragged"])
def test_keras_refuses_what_torch_has_not(kind, installed):
    with pytest.raises(ValueError, match=f"`{kind}=True` is not supported"):
        ops.convert_to_tensor(1.0, **{kind: True})


def test_a_number_is_where_keras_puts_new_tensors(installed):
    with keras.device("meta"):
        assert ops.convert_to_tensor(1.0).device.type == "meta"
        assert ops.convert_to_tensor((1, 2), "int32").shape == (2,)
    with torch.device("meta"):
        assert ops.convert_to_tensor(1.0).device.type == "cpu"


def test_a_number_is_a_new_tensor_each_time(installed):
    ops.convert_to_tensor(1.0).add_(1)
    assert float(ops.convert_to_tensor(1.0)) == 1.0


def test_the_default_follows_floatx(installed):
    keras.config.set_floatx("float16")
    try:
        assert dtype_of(ops.convert_to_tensor(0.1)) == "float16"
    finally:
        keras.config.set_floatx("float32")


def test_a_compiled_function_holds_a_number_as_before(installed):
    def function(x):
        return x * ops.cast(3, "float16") + ops.convert_to_tensor(0.5, x.dtype)

    x = torch.ones(4, dtype=torch.float16, requires_grad=True)
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    y = compiled(x)
    y.sum().backward()
    assert y.dtype == torch.float16
    assert y.tolist() == [3.5] * 4
    assert x.grad.tolist() == [3.0] * 4


# Seeds -----------------------------------------------------------------------------


def draws(generator, number=3):
    x = [keras.random.uniform((4,), seed=generator) for _ in range(number)]
    return ops.convert_to_numpy(ops.stack(x)), generator.state.value.tolist()


@pytest.mark.parametrize("seed", [0, 1, 1337, 2**31 - 2, 2**31 - 1])
def test_a_seed_draws_what_it_draws_in_keras(seed, installed):
    def drawn():
        return draws(keras.random.SeedGenerator(seed))

    (found, state), (expected, state_of_keras) = drawn(), without_us(drawn)
    np.testing.assert_array_equal(found, expected)
    assert state == state_of_keras


def test_a_number_or_nothing_as_a_seed_is_left_to_keras(installed):
    def drawn():
        return keras.random.uniform((4,), seed=7).tolist()

    assert drawn() == without_us(drawn)
    assert keras.random.uniform((4,)).shape == (4,)


def test_a_state_that_was_written_to_is_read_again(installed):
    generator = keras.random.SeedGenerator(3)
    expected, _ = draws(generator)
    draws(generator)
    generator.state.assign([3, 0])
    np.testing.assert_array_equal(draws(generator)[0], expected)
    with torch.no_grad():
        generator.state.value[1] = 0
    np.testing.assert_array_equal(draws(generator)[0], expected)


@pytest.mark.kernels
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_with_a_number_does_not_wait(name, installed):
    x = torch.ones(4, dtype=torch.float16)
    with Waits() as waits:
        OPERATIONS[name](x, 0.5)
    assert waits.noted() == []


@pytest.mark.kernels
def test_a_state_is_read_once(installed):
    generator = keras.random.SeedGenerator(3)
    draws(generator)
    with Waits() as waits:
        keras.random.uniform((4,), seed=generator)
    assert waits.noted() == []


def test_a_generator_of_the_users_own_is_asked(installed):
    class Same(keras.random.SeedGenerator):
        def next(self, ordered=True):
            return torch.tensor([5, 0], dtype=torch.int32)

    found, _ = draws(Same(1))
    np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.kernels
def test_what_is_known_of_a_state_goes_with_it(installed):
    generator = keras.random.SeedGenerator(3)
    draws(generator)
    key = id(generator.state.value)
    assert key in seeds.known.facts
    del generator
    gc.collect()
    assert key not in seeds.known.facts


def test_a_skipped_step_takes_the_draws_of_its_dropout_back():
    keras_mp.set_global_policy("mixed_float16")
    model = compiled(convolutions)
    x, y = batches(convolutions)
    model.fit(x, y, batch_size=BATCH, verbose=0, shuffle=False)
    before = state_of(model)
    bad = torch.full_like(x[:BATCH], torch.inf)
    with pytest.warns(UserWarning, match="1 of 6 steps were skipped"):
        model.fit(bad, y[:BATCH], verbose=0)
    assert all(map(np.array_equal, state_of(model), before))
    (state,) = (v for v in model.variables if "seed" in v.path)
    _, draws = state.value.tolist()
    assert draws == STEPS
    # What it draws next is what the state says.
    generator = keras.random.SeedGenerator(1)
    generator.state.assign([1, STEPS])
    dropout = next(x for x in model.layers if isinstance(x, layers.Dropout))
    ones = torch.ones((4, 4))
    np.testing.assert_array_equal(
        dropout(ones, training=True), keras.random.dropout(ones, 0.2, seed=generator)
    )
