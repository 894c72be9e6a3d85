"""The private names of TensorFlow that keras_mp uses, each with the reason.

They are looked up where they are used. Without one of the first three a step is right,
and slower or larger.
"""

from collections.abc import Callable, Sequence

import tensorflow as tf


def compiled_by_xla() -> bool:
    """Does XLA compile what is being traced?"""
    from tensorflow.python.ops import control_flow_util

    tells = getattr(control_flow_util, "GraphOrParentsInXlaContext", None)
    return tells is not None and tells(tf.compat.v1.get_default_graph())


def supports_no_merge_call() -> bool:
    """May a branch update variables on every replica?

    If not, the branch must be in the cross-replica context.
    """
    of_strategies = tf.__internal__.distribute
    tells = getattr(of_strategies, "strategy_supports_no_merge_call", None)
    return tells is not None and tells()


def is_for_gpu() -> bool:
    """Is what is being traced for a GPU? XLA does not say what it compiles for.

    Not if `tf.device`, around the call or in what is traced, names a CPU.
    """
    from tensorflow.python.eager import context

    tells = getattr(context, "context", None)
    if tells is None or not tf.config.get_visible_devices("GPU"):
        return False
    return "CPU" not in (tells().device_name or "")


def dot(
    a: tf.Tensor, b: tf.Tensor, axis_of_a: int, axis_of_b: int, dtype: str
) -> tf.Tensor:
    """The sum over an axis of each in a dtype other than theirs, which only XLA has."""
    from tensorflow.compiler.tf2xla.python.xla import dot_general
    from tensorflow.compiler.xla.xla_data_pb2 import DotDimensionNumbers

    axes = DotDimensionNumbers(
        lhs_contracting_dimensions=[axis_of_a], rhs_contracting_dimensions=[axis_of_b]
    )
    return dot_general(a, b, axes, preferred_element_type=tf.as_dtype(dtype))


def barrier(*tensors: tf.Tensor) -> Sequence[tf.Tensor]:
    """The same tensors; XLA makes all of them before what reads one of these."""
    from tensorflow.compiler.tf2xla.python.xla import optimization_barrier

    return optimization_barrier(*tensors)


def empty(shape: Sequence[int], dtype: str) -> tf.Tensor:
    """Memory without values, which XLA has on GPUs."""
    (made,) = custom_call("AllocateBuffer", [], [tf.TensorSpec(shape, dtype)])
    return made


def custom_call(
    target: str,
    operands: Sequence[tf.Tensor],
    results: Sequence[tf.TensorSpec],
    settings: str = "",
) -> Sequence[tf.Tensor]:
    """The results of a call that XLA, or a library of its, has by this name."""
    from tensorflow.compiler.tf2xla.python.xla import custom_call_v2

    return custom_call_v2(target, operands, results, settings)


def reduce(
    operands: Sequence[tf.Tensor], first: Sequence[tf.Tensor], combine: Callable
) -> Sequence[tf.Tensor]:
    """Combines several tensors over their last axis in one pass, which only XLA does.

    Args:
        operands: (..., n) each.
        first: a scalar for each, that changes nothing if it is combined.
        combine: takes two scalars for each operand, and returns one for each.
    """
    from tensorflow.compiler.tf2xla.python.xla import variadic_reduce

    specs = [tf.TensorSpec((), x.dtype) for x in operands] * 2
    reducer = tf.function(combine, autograph=False).get_concrete_function(*specs)
    return variadic_reduce(operands, first, [operands[0].shape.rank - 1], reducer)
