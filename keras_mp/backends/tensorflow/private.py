"""The private names of TensorFlow that keras_mp uses, each with the reason."""

import tensorflow as tf
from tensorflow.compiler.tf2xla.python.xla import dot_general
from tensorflow.compiler.xla.xla_data_pb2 import DotDimensionNumbers
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

# Does XLA compile what is being traced? A conditional there copies its operands.
is_in_xla_context = GraphOrParentsInXlaContext

# May a branch update variables on every replica? If not, the branch must be in the
# cross-replica context.
supports_no_merge_call = tf.__internal__.distribute.strategy_supports_no_merge_call

_OF_MATRICES = DotDimensionNumbers(
    lhs_contracting_dimensions=[1], rhs_contracting_dimensions=[0]
)


def dot(a: tf.Tensor, b: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """The product of two matrices in a dtype other than theirs, which only XLA has."""
    return dot_general(a, b, _OF_MATRICES, preferred_element_type=dtype)
