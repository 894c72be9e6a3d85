"""The repairs on torch."""

from keras_mp.backends.interface import Wrapper
from keras_mp.backends.torch import writes
from keras_mp.repairs.torch import attention


def wrappers() -> dict[str, Wrapper]:
    return {
        "Variable.assign": writes.reach_the_variable,
        "dot_product_attention": attention.attention_as_it_is,
    }
