"""Reading the code of layers that are not Keras'.

Only what stands in the source: nothing is run, and where there is no source (a class
typed into a console) nothing is found.
"""

import ast
import inspect
import textwrap
from typing import Any, NamedTuple

_FLOATS = {
    "float16": "float16",
    "half": "float16",
    "bfloat16": "bfloat16",
    "float32": "float32",
    "float": "float32",
    "float64": "float64",
    "double": "float64",
}


class Casts(NamedTuple):
    """The casts in a layer's `call`: to which dtypes, and to any that is computed?"""

    to: frozenset[str]
    back: bool


def is_keras(owner: type) -> bool:
    return owner.__module__.split(".")[0] in ("keras", "keras_mp")


def owner_of(layer: Any, method: str) -> type:
    """The class that defines a layer's method."""
    return next(owner for owner in type(layer).__mro__ if method in vars(owner))


def is_custom(layer: Any, method: str) -> bool:
    """Is a layer's method somebody else's than Keras'?"""
    return not is_keras(owner_of(layer, method))


def source_of(layer: Any, method: str) -> str:
    """The source of a method; empty where it is not to be had."""
    try:
        return textwrap.dedent(inspect.getsource(getattr(type(layer), method)))
    except (OSError, TypeError):
        return ""


def casts_of(layer: Any) -> Casts:
    """The casts in `call`, if it is not Keras' own."""
    to, back = set(), False
    if is_custom(layer, "call"):
        try:
            tree = ast.parse(source_of(layer, "call"))
        except SyntaxError:  # A lambda in the middle of an expression.
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
    """What a call casts to, if it casts."""
    function = call.func
    is_method = isinstance(function, ast.Attribute)
    name = function.attr if isinstance(function, ast.Attribute) else ""
    name = function.id if isinstance(function, ast.Name) else name
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
    """The float dtype that is written there: "float16", tf.float16, np.float16."""
    if isinstance(dtype, ast.Constant):
        return _FLOATS.get(str(dtype.value), "")
    if isinstance(dtype, ast.Attribute):
        return _FLOATS.get(dtype.attr, "")
    if isinstance(dtype, ast.Name):
        return _FLOATS.get(dtype.id, "")
    return ""
