"""Products with half-precision operands and float32 results, as XLA has them."""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax import lax
from jax.custom_derivatives import SymbolicZero

from keras_mp.backends.interface import Wrapper
from keras_mp.kernels import products
from keras_mp.kernels.logits import Product
from keras_mp.repairs.logits import note
from keras_mp.repairs.products import HalfOperands
from keras_mp.types import Tensor


def kernels() -> dict[str, Wrapper]:
    return products.kernels(
        _product, lambda: True, matmul=_matmul, einsum=_einsum, conv=_conv
    )


def _product(run: Callable, a: Tensor, b: Tensor, operands: HalfOperands) -> Any:
    result = _with_half_operands(run, a, b, operands)
    if run is multiply and b.ndim == 2:
        note(result, Product(a, b, operands))
    return result


def _with_half_operands(
    run: Callable, a: Tensor, b: Tensor, operands: HalfOperands
) -> Any:
    if operands.tied and operands.gradient != "float32" and b.ndim == 2:
        return _product_with_tied_weights(operands.dtype, a, b)

    @jax.custom_jvp
    def product(a: Tensor, b: Tensor) -> Any:
        return in_float32(run, a.astype(operands.dtype), b.astype(operands.dtype))

    @functools.partial(product.defjvp, symbolic_zeros=True)
    def derivative(primals: Sequence, tangents: Sequence) -> tuple[Any, Any]:
        # The products of the gradient are the transposes of these, in the same dtype.
        dtype = operands.gradient
        (a, b), (da, db) = primals, tangents
        terms = [
            run(x.astype(dtype), y.astype(dtype), dtype).astype("float32")
            for x, y in ((da, b), (a, db))
            if not (isinstance(x, SymbolicZero) or isinstance(y, SymbolicZero))
        ]
        return product(a, b), sum(terms)

    return product(a, b)


def in_float32(run: Callable, a: Tensor, b: Tensor) -> Any:
    """The product of half-precision tensors in float32.

    On CPUs it multiplies float32 tensors, with the same result: XLA has no kernel there
    for bfloat16 in some layouts, and finds out when the program runs.
    """
    return lax.platform_dependent(
        a,
        b,
        cpu=lambda a, b: run(a.astype("float32"), b.astype("float32"), "float32"),
        default=lambda a, b: run(a, b, "float32"),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product_with_tied_weights(half: str, a: Tensor, b: Tensor) -> Any:
    """The product of a (..., k) and b (k, n), with the gradient by b in float32.

    No JAX operation has a transpose with half operands and a float32 result. So this
    has no forward derivative.
    """
    return in_float32(multiply, a.astype(half), b.astype(half))


def _forward(half: str, a: Tensor, b: Tensor) -> tuple[Any, Any]:
    return _product_with_tied_weights(half, a, b), (a, b)


def _backward(half: str, operands: Any, gradient: Tensor) -> tuple[Any, Any]:
    a, b = operands
    half_a, half_b, half_gradient = (x.astype(half) for x in (a, b, gradient))
    rows = tuple(range(a.ndim - 1))
    by_a = jnp.matmul(half_gradient, half_b.T)
    summed = (rows, rows), ((), ())
    by_b = in_float32(
        lambda a, b, dtype: lax.dot_general(a, b, summed, preferred_element_type=dtype),
        half_a,
        half_gradient,
    )
    return by_a.astype(a.dtype), by_b


_product_with_tied_weights.defvjp(_forward, _backward)


def _matmul(x1: Tensor, x2: Tensor) -> tuple[Any, Any, Callable]:
    return x1, x2, multiply


def multiply(a: Tensor, b: Tensor, dtype: str) -> Any:
    return jnp.matmul(a, b, preferred_element_type=dtype)


def _einsum(subscripts: str, *operands: Any, **options: Any) -> tuple | None:
    if re.fullmatch(r"(.*)(\w),\2(\w)->\1\3", subscripts.replace(" ", "")):
        return (*operands, multiply)

    def run(a: Tensor, b: Tensor, dtype: str) -> Any:
        wanted = options | {"preferred_element_type": dtype}
        return jnp.einsum(subscripts, a, b, **wanted)

    return (*operands, run) if len(operands) == 2 else None


def _conv(
    inputs: Any,
    kernel: Tensor,
    strides: Any = 1,
    padding: str = "valid",
    data_format: str | None = None,
    dilation_rate: Any = 1,
) -> tuple[Any, Any, Callable]:
    data_format = data_format or keras.config.image_data_format()
    axes = "DHW"[5 - len(inputs.shape) :]
    last = data_format == "channels_last"
    layout = f"N{axes}C" if last else f"NC{axes}"
    channels = inputs.shape[-1 if last else 1]

    def run(a: Tensor, b: Tensor, dtype: str) -> Any:
        return lax.conv_general_dilated(
            a,
            b,
            _for_each(axes, strides),
            padding.upper(),
            rhs_dilation=_for_each(axes, dilation_rate),
            dimension_numbers=(layout, f"{axes}IO", layout),
            feature_group_count=channels // kernel.shape[-2],
            preferred_element_type=dtype,
        )

    return inputs, kernel, run


def _for_each(axes: str, value: Tensor) -> Sequence[int]:
    return (value,) * len(axes) if isinstance(value, int) else value
