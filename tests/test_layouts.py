"""Attention and convolutions in half precision on torch: the same, without copies."""

import keras
import numpy as np
import pytest
from backends import without_us
from keras import layers, ops

if keras.backend.backend() != "torch":
    pytest.skip("torch has tensors of any order in memory", allow_module_level=True)

import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.usefixtures("installed")

GENERATOR = np.random.default_rng(0)
HALF = ["float16", "bfloat16"]


class Copies(TorchDispatchMode):
    """Counts copies of tensors as large as `size`, in another order."""

    def __init__(self, size):
        super().__init__()
        self.size, self.number = size, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in ("clone", "contiguous"):
            self.number += args[0].numel() == self.size
        return function(*args, **(kwargs or {}))


def with_gradients(call, *arrays):
    """The result and the gradients by the arrays, in float32, and the copies."""
    tensors = [x.clone().requires_grad_() for x in arrays]
    with Copies(arrays[0].numel()) as copies:
        y = call(*tensors)
        # As a next layer would give it, in the order of the result.
        y.backward(torch.cos(y.detach().float()).to(y.dtype))
    return [x.detach().float() for x in (y, *(t.grad for t in tensors))], copies.number


def random(shape, dtype):
    return torch.tensor(GENERATOR.standard_normal(shape)).to(getattr(torch, dtype))


def assert_alike(found, expected, dtype):
    ulp = {"float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
    for a, b in zip(found, expected, strict=True):
        size = float(b.abs().max())
        np.testing.assert_allclose(a, b, rtol=2 * ulp, atol=2 * ulp * size)


MASK = GENERATOR.random((2, 1, 6, 9)) < 0.7
MASK[..., 0] = True  # Every position sees one at least, causal or not.
ADDED = {
    "nothing": {},
    "scale": {"scale": 0.3},
    "mask": {"mask": MASK},
    "mask of padding": {"mask": MASK[:, :, :1]},
    "mask for each head": {"mask": np.repeat(MASK, 4, 1)},
    "bias": {"bias": GENERATOR.standard_normal((1, 4, 6, 9))},
    "float32 bias": {"bias": GENERATOR.standard_normal((4, 6, 9)).astype("float32")},
}


# torch takes no bias beside `is_causal`, from Keras either.
PAIRS = [(name, False) for name in ADDED]
PAIRS += [(name, True) for name in ADDED if "bias" not in name]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("added", "is_causal"), PAIRS)
@pytest.mark.parametrize("of_keys", [4, 2, 1])
def test_attention_copies_nothing(of_keys, added, is_causal, dtype):
    shapes = [(2, 6, 4, 8), (2, 9, of_keys, 8), (2, 9, of_keys, 8)]
    arrays = [random(s, dtype) for s in shapes]
    options = {"is_causal": is_causal, **ADDED[added]}

    def run():
        return with_gradients(
            lambda *x: ops.dot_product_attention(*x, **options), *arrays
        )

    (expected, before), (found, copies) = without_us(run), run()
    assert before > 0
    # With a mask the keys of groups are repeated, as in Keras: that is not counted.
    assert copies == 0
    assert_alike(found, expected, dtype)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("of_keys", [4, 2, 1])
def test_a_position_that_sees_nothing_sees_all(of_keys, dtype):
    mask = MASK.copy()
    mask[0, 0, 2] = False
    shapes = [(2, 6, 4, 8), (2, 9, of_keys, 8), (2, 9, of_keys, 8)]
    arrays = [random(s, dtype) for s in shapes]

    def plain(*tensors):
        q, k, v = (x.double().transpose(1, 2) for x in tensors)
        k, v = (x.repeat_interleave(4 // of_keys, 1) for x in (k, v))
        logits = q @ k.transpose(2, 3) / 8**0.5 - 1e3 * ~torch.tensor(mask)
        return (torch.softmax(logits, -1) @ v).transpose(1, 2).to(tensors[0].dtype)

    found, _ = with_gradients(
        lambda *x: ops.dot_product_attention(*x, mask=mask), *arrays
    )
    expected, _ = with_gradients(plain, *arrays)
    assert_alike(found, expected, dtype)


def test_attention_with_a_flag_is_left_to_keras():
    arrays = [random((2, 6, 4, 8), "float16") for _ in range(3)]

    def run():
        return with_gradients(
            lambda *x: ops.dot_product_attention(*x, flash_attention=False), *arrays
        )

    (expected, before), (found, copies) = without_us(run), run()
    assert copies == before
    assert_alike(found, expected, "float16")


@pytest.mark.parametrize("of_keys", [3, 8])
def test_heads_that_do_not_go_into_groups_are_refused_as_by_keras(of_keys):
    q, k = random((2, 6, 4, 8), "float16"), random((2, 6, of_keys, 8), "float16")

    def error():
        with pytest.raises(RuntimeError) as raised:
            ops.dot_product_attention(q, k, k)
        return str(raised.value)

    assert error() == without_us(error)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("padding", ["valid", "same"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (layers.Conv2D, {}),
        (layers.Conv2D, {"strides": 2}),
        (layers.Conv2D, {"dilation_rate": 2}),
        (layers.Conv2D, {"groups": 2}),
        (layers.Conv2D, {"data_format": "channels_first"}),
        (layers.Conv3D, {}),
        (layers.Conv1D, {}),
        (layers.DepthwiseConv2D, {}),
        (layers.SeparableConv2D, {}),
    ],
    ids=str,
)
@pytest.mark.kernels
def test_a_convolution_copies_no_images(kind, options, padding, dtype):
    keras.utils.set_random_seed(0)
    filters = {} if kind is layers.DepthwiseConv2D else {"filters": 8}
    layer = kind(
        kernel_size=3, padding=padding, dtype=f"mixed_{dtype}", **filters, **options
    )
    rank = {"1D": 1, "2D": 2, "3D": 3}[kind.__name__[-2:]]
    shape = (2, *[9, 8, 7][:rank], 4)
    if layer.data_format == "channels_first":
        shape = (2, 4, *[9, 8, 7][:rank])
    x = random(shape, dtype)
    layer.build(shape)

    def run():
        return with_gradients(lambda x: layer(x), x)

    (expected, before), (found, copies) = without_us(run), run()
    assert_alike(found, expected, dtype)
    if layer.data_format == "channels_last" and rank > 1:
        assert copies == 0  # Newer versions of Keras make two.
    else:
        assert copies == before
