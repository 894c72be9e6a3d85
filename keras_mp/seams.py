"""The seams: the methods of Keras that the promises need, each with its wrapper.

A wrapper stands with what it is for, is set on the class that defines the method, and
keeps its name, its signature and its docstring. What is wrong or slow in half precision
stands in two more tables, in `repairs/table.py` and `kernels/table.py`; `installing`
sets all three.
"""

import contextlib
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import keras

import keras_mp.keras_private as private
from keras_mp import calling, compiling, first_step, fitting, sharding
from keras_mp.backends import engine
from keras_mp.config import wrap_dtype_policy, wrap_set_dtype_policy
from keras_mp.loss_scaling import resuming, unwrapped
from keras_mp.messages import warnings_at_the_user
from keras_mp.policies import heads, hidden, inputs, outputs, saving
from keras_mp.policies.choosing import choose_by_class


class Seam(NamedTuple):
    """A wrapper of methods, or functions, of Keras.

    Attributes:
        methods: "Model.compile", for example: the keys of OWNERS say whose they are.
        does: what the wrapper does.
        wrap: makes it of the method; None where the backend needs none.
    """

    methods: tuple[str, ...]
    does: str
    wrap: Callable[[Callable], Callable] | None


OWNERS = {
    "Layer": keras.layers.Layer,
    "Functional": private.Functional,
    "Sequential": keras.Sequential,
    "Model": keras.Model,
    "Optimizer": keras.optimizers.Optimizer,
    "LossScaleOptimizer": keras.optimizers.LossScaleOptimizer,
    "dtype_policies": private.policy_module,
    "config": keras.config,
    "mixed_precision": keras.mixed_precision,
}


def home_of(method: str) -> Any:
    """The class or module that has a method of `SEAMS`.

    Not keras.Model: Keras compares its methods with those of the class that defines
    them, when it loads a model.

    Raises:
        ImportError: if this Keras has it nowhere.
    """
    name, _, attribute = method.rpartition(".")
    owner = OWNERS[name]
    places = owner.__mro__ if isinstance(owner, type) else (owner,)
    found = next((place for place in places if attribute in vars(place)), None)
    if found is None:
        raise private.moved(method)
    return found


# Where the functions that return and set the global policy are looked up.
_POLICY_MODULES = ("dtype_policies", "config", "mixed_precision")


def _wrap_init(original: Callable) -> Callable:
    # Without *args, which Keras would look for in the configs of subclasses.
    def __init__(self: Any, **kwargs: Any) -> None:
        # Keras warns of these, and counts frames to the line that it names.
        warns = "input_shape" in kwargs or "input_dim" in kwargs
        with warnings_at_the_user() if warns else contextlib.nullcontext():
            original(self, **kwargs)
        choose_by_class(self)
        saving.wrap_own_get_config(type(self))

    return __init__


def _wrap_sequential_build(original: Callable) -> Callable:
    def build(self: Any, input_shape: Any = None) -> Any:
        inputs.put_float32_input(self, input_shape)
        result = original(self, input_shape)
        if self.compiled:  # Only its graph shows which layers have no weights.
            outputs.note_compiled(self)
        return result

    return build


def wrap_include_frame(original: Callable) -> Callable:
    # No promise needs it.
    def include_frame(fname: str) -> bool:
        return not fname.startswith(_FOLDER) and original(fname)

    return include_frame


_FOLDER = os.path.dirname(__file__) + os.sep


SEAMS = (
    Seam(
        ("Layer.__init__",),
        "rules about classes choose the layer's policy",
        _wrap_init,
    ),
    Seam(
        ("Layer.__call__",),
        "the first call chooses it by all other rules; the outermost call of a model "
        "returns float32",
        calling.wrap_call,
    ),
    Seam(
        ("Layer.stateless_call",), "returns float32, too", calling.wrap_stateless_call
    ),
    Seam(
        (
            "Layer.compute_output_spec",
            "Functional.compute_output_spec",
            "Sequential.compute_output_spec",
        ),
        "says so",
        calling.wrap_output_spec,
    ),
    Seam(
        ("Layer.get_config",),
        "files hold stock policies; so does the `get_config` of a model's own class",
        saving.wrap_get_config,
    ),
    Seam(
        ("Layer.__reduce__",),
        "copies keep what was decided for each layer",
        saving.wrap_reduce,
    ),
    Seam(("Sequential.build",), "the input is float32", _wrap_sequential_build),
    Seam(
        (f"Functional.{private.RUN}",),
        "what is handed out is what other outputs are made from",
        hidden.wrap_run,
    ),
    Seam(
        ("Model.compile",),
        "wraps the optimizer, keeps the outputs in float32",
        compiling.wrap_compile,
    ),
    Seam(
        ("Model.get_compile_config",),
        "files say which float32 layers are heads",
        heads.wrap_get_compile_config,
    ),
    Seam(
        ("Model.compile_from_config",),
        "reads that from the file",
        heads.wrap_compile_from_config,
    ),
    Seam(
        ("Model.make_train_function",),
        "watches the train step: a skipped one leaves no trace",
        fitting.wrap_make_train_function,
    ),
    Seam(
        ("Model.make_test_function", "Model.make_predict_function"),
        "watch the first step; an interrupt leaves a model its values",
        first_step.wrap_make_function,
    ),
    Seam(
        ("Model.fit", "Model.evaluate", "Model.predict"),
        "an exception leaves a model its values on JAX, and torch its gradient mode",
        engine.ends_whole,
    ),
    Seam(
        ("Model.get_metrics_result",),
        "nothing, not 0, if every step of an epoch was skipped",
        fitting.wrap_get_metrics_result,
    ),
    Seam(
        ("Optimizer.apply",),
        "warns if float16 layers lack loss scaling, or if bfloat16 weights lose the "
        "updates",
        unwrapped.wrap_apply,
    ),
    Seam(
        ("LossScaleOptimizer.scale_loss",),
        "Keras' own: it scales what it holds",
        unwrapped.wrap_scale_loss,
    ),
    Seam(
        ("Optimizer.load_own_variables",),
        "a file that another wrapper wrote resumes",
        resuming.wrap_load,
    ),
    Seam(
        (
            *(f"{place}.dtype_policy" for place in _POLICY_MODULES),
            "mixed_precision.global_policy",
        ),
        "returns the policy of the process, in every thread",
        wrap_dtype_policy,
    ),
    Seam(
        (
            *(f"{place}.set_dtype_policy" for place in _POLICY_MODULES),
            "mixed_precision.set_global_policy",
        ),
        "changes it",
        wrap_set_dtype_policy,
    ),
)
# For sharded weights alone: `fully_shard` puts them in.
OF_SHARDS = (
    Seam(
        ("Model.save", "Model.save_weights"),
        "one process writes the file of a sharded model",
        sharding.wrap_save,
    ),
    Seam(
        ("Optimizer.add_variable_from_reference",),
        "slots are sharded as their weight is",
        sharding.wrap_add_slot,
    ),
)
