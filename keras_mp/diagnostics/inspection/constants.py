"""Constants that float16 turns into an infinity, 0 or 1.

The model is traced in float32 and as it is, and the constants in the two programs are
compared: in the second, 70000 is infinite already. Nothing is run.
"""

import re
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

import keras_mp.keras_private as private
from keras_mp.backends import engine
from keras_mp.backends.measures import Constant
from keras_mp.diagnostics.calls import calls_made_by
from keras_mp.diagnostics.temporary_policies import in_float32
from keras_mp.loss_scaling.models import computes_in_float16
from keras_mp.policies.layers import called_with, is_graph, layer_path
from keras_mp.policies.record import Precision
from keras_mp.policies.symbolic import graph_of
from keras_mp.policies.temporary import temporary_policies

# A size that a model leaves open, except that of the batch.
_OPEN = 64
_SCOPE = r"[A-Za-z0-9.][A-Za-z0-9_.\\/>-]*"


def lost_constants(model: Any) -> Iterator[tuple[str, str, str]]:
    """Yields path, sentence and remedy for each such constant."""
    call = _call_of(model)
    if call is None or not engine.traces or not computes_in_float16(model):
        return
    try:
        half = _constants(model, call)
        with temporary_policies(model, in_float32):
            wide = _constants(model, call)
    except Exception:  # The model cannot be called like this: `fit` says why.
        return
    for path in wide:
        for value, turned in _lost(wide[path], half.get(path, [])):
            yield (
                path,
                f"its constant {value:.7g} is {turned:g} in float16.",
                'Give the layer dtype="float32", or keep it there: '
                "keras_mp.MixedFloat16(float32=PATHS).",
            )


def _lost(wide: list[Constant], half: list[Constant]) -> Iterator[tuple[float, float]]:
    """The constants of one layer that half precision loses, and what they become."""
    before = Counter(c.value for c in wide)
    kept = Counter(c.value for c in half if c.dtype != "float16")
    after = Counter(c.value for c in half)
    for value, count in before.items():
        with np.errstate(over="ignore"):
            turned = float(np.float16(value))
        if turned == value or not (np.isinf(turned) or turned in (0, 1, -1)):
            continue
        # It is lost if it is gone and what it becomes is there: a mask of -1e9 may be
        # another number in float16, and an epsilon may be added in float32.
        if kept[value] < count and after[turned] > before[turned]:
            yield value, turned


def _constants(model: Any, call: tuple[tuple, dict]) -> dict[str, list[Constant]]:
    """The constants by the path of the layer, or operation, that uses them."""
    paths: list[str] = []

    def make(operation: Any, call: Any, args: tuple, kwargs: dict) -> Any:
        is_layer = isinstance(operation, keras.layers.Layer)
        paths.append(layer_path(operation) if is_layer else operation.name)
        with engine.scope(f"keras_mp_{len(paths) - 1}_"):
            return call(*args, **kwargs)

    leaves = [x for x in keras.tree.flatten(call) if isinstance(x, keras.KerasTensor)]

    def function(tensors: list[Any]) -> Any:
        given = iter(tensors)
        args, kwargs = keras.tree.map_structure(
            lambda x: next(given) if isinstance(x, keras.KerasTensor) else x, call
        )
        with calls_made_by(make):
            return model(*args, **kwargs)

    # A call leaves notes on layers, and a first call decides what they compute in.
    layers = private.layers_in(model)
    precision, before = Precision(layers), [(vars(x), {**vars(x)}) for x in layers]
    shapes = [keras.KerasTensor(_closed(x.shape), x.dtype) for x in leaves]
    try:
        with warnings.catch_warnings():
            # JAX creates constants with NumPy, which warns if one overflows.
            warnings.simplefilter("ignore")
            found = engine.constants(function, model.variables, shapes)
    finally:
        private.clear_losses(model)
        for attributes, values in before:
            for name in attributes.keys() - values.keys():
                del attributes[name]
            attributes.update(values)
        precision.put_back()
    by_path: dict[str, list[Constant]] = {}
    for constant in found:
        if constant.scope:
            path = paths[int(constant.scope)]
            by_path.setdefault(path, []).append(constant)
    return by_path


def _closed(shape: Any) -> tuple[int, ...]:
    batch = [1 if size is None else size for size in shape[:1]]
    return (*batch, *(_OPEN if size is None else size for size in shape[1:]))


def _call_of(model: Any) -> tuple[tuple, dict[str, Any]] | None:
    """What a model is called with, as symbolic tensors; None if it is not known."""
    if not isinstance(model, keras.Model) or not model.built:
        return None
    # Keras on TensorFlow does not leave a scope whose name it could not enter.
    if not all(re.fullmatch(_SCOPE, x.name) for x in private.layers_in(model)):
        return None
    if not is_graph(model):
        return called_with(model)
    graph = graph_of(model)
    if graph is None:
        return None
    inputs = list(graph.inputs)
    return (inputs[0] if len(inputs) == 1 else inputs,), {}
