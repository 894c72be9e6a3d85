"""`find_float32_layers`: the smallest set of layers that have to be in float32."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import keras

import keras_mp.keras_private as private
from keras_mp import unseen, wanted
from keras_mp.loss_scaling.optimizer import loss_scaling_of
from keras_mp.policies.layers import children_of, parts_of
from keras_mp.policies.paths import layer_path
from keras_mp.policies.temporary import computes_in_half, temporary_policies
from keras_mp.tools.data import one_batch
from keras_mp.tools.diagnosis.diagnosis import check_compiled, loss_scale_of
from keras_mp.tools.display.progress_bar import check_verbose, progress_bar
from keras_mp.tools.float32_search.agreement import (
    TOLERANCE,
    Error,
    Quantity,
    agreement,
    step,
)
from keras_mp.tools.float32_search.search_report import Contribution, Float32Layers
from keras_mp.tools.float32_search.smallest_set import Unit, smallest_units
from keras_mp.tools.temporary_policies import (
    half_policies,
    in_float32,
    layers_in_half,
    policy_name,
    with_float32,
)
from keras_mp.types import Model

# Loss scales at which a dynamic one may settle.
_SCALES = [2.0**k for k in range(0, 25, 4)]


def find_float32_layers(
    model: keras.Model,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    tolerance: float = TOLERANCE,
    verbose: int = 1,
) -> Float32Layers:
    """Finds the smallest set of layers that have to be in float32 for a right result.

    A result is right if the outputs and gradients of one batch agree with float32's. A
    dtype with fewer bits never gives the same numbers: even in float32, rounding the
    weights changes outputs by some 0.1 %, and gradients of a deep network by 10 % and
    more. So the error ||half - float32|| / ||float32|| of each output and of each
    variable's gradient may be `tolerance` times the error from rounding the weights
    alone. Healthy models stay below 2.5 times; an overflow, a gradient that underflows,
    or a sum that stalls is far above.

    The search is QuickXplain (Junker 2004): for each of the layers that it finds it
    runs the batch about 2 log2(n) times without compiling, where n is the number of all
    layers. No layer of the set can be left out. A layer made of layers is in the set
    only if no choice of the layers within it is enough. The model stays as it was,
    except that a model which was never called is built.

    Args:
        model: a compiled `keras.Model`. A model in float32 is treated as if its policy
            was `MixedFloat16`.
        x, y, sample_weight: one batch, as `fit` takes them: arrays, or structures of
            them. `x` alone may be (x, y), (x, y, sample_weight), or a dataset, whose
            first batch is taken.
        tolerance: the allowed error, as a multiple of the error from rounding.
        verbose: 0 for silence, 1 for a progress bar.

    Returns:
        A `Float32Layers`: prints, shows in a notebook, `.paths`, `.float32_policy`,
        `.contributions`, `.to_dict()`.

    Raises:
        TypeError: if `model` is no `keras.Model`, or `x` no data.
        ValueError: if the model is not compiled, if its outputs or gradients are not
            finite in float32, if `x` has no example, if there is no `y` for the loss,
            if `tolerance` is not at least 1, or `verbose` neither 0 nor 1.

    Example:

    ```python
    found = keras_mp.find_float32_layers(model, x[:32], y[:32])
    keras_mp.convert(model, found.float32_policy)
    ```
    """
    if not tolerance >= 1 or math.isinf(tolerance):
        raise ValueError(
            f"`tolerance` must be a number of at least 1. Received: {tolerance=}."
        )
    check_verbose(verbose)
    check_compiled(model)
    batch = one_batch(model, x, y, sample_weight)
    if not model.built:
        model(batch[0])
    wanted.half_precision()
    unseen.make_up(model)
    choose, scales = half_policies(model), _scales(model)
    with temporary_policies(model, choose):
        policy = policy_name(model)
        scales = scales if policy == "mixed_float16" else [1.0]
        units = list(_units(model))
        half = layers_in_half(model)
    if not units:
        raise ValueError(
            "`model` must have layers that could compute in half precision. Received: "
            f"model={model!r}, whose layers are to stay in float32."
        )
    with temporary_policies(model, in_float32):

        def compute() -> list[Quantity]:
            return step(model, batch, 1.0)

        expected = agreement(model, compute, policy, half, tolerance)

    def badness(scale: float) -> tuple[int, float]:
        errors = expected.errors(step(model, batch, scale))
        wrong = sum(not error.agrees for error in errors)
        return wrong, abs(math.log2(scale / scales[0]))

    with temporary_policies(model, choose):
        scale = min(scales, key=badness)  # A dynamic loss scale would settle there.

    def worst(kept: Iterable[Unit]) -> Error:
        paths = [unit.path for unit in kept]
        with temporary_policies(model, with_float32(choose, paths)):
            return expected.errors(step(model, batch, scale))[0]

    def is_enough(kept: Iterable[Unit]) -> bool:
        try:
            return worst(kept).agrees
        except Exception:  # TensorFlow, for example, does not add two dtypes.
            return False  # It runs with no unit, and with all of them.

    before = worst([])
    with progress_bar(len(units), verbose) as show:
        # If all of them are not enough, no choice is.
        found = (
            smallest_units(units, is_enough, lambda n: show("layers decided", n, 0.0))
            if worst(units).agrees
            else units
        )
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


def _units(whole: Any) -> Iterator[Unit]:
    """The units within a model or layer, in its order."""
    # A wrapper and the layer that it wraps have one precision.
    for layer in [] if parts_of(whole) else children_of(whole):
        if isinstance(layer, keras.Model):
            yield from _units(layer)
        elif any(computes_in_half(part) for part in private.layers_in(layer)):
            yield Unit(layer_path(layer), tuple(_units(layer)))


def _scales(model: Model) -> list[float]:
    """The loss scales that may be the model's, the present one first."""
    present, optimizer = loss_scale_of(model), model.optimizer
    if scaling := loss_scaling_of(optimizer):
        is_dynamic = scaling.rule.dynamic
    else:
        is_dynamic = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    is_fixed = layers_in_half(model) and not is_dynamic
    return [present] if is_fixed else [present, *_SCALES]
