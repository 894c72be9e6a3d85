"""The products of a model's heads: half-precision operands, float32 results.

A head keeps its float32 policy: bias, activation, what it returns and what is saved
are float32. In a language model its three products are more than half of a step. On
NVIDIA's GPUs float32 products are TF32 anyway, with the 10 bits of float16; on TPUs
they are passes in bfloat16.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import keras

import keras_mp.keras_private as private
from keras_mp.backends.interface import BFLOAT16, HALF
from keras_mp.backends.leaves import leaves
from keras_mp.messages import warnings_at_the_user
from keras_mp.policies.choosing import decision_for, output_rule
from keras_mp.policies.layers import policy_of
from keras_mp.policies.policy import FLOAT32, Decision
from keras_mp.policies.record import record_of, records
from keras_mp.policies.weights import bring_to, has_bfloat16, has_large
from keras_mp.repairs.products import HalfOperands, half_operands
from keras_mp.types import Layer, Model

# The metrics, as `compile` takes them, that only read which logit is the largest.
_OF_CLASSES = (
    "accuracy",
    "acc",
    "sparse_categorical_accuracy",
    "categorical_accuracy",
    keras.metrics.sparse_categorical_accuracy,
    keras.metrics.categorical_accuracy,
    keras.metrics.SparseCategoricalAccuracy,
    keras.metrics.CategoricalAccuracy,
)
IN_FILES = "keras_mp_heads"
IN_BFLOAT16 = "keras_mp_bfloat16_heads"  # The heads with a bfloat16 kernel.


def is_head(layer: Layer) -> bool:
    decision = decision_for(layer)
    return decision is not None and decision.head


def call(head: Any, inputs: Any, original: Callable[[], Any]) -> Any:
    """Calls a head with these inputs.

    Operands are half precision if the input is, before Keras casts it to float32: raw
    features are not rounded. The same holds in the products of the gradient, unless it
    would be float16 and its loss is not scaled.
    """
    dtype = operands_dtype(head, inputs)
    if dtype is None:
        scope: Any = contextlib.nullcontext()
        if has_bfloat16(head.weights):  # They meet inputs from a float32 layer.
            scope = private.AutocastScope("float32")
        with scope:
            return original()
    keeps_range = dtype == "bfloat16" or records[id(head)].loss_is_scaled
    gradient = dtype if keeps_range else "float32"
    tied = any(getattr(x, "tie_weights", False) for x in private.layers_in(head))
    # bfloat16 weights have bfloat16 gradients, summed or not.
    tied = tied and not has_bfloat16(head.weights)
    how = HalfOperands(dtype, gradient, tied, *reading_of_logits(head))
    # Keras autocasts an embedding within a float32 layer that does not autocast.
    with half_operands(how), private.AutocastScope(None):
        return original()


def reading_of_logits(layer: Layer) -> tuple[str, bool]:
    """`logits` and `classes` of the `HalfOperands` of a head."""
    decision: Any = decision_for(layer)
    read = records[id(layer)].metrics_read
    # A layer from a file has no chooser: only the global policy can say.
    chooser = decision.chooser or keras.config.dtype_policy()
    if getattr(chooser, "recompute_logits", False):
        return "recomputed", read == "classes"
    return "whole" if read == "logits" else "in chunks", read == "classes"


def operands_dtype(layer: Layer, inputs: Any) -> str | None:
    """The dtype of the operands of a layer's products; None for its own."""
    if not (is_head(layer) and has_large(layer)):
        return None
    dtypes = {
        keras.backend.standardize_dtype(x.dtype)
        for x in leaves(inputs)
        if hasattr(x, "dtype")
    }
    return next((dtype for dtype in HALF if dtype in dtypes), None)


def with_heads(model: Model, config: dict[str, Any]) -> dict[str, Any]:
    """A compile config for a file, with the places of the large heads in the model.

    Layers are stored with a stock float32 policy, whoever chose it. Keras ignores these
    entries, as it ignores anything else beside the config of an object. In that of an
    optimizer of keras_mp they are within, because it may be read before all else.
    """
    heads = {
        place: layer
        for place, layer in enumerate(private.layers_in(model))
        if is_head(layer) and has_large(layer)
    }
    optimizer = config.get("optimizer")
    if heads and isinstance(optimizer, dict):
        ours = (optimizer.get("registered_name") or "").startswith("keras_mp>")
        stored = optimizer["config"] if ours else optimizer
        stored[IN_FILES] = list(heads)
        half = [place for place, layer in heads.items() if has_bfloat16(layer.weights)]
        if half:
            stored[IN_BFLOAT16] = half
    return config


def from_file(config: dict[str, Any], make: Callable[[dict[str, Any]], Any]) -> Any:
    """Makes an optimizer of keras_mp, which keeps what its config says of heads.

    Args:
        config: what a file holds.
        make: makes it from the config without that.
    """
    places = {name: config[name] for name in (IN_FILES, IN_BFLOAT16) if name in config}
    optimizer = make({k: v for k, v in config.items() if k not in places})
    if places:
        vars(optimizer)[IN_FILES] = places  # Keras does not track it.
    return optimizer


def find_heads(model: Model, stored: dict[str, Any]) -> None:
    """Makes heads of the layers that were heads when the model was saved.

    Args:
        model: a model that is being read from a file.
        stored: what the file says of heads, among other things.
    """
    for place, layer in enumerate(private.layers_in(model)):
        if place in stored.get(IN_FILES, []) and policy_of(layer) == FLOAT32:
            decision = Decision(policy_of(layer), output_rule(layer), head=True)
            record_of(layer).decision = decision
            if place in stored.get(IN_BFLOAT16, []):
                for part in private.layers_in(layer):
                    bring_to("float32", part, large=BFLOAT16)


def note_readers(layers: list[Layer], scaled: bool, metrics: Any) -> None:
    """Remembers for each head among layers what its model was compiled with.

    Args:
        layers: those of the model.
        scaled: whether its loss is scaled.
        metrics: all that it was compiled with, nested.
    """
    given = keras.tree.flatten(metrics)
    known = {x in _OF_CLASSES or type(x) in _OF_CLASSES for x in given if x is not None}
    read = "logits" if False in known else "classes" if known else "nothing"
    for layer in layers:
        if is_head(layer):
            record = records[id(layer)]
            record.loss_is_scaled, record.metrics_read = scaled, read


def wrap_get_compile_config(original: Callable) -> Callable:
    """Wraps what a file says of `compile`."""

    def get_compile_config(self: Any) -> Any:
        return with_heads(self, original(self))

    return get_compile_config


def wrap_compile_from_config(original: Callable) -> Callable:
    """Wraps `compile` by what a file says."""

    def compile_from_config(self: Any, config: Any) -> Any:
        optimizer = config.get("optimizer")
        find_heads(self, optimizer if isinstance(optimizer, dict) else {})
        with warnings_at_the_user():  # That a `compile` of the user's is not called.
            return original(self, config)

    return compile_from_config
