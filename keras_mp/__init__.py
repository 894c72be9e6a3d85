"""Mixed precision for Keras 3: switched on in one line, right on every backend."""

from keras_mp import callbacks, integration
from keras_mp.config import global_policy, policy_scope, set_global_policy
from keras_mp.conversion import convert
from keras_mp.diagnostics.diagnosis import diagnose
from keras_mp.diagnostics.float32_layers import find_float32_layers
from keras_mp.diagnostics.inspection import inspect
from keras_mp.diagnostics.trainings import compare
from keras_mp.errors import TrainingDivergedError
from keras_mp.hardware import recommended_policy
from keras_mp.loss_scale_optimizer import LossScaleOptimizer
from keras_mp.policies import MixedBFloat16, MixedFloat16, Policy
from keras_mp.rules import keep_float32

__version__ = "0.1.0"

__all__ = [
    "LossScaleOptimizer",
    "MixedBFloat16",
    "MixedFloat16",
    "Policy",
    "TrainingDivergedError",
    "callbacks",
    "compare",
    "convert",
    "diagnose",
    "find_float32_layers",
    "global_policy",
    "inspect",
    "keep_float32",
    "policy_scope",
    "recommended_policy",
    "set_global_policy",
]

integration.install()
