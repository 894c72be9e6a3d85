"""The kernels: what makes a step faster or smaller, and changes nothing else.

Each takes the place of a repair of the same name, if there is one, and does what that
does. What a kernel says of itself to others is in `own`.
"""

import importlib
from typing import Any

import keras

from keras_mp.backends.interface import Wrapper
from keras_mp.repairs.table import EACH, HEADS, Row

KERNELS: tuple[Row, ...] = (
    Row(
        "matmul einsum conv",
        "jax torch",
        "in a large head: half-precision operands, float32 results, on torch only on "
        "NVIDIA GPUs",
        "a step is 1.02 to 1.16 times as fast, by the size of the kernel: four Dense, "
        "compiled for an H100",
        by=HEADS,
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
        by=HEADS,
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
        "dot_product_attention",
        "tensorflow",
        "cuDNN's fused kernel, where XLA compiles for a GPU: off, as no GPU has run it "
        "yet, unless the environment has `KERAS_MP_CUDNN_ATTENTION=1`",
        "a decoder: 3.92 ms, not 4.64, and 1.88 GB, not 2.28; compiled for an H100",
        ("tensorflow.compiler.tf2xla.python.xla:custom_call_v2",),
    ),
    Row(
        "sparse_categorical_crossentropy categorical_crossentropy",
        "jax",
        "a large head's loss comes in chunks of rows: float32 logits are never whole",
        "in the suite `compiled`: README's decoder",
        by=HEADS,
    ),
    Row(
        "sparse_categorical_crossentropy categorical_crossentropy",
        "tensorflow",
        "the same, where XLA compiles for a GPU",
        "in the suite `compiled`: the decoder",
        (
            "tensorflow.compiler.tf2xla.python.xla:variadic_reduce",
            "tensorflow.compiler.tf2xla.python.xla:optimization_barrier",
            "tensorflow.compiler.tf2xla.python.xla:custom_call_v2",
        ),
        by=HEADS,
    ),
    Row(
        "heads.call",
        "jax tensorflow",
        "lets that loss know which logits a model returns",
        "what the chunks need",
        by=EACH,
    ),
    Row(
        "add subtract multiply divide tanh where softmax argmax",
        "jax tensorflow",
        "let that loss know what was done to the logits; metrics take its classes",
        "what the chunks need",
        by=HEADS,
    ),
    Row(
        "gelu selu",
        "jax",
        "keep their slopes alone for the gradient, but on TPUs",
        "a decoder: 1.37 ms, not 1.43, and 0.36 GB, not 0.46 (GELU); 1.37, not 1.40, "
        "and 0.36, not 0.41 (SELU); compiled for an H100",
    ),
    Row(
        "gelu",
        "tensorflow",
        "the same, where XLA compiles",
        "a decoder: 3.54 ms, not 3.60, and 1.68 GB, not 1.78; compiled for an H100",
    ),
    Row(
        "relu conv conv_transpose depthwise_conv",
        "jax",
        "a ReLU after a convolution keeps its result alone for the gradient",
        "VGG-16: 7.00 ms, not 7.66, in 0.79 of the memory; compiled for an H100",
    ),
    Row(
        "relu",
        "tensorflow",
        "the same, where XLA compiles",
        "VGG-16: 7.00 ms, not 7.66, in 0.82 of the memory; compiled for an H100",
        ("tensorflow.compiler.tf2xla.python.xla:optimization_barrier",),
    ),
    Row(
        "conv conv_transpose depthwise_conv",
        "tensorflow",
        "let that ReLU know what it follows",
        "what the ReLU needs",
    ),
    Row(
        "moments",
        "jax",
        "over a batch or a group: a gradient of one pass, in half-precision layers",
        "ResNet-50: 4.35 ms, not 4.67, and 1.62 GB, not 1.67; compiled for an H100",
        by=EACH,
    ),
    Row(
        "sparse_categorical_crossentropy add",
        "torch",
        "a large head's loss comes in chunks: its slopes are never whole",
        "half of the memory of a `torch.amp` step: the suite `kernels`",
        by=HEADS,
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
    Row(
        "Adam.update_step",
        "torch",
        "one kernel writes all variables of Adam and AdamW",
        "the suite `kernels`",
        ("torch:_fused_adam_",),
        by=EACH,
    ),
    Row(
        "convert_to_tensor array subtract multiply where maximum minimum "
        "Variable.__add__",
        "torch",
        "fill in Python numbers on the device: a copy from the host waits for it",
        "one wait in a step, not six: the suite `kernels`",
        by=EACH,
    ),
    Row(
        "torch_seed_generator",
        "torch",
        "knows the state of a seed, as that of a seeded Dropout, without reading it",
        "no wait at each draw: `tests/test_waits.py`",
        by=EACH,
    ),
)

# The module of this backend.
own: Any = importlib.import_module(f"keras_mp.kernels.{keras.backend.backend()}.table")


def wrappers() -> dict[str, Wrapper]:
    """The wrappers of this backend, by the names of `KERNELS`."""
    return own.wrappers()
