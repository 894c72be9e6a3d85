"""Layers that are not Keras': casts in their code, and policies that files lose.

Reads the source and runs nothing but `get_config`. Without a source, as for a class
typed into a console, it finds nothing.

Keras stores a layer's policy in its config. A custom class may leave it out, and the
layers that its `__init__` makes are made again when the file is opened: both then have
the global policy of the process that opens it. (Sequential and Functional models keep
the policies of their layers, and compute nothing themselves.)
"""

import ast
import inspect
import textwrap
import tokenize
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras

import keras_mp.keras_private as private
from keras_mp.policies.layers import children_of, has_map, is_graph, policy_of
from keras_mp.policies.paths import layer_path
from keras_mp.types import Layer, Model

_FLOATS = {
    "float16": "float16",
    "half": "float16",
    "bfloat16": "bfloat16",
    "float32": "float32",
    "float": "float32",
    "float64": "float64",
    "double": "float64",
}
_PLAIN = {
    *keras.Model.__mro__,
    *keras.Sequential.__mro__,
    *private.Functional.__mro__,
}


class Casts(NamedTuple):
    """The casts in a layer's `call`."""

    to: frozenset[str]  # The dtypes that the code names.
    back: bool  # Is there a cast to a dtype that is computed?


def is_keras(owner: type) -> bool:
    return owner.__module__.split(".")[0] in ("keras", "keras_mp")


def is_custom(layer: Layer, method: str) -> bool:
    """Is a layer's method defined outside of Keras?"""
    owners = (owner for owner in type(layer).__mro__ if method in vars(owner))
    return not is_keras(next(owners))


def source_of(layer: Layer, method: str) -> str:
    """The source of a method; empty if there is none, or its file is no source."""
    try:
        return textwrap.dedent(inspect.getsource(getattr(type(layer), method)))
    except (OSError, TypeError, tokenize.TokenError, SyntaxError):
        return ""


def casts_of(layer: Layer) -> Casts:
    """The casts in `call`, if it is not Keras'."""
    to, back = set(), False
    if is_custom(layer, "call"):
        try:
            tree = ast.parse(source_of(layer, "call"))
        except SyntaxError:  # The source of a lambda may start within an expression.
            return Casts(frozenset(), False)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                dtype = _dtype_of(node)
                if dtype is not None and _literal(dtype):
                    to.add(_literal(dtype))
                elif dtype is not None and "dtype" in ast.unparse(dtype):
                    back = True
    return Casts(frozenset(to), back)


def _dtype_of(call: ast.Call) -> ast.expr | None:
    """The dtype that a call casts to; None if it does not cast."""
    is_method, name = isinstance(call.func, ast.Attribute), _name_of(call.func)
    if is_method and name in ("half", "float", "bfloat16", "double") and not call.args:
        return ast.Constant(name)
    for keyword in call.keywords:
        if keyword.arg == "dtype" and name in ("cast", "astype", "to"):
            return keyword.value
    if name == "cast":
        return call.args[1] if len(call.args) > 1 else None
    if is_method and name in ("astype", "to", "type"):
        return call.args[0] if call.args else None
    return None


def _literal(dtype: ast.expr) -> str:
    """The float dtype that the code names: "float16", tf.float16, np.float16."""
    name = str(dtype.value) if isinstance(dtype, ast.Constant) else _name_of(dtype)
    return _FLOATS.get(name, "")


def _name_of(node: ast.expr) -> str:
    return getattr(node, "attr", getattr(node, "id", ""))


def lost_policies(
    model: Model, computing: Sequence[Any]
) -> Iterator[tuple[str, str, str]]:
    """Yields path, sentence and remedy for each layer that loses a policy."""
    for layer in dict.fromkeys([model, *computing]):
        if is_keras(type(layer)) or is_custom(layer, "from_config"):
            continue
        config = _config_of(layer)
        if config is not None:
            loss = _own_loss(layer, config) or _loss_of_children(layer, config)
            if loss:
                yield layer_path(layer), *loss


def _config_of(layer: Layer) -> dict[str, Any] | None:
    if has_map(layer):
        return None  # Keras changes a map that it writes.
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = layer.get_config()
    except Exception:  # Custom code may raise anything; `save` reports it.
        return None
    return config if isinstance(config, dict) else None


def _own_loss(layer: Layer, config: dict[str, Any]) -> tuple[str, str] | None:
    if is_graph(layer) or policy_of(layer).name == "float32":
        return None
    name = type(layer).__name__
    if "dtype" not in config:
        return (
            f"a saved file does not keep its policy, as `{name}.get_config` has no "
            "dtype.",
            "Let get_config begin with super().get_config(), and __init__ pass "
            "**kwargs on.",
        )
    parameters = inspect.signature(type(layer).__init__).parameters
    if "dtype" not in parameters and not any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    ):
        return (
            f"a saved file cannot be opened, as `{name}.__init__` takes no dtype, in "
            "which a file keeps the policy.",
            "Let __init__ take **kwargs and pass them to super().__init__.",
        )
    return None


def _loss_of_children(layer: Layer, config: dict[str, Any]) -> tuple[str, str] | None:
    if not all(owner in _PLAIN for owner in type(layer).__mro__ if is_keras(owner)):
        return None  # The layers that a layer of Keras makes have its policy.
    makers = [m for m in ("__init__", "build") if is_custom(layer, m)]
    source = "".join(source_of(layer, method) for method in makers)
    if not source or "dtype" in source:
        return None  # It probably sets their policies itself.
    stored = {leaf for leaf in keras.tree.flatten(config) if isinstance(leaf, str)}
    children = [c for c in children_of(layer) if c.name not in stored]
    if all(policy_of(child).name == "float32" for child in children):
        return None
    return (
        "a saved file does not keep the policies of the layers that "
        f"`{type(layer).__name__}` makes: they will be the global policy where it is "
        "opened.",
        "Set the same policy before the file is opened, or convert it after.",
    )
