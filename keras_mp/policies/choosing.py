"""How a layer gets its policy.

A Keras policy never sees the layer it is for. A `ChoosingPolicy` does: it chooses a
stock Keras policy for the layer, which the layer keeps, saves and shows:

    the layer is created     choose_by_class: rules about classes
    its first call           choose_policy: all other rules; the layer's children follow
    compile                  make_head

The decision and the rule behind it stand in the record of the layer.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

import keras_mp.keras_private as private
from keras_mp.backends.interface import BFLOAT16
from keras_mp.policies.layers import (
    children_of,
    copies_children,
    has_default_policy,
    has_map,
    is_composite,
    is_graph,
    keras_path,
    parts_of,
    policy_of,
)
from keras_mp.policies.policy import (
    FLOAT32,
    OPAQUE,
    ChoosingPolicy,
    Decision,
    as_stock,
    chooser_of,
    is_half,
)
from keras_mp.policies.record import record_of, records
from keras_mp.policies.rule import Rule
from keras_mp.policies.stock_rules import (
    MIXES_DTYPES_ALONE,
    OUTPUT,
    OUTPUT_ALONE,
    SOFTMAX,
    STORED,
)
from keras_mp.policies.weights import bring_to, has_large
from keras_mp.types import Layer, Model

# Prefix of a layer's path in a file's map: the layer and all its parts are in float32.
FLOAT32_IN_FILES = "keras_mp/"


def decision_for(layer: Layer) -> Decision | None:
    """The decision for `layer`; None if there is none, or the user has overruled it."""
    record = records.get(id(layer))
    decision = record.decision if record else None
    if decision is not None and decision.policy is policy_of(layer):
        return decision
    return None


def chooser_for(layer: Layer) -> ChoosingPolicy | None:
    """The `ChoosingPolicy` that has decided, or will decide, for `layer`, if any."""
    decision = decision_for(layer)
    return (decision and decision.chooser) or chooser_of(policy_of(layer))


def choose_by_class(layer: Layer) -> None:
    """Keeps a new layer in float32 if a rule about its class says so.

    Some layers use their policy before their first call: to adapt to data.
    """
    # A layer whose `__init__` has not called Keras' has no policy yet.
    chooser = chooser_of(getattr(layer, private.DTYPE_POLICY, None))
    if chooser is not None:
        for rule in chooser.rules_about(type(layer)):
            if isinstance(rule.applies, tuple) and rule.matches(layer):
                _set(layer, Decision(keras.DTypePolicy("float32"), rule, chooser))
                return


def choose_policy(layer: Layer) -> None:
    """Lets a `ChoosingPolicy` choose the layer's own, before its first call."""
    if has_map(layer):
        _choose_by_map(layer)
    decision = decision_for(layer)
    chooser = decision.chooser if decision else None
    chooser = chooser or chooser_of(policy_of(layer))
    if decision and decision.rule and chooser and decision.rule.fails(layer):
        decision = chooser.decide(layer)
    if decision is None:
        if chooser is None:
            return
        decision = chooser.decide(layer)
        if decision.rule is None and policy_of(layer) is not layer.dtype_policy:
            # The map's other entries are for the parts of this layer: it keeps the map.
            record_of(layer).decision = Decision(policy_of(layer), None)
            return
    _carry_out(layer, decision)
    # The layers of a graph have been called, and their dtypes are in it.
    has_own = isinstance(layer, OPAQUE) or is_graph(layer)
    if not decision.includes_children and chooser and not has_own:
        _pass_on(layer, chooser)
    for part in parts_of(layer):
        choose_policy(part)  # It may have no first call of its own.


def _choose_by_map(layer: Layer) -> None:
    path = keras_path(layer)
    if FLOAT32_IN_FILES + path in layer.dtype_policy:
        # The map has no entries for the parts of this layer that have no path.
        for part in filter(has_map, private.layers_in(layer)):
            private.set_policy(part, FLOAT32)
            _set(part, Decision(FLOAT32, STORED))
    elif not layer.path:
        # Keras sets the path only after it has cast the inputs, for some layers never.
        private.set_path(layer, path)


def choose_by_path(model: Model) -> list[Any]:
    """Lets policies choose again that go by paths, once these are known.

    A block is called before the model exists that it becomes part of.

    Returns:
        The layers that have changed.
    """
    changed: list[Any] = []
    if not ChoosingPolicy.paths_matter:
        return changed
    for layer in private.layers_in(model):
        decision, chooser = decision_for(layer), chooser_for(layer)
        if chooser and chooser.goes_by_path and decision and not decision.rule:
            decision = chooser.decide(layer)
            if decision.rule:
                _carry_out(layer, decision)
                changed.append(layer)
    return changed


@contextlib.contextmanager
def first_call(layer: Layer) -> Iterator[None]:
    """Gives the layers that `layer` creates in its first call the policy of `layer`."""
    decision = decision_for(layer)
    if decision is None or layer.built:
        yield
        return
    before = keras.config.dtype_policy()
    chooser = decision.chooser or chooser_of(decision.policy)
    policy = decision.policy if decision.includes_children else chooser
    if policy is None or policy is before:
        yield
        return
    try:
        private.set_policy_of_thread(as_stock(policy))
        yield
    finally:
        private.set_policy_of_thread(as_stock(before))


def make_head(layer: Layer) -> bool:
    """Turns an output layer to float32, unless the user chose its policy.

    Returns:
        Whether it computes in another precision than before.
    """
    choose_policy(layer)
    decision = decision_for(layer)
    if decision is None or decision.head:
        return False
    if decision.rule is SOFTMAX:
        _set(layer, decision._replace(head=True))
        # Its weights may be bfloat16 now. Nothing else is another.
        return decision.chooser is not None and _has_bfloat16_weights(decision.chooser)
    if decision.includes_children:
        return False
    chooser = decision.chooser or chooser_of(decision.policy)
    policy = keras.DTypePolicy("float32")
    _carry_out(layer, Decision(policy, output_rule(layer), chooser, head=True))
    return True


def output_rule(layer: Layer) -> Rule:
    """In a layer made of layers, only what it does with their results is float32."""
    return OUTPUT_ALONE if is_composite(layer) else OUTPUT


def unmake_head(layer: Layer) -> bool:
    """Undoes `make_head`."""
    decision = decision_for(layer)
    if decision is None or not decision.head or decision.chooser is None:
        return False
    if decision.rule is SOFTMAX:
        _set(layer, decision._replace(head=False))
        return True
    # From the inside: what a wrapper computes in depends on what it wraps.
    for part in reversed(private.layers_in(layer)):
        if decision_for(part) is decision:
            _set(part, decision.chooser.decide(part))
    return True


def keep_in_float32(layer: Layer, rule: Rule) -> None:
    """Turns a layer and what it holds to float32."""
    _carry_out(layer, Decision(FLOAT32, rule, chooser_for(layer)))


def keep_own_call_in_float32(model: Model) -> None:
    """Turns what a model computes itself to float32, unless that was decided."""
    if decision_for(model) is None or is_half(policy_of(model)):
        chooser = chooser_for(model)
        model.dtype_policy = FLOAT32  # Its weights stay: this may be within a trace.
        record_of(model).decision = Decision(FLOAT32, MIXES_DTYPES_ALONE, chooser)


def _carry_out(layer: Layer, decision: Decision) -> None:
    before = policy_of(layer)
    _set(layer, decision)
    if not (decision.includes_children or isinstance(layer, OPAQUE)):
        return
    # A layer made of layers (a wrapper, a recurrent layer's cell) computes in these.
    for child in private.layers_in(layer, itself=False):
        policy = policy_of(child)
        if (
            policy is before
            or chooser_of(policy)
            or decision_for(child)
            or has_default_policy(child, copies_children(layer))
        ):
            _set(child, decision, decision.head and has_large(layer))


def _pass_on(layer: Layer, chooser: ChoosingPolicy, copied: bool = False) -> None:
    """Gives the policy of a layer to the layers that it holds, which Keras does not."""
    children = children_of(layer)
    if not children or chooser is keras.config.dtype_policy():
        return  # They have it.
    copied = copied or copies_children(layer)
    for child in children:
        if has_default_policy(child, copied):
            child.dtype_policy = chooser
            _pass_on(child, chooser, copied)


def _has_bfloat16_weights(chooser: ChoosingPolicy) -> bool:
    return bool(chooser.variable_dtype == BFLOAT16)


def _set(layer: Layer, decision: Decision, large: bool | None = None) -> None:
    """Gives a layer what was decided for it.

    Args:
        large: whether it is a head with large kernels, or in one, if that is known.
    """
    before = getattr(policy_of(layer), "variable_dtype", None)
    layer.dtype_policy = decision.policy
    record_of(layer).decision = decision
    chooser = decision.chooser or chooser_of(decision.policy)
    if chooser is not None and _has_bfloat16_weights(chooser):
        dtype = decision.policy.variable_dtype
        # If that was and stays bfloat16, somebody asked for float32 weights: LoRA.
        if large is None:
            large = decision.head and has_large(layer)
        if not dtype == before == BFLOAT16:
            bring_to(dtype, layer, large=BFLOAT16 if large else dtype)
