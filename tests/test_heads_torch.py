"""The products of heads on torch: the kernel of its GPUs, and their derivatives."""

import numpy as np
import pytest
from backends import BACKEND

if BACKEND != "torch":
    pytest.skip("products of torch", allow_module_level=True)

import torch
from half_products_torch import use_kernel
from keras import layers, ops
from products import dispatched, products_of
from test_heads import CLASSES, compiled, data_for, ending_in
from torch import func

import keras_mp
from keras_mp.kernels.torch.products import HalfProduct
from keras_mp.repairs.products import HalfOperands, half_operands

pytestmark = pytest.mark.usefixtures("installed")

HALF = ("float16", "bfloat16")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("half", HALF)
def test_the_kernel_of_torch_takes_half_precision_and_returns_float32(half, tied):
    # Of a tensor on "meta" torch computes shapes and dtypes as its GPUs do.
    a, b = (torch.ones(s, device="meta", requires_grad=True) for s in ((4, 8), (8, 3)))
    dtype = getattr(torch, half)
    seen = dispatched(
        lambda: HalfProduct.apply(a, b, dtype, dtype, tied).sum().backward()
    )
    results = ["float32", half, "float32" if tied else half]
    assert seen == [([half, half], result) for result in results]
    assert a.grad.dtype == b.grad.dtype == torch.float32


def test_without_the_kernel_products_stay_in_float32():
    keras_mp.set_global_policy("mixed_bfloat16")
    model = compiled(ending_in(layers.Dense(CLASSES)))
    assert products_of(model, *data_for(model)) == {"bfloat16": 2, "float32": 3}


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.kernels
def test_a_float16_gradient_is_half_only_where_the_loss_is_scaled(scaled, monkeypatch):
    use_kernel(monkeypatch)
    keras_mp.set_global_policy("mixed_float16")
    model = compiled(ending_in(layers.Dense(CLASSES)), auto_scale_loss=scaled)
    found = products_of(model, *data_for(model))
    # The body's two are float32: Keras does that on CPUs.
    of_gradient = {"float16": 2, "float32": 2} if scaled else {"float32": 4}
    assert found == {"float16 -> float32": 1, **of_gradient}


SHAPES = {
    "ab,bc->ac": ((2, 4), (4, 3)),
    "abc,cd -> abd": ((2, 3, 4), (4, 5)),
    "abc,cde->abde": ((2, 3, 4), (4, 5, 6)),
    "abcd,cde->abe": ((2, 3, 4, 5), (4, 5, 6)),
    "...x,xy->...y": ((2, 3, 4), (4, 5)),
    "ab,b->a": ((2, 4), (4,)),
}
OTHERS = {
    "ab,cb->ac": ((2, 4), (3, 4)),
    "abc,abd->acd": ((2, 4, 3), (2, 4, 5)),
    "ab,bb->ab": ((2, 4), (4, 4)),
    "ab,bc->ca": ((2, 4), (4, 3)),
}


def multiplied(monkeypatch, operation, *tensors):
    """The result within the scope, that without, and whether the kernel computed it."""
    use_kernel(monkeypatch)
    expected = operation(*tensors)
    results = []
    with half_operands(HalfOperands("bfloat16", "bfloat16")):
        seen = dispatched(lambda: results.append(operation(*tensors)))
    assert results[0].dtype == torch.float32
    return results[0], expected, (["bfloat16"] * 2, "float32") in seen


def small_integers(*shape):
    """Exact in half precision, and so are their products' sums in float32."""
    return torch.randint(-8, 8, shape).float()


@pytest.mark.parametrize("subscripts", [*SHAPES, *OTHERS])
@pytest.mark.kernels
def test_an_einsum_of_two_matrices_goes_through_the_kernel(subscripts, monkeypatch):
    tensors = [small_integers(*s) for s in (SHAPES | OTHERS)[subscripts]]
    found, expected, fast = multiplied(
        monkeypatch, lambda *t: ops.einsum(subscripts, *t), *tensors
    )
    assert fast == (subscripts in SHAPES)
    assert torch.equal(found, expected)


CONVOLUTIONS = {
    "": ({}, 1, True),
    "same": ({"padding": "same", "dilation_rate": 2}, 1, True),
    "strides": ({"strides": 2}, 1, False),
    "two pixels": ({}, 2, False),
    "groups": ({}, 1, False),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("data_format", ["channels_last", "channels_first"])
@pytest.mark.kernels
def test_a_convolution_of_single_pixels_does(name, data_format, monkeypatch):
    options, size, expected_fast = CONVOLUTIONS[name]
    x = small_integers(2, 4, 5, 6)
    x = x if data_format == "channels_last" else x.movedim(-1, 1)
    kernel = small_integers(size, size, 3 if name == "groups" else 6, 8)
    found, expected, fast = multiplied(
        monkeypatch,
        lambda *t: ops.conv(*t, **options, data_format=data_format),
        x,
        kernel,
    )
    assert fast == expected_fast
    assert torch.equal(found, expected)


DERIVATIVES = {
    "gradient": func.grad,
    "of the other": lambda f: func.grad(f, argnums=1),
    "Hessian": lambda f: func.hessian(f, argnums=1),
    "backward twice": lambda f: func.jacrev(func.grad(f)),
    "forward": lambda f: lambda a, b: func.jvp(f, (a, b), (a, b))[1],
    "of each example": lambda f: func.vmap(
        func.grad(lambda a, b: f(a[None], b), argnums=1), (0, None)
    ),
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("half", HALF)
@pytest.mark.parametrize("name", DERIVATIVES)
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_derivatives_agree_with_float32(name, half, tied, monkeypatch):
    use_kernel(monkeypatch)
    generator = np.random.default_rng(0)
    a, b = (
        torch.tensor(generator.normal(size=s).astype("float32"))
        for s in ((4, 8), (8, 3))
    )

    def plain(a, b):
        return (ops.matmul(a, b) ** 2).sum()

    def rounded(a, b):
        with half_operands(HalfOperands(half, half, tied)):
            return plain(a, b)

    derivative = DERIVATIVES[name]
    expected, found = derivative(plain)(a, b), derivative(rounded)(a, b)
    unit = torch.finfo(getattr(torch, half)).eps / 2
    assert (found - expected).abs().max() <= 8 * unit * expected.abs().max()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_torch_compile_sees_one_graph(monkeypatch):
    use_kernel(monkeypatch)

    def loss(a, b):
        with half_operands(HalfOperands("bfloat16", "bfloat16")):
            return (ops.matmul(a, b) ** 2).sum()

    a, b = (torch.ones(s, requires_grad=True) for s in ((4, 8), (8, 3)))
    compiled_loss = torch.compile(loss, backend="aot_eager", fullgraph=True)
    found, expected = (torch.autograd.grad(f(a, b), b) for f in (compiled_loss, loss))
    assert torch.equal(*found, *expected)
