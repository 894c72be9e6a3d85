"""What keras_mp wraps of Keras' operations, in two tables: repairs and kernels.

An engine has a wrapper for each row of its backend. The seams, which are methods of
layers, models and optimizers, stand in a table of their own, in `seams.py`.
"""

from typing import NamedTuple

EVERYWHERE = "jax tensorflow torch"


class Row(NamedTuple):
    """Operations that one idea wraps.

    Attributes:
        operations: their names, as `keras_private.place_of` takes them.
        backends: the backends where they are wrapped.
        does: what the wrapper does.
        gain: what a kernel gains, and where that was measured.
        needs: private names, "module:name", without which a kernel is left out.
    """

    operations: str
    backends: str
    does: str
    gain: str = ""
    needs: tuple[str, ...] = ()


# Operations that are wrong in half precision, or missing.
REPAIRS = (
    Row(
        "Orthogonal.__call__",
        EVERYWHERE,
        "draws in float32: no backend decomposes matrices in half precision",
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
    ),
    Row(
        "matmul einsum conv",
        EVERYWHERE,
        "in a head whose kernel or input is half precision, the product is of float32 "
        "operands: its logits are float32",
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
        "sparse_categorical_crossentropy",
        "jax",
        "reads a head's logits once: a logit of -inf is no nan",
    ),
    Row(
        "lstm bidirectional_lstm",
        "jax",
        "are cast to float32 around cuDNN, which has no other; 11 or 13 kernels, not "
        "31 for each time step",
    ),
    Row("arange", "tensorflow", "runs in float16 graphs, which have no kernel for it"),
    Row(
        "Variable.assign",
        "torch",
        "a write within a call in half precision reaches the variable",
    ),
)

# What makes a step faster or smaller, and changes nothing else.
KERNELS = (
    Row(
        "matmul einsum conv",
        "jax torch",
        "in a large head: half-precision operands, float32 results, on torch only on "
        "NVIDIA GPUs",
        "a step is 1.02 to 1.16 times as fast, by the size of the kernel: four Dense, "
        "compiled for an H100",
    ),
    Row(
        "matmul einsum conv",
        "tensorflow",
        "the same, where XLA compiles",
        "the same",
        (
            "tensorflow.compiler.tf2xla.python.xla:dot_general",
            "tensorflow.compiler.xla.xla_data_pb2:DotDimensionNumbers",
        ),
    ),
    Row(
        "dot_product_attention",
        "jax",
        "cuDNN's fused kernel on NVIDIA GPUs, the splash kernel on TPUs: no logits in "
        "memory",
        "in the suite `compiled`: README's decoder and ViT",
        (
            "jax._src.cudnn.fused_attention_stablehlo:check_cudnn_version",
            "jax.experimental.pallas.ops.tpu.splash_attention:make_splash_mha",
        ),
    ),
    Row(
        "sparse_categorical_crossentropy categorical_crossentropy",
        "jax",
        "a large head's loss comes in chunks of rows: float32 logits are never whole",
        "in the suite `compiled`: README's decoder",
    ),
    Row(
        "add subtract multiply divide tanh where softmax argmax",
        "jax",
        "let that loss know what was done to the logits; metrics take its classes",
        "what the chunks need",
    ),
    Row(
        "gelu selu",
        "jax",
        "keep their slopes alone for the gradient, but on TPUs",
        "a decoder: 1.37 ms, not 1.43, and 0.36 GB, not 0.46 (GELU); 1.37, not 1.40, "
        "and 0.36, not 0.41 (SELU); compiled for an H100",
    ),
    Row(
        "relu conv conv_transpose depthwise_conv",
        "jax",
        "a ReLU after a convolution keeps its result alone for the gradient",
        "VGG-16: 7.00 ms, not 7.66, in 0.79 of the memory; compiled for an H100",
    ),
    Row(
        "moments",
        "jax",
        "over a batch or a group: a gradient of one pass, in half-precision layers",
        "ResNet-50: 4.35 ms, not 4.67, and 1.62 GB, not 1.67; compiled for an H100",
    ),
    Row(
        "sparse_categorical_crossentropy add",
        "torch",
        "a large head's loss comes in chunks: its slopes are never whole",
        "half of the memory of a `torch.amp` step: the suite `kernels`",
    ),
    Row(
        "conv",
        "torch",
        "takes images with channels last as they are",
        "no copies of inputs: the suite `kernels`",
    ),
    Row(
        "BatchNormalization.call",
        "torch",
        "is one kernel, not some fifty operations",
        "the suite `kernels`",
    ),
)


def needs_of(operation: str, backend: str) -> tuple[str, ...]:
    """The private names that the kernel of an operation needs."""
    rows = [r for r in KERNELS if operation in r.operations.split()]
    return tuple(
        name for row in rows if backend in row.backends.split() for name in row.needs
    )


def names_in(rows: tuple[Row, ...], backend: str) -> set[str]:
    """The operations that a table has for a backend."""
    return {
        name
        for row in rows
        if backend in row.backends.split()
        for name in row.operations.split()
    }
