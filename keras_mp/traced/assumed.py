"""What a trace takes for granted: a step is replayed only while it is so."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

import keras_mp.keras_private as private
from keras_mp.backends import engine
from keras_mp.backends.leaves import leaves
from keras_mp.loss_scaling.optimizer import loss_scaling_of
from keras_mp.types import Model, Tensor, Variable


class Assumed:
    """Where the variables of a model are, its optimizer's numbers, a batch's shapes.

    Attributes:
        variables: of the model, its metrics and its optimizer.
        tensors: those that they hold.
    """

    def __init__(self, model: Model, batch: Any) -> None:
        self._model, optimizer = model, model.optimizer
        found = [*model.variables, *model.metrics_variables]
        found += optimizer.variables if optimizer is not None else []
        self.variables: list[Variable] = [*{id(v): v for v in found}.values()]
        self.tensors: list[Tensor] = [*map(private.raw_value, self.variables)]
        scaling = loss_scaling_of(optimizer)
        self._optimizers = [optimizer, *scaling.parts] if scaling else [optimizer]
        self._before = self._now(batch)

    def holds(self, batch: Any) -> bool:
        """Is all of it so for this batch?"""
        return self._now(batch) == self._before

    def _now(self, batch: Any) -> Any:
        address, raw = engine.tracing.address, private.raw_value
        places = [(address(raw(v)), v.trainable) for v in self.variables]
        # A schedule, a rate that is a variable and the moments are read in each step.
        numbers = [
            [x for x in vars(part).items() if isinstance(x[1], int | float | str)]
            for part in self._optimizers
            if part is not None
        ]
        return id(self._model.optimizer), places, numbers, _form(batch)


def _form(structure: Any) -> Any:
    """How the tensors in a structure lie in memory, and all else as it is."""
    if isinstance(structure, dict):
        return [(key, _form(x)) for key, x in structure.items()]
    if isinstance(structure, list | tuple):
        return [_form(x) for x in structure]
    if hasattr(structure, "shape"):
        return engine.tracing.layout(structure)
    return structure


def tensors_in(structure: Any) -> list[Tensor]:
    """The tensors in a structure; arrays, which `train_on_batch` takes, as tensors."""
    return [engine.tracing.tensor(x) for x in leaves(structure) if hasattr(x, "shape")]


def places_in(structure: Any) -> Any:
    """A structure whose tensors are to be `filled` in, without what they hold."""
    return filled(structure, itertools.repeat(np.zeros(())))


def filled(structure: Any, tensors: Iterator[Tensor]) -> Any:
    """A structure with other tensors in the places of its own."""
    if isinstance(structure, dict):
        return {key: filled(x, tensors) for key, x in structure.items()}
    if isinstance(structure, list | tuple):
        return type(structure)([filled(x, tensors) for x in structure])
    return next(tensors) if hasattr(structure, "shape") else structure
