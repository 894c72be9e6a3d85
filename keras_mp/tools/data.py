"""The data of a user: for several trainings, or one batch of it."""

import pickle
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_mp.types import Model

_KINDS = ("shape", "__iter__", "__getitem__")  # A PyDataset has only the last.


class TrainingData:
    """Data that `fit` and `evaluate` can be given any number of times.

    `given` is `(x, y)` or `(x, y, sample_weight)`, anything else that `fit` takes as
    one argument, or a function that returns one of these. Raises a TypeError for
    anything else, and for an iterator, which the first training uses up; a ValueError
    for a tuple of another length.
    """

    def __init__(self, name: str, given: Any, batch_size: int) -> None:
        if isinstance(given, Iterator):
            raise TypeError(
                f"`{name}` must serve each training, and an iterator serves only one. "
                f"Received: {name}={given!r}. Give a function that returns a new one."
            )
        self._name, self._given, self._batch_size = name, given, batch_size
        if not callable(given):
            _check_kind(
                name, given, "a dataset, or a function that returns one of these"
            )
            self.arguments()

    def arguments(self) -> dict[str, Any]:
        """The arguments for `evaluate`; `fit` takes them too."""
        data = self._data()
        if not isinstance(data, tuple):
            return {"x": data}
        if not 1 <= len(data) <= 3:
            raise ValueError(
                f"`{self._name}` must be (x, y) or (x, y, sample_weight). "
                f"Received: a tuple of {len(data)}."
            )
        _check_examples(self._name, data)
        arrays = zip(("x", "y", "sample_weight"), data, strict=False)
        return {**dict(arrays), "batch_size": self._batch_size}

    def to_fit(self) -> dict[str, Any]:
        """The arguments for `fit`, which shuffles by default."""
        arguments = self.arguments()
        is_dataset = isinstance(arguments["x"], keras.utils.PyDataset)
        # Keras warns if it is asked to shuffle another kind of dataset.
        return {**arguments, "shuffle": is_dataset or "batch_size" in arguments}

    def first_batch(self) -> Any:
        """One batch, as a train step gets it."""
        data = self._data()
        if not isinstance(data, tuple):
            return next(iter(data))
        return keras.tree.map_structure(
            lambda x: None if x is None else np.asarray(x[: self._batch_size]), data
        )

    def order(self) -> list[bytes]:
        """The bytes of the first batch, to compare orders; empty for arrays.

        Keras itself shuffles arrays, by the seed.
        """
        data = self._data()
        parts = [] if isinstance(data, tuple) else keras.tree.flatten(next(iter(data)))
        return [
            pickle.dumps(ops.convert_to_numpy(x))
            for x in parts
            if hasattr(x, "__array__")
        ]

    def _data(self) -> Any:
        """A tuple of arrays, or a dataset."""
        data = self._given() if callable(self._given) else self._given
        return (data,) if not isinstance(data, tuple) and _is_array(data) else data


def one_batch(
    model: Model, x: Any, y: Any = None, sample_weight: Any = None
) -> tuple[Any, Any, Any]:
    """Inputs, targets and sample weights of one batch for a compiled model.

    They are given one by one or as one: (x, y), (x, y, sample_weight), or a dataset,
    whose first batch is taken. Raises a TypeError for anything else, and a ValueError
    if there is no example, or no target for the model's loss.
    """
    as_one = isinstance(x, list) or not _is_array(x)
    if y is None and sample_weight is None and as_one:
        _check_kind("x", x, "arrays of inputs, or a dataset")
        batch = x
        if isinstance(x, keras.utils.PyDataset):
            batch = x[0]
        elif not isinstance(x, (tuple, list)):
            batch = next(iter(x), None)
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    _check_examples("x", x)
    own_loss = type(model).compute_loss is not keras.Model.compute_loss
    if y is None and getattr(model, "loss", None) is not None and not own_loss:
        raise ValueError(
            "`y` must hold the targets of the batch: `model` is compiled with a loss. "
            f"Received: y=None, and a model with loss={model.loss!r}."
        )
    return x, y, sample_weight


def _check_examples(name: str, batch: Any) -> None:
    """Raises a ValueError if a batch has no example."""
    shapes = [tuple(x.shape) for x in keras.tree.flatten(batch) if hasattr(x, "shape")]
    if batch is None or any(shape[:1] == (0,) for shape in shapes):
        received = f"arrays of shapes {shapes}" if shapes else "no batch"
        raise ValueError(
            f"`{name}` must hold at least one example. Received: {received}."
        )


def _check_kind(name: str, given: Any, what: str) -> None:
    if isinstance(given, str) or not any(hasattr(given, x) for x in _KINDS):
        raise TypeError(
            f"`{name}` must be (x, y), (x, y, sample_weight), {what}. Received: "
            f"{name}={given!r}."
        )


def _is_array(data: Any) -> bool:
    return hasattr(data, "shape") or isinstance(data, dict | list)
