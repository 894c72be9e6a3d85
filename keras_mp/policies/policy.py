"""The policies that choose for each layer, and what they decide."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple

import keras

from keras_mp import wanted
from keras_mp.backends.interface import BFLOAT16, HALF
from keras_mp.policies.hardware import recommended_policy
from keras_mp.policies.layers import (
    copies_children,
    is_default,
    parts_of,
    policy_of,
)
from keras_mp.policies.rule import Rule, RuleTable, user_rule
from keras_mp.policies.stock_rules import (
    BATCH_STATISTICS,
    WRAPPED,
    rules_about,
    rules_with,
)
from keras_mp.types import Layer

# Layers whose inner softmax belongs to a product of their own: their children take
# the layer's policy unchanged.
OPAQUE = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)
FLOAT32 = keras.DTypePolicy("float32")


class _ChosenName(str):
    """The name of a stock policy that remembers which `ChoosingPolicy` chose it.

    A layer's policy reaches its children (`dtype=self.dtype_policy`) and its clones,
    and Keras makes their new policy from the name alone. In files it is a plain name.
    """

    chooser: "ChoosingPolicy"


class ChoosingPolicy(keras.DTypePolicy):
    """A policy that keeps in float32 what the rules say; see the subclasses."""

    _policy_name: str
    # In addition to the rules of all policies.
    _own_rules: tuple[Rule, ...] = ()

    def __init__(
        self,
        float32: Iterable[type | str | Callable[[keras.layers.Layer], bool]] = (),
        name: str | None = None,
        *,
        recompute_logits: bool = False,
    ) -> None:
        if name not in (None, self._policy_name):
            raise ValueError(
                f"`name` must be {self._policy_name!r}. Received: name={name!r}."
            )
        if isinstance(float32, (str, type)) or not isinstance(float32, Iterable):
            raise TypeError(
                "`float32` must be a list or tuple. Received: "
                f"float32={float32!r}. Write float32=[{float32!r}]."
            )
        if not isinstance(recompute_logits, bool):
            raise TypeError(
                "`recompute_logits` must be True or False. Received: "
                f"recompute_logits={recompute_logits!r}."
            )
        chosen = _ChosenName(self._policy_name)
        chosen.chooser = self
        super().__init__(chosen)
        self.float32 = tuple(float32)
        self.recompute_logits = recompute_logits
        self._users_rules = tuple(user_rule(p) for p in self.float32)
        self._matched: set[str] = set()
        self._note_paths()
        wanted.half_precision()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._note_paths()
        wanted.half_precision()  # Copies and pickles run no `__init__`.

    @property
    def rules(self) -> RuleTable:
        """What stays in float32 under this policy, and why; prints as a table."""
        return rules_with(self._users_rules, self._own_rules)

    def rules_about(self, kind: type) -> list[Rule]:
        """Those of `rules` that may keep layers of a class in float32."""
        users = (rule for rule in self._users_rules if rule.is_about(kind))
        return [*users, *rules_about(kind, self._own_rules)]

    # Has there been a policy that goes by paths? Without one, nobody asks the others.
    paths_matter: ClassVar[bool] = False

    @property
    def goes_by_path(self) -> bool:
        """Does `float32` hold a regular expression?"""
        return any(isinstance(entry, str) for entry in self.float32)

    def _note_paths(self) -> None:
        ChoosingPolicy.paths_matter |= self.goes_by_path

    def for_layer(self, layer: Layer) -> keras.DTypePolicy:
        """Returns the stock Keras policy that `layer` computes under."""
        return self.decide(layer)[0]

    def decide(
        self, layer: Layer, policy_of: Callable[[Layer], Any] = policy_of
    ) -> "Decision":
        """Returns `for_layer`'s policy and the rule behind it, None for half.

        Args:
            policy_of: the policies of layers, which may be planned.
        """
        rule = self._rule_for(layer, policy_of)
        if rule is not None:
            return Decision(keras.DTypePolicy("float32"), rule, self)
        name = self._policy_name if isinstance(layer, OPAQUE) else self.name
        return Decision(keras.DTypePolicy(name), None, self)

    def _rule_for(
        self, layer: Layer, policy_of: Callable, copied: bool = False
    ) -> Rule | None:
        for rule in self.rules_about(type(layer)):
            if rule.holds(layer):
                return rule
        # A wrapper computes in the precision of what it wraps: some call that `call`.
        copied = copied or copies_children(layer)
        for part in parts_of(layer):
            policy = policy_of(part)
            if policy == FLOAT32 and not is_default(policy, copied):
                return WRAPPED
            if of_part := self._rule_for(part, policy_of, copied):
                return of_part
        return None

    def note_match(self, rule: Rule) -> None:
        """Remembers that a rule keeps a layer in float32."""
        self._matched.add(rule.name)

    def unmatched_patterns(self, layers: Iterable[Layer]) -> list[str]:
        """The regular expressions of `float32` that match none of these layers.

        Those that matched a layer before are left out: a policy may serve many models.
        """
        return [
            rule.name
            for rule, entry in zip(self._users_rules, self.float32, strict=True)
            if isinstance(entry, str)
            and rule.name not in self._matched
            and not any(map(rule.matches, layers))
        ]

    def get_config(self) -> dict[str, Any]:
        return {"name": str(self.name)}

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, type(self))
            and bool(super().__eq__(other))
            and self.float32 == other.float32
            and self.recompute_logits == other.recompute_logits
        )

    def __repr__(self) -> str:
        given = [f"float32={list(self.float32)!r}"] if self.float32 else []
        given += ["recompute_logits=True"] if self.recompute_logits else []
        return f"{type(self).__name__}({', '.join(given)})"


@keras.saving.register_keras_serializable(package="keras_mp")
class MixedFloat16(ChoosingPolicy):
    """Computes in float16 and keeps variables, softmax and `float32` in float32.

    Usable as the global policy and as any layer's `dtype=`. A layer of a model saved
    under it holds the stock Keras policies "mixed_float16" or "float32".

    Args:
        float32: further layers that stay in float32: layer classes, regular
            expressions that the whole path of a layer must match (`re.fullmatch`), or
            predicates layer -> bool. A path is "block/conv", the names from the model's
            own layers down, however the model was made. Keras' `layer.path` matches as
            well.
        recompute_logits: on JAX, a large head's logits are not kept for the gradient of
            a cross-entropy but computed once more, in chunks of the classes: this
            saves memory and costs time. No file stores this argument.

    Raises:
        TypeError, ValueError: for an entry of `float32` that is none of these; for a
            `recompute_logits` that is not a bool.

    Example:

    ```python
    keras_mp.set_global_policy(keras_mp.MixedFloat16(float32=["decoder/.*"]))
    ```
    """

    _policy_name = "mixed_float16"


@keras.saving.register_keras_serializable(package="keras_mp")
class MixedBFloat16(ChoosingPolicy):
    """Computes in bfloat16 and keeps variables, softmax and `float32` in float32.

    Arguments and errors as in `MixedFloat16`. bfloat16 has float32's range and needs no
    loss scaling.
    """

    _policy_name = "mixed_bfloat16"


@keras.saving.register_keras_serializable(package="keras_mp")
class BFloat16(ChoosingPolicy):
    """Keeps weights in bfloat16 and computes in it: half of float32's memory.

    Arguments and errors as in `MixedFloat16`. What stays in float32 has float32 weights
    too: what the rules say, BatchNormalization and small output layers. A large output
    layer has its weights in bfloat16; its product, its bias and what it returns are
    float32.

    `compile` wraps the optimizer in a `StochasticRoundingOptimizer`: without it, Adam
    does not move bfloat16 weights. In a loop of your own, create one.
    """

    _policy_name = BFLOAT16
    _own_rules = (BATCH_STATISTICS,)


class Decision(NamedTuple):
    """What was decided for a layer.

    Attributes:
        policy: the stock policy.
        rule: why it is float32; None for half precision.
        chooser: the `ChoosingPolicy` that decided; None for a layer from a file.
        head: whether a loss reads what the layer returns; see `heads`.
    """

    policy: keras.DTypePolicy
    rule: Rule | None
    chooser: ChoosingPolicy | None = None
    head: bool = False

    @property
    def includes_children(self) -> bool:
        """Does it also keep in float32 what the layer holds?"""
        return self.rule is not None and not self.rule.alone


def Policy(name: str | keras.DTypePolicy) -> keras.DTypePolicy:  # noqa: N802 (the tf.keras name)
    """Returns the policy object for a name.

    Args:
        name: "mixed_float16", "mixed_bfloat16" and "bfloat16" give `MixedFloat16`,
            `MixedBFloat16` and `BFloat16`, "auto" gives the recommended one; "float32",
            other names of float dtypes, and policy objects mean what they do in Keras.

    Raises:
        ValueError: for a name that is no policy.
    """
    policy = _named(name)
    if any(each.compute_dtype in HALF for each in policies_in(policy)):
        wanted.half_precision()  # It may be Keras' own.
    _asked_for[id(policy)] = policy
    return policy


def policies_in(policy: Any) -> list[Any]:
    """The policies of a map, the default first; or the policy itself."""
    is_map = isinstance(policy, keras.dtype_policies.DTypePolicyMap)
    if not is_map:
        return [policy]
    # It takes names for entries, too.
    return [policy.default_policy, *map(keras.dtype_policies.get, policy.values())]


# By id, as policies have no hash.
_asked_for: weakref.WeakValueDictionary = weakref.WeakValueDictionary()


def was_asked_for(policy: Any) -> bool:
    """Did somebody pass the policy, or its name, to keras_mp? Keras' default is not."""
    return _asked_for.get(id(policy)) is policy


def _named(name: str | keras.DTypePolicy) -> keras.DTypePolicy:
    if isinstance(name, keras.DTypePolicy):
        return name
    if name == "auto":
        name = recommended_policy().name
    for policy in (MixedFloat16, MixedBFloat16, BFloat16):
        if name == policy._policy_name:
            return policy()
    # Names of integer dtypes are policies to Keras, but nothing trains in them.
    if isinstance(name, str) and "float" in name:
        try:
            return keras.dtype_policies.get(name)
        except ValueError:
            pass  # The error below lists the known names.
    meant = _meant_by(name) if isinstance(name, str) else None
    raise ValueError(
        "`policy` must be 'float32', 'mixed_float16', 'mixed_bfloat16', 'bfloat16', "
        "'auto', the name of a float dtype, or a DTypePolicy. Received: "
        f"policy={name!r}." + (f" Did you mean {meant!r}?" if meant else "")
    )


def _meant_by(name: str) -> str | None:
    """The policy that a name in another spelling stands for, if any."""
    spelled = name.strip().lower().replace("-", "_").replace(" ", "_")
    known = "float32", "mixed_float16", "mixed_bfloat16", "bfloat16", "auto"
    return spelled if spelled in known else _SHORT_NAMES.get(spelled)


_SHORT_NAMES = {
    "half": "mixed_float16",
    "fp16": "mixed_float16",
    "bf16": "mixed_bfloat16",
    "fp32": "float32",
    "mixed_fp16": "mixed_float16",
    "mixed_bf16": "mixed_bfloat16",
}


def chooser_of(policy: Any) -> ChoosingPolicy | None:
    """The `ChoosingPolicy` that `policy` is, or that chose it; None if the user did."""
    return getattr(getattr(policy, "name", None), "chooser", None)


def as_stock(policy: Any) -> Any:
    """The stock policy of the same name that remembers which `ChoosingPolicy` it is.

    That is what Keras holds for a thread: it is of use without the seams as well.
    """
    chooser = chooser_of(policy)
    return policy if chooser is None else keras.DTypePolicy(chooser.name)


def is_half(policy: Any) -> bool:
    """Does a policy compute in half precision, and is it mixed, or chosen?"""
    is_mixed = policy.variable_dtype == "float32"
    return policy.compute_dtype in HALF and (is_mixed or chooser_of(policy) is not None)
