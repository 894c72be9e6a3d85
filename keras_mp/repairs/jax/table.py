"""The repairs on JAX."""

from keras_mp.backends.interface import Wrapper
from keras_mp.repairs import logits
from keras_mp.repairs.jax import (
    attention,
    broadcasting,
    cross_entropy,
    recurrent,
    softmax,
)


def wrappers() -> dict[str, Wrapper]:
    return {
        **broadcasting.repairs(),
        **recurrent.repairs(),
        "dot_product_attention": attention.in_half_precision,
        "heads.call": logits.of_heads,
        "softmax": softmax.in_float32,
        "sparse_categorical_crossentropy": cross_entropy.in_one_pass,
    }
