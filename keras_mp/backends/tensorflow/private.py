"""The private names of TensorFlow that keras_mp uses, each with the reason.

They are looked up where they are used. Without one of the first two a step is right,
and slower.
"""

from typing import Any

import tensorflow as tf


def is_in_xla_context(graph: Any) -> bool:
    """Does XLA compile what is being traced? A conditional there copies operands."""
    from tensorflow.python.ops import control_flow_util

    tells = getattr(control_flow_util, "GraphOrParentsInXlaContext", None)
    return tells is not None and tells(graph)


def supports_no_merge_call() -> bool:
    """May a branch update variables on every replica?

    If not, the branch must be in the cross-replica context.
    """
    of_strategies = tf.__internal__.distribute
    tells = getattr(of_strategies, "strategy_supports_no_merge_call", None)
    return tells is not None and tells()


def dot(a: tf.Tensor, b: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """The product of two matrices in a dtype other than theirs, which only XLA has."""
    from tensorflow.compiler.tf2xla.python.xla import dot_general
    from tensorflow.compiler.xla.xla_data_pb2 import DotDimensionNumbers

    axes = DotDimensionNumbers(
        lhs_contracting_dimensions=[1], rhs_contracting_dimensions=[0]
    )
    return dot_general(a, b, axes, preferred_element_type=dtype)
