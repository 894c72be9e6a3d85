"""The kernels on JAX."""

from keras_mp.backends.interface import Wrapper, around
from keras_mp.kernels import convolutions, logits
from keras_mp.kernels.jax import (
    activations,
    attention,
    cross_entropy,
    moments,
    products,
)
from keras_mp.kernels.jax.large_heads import number_of_chunks
from keras_mp.kernels.jax.private import are_of_one_trace
from keras_mp.repairs.jax import broadcasting
from keras_mp.repairs.logits import of_heads

__all__ = [
    "HALF_PRODUCTS",
    "IN_CHUNKS",
    "KEEPS_LOGITS",
    "number_of_chunks",
    "wrappers",
]

HALF_PRODUCTS = IN_CHUNKS = ""
KEEPS_LOGITS = False


def wrappers() -> dict[str, Wrapper]:
    sums = broadcasting.repairs()
    sums |= around(sums, ["add"], convolutions.passed_on)
    return {
        **logits.kernels(sums, are_of_one_trace),
        **convolutions.kernels(
            products.kernels(), activations.is_differentiated, activations.relu
        ),
        **cross_entropy.kernels(),
        **activations.kernels(),
        **moments.kernels(),
        "dot_product_attention": attention.chosen_by_device,
        "heads.call": lambda call: logits.of_heads(of_heads(call)),
    }
