"""The repairs: operations of Keras that are wrong in half precision, or missing."""

import importlib
from typing import NamedTuple

import keras

from keras_mp.backends.interface import Wrapper
from keras_mp.repairs import in_float32, products, remat

EVERYWHERE = "jax tensorflow torch"
HALF, HEADS, EACH = "half", "heads", "each"


class Row(NamedTuple):
    """Operations that one idea wraps.

    Attributes:
        operations: their names, as `keras_private.place_of` takes them.
        backends: the backends where they are wrapped.
        does: what the wrapper does.
        gain: what a kernel gains, and where that was measured.
        needs: private names, "module:name", without which a kernel is left out.
        by: which calls it is for: those with an operand in `HALF`; those by `HEADS`,
            or of what a head has made; or `EACH`. Others pass `guard` alone.
    """

    operations: str
    backends: str
    does: str
    gain: str = ""
    needs: tuple[str, ...] = ()
    by: str = HALF


REPAIRS: tuple[Row, ...] = (
    Row(
        "matmul einsum conv",
        EVERYWHERE,
        "in a head whose kernel or input is half precision, the product is of float32 "
        "operands: its logits are float32",
        by=HEADS,
    ),
    Row(
        "Orthogonal.__call__",
        EVERYWHERE,
        "draws in float32: no backend decomposes matrices in half precision",
        by=EACH,
    ),
    Row(
        "normalize",
        EVERYWHERE,
        "`ops.normalize` computes in float32: its epsilon is no float16 number",
    ),
    Row(
        "remat",
        EVERYWHERE,
        "computes again in the precision of the first run",
        by=EACH,
    ),
    Row(
        "Layer.add_loss",
        EVERYWHERE,
        "adds losses in float32: half-precision ones pass 65504, and TensorFlow adds "
        "none of them to a float32 loss",
        by=EACH,
    ),
    Row(
        "Model.export",
        EVERYWHERE,
        "writes files for LiteRT in float32: it has no half-precision products",
        by=EACH,
    ),
    Row(
        "add subtract multiply",
        "jax tensorflow",
        "sum the gradients of what is broadcast, such as a bias, in float32",
    ),
    Row(
        "dot_product_attention",
        "jax",
        "multiplies in float32 on CPUs, and in float16 on TPUs, which have no such "
        "products",
    ),
    Row(
        "dot_product_attention",
        "tensorflow",
        "scales before it multiplies: float16 does not overflow",
    ),
    Row(
        "dot_product_attention",
        "torch",
        "rows that see nothing have the right gradient in bfloat16; copies no inputs",
    ),
    Row(
        "softmax",
        "jax",
        "computes in float32 and rounds once; compiled for an H100, a decoder with "
        "dropout in its attention takes 4.74 ms, not 5.04",
    ),
    Row(
        "heads.call",
        "jax",
        "lets the loss know that what it reads are logits",
        by=EACH,
    ),
    Row(
        "sparse_categorical_crossentropy",
        "jax",
        "reads a head's logits once: a logit of -inf is no nan",
        by=HEADS,
    ),
    Row(
        "lstm bidirectional_lstm",
        "jax",
        "are cast to float32 around cuDNN, which has no other; 11 or 13 kernels, not "
        "31 for each time step",
    ),
    Row(
        "arange",
        "tensorflow",
        "runs in float16 graphs, which have no kernel for it",
        by=EACH,
    ),
    Row(
        "Variable.assign",
        "torch",
        "a write within a call in half precision reaches the variable",
        by=EACH,
    ),
)


def wrappers() -> dict[str, Wrapper]:
    """The wrappers of this backend, by the names of `REPAIRS`."""
    name = keras.backend.backend()
    own = importlib.import_module(f"keras_mp.repairs.{name}.table")
    return {
        "Orthogonal.__call__": in_float32.orthogonal,
        "normalize": in_float32.normalize,
        "remat": remat.in_its_precision,
        **dict.fromkeys(("matmul", "einsum", "conv"), products.of_heads),
        **own.wrappers(),
    }


def rows_of(operation: str, rows: tuple[Row, ...]) -> list[Row]:
    """The rows of an operation on this backend."""
    backend = keras.backend.backend()
    own = (row for row in rows if backend in row.backends.split())
    return [row for row in own if operation in row.operations.split()]


def names_in(rows: tuple[Row, ...], backend: str) -> set[str]:
    """The operations that a table has for a backend."""
    return {
        name
        for row in rows
        if backend in row.backends.split()
        for name in row.operations.split()
    }
