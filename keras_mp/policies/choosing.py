"""What layers compute in: a plan, which is made before any of them changes.

A Keras policy never sees the layer it is for. A `ChoosingPolicy` does: it chooses a
stock Keras policy for the layer, which the layer keeps, saves and shows. A plan says
which, and why, for each layer that

    is created               by_class: rules about classes
    is called, or converted  choose: all other rules; the layer's children follow
    is in a compiled model   by_paths, head, no_head
    mixes dtypes             float32, own_call_in_float32

To plan looks at layers and changes none; what is planned for a layer counts for all
that is planned after it. `carry_out` changes them, and their records.
"""

from typing import Any, NamedTuple

import keras

import keras_mp.keras_private as private
from keras_mp.backends.interface import BFLOAT16
from keras_mp.policies.layers import (
    children_of,
    copies_children,
    is_composite,
    is_default,
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
_Map = keras.dtype_policies.DTypePolicyMap


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


def output_rule(layer: Layer) -> Rule:
    """In a layer made of layers, only what it does with their results is float32."""
    return OUTPUT_ALONE if is_composite(layer) else OUTPUT


class Change(NamedTuple):
    """What a plan says of one layer.

    Attributes:
        layer: the layer.
        policy: what its `dtype_policy` becomes.
        decision: the policy it computes under and the reason; None if its first call
            decides.
        weights: the dtypes of its weights, and of its large ones; None if they stay.
        leaves_map: whether a map that it shares with others stays as it is.
    """

    layer: Layer
    policy: Any
    decision: Decision | None
    weights: tuple[str, str] | None = None
    leaves_map: bool = False


class Plan:
    """What layers become.

    Attributes:
        changes: one for each layer, by its id. The layer may be so already.
        paths: those that Keras has not given to layers in a map, by the layer's id.
    """

    def __init__(self) -> None:
        self.changes: dict[int, Change] = {}
        self.paths: dict[int, tuple[Layer, str]] = {}

    def held_by(self, layer: Layer) -> Any:
        """The policy that a layer holds by then, which may be a map."""
        change = self.changes.get(id(layer))
        return getattr(layer, "dtype_policy", None) if change is None else change.policy

    def policy_of(self, layer: Layer) -> Any:
        """The policy that a layer computes under by then."""
        held = self.held_by(layer)
        return held[keras_path(layer)] if isinstance(held, _Map) else held

    def decision_for(self, layer: Layer) -> Decision | None:
        change = self.changes.get(id(layer))
        return decision_for(layer) if change is None else change.decision

    def by_class(self, layer: Layer) -> None:
        """Keeps a new layer in float32 if a rule about its class says so.

        Some layers use their policy before their first call: to adapt to data.
        """
        # A layer whose `__init__` has not called Keras' has no policy yet.
        chooser = chooser_of(getattr(layer, private.DTYPE_POLICY, None))
        for rule in chooser.rules_about(type(layer)) if chooser else ():
            if isinstance(rule.applies, tuple) and rule.matches(layer):
                policy = keras.DTypePolicy("float32")
                self._set(layer, Decision(policy, rule, chooser))
                return

    def choose(self, layer: Layer) -> None:
        """Lets a `ChoosingPolicy` choose for a layer, before its first call."""
        held = self.held_by(layer)
        policy = self._by_map(layer, held) if isinstance(held, _Map) else held
        decision = self.decision_for(layer)
        chooser = (decision and decision.chooser) or chooser_of(policy)
        if decision and decision.rule and chooser and decision.rule.fails(layer):
            decision = None
        if decision is None:
            if chooser is None:
                return
            decision = chooser.decide(layer, self.policy_of)
            if decision.rule is None and policy is not held:
                # It keeps the map, whose other entries are for the parts of this layer.
                self._add(Change(layer, held, Decision(policy, None, chooser)))
                return
        self._decide(layer, decision, policy)
        # The layers of a graph have been called, and their dtypes are in it.
        has_own = isinstance(layer, OPAQUE) or is_graph(layer)
        is_alone = decision.rule is None or decision.rule.alone
        if chooser and is_alone and not has_own:
            self._pass_on(layer, chooser)
        for part in parts_of(layer):
            self.choose(part)  # It may have no first call of its own.

    def again(self, layer: Layer, policy: Any) -> None:
        """Forgets what was chosen for a layer, which gets a policy to choose by."""
        self._add(Change(layer, policy, None, leaves_map=True))

    def by_paths(self, model: Model) -> None:
        """Lets policies choose again that go by paths, once these are known.

        A block is called before the model exists that it becomes part of.
        """
        for layer in private.layers_in(model):
            decision, policy = self.decision_for(layer), self.policy_of(layer)
            chooser = (decision and decision.chooser) or chooser_of(policy)
            if chooser and chooser.goes_by_path and decision and not decision.rule:
                decision = chooser.decide(layer, self.policy_of)
                if decision.rule:
                    self._decide(layer, decision, policy)

    def head(self, layer: Layer) -> None:
        """Keeps an output layer in float32, unless the user chose its policy."""
        self.choose(layer)
        decision = self.decision_for(layer)
        if decision is None or decision.head:
            return
        if decision.rule is SOFTMAX:
            self._set(layer, decision._replace(head=True))
        elif not decision.includes_children:
            policy, rule = keras.DTypePolicy("float32"), output_rule(layer)
            head = Decision(policy, rule, decision.chooser, head=True)
            self._decide(layer, head, decision.policy)

    def no_head(self, layer: Layer) -> None:
        """Takes back what `head` says of a layer."""
        decision = self.decision_for(layer)
        if decision is None or not decision.head or decision.chooser is None:
            return
        if decision.rule is SOFTMAX:
            self._set(layer, decision._replace(head=False))
            return
        # From the inside: what a wrapper computes in depends on what it wraps.
        for part in reversed(private.layers_in(layer)):
            if self.decision_for(part) is decision:
                self._set(part, decision.chooser.decide(part, self.policy_of))

    def float32(self, layer: Layer, rule: Rule) -> None:
        """Keeps a layer and what it holds in float32."""
        decision = Decision(FLOAT32, rule, chooser_for(layer))
        self._decide(layer, decision, self.policy_of(layer))

    def own_call_in_float32(self, model: Model) -> None:
        """Keeps what a model computes itself in float32, unless that was decided.

        Its weights stay: this may be within a trace.
        """
        if self.decision_for(model) is None or is_half(self.policy_of(model)):
            decision = Decision(FLOAT32, MIXES_DTYPES_ALONE, chooser_for(model))
            self._add(Change(model, FLOAT32, decision))

    def _by_map(self, layer: Layer, policies: Any) -> Any:
        """The policy of a layer in a map, which may be from a file."""
        path = keras_path(layer)
        if FLOAT32_IN_FILES + path in policies:
            # The map has no entries for the parts of this layer that have no path.
            for part in private.layers_in(layer):
                if isinstance(self.held_by(part), _Map):
                    decision = Decision(FLOAT32, STORED)
                    self._add(Change(part, FLOAT32, decision, leaves_map=True))
            return FLOAT32
        if not layer.path:
            # Keras sets it only after it has cast the inputs, for some layers never.
            self.paths[id(layer)] = layer, path
        return policies[path]

    def _decide(self, layer: Layer, decision: Decision, before: Any) -> None:
        """Plans a decision for a layer, and for the layers that it computes in.

        Args:
            before: the policy that it computed under.
        """
        self._set(layer, decision)
        if not (decision.includes_children or isinstance(layer, OPAQUE)):
            return
        large, copied = decision.head and has_large(layer), copies_children(layer)
        for child in private.layers_in(layer, itself=False):
            policy, own = self.policy_of(child), self.decision_for(child)
            if own and own.head and not decision.head:
                continue  # What a loss reads stays so when the layer is called again.
            if (
                policy is before
                or chooser_of(policy)
                or own
                or is_default(self.held_by(child), copied)
            ):
                self._set(child, decision, large)

    def _pass_on(
        self, layer: Layer, chooser: ChoosingPolicy, copied: bool = False
    ) -> None:
        """Gives the policy of a layer to the layers it holds, which Keras does not."""
        children = children_of(layer)
        if not children or chooser is keras.config.dtype_policy():
            return  # They have it.
        copied = copied or copies_children(layer)
        for child in children:
            if is_default(self.held_by(child), copied):
                self._add(Change(child, chooser, None))
                self._pass_on(child, chooser, copied)

    def _set(self, layer: Layer, decision: Decision, large: bool | None = None) -> None:
        """Plans a decision for a layer alone.

        Args:
            large: whether it is a head with large kernels, or in one, if that is known.
        """
        weights, dtype = None, decision.policy.variable_dtype
        chooser = decision.chooser
        if chooser is not None and chooser.variable_dtype == BFLOAT16:
            # If that was and stays bfloat16, somebody asked for float32 weights: LoRA.
            before = getattr(policy_of(layer), "variable_dtype", None)
            if not dtype == before == BFLOAT16:
                if large is None:
                    large = decision.head and has_large(layer)
                weights = dtype, BFLOAT16 if large else dtype
        self._add(Change(layer, decision.policy, decision, weights))

    def _add(self, change: Change) -> None:
        before = self.changes.get(id(change.layer))
        if before is not None and before.leaves_map:
            change = change._replace(leaves_map=True)
        self.changes[id(change.layer)] = change


def carry_out(plan: Plan) -> list[Layer]:
    """Gives layers what was planned for them.

    Returns:
        Those that compute in another precision than before.
    """
    for layer, path in plan.paths.values():
        private.set_path(layer, path)
    changed = []
    for layer, policy, decision, weights, leaves_map in plan.changes.values():
        before = after = policy_of(layer)
        if policy is not layer.dtype_policy:
            if leaves_map:
                private.set_policy(layer, before)
            layer.dtype_policy = policy
            after = policy_of(layer) if decision is None else decision.policy
        record_of(layer).decision = decision
        if decision and decision.rule and decision.chooser:
            decision.chooser.note_match(decision.rule)
        others = (
            before.compute_dtype != after.compute_dtype
            or before.variable_dtype != after.variable_dtype
        )
        if weights is not None:
            others |= bring_to(weights[0], layer, large=weights[1])
        if others:
            changed.append(layer)
    return changed


def choose_by_class(layer: Layer) -> None:
    """Keeps a new layer in float32 if a rule about its class says so."""
    plan = Plan()
    plan.by_class(layer)
    carry_out(plan)


def choose_policy(layer: Layer) -> None:
    """Lets a `ChoosingPolicy` choose the layer's own, before its first call."""
    plan = Plan()
    plan.choose(layer)
    carry_out(plan)
