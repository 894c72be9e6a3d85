"""Mixed-precision policies that choose each layer's precision.

A Keras policy never sees the layer it is for. These do: at a layer's first call
`for_layer` chooses a stock Keras policy for it, which is what the layer keeps, saves
and shows. What was decided, and by which rule, is stored on the layer.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import keras

from keras_mp.hardware import recommended_policy
from keras_mp.parts import children_of, is_graph, layer_path, parts_of
from keras_mp.rule import Rule, RuleTable, user_rule
from keras_mp.rules import OUTPUT, STORED, WRAPPED, rules_with

# Layers whose inner softmax belongs to a product of their own: their children take
# the layer's policy as it stands.
_OPAQUE = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)
_FLOAT32 = keras.DTypePolicy("float32")
HALF = ("float16", "bfloat16")
# Before the path of a layer in a file's map: it is in float32 with all its parts.
IN_FILES = "keras_mp/"


class _ChosenName(str):
    """The name of a stock policy that remembers which policy of ours chose it.

    A layer's policy reaches its children (`dtype=self.dtype_policy`) and its clones,
    for which Keras makes a new policy of the name alone. In files it is a plain name.
    """

    chooser: "MixedPolicy"


class MixedPolicy(keras.DTypePolicy):
    """A mixed policy that keeps in float32 what the rules say; see the subclasses."""

    _policy_name: str

    def __init__(self, float32: Iterable[Any] = (), name: str | None = None) -> None:
        if name not in (None, self._policy_name):
            raise ValueError(
                f"`name` must be {self._policy_name!r}. Received: name={name!r}."
            )
        if isinstance(float32, (str, type)) or not isinstance(float32, Iterable):
            raise TypeError(
                "`float32` must be a list or tuple. Received: "
                f"float32={float32!r}. Write float32=[{float32!r}]."
            )
        chosen = _ChosenName(self._policy_name)
        chosen.chooser = self
        super().__init__(chosen)
        self.float32 = tuple(float32)
        self._users_rules = tuple(user_rule(p) for p in self.float32)

    @property
    def rules(self) -> RuleTable:
        """What stays in float32 under this policy, and why; prints as a table."""
        return rules_with(self._users_rules)

    def for_layer(self, layer: Any) -> keras.DTypePolicy:
        """Returns the stock Keras policy that `layer` computes under."""
        return self.decide(layer)[0]

    def decide(self, layer: Any) -> "Decision":
        """Returns `for_layer`'s policy with the rule that chose it, None for half."""
        rule = self._rule_for(layer)
        if rule is not None:
            return Decision(keras.DTypePolicy("float32"), rule, self)
        if isinstance(layer, _OPAQUE):
            return Decision(keras.DTypePolicy(self._policy_name), None)
        return Decision(keras.DTypePolicy(self.name), None)

    def _rule_for(self, layer: Any, copied: bool = False) -> Rule | None:
        for rule in self.rules:
            if rule.matches(layer):
                return rule
        # A wrapper computes in the precision of what it wraps: some call its `call`.
        copied = copied or _copies(layer)
        for part in parts_of(layer):
            if policy_of(part) == _FLOAT32 and not _is_default(part, copied):
                return WRAPPED
            if of_part := self._rule_for(part, copied):
                return of_part
        return None

    def get_config(self) -> dict[str, Any]:
        return {"name": str(self.name)}

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, type(self)) and super().__eq__(other)
        return bool(same) and self.float32 == other.float32  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        kept = f"float32={list(self.float32)!r}" if self.float32 else ""
        return f"{type(self).__name__}({kept})"


@keras.saving.register_keras_serializable(package="keras_mp")
class MixedFloat16(MixedPolicy):
    """Computes in float16 and keeps variables, softmax and `float32` in float32.

    Usable as the global policy and as any layer's `dtype=`. A layer of a model saved
    under it holds the stock Keras policies "mixed_float16" or "float32".

    Args:
        float32: further layers that stay in float32: layer classes, regular
            expressions that the whole path of a layer must match (`re.fullmatch`), or
            predicates layer -> bool.

    Raises:
        TypeError, ValueError: for an entry of `float32` that is none of these.

    Example:

    ```python
    keras_mp.set_global_policy(keras_mp.MixedFloat16(float32=["decoder/.*"]))
    ```
    """

    _policy_name = "mixed_float16"


@keras.saving.register_keras_serializable(package="keras_mp")
class MixedBFloat16(MixedPolicy):
    """Computes in bfloat16 and keeps variables, softmax and `float32` in float32.

    Arguments and errors as in `MixedFloat16`. bfloat16 has float32's range and needs no
    loss scaling.
    """

    _policy_name = "mixed_bfloat16"


class Decision(NamedTuple):
    """What was decided for a layer.

    Attributes:
        policy: the stock policy.
        rule: why it is float32; None for half precision.
        chooser: the policy of ours that decided by a rule.
    """

    policy: keras.DTypePolicy
    rule: Rule | None
    chooser: MixedPolicy | None = None

    @property
    def goes_for_all(self) -> bool:
        """Does it keep in float32 what the layer holds, too?"""
        return self.rule is not None and not self.rule.alone


def Policy(name: Any) -> keras.DTypePolicy:  # noqa: N802 (the tf.keras name)
    """Returns the policy object for a name.

    Args:
        name: "mixed_float16" and "mixed_bfloat16" give `MixedFloat16` and
            `MixedBFloat16`, "auto" the recommended one; "float32" and the other names
            of float dtypes, and policy objects, what they are in Keras.

    Raises:
        ValueError: for a name that is no policy.
    """
    if isinstance(name, keras.DTypePolicy):
        return name
    if name == "auto":
        name = recommended_policy().name
    for policy in (MixedFloat16, MixedBFloat16):
        if name == policy._policy_name:
            return policy()
    # Names of integer dtypes are policies to Keras, but nothing trains in them.
    if isinstance(name, str) and "float" in name:
        try:
            return keras.dtype_policies.get(name)
        except ValueError:
            pass  # Said below, with the names that are known.
    raise ValueError(
        "`policy` must be 'float32', 'mixed_float16', 'mixed_bfloat16', 'auto', the "
        f"name of a float dtype, or a DTypePolicy. Received: policy={name!r}."
    )


def chooser_of(policy: Any) -> MixedPolicy | None:
    """The policy of ours that `policy` is, or that chose it; None if the user did."""
    return getattr(getattr(policy, "name", None), "chooser", None)


def decision_for(layer: Any) -> Decision | None:
    """What was decided for `layer`, unless the user has set another policy since."""
    decision = getattr(layer, "_keras_mp_decision", None)
    if decision is not None and decision.policy is policy_of(layer):
        return decision
    return None


def policy_of(layer: Any) -> Any:
    """The policy that a layer computes under: of a map, what stands at its path."""
    policy: Any = getattr(layer, "dtype_policy", None)
    return policy[layer_path(layer)] if _has_map(layer) else policy


def is_half(policy: Any) -> bool:
    """Does a policy compute in half precision with its variables in float32?"""
    return policy.variable_dtype == "float32" and policy.compute_dtype in HALF


def settle_by_class(layer: Any) -> None:
    """Keeps a layer that was just created in float32, if its class is reason enough.

    Some layers use their precision before their first call: to adapt to data.
    """
    chooser = chooser_of(getattr(layer, "_dtype_policy", None))
    if chooser is not None:
        for rule in chooser.rules:
            if isinstance(rule.applies, tuple) and rule.matches(layer):
                _decide(layer, Decision(keras.DTypePolicy("float32"), rule, chooser))
                return


def settle(layer: Any) -> None:
    """Lets a policy of ours choose the layer's own, before its first call."""
    if _has_map(layer):
        _settle_by_map(layer)
    decision = decision_for(layer)
    chooser = decision.chooser if decision else None
    chooser = chooser or chooser_of(policy_of(layer))
    if decision is None:
        if chooser is None:
            return
        decision = chooser.decide(layer)
        if decision.rule is None and policy_of(layer) is not layer.dtype_policy:
            # Within a map: what else it says is for the parts of this layer.
            layer._keras_mp_decision = Decision(policy_of(layer), None)
            return
    _carry_out(layer, decision)
    # The layers of a graph have been called, and their dtypes are in it.
    has_own = isinstance(layer, _OPAQUE) or is_graph(layer)
    if not decision.goes_for_all and chooser and not has_own:
        _pass_on(layer, chooser)
    for part in parts_of(layer):
        settle(part)  # It may have no first call of its own.


def _settle_by_map(layer: Any) -> None:
    path = layer_path(layer)
    if IN_FILES + path in layer.dtype_policy:
        # Out of the map, which has no word for all that the layer is made of.
        for part in filter(_has_map, layer._flatten_layers()):
            vars(part)["_dtype_policy"] = _FLOAT32
            _decide(part, Decision(_FLOAT32, STORED))
    elif not layer.path:
        # Keras knows it after it has cast the inputs, and of some layers never.
        vars(layer)["_path"] = path


def _has_map(layer: Any) -> bool:
    policy = getattr(layer, "dtype_policy", None)
    return isinstance(policy, keras.dtype_policies.DTypePolicyMap)


def policy_in_files(layer: Any) -> keras.DTypePolicy | None:
    """The stock policy to store for a layer with one of ours; None for others.

    Keras cannot open a file that names a policy of ours where keras_mp is missing. A
    layer that was never called has one, and so has the map that a layer's is part of.
    """
    policy: Any = getattr(layer, "dtype_policy", None)
    if isinstance(policy, MixedPolicy):
        return policy.for_layer(layer)
    if _has_map(layer):
        if layer.path and not children_of(layer):
            # Opened, it has another path: Keras builds it outside of its model.
            return _stock(policy_of(layer))
        entries = {path: _stock(policy[path]) for path in policy}
        default = _stock(policy._default_policy_arg)
        return keras.dtype_policies.DTypePolicyMap(default, entries)
    return None


def _stock(policy: Any) -> Any:
    ours = isinstance(policy, MixedPolicy)
    return keras.DTypePolicy(policy.name) if ours else policy


@contextlib.contextmanager
def first_call(layer: Any) -> Iterator[None]:
    """What a layer builds at its first call has the layer's precision, unless told."""
    decision = decision_for(layer)
    if decision is None or layer.built:
        yield
        return
    before = keras.config.dtype_policy()
    chooser = decision.chooser or chooser_of(decision.policy)
    mine = decision.policy if decision.goes_for_all else chooser
    keras.config.set_dtype_policy(mine or before)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def keep_output_in_float32(layer: Any) -> bool:
    """Turns an output layer to float32, if a policy of ours is what decided for it."""
    settle(layer)
    decision = decision_for(layer)
    if decision is None or decision.goes_for_all:
        return False
    _carry_out(layer, Decision(keras.DTypePolicy("float32"), OUTPUT))
    return True


def _carry_out(layer: Any, decision: Decision) -> None:
    before = policy_of(layer)
    _decide(layer, decision)
    if not (decision.goes_for_all or isinstance(layer, _OPAQUE)):
        return
    # A layer made of layers (a wrapper, a recurrent layer's cell) computes in these.
    for child in layer._flatten_layers(include_self=False):
        policy = policy_of(child)
        if (
            policy is before
            or chooser_of(policy)
            or decision_for(child)
            or _is_default(child, _copies(layer))
        ):
            _decide(child, decision)


def _pass_on(layer: Any, chooser: MixedPolicy, copied: bool = False) -> None:
    """Gives a policy that stands on a layer to the layers that it holds.

    Keras gives it to none.
    """
    if chooser is keras.config.dtype_policy():
        return  # They have it.
    copied = copied or _copies(layer)
    for child in children_of(layer):
        if _is_default(child, copied):
            child.dtype_policy = chooser
            _pass_on(child, chooser, copied)


def _is_default(child: Any, copied: bool) -> bool:
    """Has nobody chosen a policy for this child?"""
    policy, default = child.dtype_policy, keras.config.dtype_policy()
    return policy == default if copied else policy is default


def _copies(layer: Any) -> bool:
    """Are the layers in it, and those in these, copies made of their configs?"""
    return isinstance(layer, keras.layers.Bidirectional)


def _decide(layer: Any, decision: Decision) -> None:
    layer.dtype_policy = decision.policy
    layer._keras_mp_decision = decision
