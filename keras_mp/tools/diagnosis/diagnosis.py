"""`diagnose`: one batch, forward and backward, and what precision does to it."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

import keras_mp.keras_private as private
from keras_mp import unseen, wanted
from keras_mp.policies.paths import variable_path
from keras_mp.policies.temporary import Choice, temporary_policies
from keras_mp.tools.data import one_batch
from keras_mp.tools.diagnosis.departure import Comparison, Departure, layer_of
from keras_mp.tools.diagnosis.diagnosis_report import Report
from keras_mp.tools.diagnosis.probe import Output, Probe, probe
from keras_mp.tools.diagnosis.ranges import range_of
from keras_mp.tools.diagnosis.verdict import Measured, Verdict, verdict_on
from keras_mp.tools.display.progress_bar import check_verbose, progress_bar
from keras_mp.tools.inspection.inspection import inspect
from keras_mp.tools.temporary_policies import (
    half_policies,
    in_float32,
    in_the_half,
    is_in_half,
    layers_in_half,
    policy_name,
    with_float32,
)
from keras_mp.types import Model

# How many layers are added, one by one, to those that stay in float32.
_ROUNDS = 8
_FIRST_SCALE = 2.0**15  # Where a dynamic loss scale starts.


def diagnose(
    model: Model,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    verbose: int = 1,
) -> Report:
    """Says what float16 and bfloat16 do to a model, on one batch of its data.

    The batch goes forward and backward several times: in float32, where magnitudes show
    what would fit; under the model's policy, or float16 if it has none; to compare
    outputs and loss in half precision with those in float32, up to the rounding that no
    half dtype can avoid; and with more and more layers in float32, until everything is
    finite and agrees. The model stays as it was, except that a model which was never
    called is built. The inside of an RNN's cell, which runs in a loop, is not checked.

    Args:
        model: a compiled `keras.Model`. Its `compute_loss` is differentiated; a
            `train_step` of the model's own is not called.
        x, y, sample_weight: one batch, as `fit` takes them: arrays, or structures of
            them. `x` alone may be (x, y), (x, y, sample_weight), or a dataset, whose
            first batch is taken.
        verbose: 0 for no progress bar.

    Returns:
        A `Report`: prints, shows in a notebook, `.to_html(path)`, `.to_dict()`,
        `.plot()`.

    Raises:
        TypeError: if `model` is no `keras.Model`.
        ValueError: if it is not compiled, if `x` has no example, or if there is no `y`
            for the loss, or if `verbose` is neither 0 nor 1.

    Example:

    ```python
    print(keras_mp.diagnose(model, x[:32], y[:32]))
    ```
    """
    check_verbose(verbose)
    check_compiled(model)
    batch = one_batch(model, x, y, sample_weight)
    wanted.half_precision()
    unseen.make_up(model)
    with progress_bar(4, verbose) as show:
        return _diagnosis(model, batch, show)


def _diagnosis(
    model: Model, batch: Any, show: Callable[[str, int, float], None]
) -> Report:
    show("in float32", 0, 0)
    if not model.built:
        model(batch[0])
    scale = loss_scale_of(model)
    choose = half_policies(model)
    with temporary_policies(model, in_float32):
        wide = probe(model, batch, 1.0)
    show("in half precision", 1, 0)
    with temporary_policies(model, choose):
        found = probe(model, batch, scale)
        half = layers_in_half(model)
        epsilons = [w for w in inspect(model).warnings if "epsilon" in w.sentence]
    measured = _measured(model, wide, half)
    verdict = verdict_on(measured, scale)
    first = _first_broken(found, wide)
    broken = _broken_in_float32(batch, wide)
    kept: tuple[str, ...] = ()
    departure, cured, suits = None, None, ""
    show("one beside the other", 2, 0)
    if not broken:
        float16 = Comparison(model, batch, choose, "float16")
        if verdict.fits and not first:
            departure = float16.departure()
        if verdict.fits and not first and not departure:
            suits = "float16"
        elif verdict.bfloat16:
            suits = "bfloat16" if _agrees_in_bfloat16(model, batch, choose) else ""
        kept = _to_keep(
            verdict, first, departure, [p for w in epsilons for p in w.paths]
        )
        if kept:
            show("with layers in float32", 3, 0)
            choose = in_the_half(choose, "float16")
            kept, cured = _cure(model, batch, choose, float16, kept)
    return Report(
        model=model.name,
        scale=scale,
        policy=policy_name(model),
        measured=measured,
        verdict=verdict,
        broken_in_float32=broken,
        broken=first.path if first else "",
        broken_values=first.values if first else None,
        departure=departure,
        suits=suits,
        epsilons=tuple(epsilons),
        kept=kept,
        cured=cured,
    )


def check_compiled(model: Model) -> None:
    """Raises if `model` is no model, or is not compiled."""
    if not isinstance(model, keras.Model):
        raise TypeError(f"`model` must be a keras.Model. Received: model={model!r}.")
    if not model.compiled:
        raise ValueError(
            "`model` must be compiled: its loss is what is differentiated. Received: "
            f"model={model!r}."
        )


def loss_scale_of(model: Model) -> float:
    """The present loss scale, or the one that a dynamic loss scale starts from."""
    optimizer = model.optimizer
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return float(optimizer.dynamic_scale)
    if layers_in_half(model):
        return float(optimizer.loss_scale_factor or 1.0)
    return _FIRST_SCALE


def _measured(model: Model, wide: Probe, half: set[int]) -> tuple[Measured, ...]:
    outputs, flowing = [], []
    for o in wide.outputs:
        what = (is_in_half(o.operation, half), layer_of(o.operation))
        outputs.append(Measured(o.path, "output", o.values, *what))
        if o.gradient is not None:
            kind = "activation gradient"
            flowing.append(Measured(o.path, kind, o.gradient, *what))
    owners = {
        id(v): layer
        for layer in private.layers_in(model)
        for v in private.own_trainable(layer)
    }
    gradients = []
    for variable in reversed(model.trainable_variables):
        path = variable_path(variable)
        found, owner = wide.gradients[path], owners.get(id(variable))
        if found is not None:
            what = (id(owner) in half, layer_of(owner))
            gradients.append(Measured(path, "gradient", found, *what))
    return (*outputs, *reversed(flowing), *gradients)


def _broken_in_float32(batch: Any, wide: Probe) -> str:
    """The first part of the batch, or output, not finite in float32; or empty."""
    for name, part in zip(("x", "y", "sample_weight"), batch, strict=True):
        for array in keras.tree.flatten(part):
            dtype = getattr(array, "dtype", None)
            if dtype is None or not keras.backend.is_float_dtype(
                keras.backend.standardize_dtype(dtype)
            ):
                continue
            if not range_of(ops.convert_to_numpy(array)).finite:
                return f"`{name}`"
    named = [*((o.path, o.values) for o in wide.outputs), ("the loss", wide.loss)]
    return next((path for path, values in named if not values.finite), "")


def _first_broken(found: Probe, wide: Probe) -> Output | None:
    """The first output that is not finite, if it is finite in float32."""
    fine = {o.path for o in wide.outputs if o.values.finite}
    broken = next((o for o in found.outputs if not o.values.finite), None)
    return broken if broken and broken.path in fine else None


def _to_keep(
    verdict: Verdict,
    first: Output | None,
    departure: Departure | None,
    epsilons: Sequence[str],
) -> tuple[str, ...]:
    """The paths of the layers that should stay in float32."""
    paths = [m.layer for m in (*verdict.overflowing, *verdict.outliers)]
    paths += epsilons
    # What follows an overflow is not finite either.
    if first and not verdict.overflowing:
        paths.append(layer_of(first.operation))
    if departure:
        paths.append(departure.layer)
    return tuple(dict.fromkeys(p for p in paths if p))


def _cure(
    model: keras.Model,
    batch: Any,
    choose: Choice,
    expected: Comparison,
    kept: tuple[str, ...],
) -> tuple[tuple[str, ...], bool]:
    """Keeps more layers in float32 until all is finite, unscaled, and agrees.

    Returns:
        The paths of all that are kept, and whether they are enough.
    """
    for _ in range(_ROUNDS):
        try:
            with temporary_policies(model, with_float32(choose, kept)):
                seen = probe(model, batch, 1.0)
            departure = expected.departure(kept) if _finite(seen) else None
        except Exception:  # TensorFlow, for example, does not add two dtypes.
            break
        # An output in float32 may be infinite only in the layer that it goes to.
        broken = next((o for o in seen.outputs if not o.values.finite), None)
        if departure:
            more = departure.layer
        elif broken:
            more = layer_of(broken.operation)
        else:
            return kept, _finite(seen)
        if not more or more in kept:
            break
        kept = (*kept, more)
    return kept, False


def _finite(seen: Probe) -> bool:
    ranges = [*(o.values for o in seen.outputs), *seen.gradients.values()]
    return all(found is None or found.finite for found in ranges)


def _agrees_in_bfloat16(model: Model, batch: Any, choose: Choice) -> bool:
    try:
        return Comparison(model, batch, choose, "bfloat16").departure() is None
    except Exception:  # An operation may have no kernel for bfloat16.
        return False
