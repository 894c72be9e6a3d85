"""The kernels on TensorFlow."""

import tensorflow as tf

from keras_mp.backends.interface import Wrapper, around
from keras_mp.kernels import convolutions, logits
from keras_mp.kernels.tensorflow import activations, cross_entropy, cudnn_attention
from keras_mp.kernels.tensorflow.cross_entropy import number_of_chunks
from keras_mp.kernels.tensorflow.products import kernels as of_products
from keras_mp.repairs.tensorflow import attention
from keras_mp.repairs.tensorflow.table import wrappers as repairs
from keras_mp.types import Tensor

__all__ = [
    "HALF_PRODUCTS",
    "IN_CHUNKS",
    "KEEPS_LOGITS",
    "number_of_chunks",
    "wrappers",
]

HALF_PRODUCTS = " where XLA compiles"
IN_CHUNKS = " where XLA compiles for a GPU"
KEEPS_LOGITS = False


def wrappers() -> dict[str, Wrapper]:
    sums = {name: repairs()[name] for name in ("add", "subtract", "multiply")}
    sums |= around(sums, ["add"], convolutions.passed_on)
    return {
        **logits.kernels(sums, _are_of_one_graph),
        **convolutions.kernels(
            of_products(), activations.is_differentiated, activations.relu
        ),
        **cross_entropy.kernels(),
        "dot_product_attention": lambda original: cudnn_attention.kernel(
            attention.scaled_first(original)
        ),
        "gelu": activations.keeping_slopes,
        "softmax": logits.softmax,
        "heads.call": logits.of_heads,
    }


def _are_of_one_graph(a: Tensor, b: Tensor) -> bool:
    return b.graph is tf.compat.v1.get_default_graph()
