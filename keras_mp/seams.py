"""The seams: the methods of Keras that keras_mp wraps.

Each wrapper is set on the class that defines the method, and has no logic of its own:

    Layer.__init__               rules about classes choose the layer's policy
    Layer.__call__               the first call chooses it by all other rules; the
                                 outermost call of a model returns float32
    Layer.stateless_call         returns float32, too
    Layer.compute_output_spec    says so; so do Functional's and Sequential's
    Layer.get_config             files hold stock policies; so does the `get_config` of
                                 a model's own class
    Layer.__reduce__             copies keep what was decided for each layer
    Layer.add_loss               losses are float32
    Sequential.build             the input is float32
    Function._run_through_graph  what is handed out is what other outputs are made from
    Trainer.compile              wraps the optimizer, keeps the outputs in float32
    Trainer.get_compile_config   files say which float32 layers are heads
    Trainer.compile_from_config  reads that from the file
    Trainer.make_train_function  watches the train step
    Trainer.get_metrics_result   nothing, not 0, if every step of an epoch was skipped
    Trainer.fit, evaluate, predict  if interrupted, leave a model its values on JAX, and
                                 torch's grad mode as it was
    Trainer.make_test_function, make_predict_function  the same; they watch first steps
    Model.export                 files for LiteRT compute in float32
    Model.save, save_weights     one process writes the file of a sharded model
    Optimizer.apply              warns if float16 layers lack loss scaling, or if
                                 bfloat16 weights lose the updates
    Optimizer.add_variable_from_reference  slots are sharded as their weight is
    Optimizer.load_own_variables  a file that another wrapper wrote resumes
    traceback_utils.include_frame  a user's traceback leaves our frames out, too
    Orthogonal.__call__, ops.normalize  compute in float32 what half precision cannot
    LossScaleOptimizer.scale_loss  Keras' own: it scales what it holds
    keras.config.dtype_policy    the policy of the process, in every thread
    keras.config.set_dtype_policy  changes it
    keras.mixed_precision.global_policy, set_global_policy  the same two

and what the backend's `repairs` name:

    dot_product_attention        is safe in half precision, and fused on JAX
    add, subtract, multiply      sum their gradients in float32
    matmul, einsum, conv         have half-precision operands in a model's heads
    softmax, sparse_categorical_crossentropy  read a head's logits once, or in chunks
    categorical_crossentropy     reads them in chunks
    argmax                       takes what the loss has found
    divide, tanh, where          let the loss know what was done to them
    gelu, selu                   keep their slopes alone for the gradient
    relu                         keeps its result alone after a conv, conv_transpose or
                                 depthwise_conv
    moments                      has a gradient of one pass
    lstm, bidirectional_lstm     are cast to float32 around cuDNN
    arange                       runs in float16 graphs
    remat                        computes again in the precision of the first run
    BatchNormalization.call      is one kernel on torch
    Variable's write             reaches the variable within a call in half precision,
                                 and the shards of a sharded one
    convert_to_numpy, Variable's __array__  gather the shards of a sharded variable
"""

import contextlib
import functools
import inspect
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras import ops

import keras_mp.keras_private as private
from keras_mp import compiling, first_step, fitting, wanted
from keras_mp.backends import engine
from keras_mp.backends.interface import HALF
from keras_mp.config import (
    give_back_global_policy,
    note_global_policy,
    restore_global_policy,
    show_scope,
)
from keras_mp.display.messages import warnings_at_the_user
from keras_mp.loss_scaling import resuming, stage, unscaled
from keras_mp.loss_scaling.models import losses_in_float32
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
from keras_mp.policies.choosing import choose_by_class, choose_policy
from keras_mp.policies.layers import is_graph, note_call, note_result
from keras_mp.policies.policy import chooser_of
from keras_mp.policies.record import record_of, records
from keras_mp.rounding import lost
from keras_mp.sharding import warn_of_torchs_own


def install() -> None:
    """Wraps methods of Keras, as asking for half precision does.

    It does nothing if they are wrapped already.

    Raises:
        ImportError: if this Keras lacks one of them. None is wrapped then.
    """
    with wanted.lock:
        for name, owner, seam in _seams():
            original = vars(owner)[name]
            if not hasattr(original, "_keras_mp_original"):
                wrapper: Any = functools.wraps(original)(seam(original))
                wrapper._keras_mp_original, wrapper._keras_mp_self = original, wrapper
                setattr(owner, name, wrapper)
        for model_class in _subclasses(private.Functional):
            _wrap_own_get_config(model_class)
        wanted.done = True


def uninstall() -> None:
    """Gives Keras back as it is without keras_mp; does nothing if it is.

    The wrappers go, and the global policy becomes Keras' own of the same name. Asking
    for half precision again, or `install`, puts the wrappers back.

    What was made before stays: a layer keeps the dtype policy that was chosen for it,
    and a `LossScaleOptimizer` scales, but in `fit` a skipped step changes statistics,
    metrics and logs. Layers that are created afterwards are Keras' own.

    Example:

    ```python
    keras_mp.uninstall()
    keras.layers.Dense(8)  # as if keras_mp had not been imported
    keras_mp.install()
    ```
    """
    with wanted.lock:
        give_back_global_policy()
        inputs.give_back()
        for name, owner, _ in _seams():
            marks = vars(vars(owner)[name])
            # Another library's wrapper round ours has our marks, copied by functools.
            if marks.get("_keras_mp_self") is vars(owner)[name]:
                setattr(owner, name, marks["_keras_mp_original"])
        while _own_get_configs:
            owner, get_config = _own_get_configs.popitem()
            owner.get_config = get_config
        wanted.done = False


def _subclasses(kind: type) -> Iterator[type]:
    each: type
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


# The models' classes seen so far with a `get_config` of their own -> that `get_config`.
_own_get_configs: dict[Any, Callable] = {}


def _seams() -> list[tuple[str, Any, Callable[[Callable], Callable]]]:
    methods = [
        ("__init__", keras.layers.Layer, _layer_init),
        ("__call__", keras.layers.Layer, _layer_call),
        ("stateless_call", keras.layers.Layer, _stateless_call),
        *(("compute_output_spec", owner, _output_spec) for owner in _with_specs),
        ("get_config", keras.layers.Layer, _layer_get_config),
        ("__reduce__", keras.layers.Layer, _reduce),
        ("add_loss", keras.layers.Layer, _add_loss),
        ("build", keras.Sequential, _sequential_build),
        (private.RUN, private.Functional, hidden.run_through_graph),
        ("compile", keras.Model, _compile),
        ("get_compile_config", keras.Model, _get_compile_config),
        ("compile_from_config", keras.Model, _compile_from_config),
        ("make_train_function", keras.Model, _make_train_function),
        ("make_test_function", keras.Model, _make("test_function")),
        ("make_predict_function", keras.Model, _make("predict_function")),
        ("get_metrics_result", keras.Model, _get_metrics_result),
        ("export", keras.Model, _export),
        ("save", keras.Model, _save),
        ("save_weights", keras.Model, _save),
        ("apply", keras.optimizers.Optimizer, _apply),
        ("add_variable_from_reference", keras.optimizers.Optimizer, _add_slot),
        ("load_own_variables", keras.optimizers.Optimizer, _load_optimizer),
        ("scale_loss", keras.optimizers.LossScaleOptimizer, _scale_loss),
        ("__call__", keras.initializers.Orthogonal, _orthogonal),
    ]
    # `keras.ops` looks an operation up in one of the modules; for `tanh`, which is in
    # two, that is the module of NumPy's names.
    modules = private.backend_core, private.backend_numpy, private.backend_nn
    others = private.backend_rnn, private.backend_remat
    backend = *modules, *others, *keras.Variable.__mro__
    repairs = engine.repairs().items()
    return [
        *((name, _definer(name, owner), seam) for name, owner, seam in methods),
        *((name, _home(name, place), seam) for name, place, seam in _of_policies()),
        (private.NORMALIZE, _home(private.NORMALIZE, private.ops_nn), _normalize),
        (private.INCLUDE_FRAME, private.tracebacks, _include_frame),
        *((name, _home(name, *backend), repair) for name, repair in repairs),
        *(("call", kind, repair) for kind, repair in engine.repaired_layers().items()),
        *(
            (name, _definer(name), seam)
            for name, seam in engine.interruptible().items()
        ),
    ]


_with_specs = (keras.layers.Layer, private.Functional, keras.Sequential)


def _of_policies() -> list[tuple[str, Any, Callable[[Callable], Callable]]]:
    """Where the functions that return and set the global policy are looked up."""
    return [
        *(("dtype_policy", place, _dtype_policy) for place in _policy_modules),
        *(("set_dtype_policy", place, _set_dtype_policy) for place in _policy_modules),
        ("global_policy", keras.mixed_precision, _dtype_policy),
        ("set_global_policy", keras.mixed_precision, _set_dtype_policy),
    ]


_policy_modules = (private.policy_module, keras.config, keras.mixed_precision)


def _home(name: str, *places: Any) -> Any:
    """The first of these modules or classes that defines the name."""
    for place in places:
        if name in vars(place):
            return place
    raise private.moved(f"{places[0].__name__}.{name}")


def _definer(name: str, owner: type = keras.Model) -> Any:
    # Not keras.Model: Keras compares its methods with those of the class that defines
    # them, when it loads a model.
    return _home(name, *owner.__mro__)


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
            record = records.get(id(self))
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
            outermost = is_model and _is_outermost()
            if first:
                note_call(self, args, kwargs)
                outputs.note_first_call(self, args)
                choose_policy(self)
                inputs.keep_input_dtypes(self)
            if inputs.keeps_input_dtypes(self):
                args, kwargs = inputs.tensors_in_their_dtypes((args, kwargs))
            mixes = record and record.mixes
            makers = hidden.makers_within(self) if outermost else None
            if untried or within or mixes or makers:
                call = functools.partial(original, self, *args, **kwargs)
                if untried:
                    call = functools.partial(mixed_dtypes.first_result, self, call)
                with (
                    _in_a_call() if first else contextlib.nullcontext(),
                    returned.noted(self, first and outermost) as note,
                    hidden.passed_on(makers),
                    own_calls.entered(self) as to_own_call,
                    own_calls.mended(self)
                    if untried or mixes
                    else contextlib.nullcontext(),
                ):
                    result = heads.call(self, (args, kwargs), call)
                    if hidden.makes_output(self):
                        result = hidden.through_float32(result)
                    if to_own_call:
                        result = own_calls.handed(result)
                    note(result)
            else:
                result = original(self, *args, **kwargs)
            if untried and note_result(self, result):
                again = functools.partial(original, self, *args, **kwargs)
                integer_casts.look(self, (args, kwargs), again)
            if first:
                outputs.note_first_call(self, args)  # Its call may have created layers.
                record_of(self).chosen = self.dtype_policy
                unscaled.note_layer(self)
            if not outermost:
                return result
            if first:
                warn_of_torchs_own(self)
            if first and self.compiled and not is_graph(self):
                outputs.note_compiled(self)
            return outputs.in_float32(self, result)
        except Exception as error:
            private.drop_internal_frames(error)
            raise

    return __call__


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
    return not (private.is_in_a_call() or getattr(_thread, "in_a_call", False))


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


def _make(name: str) -> Callable[[Callable], Callable]:
    def seam(original: Callable) -> Callable:
        def make(self: Any, force: bool = False) -> Any:
            first_step.make_function(self, name, original, force)

        return make

    return seam


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
        unscaled.look(self, trainable_variables)
        lost.look(self, trainable_variables)
        updated = trainable_variables or private.own_trainable(self)
        with stage.update_by(self), engine.among_shards(updated):
            return original(self, grads, trainable_variables)

    return apply


def _scale_loss(original: Callable) -> Callable:
    def scale_loss(self: Any, loss: Any) -> Any:
        unscaled.leave_alone(self.inner_optimizer)
        return original(self, loss)

    return scale_loss


def _include_frame(original: Callable) -> Callable:
    def include_frame(fname: str) -> bool:
        return not fname.startswith(_FOLDER) and original(fname)

    return include_frame


_FOLDER = os.path.dirname(__file__) + os.sep


def _orthogonal(original: Callable) -> Callable:
    def __call__(self: Any, shape: Any, dtype: Any = None) -> Any:
        if dtype is None or keras.backend.standardize_dtype(dtype) not in HALF:
            return original(self, shape, dtype)
        # Recurrent layers start like this, and no backend decomposes matrices in half.
        return ops.cast(original(self, shape, "float32"), dtype)

    return __call__


def _normalize(original: Callable) -> Callable:
    # Its epsilon of 1e-7 is no float16 number, and the inverse of it is infinite.
    def normalize(x: Any, *args: Any, **kwargs: Any) -> Any:
        x = ops.convert_to_tensor(x)
        dtype = keras.backend.standardize_dtype(x.dtype)
        if dtype not in HALF:
            return original(x, *args, **kwargs)
        return ops.cast(original(ops.cast(x, "float32"), *args, **kwargs), dtype)

    return normalize


wanted.put_in = install
