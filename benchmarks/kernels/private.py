"""The private names of Keras and torch that the suite uses, each with the reason."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from keras.src.backend.torch import numpy as keras_numpy

# Sees every operation that torch runs. Its documented home has this name.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

from keras_mp.kernels.torch import products

_PRODUCTS = ("matmul", "einsum", "tensordot", "dot", "inner", "outer", "vdot")


@contextlib.contextmanager
def products_as_on_a_gpu() -> Iterator[None]:
    """Makes products have half-precision operands, as on a GPU.

    On CPUs Keras multiplies float16 in float32, with two casts per product. It looks at
    the device inside the function. And heads stay in float32 there.
    """

    def as_on_a_gpu(function: Any) -> Any:
        def product(*args: Any, **kwargs: Any) -> Any:
            with mock.patch.object(keras_numpy, "get_device", lambda: "cuda"):
                return function(*args, **kwargs)

        return product

    give_cpus_half_products()
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(products, "DEVICES", ("cpu",)))
        for name in _PRODUCTS:
            function = as_on_a_gpu(getattr(keras_numpy, name))
            patches.enter_context(mock.patch.object(keras_numpy, name, function))
        yield


# Operations that compute nothing, though they return no view.
_FREE = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "detach",
    "is_same_size",
    "_unsafe_view",
}


# A tensor becomes a Python number, or numbers become a tensor: on a GPU by a copy from
# the host, which waits as well.
_WAITS = {"_local_scalar_dense", "lift_fresh"}


def is_wait(operation: Any) -> bool:
    """Does Python wait for the device?"""
    return operation.overloadpacket.__name__ in _WAITS


def is_kernel(operation: Any) -> bool:
    """Does an operation compute, or copy?

    A view is what it was given, in another shape: its schema says so.
    """
    returned = operation._schema.returns
    view = any(r.alias_info is not None and not r.alias_info.is_write for r in returned)
    free = operation.overloadpacket.__name__ in _FREE
    return not (view or free or is_wait(operation))


_library: Any = None


def give_cpus_half_products() -> None:
    """Gives CPUs torch's product of half-precision matrices with a float32 result."""
    global _library
    if _library is None:
        _library = torch.library.Library("aten", "IMPL")
        _library.impl("mm.dtype", _half_product, "CPU")


def _half_product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> Any:
    assert a.dtype == b.dtype in (torch.float16, torch.bfloat16)
    return torch.mm(a.float(), b.float()).to(dtype)
