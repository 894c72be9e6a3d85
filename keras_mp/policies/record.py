"""What keras_mp remembers about a layer: one record each, outside of the layer.

`dir` and `vars` of other people's layers do not show it, and Keras does not track it. A
record is dropped with its layer.
"""

import weakref
from collections.abc import Iterable
from typing import Any

import keras

import keras_mp.keras_private as private
from keras_mp.backends import engine
from keras_mp.types import Layer

# The layer's own attributes that a change of precision, or a call under another, sets.
_OWN = (private.DTYPE_POLICY, private.CONVERT_INPUTS)
_REMEMBERED = (
    "decision",
    "chosen",
    "path",
    "inside",
    "keras_path",
    "first_input",
    "called_with",
    "runs_users_code",
    "untried",
    "returned",
    "makers",
    "keeps_input_dtypes",
    "mixes",
    "loss_is_scaled",
    "metrics_read",
)


class Record:
    """What is remembered about one layer.

    Attributes:
        layer: a weak reference to it.
        decision: the `Decision` about its policy, or None.
        chosen: the policy under which it was last called for the first time.
        path: its path in the outermost model, or empty; see `paths`.
        inside: whether that model is another than the layer itself.
        keras_path: where it was first called, for a layer to which Keras gives no path.
        first_input: what it was first called with, symbolic: shape and dtype.
        called_with: for a layer that runs code of the user's, its first arguments.
        runs_users_code: whether it has code of the user's: see `layers.users_code`.
        untried: whether its first call is under way, or it has code of the user's that
            has not run on values yet.
        returned: for such a model, what it returned, each tensor replaced by a weak
            reference to the layer that made it, or None.
        makers: for a model, what makes the outputs that it may hand out, or None while
            that is not known; see `hidden.within`.
        keeps_input_dtypes: whether Keras' cast of its inputs was turned off.
        mixes: for a model, whether its own `call` mixes dtypes; see `own_calls`.
        loss_is_scaled: for a head, whether the loss that reads it is scaled.
        metrics_read: for a head, what its model's metrics read from its output:
            "nothing", the largest "classes", or "logits".
    """

    __slots__ = ("layer", *_REMEMBERED)

    def __init__(self, layer: Layer) -> None:
        # By id, not in a WeakKeyDictionary: every call of a layer looks here, and
        # `dict.get` runs no Python code.
        key = id(layer)
        self.layer = weakref.ref(layer, lambda _: records.pop(key, None))
        self.decision: Any = None
        self.chosen: Any = None
        self.path = ""
        self.inside = False
        self.keras_path = ""
        self.first_input: keras.KerasTensor | None = None
        self.called_with: tuple[tuple, dict[str, Any]] | None = None
        self.runs_users_code = False
        self.untried = False
        self.returned: Any = None
        self.makers: dict[int | None, set[int]] | None = None
        self.keeps_input_dtypes = False
        self.mixes = False
        self.loss_is_scaled = False
        self.metrics_read = "nothing"


# The records by the id of their layer, for reading without creating one.
records: dict[int, Record] = {}


def record_of(layer: Layer) -> Record:
    """The record of a layer, created if there is none."""
    record = records.get(id(layer))
    if record is None:
        record = records.setdefault(id(layer), Record(layer))  # Threads may both ask.
    return record


class Precision:
    """The precision of layers, so that it can be restored."""

    def __init__(self, layers: Iterable[Layer]) -> None:
        self._before = []
        self._dtypes = []
        for layer in layers:
            variables = private.own_variables(layer)
            self._dtypes += [(v, private.stored_dtype(v)) for v in variables]
            own = {name: vars(layer)[name] for name in _OWN if name in vars(layer)}
            record = record_of(layer)
            values = {name: getattr(record, name) for name in _REMEMBERED}
            self._before.append((layer, own, values))

    def put_back(self) -> None:
        """Gives each layer back its policy, its weights and what was remembered."""
        for layer, own, values in self._before:
            for name in _OWN:
                vars(layer).pop(name, None)
            vars(layer).update(own)
            record = record_of(layer)
            for name, value in values.items():
                setattr(record, name, value)
        for variable, dtype in self._dtypes:
            if private.stored_dtype(variable) != dtype:
                engine.set_dtype(variable, dtype)
