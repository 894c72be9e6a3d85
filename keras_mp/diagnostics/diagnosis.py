"""`diagnose`: one batch, forward and backward, and what precision does to it."""

import re
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from keras_mp.diagnostics.inspection import inspect
from keras_mp.diagnostics.probe import Probe, policies_meanwhile, probe
from keras_mp.diagnostics.ranges import range_of
from keras_mp.diagnostics.report import Report
from keras_mp.diagnostics.verdict import Measured, Verdict, verdict_on
from keras_mp.outputs import producers
from keras_mp.parts import is_graph
from keras_mp.policies import HALF, MixedFloat16, layer_path, policy_of
from keras_mp.symbolic import graph_of

_FLOAT32 = keras.DTypePolicy("float32")
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
        ValueError: if it is not compiled.

    Example:

    ```python
    print(keras_mp.diagnose(model, x[:32], y[:32]))
    ```
    """
    if not isinstance(model, keras.Model):
        raise TypeError(f"`model` must be a keras.Model. Received: model={model!r}.")
    if not model.compiled:
        raise ValueError(
            "`model` must be compiled: its loss is what is differentiated. Received: "
            f"model={model!r}."
        )
    batch = (x, y, sample_weight)
    if not model.built:
        model(x)
    scale = _scale_of(model)
    choose = _half_policies(model)
    with policies_meanwhile(model, lambda layer: _FLOAT32):
        wide = probe(model, batch, 1.0)
    with policies_meanwhile(model, choose):
        found = probe(model, batch, scale)
        half = {id(x) for x in model._flatten_layers() if _computes_in_half(x)}
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
        policy=_name(model),
        measured=measured,
        verdict=verdict,
        broken_in_float32=broken,
        broken=born.path if born else "",
        epsilons=tuple(epsilons),
        kept=kept,
        cured=_is_cured(model, batch, choose, kept) if kept else None,
    )


def _scale_of(model: Any) -> float:
    optimizer = model.optimizer
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return float(optimizer.dynamic_scale)
    return (
        float(optimizer.loss_scale_factor or 1.0) if _has_half(model) else _FIRST_SCALE
    )


def _computes_in_half(layer: Any) -> bool:
    return policy_of(layer).compute_dtype in HALF


def _has_half(model: Any) -> bool:
    return any(_computes_in_half(layer) for layer in model._flatten_layers())


def _name(model: Any) -> str:
    dtypes = [policy_of(layer).compute_dtype for layer in model._flatten_layers()]
    return next((f"mixed_{dtype}" for dtype in HALF if dtype in dtypes), "float32")


def _half_policies(model: Any) -> Any:
    """layer -> its policy in a model that is to compute in half precision."""
    if _has_half(model):
        return lambda layer: None
    policy = MixedFloat16()
    graph = graph_of(model) if is_graph(model) else None
    kept = [p for t in (graph.outputs if graph else ()) for p in producers(t)]
    kept += [x for x in model._flatten_layers() if policy.decide(x).goes_for_all]
    within = {id(part) for layer in kept for part in layer._flatten_layers()}
    half = keras.DTypePolicy(policy.name)
    return lambda layer: _FLOAT32 if id(layer) in within else half


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
    patterns = [re.compile(f"{re.escape(path)}(/.*)?") for path in kept]

    def chosen(layer: Any) -> Any:
        path = layer_path(layer)
        return _FLOAT32 if any(p.fullmatch(path) for p in patterns) else choose(layer)

    with policies_meanwhile(model, chosen):
        seen = probe(model, batch, 1.0)
    gradients = [g for g in seen.gradients.values() if g is not None]
    return all(o.values.finite for o in seen.outputs) and all(
        g.finite for g in gradients
    )
