"""What may go wrong with a model's precision, found without running it."""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np

import keras_mp.keras_private as private
from keras_mp.backends.interface import HALF
from keras_mp.loss_scaling.nonfinite import named
from keras_mp.loss_scaling.wrapping import computes_in_float16
from keras_mp.policies.choosing import decision_for
from keras_mp.policies.layers import is_graph, policy_of
from keras_mp.policies.outputs import producers
from keras_mp.policies.paths import layer_path
from keras_mp.policies.reach import unreached
from keras_mp.policies.symbolic import graph_of
from keras_mp.tools.inspection.custom_layers import casts_of, is_custom, lost_policies
from keras_mp.tools.inspection.programs import lost_numbers
from keras_mp.tools.inspection.shapes import long_sums, odd_widths
from keras_mp.types import Layer, Model

layers = keras.layers
_SMALLEST_NORMAL = float(np.finfo(np.float16).smallest_normal)


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something to look at.

    Attributes:
        paths: the layers that it is about.
        sentence: what is wrong.
        remedy: what helps.
    """

    paths: tuple[str, ...]
    sentence: str
    remedy: str

    def __str__(self) -> str:
        return f"{named(self.paths)}: {self.sentence} {self.remedy}"


def findings_of(
    model: Model, computing: Sequence[Any], nodes: Sequence[Any]
) -> tuple[Finding, ...]:
    """All findings, given the layers that compute and the calls in the graph."""
    # Layers with the same finding share one.
    found: dict[tuple[str, str], list[str]] = {}
    for path, sentence, remedy in dict.fromkeys(_all(model, computing, nodes)):
        found.setdefault((sentence, remedy), []).append(path)
    return tuple(
        # PATHS in a remedy stands for the layers, as `float32=` takes them.
        Finding(
            tuple(paths),
            sentence,
            remedy.replace("PATHS", repr([*map(re.escape, paths)])),
        )
        for (sentence, remedy), paths in found.items()
    )


def _all(
    model: Model, computing: Sequence[Any], nodes: Sequence[Any]
) -> Iterator[tuple[str, str, str]]:
    yield from _half_outputs(model)
    yield from _unscaled(model)
    yield from unreached(model)
    epsilons = [found for layer in computing for found in _epsilons(layer)]
    for layer in computing:
        yield from _hand_casts(layer)
    yield from epsilons
    yield from _optimizer_epsilon(model)
    told = {path for path, *_ in epsilons}
    yield from (found for found in lost_numbers(model) if found[0] not in told)
    yield from long_sums(nodes)
    yield from odd_widths(computing)
    yield from lost_policies(model, computing)


def _half_outputs(model: Model) -> Iterator[tuple[str, str, str]]:
    # What a subclassed model returns is not known without a run.
    graph = graph_of(model) if is_graph(model) else None
    for tensor in graph.outputs if graph is not None else ():
        if tensor.dtype not in HALF:
            continue
        sentence = (
            f"makes an output of the model in {tensor.dtype}: what the loss sees is "
            "rounded."
        )
        makers = [m for m in producers(tensor) if policy_of(m).compute_dtype in HALF]
        for maker in makers:
            if decision_for(maker) and not model.compiled:
                remedy = "`compile` turns it to float32."
            else:
                remedy = 'Give the layer dtype="float32".'
            yield layer_path(maker), sentence, remedy
        if not makers:
            operation, _ = private.origin(tensor)
            yield operation.name, sentence, 'Cast it to "float32".'


def _unscaled(model: Model) -> Iterator[tuple[str, str, str]]:
    optimizer = getattr(model, "optimizer", None)
    if (
        isinstance(optimizer, keras.optimizers.Optimizer)
        and not isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        and optimizer.loss_scale_factor is None
        and computes_in_float16(model)
    ):
        yield (
            layer_path(model),
            f"it computes in float16, and its {type(optimizer).__name__} does not "
            "scale the loss: small gradients may become 0.",
            "Compile it with keras_mp.LossScaleOptimizer(optimizer).",
        )


def _hand_casts(layer: Layer) -> Iterator[tuple[str, str, str]]:
    casts = casts_of(layer)
    computes_in = policy_of(layer).compute_dtype
    for dtype in sorted(casts.to):
        # A layer may compute in float32 and cast back, a model may cast its output.
        if dtype == "float32" and (casts.back or isinstance(layer, keras.Model)):
            continue
        if dtype != computes_in:
            yield (
                layer_path(layer),
                f"`{type(layer).__name__}.call` casts to {dtype} by hand, and computes "
                f"in {computes_in} otherwise.",
                "Cast to self.compute_dtype, and choose that by the layer's dtype=.",
            )


def _epsilons(layer: Layer) -> Iterator[tuple[str, str, str]]:
    if policy_of(layer).compute_dtype != "float16":
        return
    for epsilon in _epsilons_in_compute_dtype(layer):
        if loss := _underflow(epsilon):
            yield (
                layer_path(layer),
                f"its epsilon {loss}.",
                'Give the layer dtype="float32", or keep it there: '
                "keras_mp.MixedFloat16(float32=PATHS).",
            )


def _epsilons_in_compute_dtype(layer: Layer) -> list[Any]:
    if is_custom(layer, "call"):
        if "float32" in casts_of(layer).to:
            return []
        return [getattr(layer, name, None) for name in ("epsilon", "eps")]
    # The other normalizations of Keras compute in float32, whatever their policy.
    if isinstance(layer, layers.UnitNormalization) or (
        isinstance(layer, layers.Dot) and layer.normalize
    ):
        return [1e-12]  # A literal in Keras.
    if isinstance(layer, layers.Normalization):
        return [keras.config.epsilon()]
    return []


def _optimizer_epsilon(model: Model) -> Iterator[tuple[str, str, str]]:
    optimizer = getattr(model, "optimizer", None)
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    loss = _underflow(getattr(optimizer, "epsilon", None))
    if loss and any(v.dtype == "float16" for v in model.trainable_variables):
        yield (
            layer_path(model),
            f"the model has float16 weights, whose {type(optimizer).__name__} computes "
            f"in float16: its epsilon {loss}.",
            "Keep weights in float32: a mixed policy does.",
        )


def _underflow(epsilon: Any) -> str:
    """What float16 makes of an epsilon that underflows; empty for any other."""
    if not isinstance(epsilon, float) or not 0 < epsilon < _SMALLEST_NORMAL:
        return ""
    held = float(np.float16(epsilon))
    if held == 0:
        return f"{epsilon:g} is 0 in float16"
    return (
        f"{epsilon:g} is {held:.3g} in float16, below its smallest normal number "
        f"{_SMALLEST_NORMAL:.2g}: on devices that flush such numbers it is 0"
    )
