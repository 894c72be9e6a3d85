"""The seams: the methods of Keras that the promises need, each with its wrapper.

A wrapper is set on the class that defines the method, keeps its name, its signature and
its docstring, and has no logic of its own. What is wrong or slow in half precision
stands in two more tables, in `repairs/table.py`; `installing` sets all three.
"""

import contextlib
import functools
import inspect
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras

import keras_mp.keras_private as private
from keras_mp import compiling, first_step, fitting, wanted
from keras_mp.backends import engine
from keras_mp.config import note_global_policy, restore_global_policy, show_scope
from keras_mp.loss_scaling import resuming, stage, unwrapped
from keras_mp.loss_scaling.wrapping import losses_in_float32
from keras_mp.messages import warnings_at_the_user
from keras_mp.policies import (
    exporting,
    heads,
    hidden,
    inputs,
    integer_casts,
    mixed_dtypes,
    outputs,
    own_calls,
    returned,
    saving,
)
from keras_mp.policies.choosing import choose_by_class, choose_policy, first_call
from keras_mp.policies.layers import is_graph, note_call, note_result
from keras_mp.policies.policy import chooser_of
from keras_mp.policies.record import record_of, records
from keras_mp.rounding import lost
from keras_mp.sharding import warn_of_torchs_own


class Seam(NamedTuple):
    """A wrapper of methods, or functions, of Keras.

    Attributes:
        methods: "Model.compile", for example: the keys of OWNERS say whose they are.
        does: what the wrapper does.
        wrap: makes it of the method.
    """

    methods: tuple[str, ...]
    does: str
    wrap: Callable[[Callable], Callable]


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


# The models' classes seen so far with a `get_config` of their own -> that `get_config`.
_own_get_configs: dict[Any, Callable] = {}


def wrap_own_get_configs() -> None:
    """Wraps the `get_config` of classes that exist: models may have been created."""
    for model_class in _subclasses(private.Functional):
        _wrap_own_get_config(model_class)


def unwrap_own_get_configs() -> None:
    """Gives each class its own `get_config` back."""
    while _own_get_configs:
        owner, get_config = _own_get_configs.popitem()
        owner.get_config = get_config


def _subclasses(kind: type) -> Iterator[type]:
    each: type
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


# Where the functions that return and set the global policy are looked up.
_POLICY_MODULES = ("dtype_policies", "config", "mixed_precision")


def _dtype_policy(original: Callable) -> Callable:
    def dtype_policy() -> Any:
        restore_global_policy()
        policy = original()
        return chooser_of(policy) or policy

    return dtype_policy


def _set_dtype_policy(original: Callable) -> Callable:
    def set_dtype_policy(policy: Any) -> None:
        show_scope()
        if private.is_default_being_set() and restore_global_policy():
            return
        original(policy)
        note_global_policy()

    return set_dtype_policy


def _layer_init(original: Callable) -> Callable:
    # Without *args, which Keras would look for in the configs of subclasses.
    def __init__(self: Any, **kwargs: Any) -> None:
        # Keras warns of these, and counts frames to the line that it names.
        warns = "input_shape" in kwargs or "input_dim" in kwargs
        with warnings_at_the_user() if warns else contextlib.nullcontext():
            original(self, **kwargs)
        choose_by_class(self)
        _wrap_own_get_config(type(self))

    return __init__


def _wrap_own_get_config(layer_class: type) -> None:
    owner = saving.own_get_config(layer_class)
    if owner is not None and owner not in _own_get_configs:
        _own_get_configs[owner] = vars(owner)["get_config"]
        wrapper = saving.storing_a_map(_own_get_configs[owner])
        setattr(owner, "get_config", wrapper)  # noqa: B010 (for the type check)


def _layer_call(original: Callable) -> Callable:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            # After a layer's first call this costs a few look-ups and no call, until
            # the user sets another policy.
            record: Any = records.get(id(self))
            policy = self.__dict__.get(private.DTYPE_POLICY)
            chosen = record and record.chosen
            if policy is None:  # Its `__init__` did not call Keras': Keras says so.
                return original(self, *args, **kwargs)
            first = chosen is None or chosen is not policy or not self.built
            untried = first or (record and record.untried)
            is_model = isinstance(self, keras.Model)
            within = returned.watched or own_calls.under_way or hidden.within
            if not (untried or is_model or within):
                if not record or not record.decision or not record.decision.head:
                    return original(self, *args, **kwargs)
                call = functools.partial(original, self, *args, **kwargs)
                return heads.call(self, (args, kwargs), call)
            alone = (first or is_model) and _is_outermost()
            outermost = is_model and alone
            if first:
                note_call(self, args, kwargs)
                if alone:
                    outputs.note_first_call(self, args)
                choose_policy(self)
                if is_model:
                    inputs.keep_input_dtypes(self)
                if outermost:
                    hidden.note_makers(self)
                record = record_of(self)
            if record and record.keeps_input_dtypes:
                args, kwargs = inputs.tensors_in_their_dtypes((args, kwargs))
            mixes = record and record.mixes
            makers = record.makers if record and outermost else None
            if untried or within or mixes or makers:
                call = functools.partial(original, self, *args, **kwargs)
                if untried and record.runs_users_code:
                    call = functools.partial(mixed_dtypes.first_result, self, call)
                elif first:
                    call = functools.partial(_within_first_call, self, call)
                waits = mixes or own_calls.under_way
                with (
                    _in_a_call() if first else contextlib.nullcontext(),
                    returned.watching(self)
                    if first and outermost
                    else contextlib.nullcontext(),
                    hidden.passed_on(makers) if makers else contextlib.nullcontext(),
                    own_calls.entered(self)
                    if waits
                    else contextlib.nullcontext() as to_own_call,
                    own_calls.mended(self)
                    if is_model and (untried or mixes)
                    else contextlib.nullcontext(),
                ):
                    decision = record and record.decision
                    if decision and decision.head:
                        result = heads.call(self, (args, kwargs), call)
                    else:
                        result = call()
                    watched = bool(returned.watched)
                    if (watched or hidden.within) and hidden.makes_output(self):
                        result = hidden.through_float32(result)
                    if to_own_call:
                        result = own_calls.handed(result)
                    if watched:
                        returned.note(self, result, first and outermost)
            else:
                result = original(self, *args, **kwargs)
            if untried and note_result(self, result) and not is_model:
                again = functools.partial(original, self, *args, **kwargs)
                integer_casts.look(self, (args, kwargs), again)
            if first:
                if alone:  # Its call may have created layers.
                    outputs.note_first_call(self, args)
                record.chosen = self.dtype_policy
            if not outermost:
                return result
            if first:
                hidden.note_makers(self)
                if engine.shards:
                    warn_of_torchs_own(self)
            if first and self.compiled and not is_graph(self):
                outputs.note_compiled(self)
            return outputs.in_float32(self, result)
        except Exception as error:
            private.drop_internal_frames(error)
            raise

    return __call__


def _within_first_call(layer: Any, call: Callable[[], Any]) -> Any:
    with first_call(layer):
        return call()


def _stateless_call(original: Callable) -> Callable:
    def stateless_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        outermost = isinstance(self, keras.Model) and _is_outermost()
        with _in_a_call(), own_calls.entered(self), own_calls.mended(self):
            result, *state = original(self, *args, **kwargs)
        return (outputs.in_float32(self, result) if outermost else result), *state

    return stateless_call


def _output_spec(original: Callable) -> Callable:
    def compute_output_spec(self: Any, *args: Any, **kwargs: Any) -> Any:
        outermost = isinstance(self, keras.Model) and _is_outermost()
        with _in_a_call():
            specs = original(self, *args, **kwargs)
        return outputs.specs_in_float32(self, specs) if outermost else specs

    return compute_output_spec


# Which calls this thread is in.
_thread = threading.local()


@contextlib.contextmanager
def _in_a_call() -> Iterator[None]:
    """Marks a call that Keras has no context for: while it builds, and stateless."""
    before = getattr(_thread, "in_a_call", False)
    try:
        _thread.in_a_call = True
        yield
    finally:
        _thread.in_a_call = before


def _is_outermost() -> bool:
    in_a_call = getattr(_thread, "in_a_call", False)
    return not in_a_call and private.call_under_way() is None


def _layer_get_config(original: Callable) -> Callable:
    def get_config(self: Any) -> Any:
        config = original(self)
        stock = saving.policy_in_files(self)
        if stock is not None:
            config["dtype"] = keras.dtype_policies.serialize(stock)
        return config

    return get_config


def _reduce(original: Callable) -> Callable:
    # Keras' optimizers and metrics inherit it from the same class.
    def __reduce__(self: Any) -> Any:
        pickled = original(self)
        is_layer = isinstance(self, keras.layers.Layer)
        return saving.with_decisions(self, pickled) if is_layer else pickled

    return __reduce__


def _add_loss(original: Callable) -> Callable:
    def add_loss(self: Any, loss: Any) -> Any:
        return original(self, losses_in_float32(loss))

    return add_loss


def _sequential_build(original: Callable) -> Callable:
    def build(self: Any, input_shape: Any = None) -> Any:
        inputs.put_float32_input(self, input_shape)
        result = original(self, input_shape)
        if self.compiled:  # Only its graph shows which layers have no weights.
            outputs.note_compiled(self)
        return result

    return build


def _compile(original: Callable) -> Callable:
    signature = inspect.signature(original)

    def compile(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            call = signature.bind(self, *args, **kwargs)
        except TypeError:
            return original(self, *args, **kwargs)  # Keras raises its own error.
        call.apply_defaults()
        automatic = call.arguments["auto_scale_loss"]
        # Keras decides by the policy's name whether to wrap; we by the layers.
        call.arguments["auto_scale_loss"] = False
        result = original(*call.args, **call.kwargs)
        compiling.note(self, automatic)
        return result

    return compile


def _get_compile_config(original: Callable) -> Callable:
    def get_compile_config(self: Any) -> Any:
        return heads.with_heads(self, original(self))

    return get_compile_config


def _compile_from_config(original: Callable) -> Callable:
    def compile_from_config(self: Any, config: Any) -> Any:
        optimizer = config.get("optimizer")
        heads.find_heads(self, optimizer if isinstance(optimizer, dict) else {})
        with warnings_at_the_user():  # That a `compile` of the user's is not called.
            return original(self, config)

    return compile_from_config


def _make_train_function(original: Callable) -> Callable:
    def make_train_function(self: Any, force: bool = False) -> Any:
        fitting.make_train_function(self, original, force)

    return make_train_function


def _make_function(original: Callable) -> Callable:
    name = original.__name__.removeprefix("make_")

    def make(self: Any, force: bool = False) -> Any:
        first_step.make_function(self, name, original, force)

    return make


def _get_metrics_result(original: Callable) -> Callable:
    def get_metrics_result(self: Any) -> Any:
        results = original(self)
        in_a_step = engine.is_tracing() or stage.in_train_step()
        return results if in_a_step else fitting.measured(self, results)

    return get_metrics_result


def _export(original: Callable) -> Callable:
    def export(
        self: Any,
        filepath: Any,
        format: str = "tf_saved_model",
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        with exporting.policies_for(self, format):
            return original(self, filepath, format, *args, **kwargs)

    return export


def _save(original: Callable) -> Callable:
    def save(self: Any, *args: Any, **kwargs: Any) -> Any:
        write = functools.partial(original, self, *args, **kwargs)
        return engine.write_file(self, write)

    return save


def _add_slot(original: Callable) -> Callable:
    def add_variable_from_reference(
        self: Any, reference_variable: Any, *args: Any, **kwargs: Any
    ) -> Any:
        slot = original(self, reference_variable, *args, **kwargs)
        engine.shard_like(reference_variable, slot)
        return slot

    return add_variable_from_reference


def _load_optimizer(original: Callable) -> Callable:
    def load_own_variables(self: Any, store: Any) -> None:
        resuming.load(self, store, functools.partial(original, self))

    return load_own_variables


def _apply(original: Callable) -> Callable:
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)  # Read more than once.
        # Within a scaler there is nothing to look for from the second step on.
        is_known = stage.in_scaled_update() and self in lost.seen
        if is_known and not wanted.shards:
            return original(self, grads, trainable_variables)
        unwrapped.look(self, trainable_variables)
        lost.look(self, trainable_variables)
        updated = trainable_variables or private.own_trainable(self)
        with stage.update_by(self), engine.among_shards(updated):
            return original(self, grads, trainable_variables)

    return apply


def _scale_loss(original: Callable) -> Callable:
    def scale_loss(self: Any, loss: Any) -> Any:
        unwrapped.leave_alone(self.inner_optimizer)
        return original(self, loss)

    return scale_loss


def include_frame(original: Callable) -> Callable:
    # No promise needs it.
    def include_frame(fname: str) -> bool:
        return not fname.startswith(_FOLDER) and original(fname)

    return include_frame


_FOLDER = os.path.dirname(__file__) + os.sep


SEAMS = (
    Seam(
        ("Layer.__init__",),
        "rules about classes choose the layer's policy",
        _layer_init,
    ),
    Seam(
        ("Layer.__call__",),
        "the first call chooses it by all other rules; the outermost call of a model "
        "returns float32",
        _layer_call,
    ),
    Seam(("Layer.stateless_call",), "returns float32, too", _stateless_call),
    Seam(
        (
            "Layer.compute_output_spec",
            "Functional.compute_output_spec",
            "Sequential.compute_output_spec",
        ),
        "says so",
        _output_spec,
    ),
    Seam(
        ("Layer.get_config",),
        "files hold stock policies; so does the `get_config` of a model's own class",
        _layer_get_config,
    ),
    Seam(("Layer.__reduce__",), "copies keep what was decided for each layer", _reduce),
    Seam(("Layer.add_loss",), "losses are float32", _add_loss),
    Seam(("Sequential.build",), "the input is float32", _sequential_build),
    Seam(
        (f"Functional.{private.RUN}",),
        "what is handed out is what other outputs are made from",
        hidden.run_through_graph,
    ),
    Seam(
        ("Model.compile",),
        "wraps the optimizer, keeps the outputs in float32",
        _compile,
    ),
    Seam(
        ("Model.get_compile_config",),
        "files say which float32 layers are heads",
        _get_compile_config,
    ),
    Seam(
        ("Model.compile_from_config",),
        "reads that from the file",
        _compile_from_config,
    ),
    Seam(
        ("Model.make_train_function",),
        "watches the train step: a skipped one leaves no trace",
        _make_train_function,
    ),
    Seam(
        ("Model.make_test_function", "Model.make_predict_function"),
        "watch the first step; an interrupt leaves a model its values",
        _make_function,
    ),
    Seam(
        ("Model.get_metrics_result",),
        "nothing, not 0, if every step of an epoch was skipped",
        _get_metrics_result,
    ),
    Seam(("Model.export",), "files for LiteRT compute in float32", _export),
    Seam(
        ("Optimizer.apply",),
        "warns if float16 layers lack loss scaling, or if bfloat16 weights lose the "
        "updates",
        _apply,
    ),
    Seam(
        ("LossScaleOptimizer.scale_loss",),
        "Keras' own: it scales what it holds",
        _scale_loss,
    ),
    Seam(
        ("Optimizer.load_own_variables",),
        "a file that another wrapper wrote resumes",
        _load_optimizer,
    ),
    Seam(
        (
            *(f"{place}.dtype_policy" for place in _POLICY_MODULES),
            "mixed_precision.global_policy",
        ),
        "returns the policy of the process, in every thread",
        _dtype_policy,
    ),
    Seam(
        (
            *(f"{place}.set_dtype_policy" for place in _POLICY_MODULES),
            "mixed_precision.set_global_policy",
        ),
        "changes it",
        _set_dtype_policy,
    ),
)
# For sharded weights alone: `fully_shard` puts them in.
OF_SHARDS = (
    Seam(
        ("Model.save", "Model.save_weights"),
        "one process writes the file of a sharded model",
        _save,
    ),
    Seam(
        ("Optimizer.add_variable_from_reference",),
        "slots are sharded as their weight is",
        _add_slot,
    ),
)
