"""The kernels on torch."""

from keras_mp.backends.interface import Wrapper
from keras_mp.kernels.torch import (
    adam,
    constants,
    cross_entropy,
    layouts,
    logits,
    normalization,
    products,
    seeds,
)
from keras_mp.kernels.torch.cross_entropy import number_of_chunks

__all__ = [
    "HALF_PRODUCTS",
    "IN_CHUNKS",
    "KEEPS_LOGITS",
    "number_of_chunks",
    "wrappers",
]

HALF_PRODUCTS = IN_CHUNKS = " on NVIDIA's GPUs"
KEEPS_LOGITS = True


def wrappers() -> dict[str, Wrapper]:
    found = products.kernels()
    of_heads = found["conv"]
    return {
        **found,
        **logits.kernels(),
        **cross_entropy.kernels(),
        "conv": lambda conv: of_heads(layouts.convolution_as_it_is(conv)),
        "BatchNormalization.call": normalization.in_one_kernel,
        "Adam.update_step": adam.in_one_kernel,
        "convert_to_tensor": constants.filled,
        "array": constants.array,
        "where": constants.where,
        **dict.fromkeys(("maximum", "minimum"), constants.extremes),
        **dict.fromkeys(
            ("subtract", "multiply", "Variable.__add__"), constants.beside_tensors
        ),
        "torch_seed_generator": seeds.read_once,
    }
