"""The private names of TensorFlow that keras_mp uses, each with the reason."""

import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

# Does XLA compile what is being traced? A conditional there copies its operands.
is_in_xla_context = GraphOrParentsInXlaContext

# May a branch update variables on every replica? Where it may not, the branch stands in
# the cross-replica context.
supports_no_merge_call = tf.__internal__.distribute.strategy_supports_no_merge_call
