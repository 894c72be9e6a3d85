"""Facts about tensors, kept outside them: JAX's tracers take no attributes."""

import weakref
from collections.abc import Sized
from typing import ClassVar, Generic, TypeVar

import keras

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


class KnownInGraph(Known[Fact]):
    """Facts that hold other tensors of the same graph of TensorFlow.

    Each is kept on its tensor: what this object held would keep the whole graph. In
    `facts` is the last one alone, without what it says, until somebody asks outside of
    a trace: TensorFlow itself keeps graphs with gradients of their own.
    """

    _all: ClassVar[list["KnownInGraph"]] = []

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = f"_keras_mp_{name}"
        self._all.append(self)

    def note(self, tensor: Tensor, fact: Fact) -> None:
        setattr(tensor, self._name, fact)
        self.facts.clear()
        super().note(tensor, None)  # type: ignore[arg-type]

    def get(self, tensor: Tensor) -> Fact | None:
        if self.facts and not _is_tracing():
            for known in self._all:
                known.facts.clear()
        return getattr(tensor, self._name, None)


def _is_tracing() -> bool:
    from tensorflow import executing_eagerly  # Here TensorFlow is the backend.

    return not executing_eagerly()


def known_tensors(name: str) -> Known:
    """Facts about what this backend traces, to be added to `IN_USE`."""
    in_graph = keras.backend.backend() == "tensorflow"
    known: Known = KnownInGraph(name) if in_graph else Known()
    IN_USE.append(known.facts)
    return known
