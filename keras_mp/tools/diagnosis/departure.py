"""Where half precision departs from float32, if its outputs or loss do.

A constant that becomes infinite, or an epsilon that becomes 0, leaves every number
finite and in range: only a comparison with float32 shows it.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras

from keras_mp.backends.random_draws import same_draws_in_every_dtype
from keras_mp.loss_scaling.one_batch import gradients_of
from keras_mp.policies.paths import layer_path
from keras_mp.policies.temporary import Choice, temporary_policies
from keras_mp.tools.diagnosis.probe import Calls
from keras_mp.tools.float32_search.agreement import (
    Agreement,
    Error,
    Quantity,
    agreement,
    outputs_of,
)
from keras_mp.tools.temporary_policies import (
    in_float32,
    in_the_half,
    layers_in_half,
    with_float32,
)
from keras_mp.types import Model


@dataclasses.dataclass(frozen=True)
class Departure:
    """The first output, in the order of the computation, that departs from float32's.

    Attributes:
        dtype: "float16" or "bfloat16".
        path: the layer or operation; "loss", or "output", if every layer agrees.
        layer: its path as `float32=` takes it; empty if it is no layer.
        error: how far it is from float32's, see `Error`.
    """

    dtype: str
    path: str
    layer: str
    error: Error

    def __str__(self) -> str:
        off, allowed = self.error.error, self.error.allowed
        found = "not finite" if off == float("inf") else f"off by {100 * off:.3g} %"
        return (
            f"{self.path} is the first that departs from float32 in {self.dtype}: it "
            f"is {found}, and rounding explains {100 * allowed:.2g} %."
        )


class Comparison:
    """One batch in float32, to compare half precision with.

    Args:
        choose: the policies of the layers in half precision.
        dtype: the half dtype that they are to have.
    """

    def __init__(self, model: Model, batch: Any, choose: Choice, dtype: str) -> None:
        self._model, self._batch, self._dtype = model, batch, dtype
        self._choose = in_the_half(choose, dtype)
        with temporary_policies(model, self._choose):
            self._half = layers_in_half(model)
        self._ends = self._agreement(every=False)

    def departure(self, kept: Sequence[str] = ()) -> Departure | None:
        """Where it departs with these layers in float32; None if the results agree."""
        errors = self._errors(self._ends, kept, every=False)
        wrong = next((error for error in errors if not error.agrees), None)
        if wrong is None:
            return None
        # Every layer is compared only now, because that takes much memory.
        within = self._errors(self._agreement(every=True), kept, every=True)
        first = next((error for error in within if not error.agrees), None)
        if first is None:
            return Departure(self._dtype, wrong.name, "", wrong)
        layer = self._layers.get(first.name, "")
        return Departure(self._dtype, first.name, layer, first)

    def _agreement(self, every: bool) -> Agreement:
        with temporary_policies(self._model, in_float32):
            return agreement(
                self._model,
                lambda: self._computed(every),
                f"mixed_{self._dtype}",
                self._half,
            )

    def _errors(
        self, expected: Agreement, kept: Sequence[str], every: bool
    ) -> list[Error]:
        with temporary_policies(self._model, with_float32(self._choose, kept)):
            return expected.in_order(self._computed(every))

    def _computed(self, every: bool) -> list[Quantity]:
        """The outputs of the model, or of every layer, and the loss."""
        calls = Calls()
        watch = calls.shown_to if every else None
        with same_draws_in_every_dtype():
            # Not compiled: each choice of layers would be compiled again.
            found = gradients_of(self._model, self._batch, 1.0, watch)
        if every:
            self._layers = {path: layer_of(made) for path, made in calls.made}
            pairs = zip([path for path, _ in calls.made], found.seen, strict=True)
            outputs = [Quantity(*pair) for pair in pairs]
        else:
            outputs = outputs_of(found)
        return [*outputs, Quantity("loss", found.loss)]


def layer_of(operation: Any) -> str:
    """The path that `float32=` takes; empty if `operation` is no single layer."""
    is_layer = isinstance(operation, keras.layers.Layer)
    # All layers of a model would follow it to float32.
    is_single = is_layer and not isinstance(operation, keras.Model)
    return layer_path(operation) if is_single else ""
