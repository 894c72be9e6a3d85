"""Mixed precision for Keras 3: switched on in one line, right on every backend."""

from typing import TYPE_CHECKING, Any

from keras_mp.errors import BACKENDS, TrainingDivergedError, needed

# Before anything else, so that one sentence says what to install. Keras imports its
# backend, and rich, which draws the tables here too.
with needed("keras_mp", "rich", *BACKENDS):
    import keras  # noqa: F401
    import rich  # noqa: F401

from keras_mp import callbacks
from keras_mp.config import global_policy, policy_scope, set_global_policy
from keras_mp.conversion import convert
from keras_mp.installing import install, uninstall
from keras_mp.loss_scaling.optimizer import LossScaleOptimizer
from keras_mp.policies.hardware import recommended_policy
from keras_mp.policies.policy import BFloat16, MixedBFloat16, MixedFloat16, Policy
from keras_mp.policies.stock_rules import keep_float32
from keras_mp.rounding.optimizer import StochasticRoundingOptimizer
from keras_mp.sharding import fully_shard

if TYPE_CHECKING:
    from keras_mp.tools.comparison.comparison import compare
    from keras_mp.tools.diagnosis.diagnosis import diagnose
    from keras_mp.tools.float32_search.search import find_float32_layers
    from keras_mp.tools.inspection.inspection import inspect

__version__ = "0.2.0"

__all__ = [
    "BFloat16",
    "LossScaleOptimizer",
    "MixedBFloat16",
    "MixedFloat16",
    "Policy",
    "StochasticRoundingOptimizer",
    "TrainingDivergedError",
    "callbacks",
    "compare",
    "convert",
    "diagnose",
    "find_float32_layers",
    "fully_shard",
    "global_policy",
    "inspect",
    "install",
    "keep_float32",
    "policy_scope",
    "recommended_policy",
    "set_global_policy",
    "uninstall",
]

# Half of all modules: imported when they are asked for, a training rarely does.
_DIAGNOSTICS = {
    "compare": "comparison.comparison",
    "diagnose": "diagnosis.diagnosis",
    "find_float32_layers": "float32_search.search",
    "inspect": "inspection.inspection",
}


def __getattr__(name: str) -> Any:
    if name not in _DIAGNOSTICS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    module = importlib.import_module(f"keras_mp.tools.{_DIAGNOSTICS[name]}")
    globals()[name] = getattr(module, name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
