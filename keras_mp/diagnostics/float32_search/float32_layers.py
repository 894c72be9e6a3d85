"""`find_float32_layers`: the smallest set of layers that have to be in float32."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras

from keras_mp.diagnostics.diagnosis.diagnosis import check_compiled, loss_scale_of
from keras_mp.diagnostics.diagnosis.other_policies import (
    FLOAT32,
    computes_in_half,
    half_policies,
    has_half,
    policies_meanwhile,
    policy_name,
    with_float32,
)
from keras_mp.diagnostics.float32_search.agreement import Error, agreement, step
from keras_mp.diagnostics.float32_search.smallest_set import smallest_set
from keras_mp.diagnostics.training_data import one_batch
from keras_mp.display.progress_bar import check_verbose, progress_bar
from keras_mp.display.tables import Table
from keras_mp.policies.layers import children_of, layer_path, parts_of
from keras_mp.policies.policy import MixedBFloat16, MixedFloat16, MixedPolicy

# Where a dynamic loss scale may settle.
_SCALES = [2.0**k for k in range(0, 25, 4)]
_CHOOSERS = {"mixed_float16": MixedFloat16, "mixed_bfloat16": MixedBFloat16}


@dataclasses.dataclass(frozen=True)
class Contribution:
    """What one layer in float32 is good for.

    Attributes:
        path: the layer's path.
        without: what is worst off while it alone goes back to half precision.
    """

    path: str
    without: Error


@dataclasses.dataclass(frozen=True, repr=False)
class Float32Layers:
    """The layers that have to be in float32; prints in words, with a table.

    Attributes:
        model: the model's name.
        policy: "mixed_float16" or "mixed_bfloat16".
        scale: the loss scale at which gradients were compared.
        candidates: how many layers could have been chosen.
        contributions: a line for each layer that was.
        before: what is worst off with none of them in float32.
        after: what is worst off with all of them in float32.
        undetermined: outputs and gradients that were not compared, as rounding the
            weights alone changes them by more than half.
    """

    model: str
    policy: str
    scale: float
    candidates: int
    contributions: tuple[Contribution, ...]
    before: Error
    after: Error
    undetermined: tuple[str, ...]

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the layers."""
        return tuple(c.path for c in self.contributions)

    @property
    def agrees(self) -> bool:
        """Do all outputs and gradients agree with these layers in float32?"""
        return self.after.agrees

    @property
    def float32_policy(self) -> MixedPolicy:
        """The policy that keeps them in float32."""
        return _CHOOSERS[self.policy](float32=[re.escape(p) for p in self.paths])

    @property
    def sentences(self) -> list[str]:
        """What was found, in words."""
        return [*self._found(), *self._left_out()]

    def _found(self) -> Iterator[str]:
        if not self.agrees:
            yield (
                f"No choice of layers is enough: with all {self.candidates} in float32 "
                f"{_told(self.after)}. The cause is outside of layers, in the `call` "
                "of the model itself or in its loss."
            )
            return
        if not self.paths:
            yield (
                "No layer has to be in float32: all outputs and gradients agree; "
                f"of them {_told(self.before)}."
            )
            return
        count = len(self.paths)
        yield (
            f"{count} of {self.candidates} layers {'has' if count == 1 else 'have'} to "
            f"be in float32. Without {'it' if count == 1 else 'them'} "
            f"{_told(self.before)}; with {'it' if count == 1 else 'them'}, "
            f"{_told(self.after)}."
        )
        yield f"keras_mp.{self.float32_policy!r}"

    def _left_out(self) -> Iterator[str]:
        if count := len(self.undetermined):
            yield (
                "Looked at for inf and nan alone, being 0 or changed by more than half "
                f"when the weights alone are rounded: {count} of the outputs and "
                "gradients."
            )

    def to_dict(self) -> dict[str, Any]:
        """All of it in dicts, lists, texts and numbers, as JSON has them."""
        return {
            "model": self.model,
            "policy": self.policy,
            "loss_scale": self.scale,
            "candidates": self.candidates,
            "sentences": self.sentences,
            "agrees": self.agrees,
            "float32": list(self.paths),
            "contributions": [
                {"path": c.path, "without": _json(c.without)}
                for c in self.contributions
            ],
            "before": _json(self.before),
            "after": _json(self.after),
            "undetermined": list(self.undetermined),
        }

    def table(self) -> Table:
        """A line for each layer in float32: what is worst off without it."""
        return Table(
            ("layer in float32", "without it, worst off", "error", "allowed"),
            [
                (c.path, c.without.name, _percent(c.without.error), _allowed(c.without))
                for c in self.contributions
            ],
            f"{self.model}: {self.policy}, loss scale {self.scale:g}",
            [f"- {sentence}" for sentence in self.sentences],
        )

    def __str__(self) -> str:
        return self.table().text()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.table().html()


def find_float32_layers(
    model: Any, data: Any, *, tolerance: float = 4.0, verbose: int = 1
) -> Float32Layers:
    """Searches the smallest set of layers whose return to float32 makes a model right.

    Right is a model whose outputs and gradients, of one batch, agree with float32's. No
    dtype of fewer bits gives the very same: even in float32, weights that are rounded
    change outputs by some 0.1 %, and gradients of a deep network by 10 % and more. So
    the error ||half - float32|| / ||float32|| of each output and of each variable's
    gradient may be `tolerance` times what rounding the weights alone makes it. Healthy
    models stay below 2.5 times; an overflow, a gradient that vanishes, or a sum that
    stalls is far beyond.

    The search is QuickXplain (Junker 2004): it runs the batch some 2 log2(n) times for
    each of the layers found, n being all layers, without compiling; and no layer of the
    set can be spared. A layer made of layers is in the set only if none of those
    within it is enough. Nothing of the model changes, but that one which was never
    called is built.

    Args:
        model: a compiled `keras.Model`. One in float32 is judged as if `MixedFloat16`
            was its policy.
        data: one batch: (x, y) or (x, y, sample_weight) of arrays, or structures of
            them; or what gives batches (a dataset), of which the first is taken.
        tolerance: how many times what rounding the weights changes is allowed.
        verbose: 0 for silence, 1 for a progress bar.

    Returns:
        A `Float32Layers`: prints, shows in a notebook, `.paths`, `.float32_policy`,
        `.contributions`, `.to_dict()`.

    Raises:
        TypeError: if `model` is no `keras.Model`, or `data` no data.
        ValueError: if the model is not compiled, if its outputs or gradients are not
            finite in float32, if `data` has no example, if `tolerance` is not at least
            1, or `verbose` neither 0 nor 1.

    Example:

    ```python
    found = keras_mp.find_float32_layers(model, (x[:32], y[:32]))
    keras_mp.convert(model, found.float32_policy)
    ```
    """
    if not tolerance >= 1 or math.isinf(tolerance):
        raise ValueError(
            f"`tolerance` must be a number of at least 1. Received: {tolerance=}."
        )
    check_verbose(verbose)
    check_compiled(model)
    batch = one_batch("data", data)
    if not model.built:
        model(batch[0])
    choose, scales = half_policies(model), _scales(model)
    with policies_meanwhile(model, choose):
        policy = policy_name(model)
        scales = scales if policy == "mixed_float16" else [1.0]
        units = list(_units(model))
        half = {id(x) for x in model._flatten_layers() if computes_in_half(x)}
    if not units:
        raise ValueError(
            "`model` must have layers that could compute in half precision. Received: "
            f"model={model!r}, whose layers are to stay in float32."
        )
    with policies_meanwhile(model, lambda layer: FLOAT32):
        expected = agreement(
            model, batch, policy.removeprefix("mixed_"), _is_among(half), tolerance
        )
    with policies_meanwhile(model, choose):
        scale = _best(scales, lambda s: expected.errors(step(model, batch, s)))

    def worst(kept: Iterable[Unit]) -> Error:
        paths = [unit.path for unit in kept]
        with policies_meanwhile(model, with_float32(choose, paths)):
            return expected.errors(step(model, batch, scale))[0]

    before = worst([])
    with progress_bar(len(units), verbose) as tell:
        found = _search(units, worst, lambda n: tell("layers decided", n, 0.0))
        after = worst(found)
        alone = {u.path: worst([x for x in found if x != u]) for u in found}
    return Float32Layers(
        model=model.name,
        policy=policy,
        scale=scale,
        candidates=len(units),
        contributions=tuple(Contribution(*pair) for pair in alone.items())
        if after.agrees
        else (),
        before=before,
        after=after,
        undetermined=tuple(expected.undetermined),
    )


@dataclasses.dataclass(frozen=True)
class Unit:
    """A layer that may be in float32, with all that it holds.

    Attributes:
        path: the layer's path.
        parts: the units within it, some of which may do instead.
    """

    path: str
    parts: tuple["Unit", ...]


def _units(whole: Any) -> Iterator[Unit]:
    """The units within a model or layer, in its order."""
    # A wrapper and what it wraps have one precision.
    for layer in [] if parts_of(whole) else children_of(whole):
        if isinstance(layer, keras.Model):
            yield from _units(layer)
        elif any(computes_in_half(part) for part in layer._flatten_layers()):
            yield Unit(layer_path(layer), tuple(_units(layer)))


def _is_among(half: set[int]) -> Callable[[Any], bool]:
    def is_half(operation: Any) -> bool:
        # An operation of a graph computes in what it is given.
        is_layer = isinstance(operation, keras.layers.Layer)
        return id(operation) in half or not is_layer

    return is_half


def _scales(model: Any) -> list[float]:
    """The loss scales that may be the model's, the present one first."""
    present = loss_scale_of(model)
    fixed = has_half(model) and not _is_dynamic(model.optimizer)
    return [present] if fixed else [present, *_SCALES]


def _best(scales: list[float], errors: Callable[[float], Sequence[Error]]) -> float:
    """The loss scale at which most agrees: there a dynamic one would settle."""

    def badness(scale: float) -> tuple[int, float]:
        wrong = sum(not error.agrees for error in errors(scale))
        return wrong, abs(math.log2(scale / scales[0]))

    return min(scales, key=badness)


def _is_dynamic(optimizer: Any) -> bool:
    rule = getattr(optimizer, "rule", None)  # Keras' own wrapper has none.
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    return scales and (rule is None or rule.dynamic)


def _search(
    units: Sequence[Unit],
    worst: Callable[[Iterable[Unit]], Error],
    advance: Callable[[int], None],
) -> list[Unit]:
    """The smallest set of units with which the worst error agrees; all if none does."""

    def is_enough(kept: Iterable[Unit]) -> bool:
        try:
            return worst(kept).agrees
        except Exception:  # Of whatever kind: with no unit, and with all, it runs.
            return False  # TensorFlow adds no tensors of two dtypes.

    if not worst(units).agrees:
        return list(units)
    found = smallest_set(units, is_enough, advance)
    if not is_enough(found):
        found = list(units)  # More layers in float32 have done harm.
    found = _without_spare(found, is_enough)
    waiting = list(found)
    while waiting:
        unit = waiting.pop()
        others = [other for other in found if other != unit]

        def is_enough_instead(
            parts: Iterable[Unit], others: list[Unit] = others
        ) -> bool:
            return is_enough([*others, *parts])

        if unit.parts and is_enough_instead(unit.parts):
            parts = smallest_set(unit.parts, is_enough_instead)
            if is_enough_instead(parts):
                found = [*others, *parts]
                waiting += parts
    return found


def _without_spare(
    units: list[Unit], is_enough: Callable[[Iterable[Unit]], bool]
) -> list[Unit]:
    for unit in list(units):
        without = [other for other in units if other != unit]
        if is_enough(without):
            units = without
    return units


def _told(error: Error) -> str:
    if error.error == float("inf"):
        return f"{error.name} is not finite"
    return (
        f"the worst is {error.name}, {_percent(error.error)} off (allowed: "
        f"{_allowed(error)})"
    )


def _percent(share: float) -> str:
    return "not finite" if share == float("inf") else f"{100 * share:.3g} %"


def _allowed(error: Error) -> str:
    return "all finite" if error.allowed > 1e300 else _percent(error.allowed)


def _json(error: Error) -> dict[str, Any]:
    share = None if error.error == float("inf") else error.error
    return {"name": error.name, "error": share, "allowed": error.allowed}
