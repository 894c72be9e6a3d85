"""`diagnose`: one batch, forward and backward, and what precision does to it."""

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from keras_mp.diagnostics.diagnosis.other_policies import (
    FLOAT32,
    computes_in_half,
    half_policies,
    has_half,
    policies_meanwhile,
    policy_name,
    with_float32,
)
from keras_mp.diagnostics.diagnosis.probe import Probe, probe
from keras_mp.diagnostics.diagnosis.ranges import range_of
from keras_mp.diagnostics.diagnosis.report import Report
from keras_mp.diagnostics.diagnosis.verdict import Measured, Verdict, verdict_on
from keras_mp.diagnostics.inspection.inspection import inspect
from keras_mp.diagnostics.training_data import check_examples
from keras_mp.policies.layers import layer_path

_FIRST_SCALE = 2.0**15  # Where a dynamic loss scale starts.


def diagnose(model: Any, x: Any, y: Any = None, sample_weight: Any = None) -> Report:
    """Says what float16 and bfloat16 do to a model, by one batch of its data.

    The batch goes forward and backward three times: in float32, whose magnitudes tell
    what would fit; under the model's policy, or float16 if it has none; and once more
    with the layers that should stay in float32. Nothing of the model changes, but that
    one which was never called is built. What is inside of a loop (a cell of an RNN) is
    seen from outside.

    Args:
        model: a compiled `keras.Model`. Its `compute_loss` is what is differentiated; a
            `train_step` of its own is not called.
        x, y, sample_weight: one batch, as `fit` takes them: arrays, or structures of
            them.

    Returns:
        A `Report`: prints, shows in a notebook, `.to_html(path)`, `.to_dict()`,
        `.plot()`.

    Raises:
        TypeError: if `model` is no `keras.Model`.
        ValueError: if it is not compiled, or `x` has no example.

    Example:

    ```python
    print(keras_mp.diagnose(model, x[:32], y[:32]))
    ```
    """
    check_compiled(model)
    batch = (x, y, sample_weight)
    check_examples("x", x)
    if not model.built:
        model(x)
    scale = loss_scale_of(model)
    choose = half_policies(model)
    with policies_meanwhile(model, lambda layer: FLOAT32):
        wide = probe(model, batch, 1.0)
    with policies_meanwhile(model, choose):
        found = probe(model, batch, scale)
        half = {id(x) for x in model._flatten_layers() if computes_in_half(x)}
        epsilons = [w for w in inspect(model).warnings if "epsilon" in w.sentence]
    measured = _measured(model, wide, half)
    verdict = verdict_on(measured, scale)
    born = _first_broken(found, wide)
    broken = _broken_in_float32(batch, wide)
    kept: tuple[str, ...] = ()
    if not broken:
        kept = _to_keep(verdict, born, [p for w in epsilons for p in w.paths])
    return Report(
        model=model.name,
        scale=scale,
        policy=policy_name(model),
        measured=measured,
        verdict=verdict,
        broken_in_float32=broken,
        broken=born.path if born else "",
        epsilons=tuple(epsilons),
        kept=kept,
        cured=_is_cured(model, batch, choose, kept) if kept else None,
    )


def check_compiled(model: Any) -> None:
    """Raises if `model` is no model, or is not compiled."""
    if not isinstance(model, keras.Model):
        raise TypeError(f"`model` must be a keras.Model. Received: model={model!r}.")
    if not model.compiled:
        raise ValueError(
            "`model` must be compiled: its loss is what is differentiated. Received: "
            f"model={model!r}."
        )


def loss_scale_of(model: Any) -> float:
    """The present loss scale, or where one would start."""
    optimizer = model.optimizer
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return float(optimizer.dynamic_scale)
    return (
        float(optimizer.loss_scale_factor or 1.0) if has_half(model) else _FIRST_SCALE
    )


def _of_layer(operation: Any) -> str:
    """What `float32=` takes; empty for models, whose layers would all follow them."""
    single = isinstance(operation, keras.layers.Layer) and not _is_model(operation)
    return layer_path(operation) if single else ""


def _measured(model: Any, wide: Probe, half: set[int]) -> tuple[Measured, ...]:
    def is_half(operation: Any) -> bool:
        # An operation of a graph computes in what it is given.
        return id(operation) in half or not isinstance(operation, keras.layers.Layer)

    owners = {
        id(v): layer
        for layer in model._flatten_layers()
        for v in layer._trainable_variables
    }
    found = [
        Measured(
            o.path, "output", is_half(o.operation), o.values, _of_layer(o.operation)
        )
        for o in wide.outputs
    ]
    found += [
        Measured(
            o.path,
            "activation gradient",
            is_half(o.operation),
            o.gradient,
            _of_layer(o.operation),
        )
        for o in reversed(wide.outputs)
        if o.gradient is not None
    ]
    for variable in reversed(model.trainable_variables):
        gradient = wide.gradients[variable.path]
        owner = owners.get(id(variable))
        if gradient is not None:
            found.append(
                Measured(
                    variable.path,
                    "gradient",
                    id(owner) in half,
                    gradient,
                    _of_layer(owner),
                )
            )
    return tuple(found)


def _is_model(layer: Any) -> bool:
    return isinstance(layer, keras.Model)


def _broken_in_float32(batch: Any, wide: Probe) -> str:
    """What is not finite whatever the precision, and comes first; or empty."""
    for name, part in zip(("x", "y", "sample_weight"), batch, strict=True):
        for array in keras.tree.flatten(part):
            dtype = getattr(array, "dtype", None)
            if dtype is None or not keras.backend.is_float_dtype(
                keras.backend.standardize_dtype(dtype)
            ):
                continue
            if not range_of(ops.convert_to_numpy(array)).finite:
                return f"`{name}`"
    return next((o.path for o in wide.outputs if not o.values.finite), "")


def _first_broken(found: Probe, wide: Probe) -> Any:
    """The first output that is not finite, if it is in float32."""
    fine = {o.path for o in wide.outputs if o.values.finite}
    broken = next((o for o in found.outputs if not o.values.finite), None)
    return broken if broken and broken.path in fine else None


def _to_keep(verdict: Verdict, born: Any, epsilons: Sequence[str]) -> tuple[str, ...]:
    """The paths of the layers that should stay in float32."""
    troubled = [*verdict.overflowing, *verdict.outliers]
    paths = [m.layer for m in troubled] + list(epsilons)
    # Behind an overflow all the rest is not finite either.
    if born and not verdict.overflowing:
        paths.append(_of_layer(born.operation))
    return tuple(dict.fromkeys(p for p in paths if p))


def _is_cured(model: Any, batch: Any, choose: Any, kept: Sequence[str]) -> bool:
    """Is everything finite, unscaled, with these layers in float32?"""
    with policies_meanwhile(model, with_float32(choose, kept)):
        seen = probe(model, batch, 1.0)
    gradients = [g for g in seen.gradients.values() if g is not None]
    return all(o.values.finite for o in seen.outputs) and all(
        g.finite for g in gradients
    )
