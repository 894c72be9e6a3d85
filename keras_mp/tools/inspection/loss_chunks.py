"""How the loss reads the logits of large heads: as a whole, or in chunks, and why."""

import math
from typing import Any

import keras

import keras_mp.keras_private as private
from keras_mp import wanted
from keras_mp.kernels.table import own as kernels
from keras_mp.policies import heads
from keras_mp.policies.paths import layer_path
from keras_mp.tables import in_bytes
from keras_mp.types import Layer, Model

_BATCH = 32  # The default of `fit`.
_SPARSE = keras.losses.SparseCategoricalCrossentropy


def loss_chunks(model: Model, calls: dict[int, list[Any]]) -> tuple[str, ...]:
    """A sentence for each large head whose logits are large in a batch of 32.

    Args:
        model: a layer or a model.
        calls: the calls of each layer in a graph, by its id.
    """
    losses = keras.tree.flatten(getattr(model, "loss", None))
    if not (wanted.kernels and any(map(_is_known, losses))):
        return ()
    sentences = []
    for layer in private.layers_in(model):
        for node in calls.get(id(layer), []):
            (*_, shape) = (tensor.shape for tensor in node.outputs)
            shapes = [v.shape for v in _matrices(layer) if shape[-1] in v.shape]
            known = shapes and None not in shape[1:]
            if known and heads.operands_dtype(layer, node.input_tensors):
                rows = _BATCH * math.prod(shape[1:-1])
                sentences.append(_sentence(layer, rows, shape[-1]))
    return tuple(filter(None, sentences))


def _sentence(layer: Layer, rows: int, classes: int) -> str:
    """The sentence about a head with logits (rows, classes); empty if these are few."""
    mode, _ = heads.reading_of_logits(layer)
    number = kernels.number_of_chunks(rows, classes, mode)
    if kernels.KEEPS_LOGITS:
        mode = "kept"
    elif not number:
        mode = "whole" if mode != "recomputed" else "not recomputed"
        number = kernels.number_of_chunks(rows, classes, "in chunks")
    if not number:
        return ""
    path, size_of = layer_path(layer), in_bytes(4 * rows * classes)
    chunks = f"in {number} chunk{'s' if number > 1 else ''}{kernels.IN_CHUNKS}"
    in_words = {
        "in chunks": f"head and loss {chunks}: logits would take {size_of}",
        "recomputed": f"head and loss {chunks}, whose logits ({size_of}) are computed "
        "again in the backward pass",
        "kept": f"head and loss are differentiated {chunks}: the gradient of the "
        f"logits would take {size_of}",
        "not recomputed": f"logits take {size_of} as a whole: only JAX computes them "
        f"again; without `recompute_logits` head and loss are computed {chunks}",
        "whole": f"logits take {size_of} as a whole, for the metrics; without metrics "
        f"head and loss are computed {chunks}",
    }
    return f"{path}: {in_words[mode]} (batches of {_BATCH})."


def _matrices(layer: Layer) -> list[Any]:
    parts = private.layers_in(layer)
    weights = [v for part in parts for v in private.own_trainable(part)]
    return [v for v in weights if len(v.shape) == 2]


def _is_known(loss: Any) -> bool:
    """Is it computed in chunks?"""
    if kernels.KEEPS_LOGITS:
        return isinstance(loss, _SPARSE) and _reads_logits(loss)
    if isinstance(loss, keras.losses.CategoricalCrossentropy):
        return _reads_logits(loss)
    function = keras.losses.sparse_categorical_crossentropy
    names = function.__name__, _SPARSE.__name__, function
    return isinstance(loss, _SPARSE) or loss in names


def _reads_logits(loss: keras.losses.Loss) -> bool:
    # Before Keras 3.16 it is an attribute, too.
    return bool(loss.get_config()["from_logits"])
