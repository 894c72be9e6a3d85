"""`convert`: changes the policy of a model that exists already, and back."""

from typing import Any

import keras

import keras_mp.keras_private as private
from keras_mp import interrupts, unseen
from keras_mp.backends.interface import BFLOAT16, HALF
from keras_mp.loss_scaling.wrapping import rescale_optimizer
from keras_mp.policies import symbolic
from keras_mp.policies.choosing import Plan, carry_out, chooser_for
from keras_mp.policies.layers import is_graph, keras_path, policy_of
from keras_mp.policies.outputs import plan_heads
from keras_mp.policies.paths import layer_path, variable_path
from keras_mp.policies.policy import Policy
from keras_mp.policies.reach import warn_of_unmatched
from keras_mp.policies.record import Precision
from keras_mp.types import Layer, Model


def convert(
    model: keras.layers.Layer, policy: str | keras.DTypePolicy
) -> keras.layers.Layer:
    """Changes the precision policy of a model in place, built or not, compiled or not.

    Every layer gets what the policy chooses for it, whatever it had before; layers that
    are quantized or do not compute in floats stay as they are. Weights stay the very
    same variables, in float32. A compiled model trains on: its optimizer keeps its
    state, and loss scaling comes or goes with the layers that compute in float16. A
    pattern of `float32=` that matches no layer gives a warning. Keras does not remember
    that a float32 model was compiled with `auto_scale_loss=False`: if that was before
    anything asked for half precision, compile it once more afterwards.

    Args:
        model: a `keras.Model`, or any layer.
        policy: "float32", which undoes a conversion, "mixed_float16",
            "mixed_bfloat16", "auto", or a `keras.DTypePolicy`.

    Returns:
        `model`.

    Raises:
        TypeError: if `model` is no layer.
        ValueError: for a name that is no policy; for a layer whose variables the policy
            would keep in another dtype, or that cannot be called under the policy. The
            model is left as it was, after an interrupt as well.

    Example:

    ```python
    model = keras.models.load_model("model.keras")
    keras_mp.convert(model, "mixed_float16")
    ```
    """
    if not isinstance(model, keras.layers.Layer):
        raise TypeError(
            f"`model` must be a keras.Model or a layer. Received: model={model!r}."
        )
    policy = Policy(policy)
    if _is_under(policy, model):
        return model
    unseen.make_up(model)
    layers = [layer for layer in private.layers_in(model) if converts(layer)]
    for layer in layers:
        _refuse_other_variables(layer, _policy_at(policy, layer))

    without_graph = [layer for layer in layers if _can_be_called(layer)]
    before = Precision(layers)
    try:
        carry_out(planned(model, layers, policy))
        _recast_constants(layers)
        symbolic.refresh(model)
        for layer in without_graph:
            symbolic.call_again(layer)
    except BaseException as error:
        with interrupts.held():
            before.put_back()
            _recast_constants(layers)
            symbolic.refresh(model)
        if not isinstance(error, symbolic.SymbolicCallError):
            raise
        is_layer = isinstance(error.layer, keras.layers.Layer)
        path = layer_path(error.layer) if is_layer else error.layer.name
        raise ValueError(
            f"`model` must be able to compute under the policy. Received: policy="
            f"{policy!r}, under which {path!r} ({type(error.layer).__name__}) raises "
            f"{error}. The model is as it was. Keep that layer in float32: "
            f"keras_mp.MixedFloat16(float32=[{path!r}])."
        ) from error

    with interrupts.held():
        for layer in private.layers_in(model):
            if isinstance(layer, keras.Model):
                if layer.compiled:
                    rescale_optimizer(layer)
                symbolic.forget_traces(layer)
    warn_of_unmatched(model, policy)
    return model


def _is_under(policy: Any, model: Model) -> bool:
    """Was the model built under this policy, whose weights are bfloat16?"""
    if policy.variable_dtype != BFLOAT16:
        return False
    layers = [x for x in private.layers_in(model) if x.built and x.weights]
    return bool(layers) and all(chooser_for(layer) == policy for layer in layers)


def converts(layer: Layer) -> bool:
    """Is its precision one that a conversion changes?"""
    policy = policy_of(layer)
    return (
        policy.quantization_mode is None
        # Not lookups, which compute in int64, nor float64, which someone asked for.
        and policy.compute_dtype in ("float32", *HALF)
    )


def _can_be_called(layer: Layer) -> bool:
    """Can a model without a graph be called on symbolic tensors? Not all can."""
    if is_graph(layer) or not isinstance(layer, keras.Model):
        return False
    try:
        symbolic.call_again(layer)
    except symbolic.SymbolicCallError:
        return False
    return True


def _policy_at(policy: Any, layer: Layer) -> Any:
    """The policy for a layer; in a map, the entry for its path."""
    if isinstance(policy, keras.dtype_policies.DTypePolicyMap):
        return policy[keras_path(layer)]
    return policy


def _refuse_other_variables(layer: Layer, policy: Any) -> None:
    for variable in private.own_variables(layer):
        is_half = private.stored_dtype(variable) == BFLOAT16 and chooser_for(layer)
        own = BFLOAT16 if is_half else layer.variable_dtype
        if variable.dtype in ("float32", *HALF) and own != policy.variable_dtype:
            raise ValueError(
                "`policy` must keep variables in the dtype that they have. Received: "
                f"policy={policy!r} for {policy.variable_dtype} variables, while "
                f"{variable_path(variable)!r} of layer {layer_path(layer)!r} "
                f"({type(layer).__name__}) is {variable.dtype}. Create the model, or "
                "load it, under the policy, and then load its weights."
            )


def planned(model: Model, layers: list[Layer], policy: Any) -> Plan:
    """What layers of a model become under a policy."""
    plan = Plan()
    for layer in layers:
        plan.again(layer, _policy_at(policy, layer))
    # Parents come before their children, which follow what the parents decide. A layer
    # that is not built chooses at its first call.
    for layer in layers:
        if layer.built:
            plan.choose(layer)
    plan_heads(plan, model)
    return plan


def _recast_constants(layers: list[Layer]) -> None:
    # Normalization casts its mean and variance once, when it is built.
    for layer in layers:
        if isinstance(layer, keras.layers.Normalization) and layer.built:
            if layer.input_mean is None:
                layer.finalize_state()
            else:
                private.build_again(layer)
