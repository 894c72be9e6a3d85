"""Numbers that half precision loses in the program of a model, which is not run.

Constants that float16 turns into an infinity, 0 or 1: the model is traced in float32
and as it is, and the constants in the two programs are compared, for in the second
70000 is infinite already. Constants that are lost in a sum with a larger one, and casts
to integers, in the program of the model as it is.
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
from keras_mp.backends.interface import WHOLE
from keras_mp.backends.measures import Constant, Fact, IntegerCast, LostAddend
from keras_mp.loss_scaling.wrapping import computes_in_float16
from keras_mp.policies.layers import called_with, is_graph
from keras_mp.policies.paths import layer_path
from keras_mp.policies.record import Precision
from keras_mp.policies.symbolic import graph_of
from keras_mp.policies.temporary import computes_in_half, temporary_policies
from keras_mp.tools.calls import calls_made_by
from keras_mp.tools.temporary_policies import in_float32
from keras_mp.types import Model

# A size that a model leaves open, except that of the batch.
_OPEN = 64
_SCOPE = r"[A-Za-z0-9.][A-Za-z0-9_.\\/>-]*"


def lost_numbers(model: Model) -> Iterator[tuple[str, str, str]]:
    """Yields path, sentence and remedy for each place where numbers are lost."""
    call = _call_of(model)
    if call is None or not engine.traces:
        return
    if not any(computes_in_half(layer) for layer in private.layers_in(model)):
        return
    wide: dict[str, list[Fact]] = {}
    try:
        half = _facts(model, call)
        if computes_in_float16(model):
            with temporary_policies(model, in_float32):
                wide = _facts(model, call)
    except Exception:  # The model cannot be called like this: `fit` says why.
        return
    for path in wide:
        for value, turned in _lost(wide[path], half.get(path, [])):
            sentence = f"its constant {value:.7g} is {turned:g} in float16."
            yield path, sentence, _remedy("float16")
    for path, facts in half.items():
        for fact in facts:
            if isinstance(fact, LostAddend):
                sentence = (
                    f"it adds {fact.value:.1g} to a sum with {fact.beside:g}, beside "
                    f"which {fact.dtype} loses it."
                )
                yield path, sentence, _remedy(fact.dtype)
            elif isinstance(fact, IntegerCast):
                sentence = (
                    f"it casts {fact.source} to {fact.target}: above "
                    f"{WHOLE[fact.source]} whole numbers are rounded."
                )
                yield path, sentence, _remedy(fact.source)


def _remedy(dtype: str) -> str:
    policy = {"float16": "MixedFloat16", "bfloat16": "MixedBFloat16"}[dtype]
    return (
        'Give the layer dtype="float32", or keep it there: '
        f"keras_mp.{policy}(float32=PATHS)."
    )


def _lost(wide: list[Fact], half: list[Fact]) -> Iterator[tuple[float, float]]:
    """The constants of one layer that float16 loses, and what they become."""
    narrow = [fact for fact in half if isinstance(fact, Constant)]
    before = Counter(fact.value for fact in wide if isinstance(fact, Constant))
    kept = Counter(c.value for c in narrow if c.dtype != "float16")
    after = Counter(c.value for c in narrow)
    for value, count in before.items():
        with np.errstate(over="ignore"):
            turned = float(np.float16(value))
        if turned == value or not (np.isinf(turned) or turned in (0, 1, -1)):
            continue
        # It is lost if it is gone and what it becomes is there: a mask of -1e9 may be
        # another number in float16, and an epsilon may be added in float32.
        if kept[value] < count and after[turned] > before[turned]:
            yield value, turned


def _facts(model: Model, call: tuple[tuple, dict]) -> dict[str, list[Fact]]:
    """The facts by the path of the layer, or operation, that they are about."""
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
            found = engine.traced(function, model.variables, shapes)
    finally:
        private.clear_losses(model)
        for attributes, values in before:
            for name in attributes.keys() - values.keys():
                del attributes[name]
            attributes.update(values)
        precision.put_back()
    by_path: dict[str, list[Fact]] = {}
    for fact in found:
        if fact.scope:
            by_path.setdefault(paths[int(fact.scope)], []).append(fact)
    return by_path


def _closed(shape: Any) -> tuple[int, ...]:
    batch = [1 if size is None else size for size in shape[:1]]
    return (*batch, *(_OPEN if size is None else size for size in shape[1:]))


def _call_of(model: Model) -> tuple[tuple, dict[str, Any]] | None:
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
