"""Facts about tensors, kept outside them: JAX's tracers take no attributes."""

import weakref
from collections.abc import Sized
from typing import Generic, TypeVar

from keras_mp.types import Tensor

Fact = TypeVar("Fact")
# Where operations go by more than their operands' dtype: facts about logits, and heads
# that are being called. Unless all are empty, they must be asked; that runs no Python.
IN_USE: list[Sized] = []


class Known(Generic[Fact]):
    """Facts by the identity of tensors; each is dropped with its tensor.

    Attributes:
        facts: empty if nothing is known, which is checked without a call.
    """

    def __init__(self) -> None:
        self.facts: dict[int, tuple[weakref.ref, Fact]] = {}

    def note(self, tensor: Tensor, fact: Fact) -> None:
        facts, key = self.facts, id(tensor)
        facts[key] = weakref.ref(tensor, lambda _: facts.pop(key, None)), fact

    def get(self, tensor: Tensor) -> Fact | None:
        reference, fact = self.facts.get(id(tensor), (None, None))
        return fact if reference is not None and reference() is tensor else None
