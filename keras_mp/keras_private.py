"""Every private name of Keras that keras_mp uses, each with the reason.

No other file of the package touches one. If there is a public way, we take it: these
names have none. `tests/test_keras_private.py` checks each of them against Keras.
"""

import contextlib
import functools
import inspect
import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

import keras
from keras import layers, ops

from keras_mp.types import Layer, Model, Optimizer, Tensor, Variable, Variables

# The newest that `make test-versions` has tested. A newer Keras is welcome as long as
# it has the names below.
NEWEST_KERAS = "3.15"


def moved(name: str) -> ImportError:
    """The error for a name that this Keras has no longer, or not yet."""
    return ImportError(
        f"keras_mp needs {name}, which Keras {keras.__version__} does not have: run "
        f"`pip install --upgrade keras_mp`, or install Keras 3.10 to {NEWEST_KERAS}."
    )


class Missing:
    """Stands for a name that this Keras has not got; to use it is an error."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        raise moved(self._name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise moved(self._name)

    def __instancecheck__(self, instance: object) -> bool:
        raise moved(self._name)

    def error(self) -> ImportError:
        """The error that it is if nothing works without it."""
        return moved(self._name)


def _find(*paths: str) -> Any:
    """The first of these names, "module:name", that Keras has: versions move some."""
    for path in paths:
        with contextlib.suppress(ImportError, AttributeError):
            return resolve_name(path)
    return Missing(" or ".join(path.replace(":", ".") for path in paths))


# Modules and functions -------------------------------------------------------------

# `keras.ops` looks its operations up in these modules: a repair goes there. Keras 3.16
# moved them into `ops`; there `backend.numpy` is something else, so it comes last.
backend_nn = _find("keras.src.backend:ops.nn", "keras.src.backend:nn")
backend_numpy = _find("keras.src.backend:ops.numpy", "keras.src.backend:numpy")
backend_core = _find("keras.src.backend:ops.core", "keras.src:backend")
# `keras.ops` looks `convert_to_tensor` up here, and on torch so does `cast`. Other
# modules of the backend have imported the function.
backend_conversions = _find("keras.src.backend:ops.core", "keras.src.backend:core")
# `keras.remat` looks the function of the backend up here.
backend_remat = _find("keras.src.backend:core", "keras.src.backend:ops")
# Recurrent layers look up their kernels here. Before Keras 3.16 `rnn` is a function.
_backend = _find("keras.src:backend")
backend_rnn = _backend.rnn if isinstance(_backend.rnn, ModuleType) else _backend
# From Keras 3.16 on `fit` on JAX gets the batches of one call of the train function at
# once: stacked, or, if they are fewer or differ in shape, in a list of this class.
_adapters = _find("keras.src.trainers.data_adapters:data_adapter_utils")
PartialBatches = vars(_adapters).get("PartialBatchList")
# Every random draw of a layer passes here.
backend_random = _find("keras.src.backend:random")
# A cast must keep the mask that Keras attaches to a tensor.
get_keras_mask = _find("keras.src.backend.common.masking:get_keras_mask")
set_keras_mask = _find("keras.src.backend.common.masking:set_keras_mask")
# On torch a seeded draw gets its generator here.
SEEDED = "torch_seed_generator"
# The values that stand for variables in a stateless call, which an update rewrites.
get_stateless_scope = _find(
    "keras.src.backend.common.stateless_scope:get_stateless_scope"
)
# The dtype in which variables are read; None for their own, which no policy asks for.
AutocastScope = _find("keras.src.backend.common.variables:AutocastScope")
# The path that a layer is about to get, asked for during its first call.
current_path = _find("keras.src.backend.common.name_scope:current_path")
# The class of models with a graph, also of those that subclass it.
Functional = _find("keras.src.models.functional:Functional")
# An optimizer that is set as an attribute must not be tracked, as in Keras' `compile`.
untracked = _find("keras.src.utils.tracking:no_automatic_dependency_tracking")
# All of Keras looks `dtype_policy` up here.
policy_module = _find("keras.src.dtype_policies:dtype_policy")
# `keras.ops.normalize`, from whichever module somebody imported it, ends here.
ops_nn = _find("keras.src.ops.nn")
NORMALIZE = "_normalize"
# What Keras' filter of tracebacks asks of each file.
tracebacks = _find("keras.src.utils:traceback_utils")
INCLUDE_FRAME = "include_frame"
_global_state = _find("keras.src.backend.common:global_state")
_of_thread = _find("keras.src.backend.common.global_state:get_global_attribute")
_NAMES = "object_name_uids"

# Without these an operation is not found, or an error shows more frames.
_OPTIONAL = (
    "backend_conversions",
    "backend_core",
    "backend_nn",
    "backend_numpy",
    "backend_random",
    "backend_remat",
    "backend_rnn",
    "ops_nn",
    "tracebacks",
    "_adapters",
)


def check() -> None:
    """Raises an ImportError if this Keras lacks a name that all else stands on.

    What is only read, as an attribute that may be missing, or set, would be wrong in
    silence if it had another name: Keras' own code must have these.
    """
    for name, value in globals().items():
        if isinstance(value, Missing) and name not in _OPTIONAL:
            raise value.error()
    for owner, *names in (
        (layers.Layer, "current_call_ctx", CONVERT_INPUTS, DTYPE_POLICY),
        (policy_module, "dtype_policy"),
        (AutocastScope, "autocast_scope"),
    ):
        used = _names_used_by(owner)
        for name in names:
            if name not in used:
                raise moved(f"{owner.__name__}: {name}")


def _names_used_by(owner: Any) -> set[Any]:
    members = [
        (x.fget, x.fset) if isinstance(x, property) else (x,)
        for x in vars(owner).values()
    ]
    functions = (inspect.unwrap(x) for x in itertools.chain(*members) if callable(x))
    codes = [x.__code__ for x in functions if inspect.isfunction(x)]
    return {name for code in codes for name in (*code.co_names, *code.co_consts)}


def place_of(operation: str) -> tuple[Any, str] | None:
    """The module or class where Keras looks an operation up, and its name there.

    `keras.ops` looks in one of the modules of the backend; for `tanh`, which is in two,
    that is the module of NumPy's names. None if this Keras has it nowhere.
    """
    owner, _, name = operation.rpartition(".")
    places: Iterable[Any] = (
        backend_core,
        backend_numpy,
        backend_nn,
        backend_rnn,
    )
    if owner and owner != "Adam":
        kinds = (
            keras.Variable,
            keras.initializers.Orthogonal,
            layers.BatchNormalization,
            layers.Layer,
            keras.Model,
        )
        places = next(kind.__mro__ for kind in kinds if kind.__name__ == owner)
    if operation == "normalize":
        places, name = (ops_nn,), NORMALIZE
    elif operation == "Variable.assign":
        name = WRITE
    elif operation == "convert_to_tensor":
        places = (backend_conversions,)
    elif operation == "remat":
        places = (backend_remat,)
    elif operation == SEEDED:
        places = (backend_random,)
    elif operation == "Adam.update_step":  # On torch.
        places = (_find("keras.src.backend.torch.optimizers.torch_adam:Adam"),)
        name = UPDATE_STEP
    return next(((place, name) for place in places if name in vars(place)), None)


def names_given() -> dict[str, int]:
    """How often Keras has given each automatic name so far.

    The public `get_uid` only counts on, and `reset_uids` forgets what came before.
    """
    names: dict[str, int] = defaultdict(int)
    names.update(_of_thread(_NAMES, {}))
    return names


def set_names_given(names: dict[str, int]) -> None:
    """Makes Keras count on from there: two builds of a model then have equal names."""
    _global_state.set_global_attribute(_NAMES, defaultdict(int, names))


# The global policy of this thread; None if nobody has set or asked for one.
policy_of_thread = functools.partial(_of_thread, "dtype_policy")


def is_default_being_set() -> bool:
    """Is the function that asks called by Keras' `dtype_policy`, which has found none?

    Programs that have imported that function before the seams went in go on with it.
    """
    asking = inspect.unwrap(policy_module.dtype_policy).__code__
    return sys._getframe(2).f_code is asking


def set_policy_of_thread(policy: Any) -> None:
    """Sets the global policy of this thread, which Keras' setter does for the user."""
    _global_state.set_global_attribute("dtype_policy", policy)


# Where classes come from -----------------------------------------------------------


def is_keras_own(kind: Any) -> bool:
    """Does Keras itself define a class or function, not the user or another package?"""
    return kind.__module__.startswith("keras.src.")


def backend_of(kind: type) -> str | None:
    """The backend that a class of Keras is made for; None if it is made for all."""
    package, _, rest = kind.__module__.partition("keras.src.backend.")
    return rest.split(".")[0] if rest and not package else None


def preprocessing_classes() -> tuple[type, ...]:
    """The layers of Keras that take raw data, and their bases, which have no export."""
    exported = [c for c in vars(layers).values() if isinstance(c, type)]
    bases = {base for c in exported for base in c.__mro__}
    return tuple(
        base
        for base in bases
        if base.__module__.startswith("keras.src.layers.preprocessing")
    )


# Layers ----------------------------------------------------------------------------


def autocast_dtype() -> str | None:
    """The dtype to which variables are cast where they are read, in a layer's call."""
    scope = _of_thread("autocast_scope")
    return scope and scope.dtype


def is_autocast_to_half() -> bool:
    """Is a layer in half precision being called, whose variables are cast to it?"""
    return autocast_dtype() in ("float16", "bfloat16")


# The context of the call that is under way in this thread, or None. Not a function of
# ours: every call of a model asks.
call_under_way = functools.partial(_of_thread, "current_call_ctx")


def layer_in_call() -> Any:
    """The innermost layer that this thread is calling or building; None if none is.

    Keras keeps it with the name that it gives to what the layer creates.
    """
    scopes = _of_thread("name_scope_stack") or [None]
    caller = getattr(scopes[-1], "caller", None)
    return caller if isinstance(caller, layers.Layer) else None


def cast_output(x: Any, dtype: Any = "float32") -> Any:
    """A tensor in another dtype, with what Keras attaches: its mask, and its logits.

    Logits, of a sigmoid or a softmax, are cast too: on TensorFlow Keras' losses read
    them in place of the tensor, beside float32 targets.
    """
    cast = ops.cast(x, dtype)
    mask = get_keras_mask(x)
    if mask is not None:
        set_keras_mask(cast, mask)
    if hasattr(x, "_keras_logits"):
        cast._keras_logits = ops.cast(x._keras_logits, dtype)
    return cast


# The attribute behind `Layer.dtype_policy`, to read it without a call.
DTYPE_POLICY = "_dtype_policy"
# Does Keras cast the inputs of a call? It is an attribute without a setter.
CONVERT_INPUTS = "_convert_input_args"


def layers_in(layer: Layer, itself: bool = True, nested: bool = True) -> list[Any]:
    """The layers that a layer is made of, parents before their children.

    `Model.layers` is public; a layer that is no model has nothing like it.
    """
    return list(layer._flatten_layers(include_self=itself, recursive=nested))


def own_trainable(layer: Layer) -> list[Any]:
    """The weights of a layer, or of an optimizer, without those of its children.

    Frozen ones are among them, which the public properties leave out.
    """
    return layer._trainable_variables


def own_state(layer: Layer) -> list[Any]:
    """The variables of a layer that were not made to be trained: counters, averages.

    Those of its children are left out, and so are its frozen weights.
    """
    return layer._non_trainable_variables


def own_variables(layer: Layer) -> list[Any]:
    """All variables of a layer, without those of its children."""
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def build_again(layer: Layer) -> None:
    """Builds a layer once more; the shape that it was built with has no public name."""
    type(layer).build(layer, layer._build_input_shape)


def set_policy(layer: Layer, policy: Any) -> None:
    """Sets a layer's policy; the public setter keeps a map if the layer has one."""
    vars(layer)[DTYPE_POLICY] = policy


def set_path(layer: Layer, path: str) -> None:
    """Sets a layer's path, by which Keras looks it up in a map of policies."""
    vars(layer)["_path"] = path


def default_in_map(policies: Any) -> Any:
    """The default that a `DTypePolicyMap` was given; None for the global policy.

    The public `default_policy` returns the current global policy instead of None.
    """
    return policies._default_policy_arg


def drop_internal_frames(error: BaseException) -> None:
    """Removes what Keras removes from a traceback, unless the user wants to see it.

    An interrupt keeps all, as in Keras: it may come at an instruction that has no line,
    and Keras' filter fails at those.
    """
    if (
        isinstance(error, Exception)
        and not isinstance(tracebacks, Missing)
        and keras.config.is_traceback_filtering_enabled()
    ):
        error.__traceback__ = tracebacks._process_traceback_frames(error.__traceback__)


def clear_losses(layer: Layer) -> None:
    """Forgets the losses that a layer, and those inside, have added."""
    layer._clear_losses()


def own_losses(layer: Layer) -> list[Any]:
    """What a layer, without those inside, has added in its calls in this step.

    Its public `losses` are those of all layers inside as well.
    """
    found: list[Any] = layer._get_own_losses()
    return found


# Variables and tensors -------------------------------------------------------------


def is_autocast(variable: Variable) -> bool:
    """Does a layer's call read the variable in the layer's compute dtype?"""
    return variable._autocast


def raw_value(variable: Variable) -> Any:
    """The tensor of a variable; `value` is half precision within a layer's call."""
    return variable._value


def set_raw_value(variable: Variable, value: Any) -> None:
    """Gives a variable another tensor; `assign` copies into the one that it has."""
    variable._value = value


@contextlib.contextmanager
def holding(variables: Sequence[Variable], values: Sequence[Tensor]) -> Iterator[None]:
    """Lets variables hold other tensors for a while: as many as there are variables."""
    before = [variable._value for variable in variables]
    try:
        for variable, value in zip(variables, values, strict=False):
            variable._value = value
        yield
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable._value = value


def stored_dtype(variable: Variable) -> str:
    """The dtype of a variable; `dtype` is half precision within a layer's call."""
    return variable._dtype


def dtype_when_read(variable: Variable) -> str:
    """The dtype of `value`; in a scope of None `dtype` is Keras' `floatx()` instead."""
    scope = _of_thread("autocast_scope")
    if scope is not None and scope.dtype is None:
        return stored_dtype(variable)
    return variable.dtype


def set_dtype(variable: Variable, dtype: str, value: Any = None) -> None:
    """Casts a variable, with its value unless it has none yet; or gives it this one."""
    if value is None and variable._value is not None:
        value = ops.cast(variable._value, dtype)
    variable._dtype = dtype
    if value is not None:
        variable._initialize(value)


@contextlib.contextmanager
def as_dtype(variables: Iterable[Variable], dtype: str) -> Iterator[None]:
    """Makes variables report another dtype for a while.

    An optimizer computes, and creates slots, in the dtype that a variable names.
    """
    named = [(v, v._dtype) for v in variables]
    try:
        for variable, _ in named:
            variable._dtype = dtype
        yield
    finally:
        for variable, before in named:
            variable._dtype = before


# All writes to a variable go through this method.
WRITE = "_direct_assign"


def set_symbolic_dtype(tensor: Tensor, dtype: str) -> None:
    """Sets the dtype of a KerasTensor, which a conversion has made out of date."""
    tensor._dtype = dtype


# Graphs ----------------------------------------------------------------------------


def graph_of(model: Model) -> Any:
    """The Functional model behind a Sequential one; None before it is built."""
    return model._functional


def nodes_by_depth(graph: Any) -> dict[int, list[Any]]:
    """The calls that a Functional model consists of; the largest depth comes first."""
    return graph._nodes_by_depth


# The method that runs a graph; what it is given wraps each operation.
RUN = "_run_through_graph"


def calls_of(operation: Any) -> list[Any]:
    """The nodes of all symbolic calls of a layer or operation."""
    return operation._inbound_nodes


def origin(tensor: Tensor) -> tuple[Any, int]:
    """The operation that returned a KerasTensor, and in which of its calls."""
    history = tensor._keras_history
    return history.operation, history.node_index


def set_sequential_layers(model: Model, layers: Sequence[Layer]) -> None:
    """Sets the layers of a Sequential model; `add` only appends."""
    model._layers = list(layers)


def sequential_layers(model: Model) -> list[Any]:
    """The layers of a Sequential model with its Input, which `layers` leaves out."""
    return model._layers


# Models ----------------------------------------------------------------------------


def build_from_batch(model: Model, batch: Any) -> None:
    """Builds a model, its metrics and its optimizer from one batch, as `fit` does."""
    model._symbolic_build(data_batch=batch)


def record_shardings(model: Model) -> None:
    """Lets Keras 3.11 and older on JAX count the variables of a wrapped optimizer.

    `fit` records the sharding of each variable before `make_train_function`.
    """
    record = getattr(model, "_record_training_state_sharding_spec", None)
    if record is not None:
        record()


def last_compile(model: Model) -> Any:
    """What the last `compile` of a model has left for files, an object of its own."""
    return model._compile_config


def compile_config(model: Model) -> dict[str, Any]:
    """The arguments of `compile` as they are stored in files, to be corrected."""
    return last_compile(model).config


def note_state(model: Model, state: dict[str, Any]) -> None:
    """Keeps the state that `fit` on JAX passes round where `fit` itself keeps it."""
    vars(model)["_jax_state"] = state


def noted_state(model: Model) -> dict[str, Any]:
    """The state that was kept last."""
    return model._jax_state


def attach_state(model: Model, state: dict[str, Any]) -> None:
    """Writes the state that `fit` on JAX passes round into the model's variables."""
    note_state(model, state)
    model._jax_state_synced = False
    model.jax_state_sync()


def detach_state(model: Model, parts: Iterable[str]) -> None:
    """Leaves the variables without values again, as `fit` on JAX does."""
    model._purge_model_variables(**dict.fromkeys(parts, True))
    model._jax_state_synced = False


# Optimizers ------------------------------------------------------------------------


def applied_steps(optimizer: Optimizer) -> Any:
    """The variable that counts updates; `iterations` divides it by accumulation."""
    return optimizer._iterations


def share_steps(wrapper: Any, optimizer: Optimizer) -> None:
    """Makes a wrapper share the count of updates of the optimizer inside it."""
    vars(wrapper)["_iterations"] = optimizer._iterations


# The methods in which backends' optimizers write without `assign`.
_PAST_ASSIGN = (
    "assign",
    "assign_add",
    "assign_sub",
    "_apply_weight_decay",
    "_backend_increment_gradient_accumulators",
    "_backend_reset_gradient_accumulators",
    "_backend_update_step",
    "_overwrite_model_variables_with_average_value",
)


def plain_methods(optimizer: Optimizer) -> dict[str, Callable]:
    """The methods of an optimizer that write by `assign`, to replace its backend's.

    They come from the classes that the backend's own class derives from.
    """
    methods: dict[str, Callable] = {}
    on_tensorflow = "tensorflow" in map(backend_of, type(optimizer).__mro__)
    for name in _PAST_ASSIGN:
        owners = [c for c in type(optimizer).__mro__ if name in vars(c)]
        plain = next(c for c in owners if backend_of(c) is None)
        if owners[0] is not plain:
            methods[name] = functools.partial(vars(plain)[name], optimizer)
        elif name == "_backend_update_step" and on_tensorflow and len(owners) > 1:
            methods.update(_with_its_variables(optimizer))
    if on_tensorflow:  # It finds the place of a variable by its value's id.
        key = optimizer._var_key
        methods["_var_key"] = lambda v: key(getattr(v, "_value", v))
    return methods


def _with_its_variables(optimizer: Optimizer) -> dict[str, Callable]:
    """Nadam's update calls TensorFlow's, which gets values: this passes variables."""
    original = optimizer._backend_update_step
    given: list[Any] = []

    def update_all(grads: Any, variables: Any, learning_rate: Any) -> None:
        given[:] = variables
        original(grads, variables, learning_rate)

    def update_each(strategy: Any, pairs: Any, learning_rate: Any) -> None:
        for (grad, _), variable in zip(pairs, given, strict=True):
            optimizer.update_step(grad, variable, learning_rate)

    return {
        "_backend_update_step": update_all,
        "_distributed_tf_update_step": update_each,
    }


def track(optimizer: Optimizer, variable: Variable) -> None:
    """Adds a variable to an optimizer's; `add_variable` cannot exclude autocast."""
    optimizer._track_variable(variable)


def check_known(optimizer: Optimizer, variables: Variables) -> None:
    """Raises Keras' error for a variable that the optimizer was not built with."""
    optimizer._check_variables_are_known(variables)


def index_in(optimizer: Optimizer, variable: Variable) -> int:
    """The place of a variable among those that the optimizer was built with.

    Keras has a key for each, which under TensorFlow's strategies is not its id.
    """
    return optimizer._get_variable_index(variable)


def averages(optimizer: Optimizer) -> list[Any]:
    """The moving averages of `use_ema`, one for each variable or None."""
    return optimizer._model_variables_moving_average


def learning_rate(optimizer: Optimizer) -> Any:
    """The learning rate as it was given: `learning_rate` evaluates a schedule."""
    return getattr(optimizer, "_learning_rate", None)


# Where Keras' own optimizers on torch update all variables at once.
UPDATE_STEP = "_parallel_update_step"


def adam_slots(optimizer: Optimizer, variables: Variables) -> list[list[Any]]:
    """Adam's first and second moments of these variables, and the largest of those.

    The last exist only with amsgrad.
    """
    kinds = [optimizer._momentums, optimizer._velocities]
    kinds.append(optimizer._velocity_hats if optimizer.amsgrad else [])
    places = [index_in(optimizer, v) for v in variables]
    return [[kind[i].value for i in places] if kind else [] for kind in kinds]
