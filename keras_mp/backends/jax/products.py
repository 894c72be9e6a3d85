"""Products with half-precision operands and float32 results, as XLA has them."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax import lax
from jax.custom_derivatives import SymbolicZero

from keras_mp.backends import products
from keras_mp.backends.engine import Wrapper
from keras_mp.backends.products import HalfOperands


def repairs() -> dict[str, Wrapper]:
    return products.repairs(
        _product, lambda: True, matmul=_matmul, einsum=_einsum, conv=_conv
    )


def _product(run: Callable, a: Any, b: Any, operands: HalfOperands) -> Any:
    @jax.custom_jvp
    def product(a: Any, b: Any) -> Any:
        half = operands.dtype
        return run(a.astype(half), b.astype(half), "float32")

    @functools.partial(product.defjvp, symbolic_zeros=True)
    def derivative(primals: Sequence, tangents: Sequence) -> tuple[Any, Any]:
        # The transposes of these are the products of the gradient: its dtype is theirs.
        dtype = operands.gradient
        (a, b), (da, db) = primals, tangents
        terms = [
            run(x.astype(dtype), y.astype(dtype), dtype).astype("float32")
            for x, y in ((da, b), (a, db))
            if not (isinstance(x, SymbolicZero) or isinstance(y, SymbolicZero))
        ]
        return product(a, b), sum(terms)

    return product(a, b)


def _matmul(x1: Any, x2: Any) -> tuple[Any, Any, Callable]:
    return x1, x2, lambda a, b, dtype: jnp.matmul(a, b, preferred_element_type=dtype)


def _einsum(subscripts: str, *operands: Any, **options: Any) -> tuple | None:
    def run(a: Any, b: Any, dtype: str) -> Any:
        wanted = options | {"preferred_element_type": dtype}
        return jnp.einsum(subscripts, a, b, **wanted)

    return (*operands, run) if len(operands) == 2 else None


def _conv(
    inputs: Any,
    kernel: Any,
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

    def run(a: Any, b: Any, dtype: str) -> Any:
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


def _for_each(axes: str, value: Any) -> Sequence[int]:
    return (value,) * len(axes) if isinstance(value, int) else value
