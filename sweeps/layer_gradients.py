"""Calls a layer once, with gradients, eagerly or compiled, on the current backend.

The loss is the float32 sum of the layer's own losses and of its outputs, each element
times a fixed random number, so that all it returns has a gradient.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import tree

BACKEND = keras.backend.backend()

# The ways to run a layer: TensorFlow compiles with and without XLA.
MODES = {
    "jax": ("eager", "jit"),
    "tensorflow": ("eager", "graph", "xla"),
    "torch": ("eager",),
}[BACKEND]


def called(
    layer: Any, args: list, options: dict[str, Any], mode: str, gradient: bool
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Outputs and gradients of a built layer, by name, as NumPy arrays.

    Args:
        layer: a built layer; afterwards its state is the same as before.
        args: its positional arguments: NumPy arrays, or structures of them.
        options: its keyword arguments.
        mode: one of MODES.
        gradient: whether to differentiate by float inputs and trainable weights.
    """
    # Copied: on torch, and on CPUs, NumPy's arrays are the variables' own memory.
    before = [(v, np.array(keras.ops.convert_to_numpy(v))) for v in layer.variables]
    args, floats, outputs_of = _prepared(layer, args, options)
    run = {"jax": _jax, "tensorflow": _tensorflow, "torch": _torch}[BACKEND]
    try:
        outputs, by_input, by_weight = run(
            layer, args, floats, outputs_of, mode, gradient
        )
    finally:
        for variable, value in before:
            variable.assign(value)
    names = [f"gradient by input {i}" for i, float_ in enumerate(floats) if float_]
    weights = [
        f"gradient by {v.name.rstrip('_0123456789')} {i}"
        for i, v in enumerate(layer.trainable_variables)
    ]
    gradients = dict(zip(names + weights, [*by_input, *by_weight], strict=True))
    return (
        {f"output {i}": _array(x) for i, x in enumerate(outputs) if x is not None},
        {name: _array(g) for name, g in gradients.items() if g is not None},
    )


def _prepared(
    layer: Any, args: list, options: dict[str, Any]
) -> tuple[list, list[bool], Callable[[list], list]]:
    """The arguments, which of them are floats, and what calls the layer with them."""
    # Text stays in NumPy: only TensorFlow has text tensors.
    args = tree.map_structure(
        lambda x: keras.ops.convert_to_tensor(x) if _is_integer(x) else x, args
    )

    def outputs_of(arguments: list) -> list:
        result = layer(*arguments, **options)
        return tree.flatten(result) + list(layer.losses)

    return args, [_is_float(x) for x in tree.flatten(args)], outputs_of


def _is_float(x: Any) -> bool:
    return getattr(getattr(x, "dtype", None), "kind", "") == "f"


def _is_integer(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.dtype.kind in "iub"


def _array(x: Any) -> np.ndarray:
    if isinstance(x, np.ndarray):
        return x
    if keras.backend.is_float_dtype(keras.backend.standardize_dtype(x.dtype)):
        x = keras.ops.cast(x, "float32")
    return np.array(keras.ops.convert_to_numpy(x))


def _with_floats(args: list, floats: list[bool], values: list) -> list:
    """The arguments with their floating-point arrays replaced."""
    values = list(values)
    flat = [
        values.pop(0) if is_float else x
        for x, is_float in zip(tree.flatten(args), floats, strict=True)
    ]
    return tree.pack_sequence_as(args, flat)


def _floats_of(args: list, floats: list[bool]) -> list:
    """The floating-point arrays among the arguments."""
    pairs = zip(tree.flatten(args), floats, strict=True)
    return [x for x, is_float in pairs if is_float]


def _loss(outputs: list) -> Any:
    total = keras.ops.zeros((), "float32")
    for i, x in enumerate(outputs):
        if x is not None and keras.backend.is_float_dtype(
            keras.backend.standardize_dtype(x.dtype)
        ):
            # Not the inputs' seeds, as many layers have no gradient along their input.
            weights = np.random.default_rng(1000 + i).standard_normal(x.shape)
            weights = _unfolded(keras.ops.convert_to_tensor(weights, "float32"))
            total = total + keras.ops.sum(keras.ops.cast(x, "float32") * weights)
    return total


def _unfolded(constant: Any) -> Any:
    """Keeps XLA from folding the constant, which is slow and rounds differently."""
    if BACKEND != "jax":
        return constant
    import jax

    return jax.lax.optimization_barrier(constant)


def _jax(
    layer: Any,
    args: list,
    floats: list[bool],
    outputs_of: Callable,
    mode: str,
    gradient: bool,
) -> tuple[list, list, list]:
    import jax

    run, values = _jax_program(layer, args, floats, outputs_of, gradient)
    result = (jax.jit(run) if mode == "jit" else run)(*values)
    if gradient:
        (by_input, by_weight), outputs = result
        return outputs, by_input, by_weight
    inputs, weights, _ = values
    return result[1], [None] * len(inputs), [None] * len(weights)


def jax_program(
    layer: Any, args: list, options: dict[str, Any], gradient: bool
) -> tuple[Callable, tuple[list, list, list]]:
    """A function that calls a layer, or differentiates it, and what to call it with."""
    return _jax_program(layer, *_prepared(layer, args, options), gradient)


def _jax_program(
    layer: Any, args: list, floats: list[bool], outputs_of: Callable, gradient: bool
) -> tuple[Callable, tuple[list, list, list]]:
    import jax

    inputs = [jax.numpy.asarray(x) for x in _floats_of(args, floats)]
    weights = [v.value for v in layer.trainable_variables]
    others = [v.value for v in layer.non_trainable_variables]

    def forward(inputs: list, weights: list, others: list) -> tuple[Any, list]:
        state = zip(
            layer.trainable_variables + layer.non_trainable_variables,
            [*weights, *others],
            strict=True,
        )
        with keras.StatelessScope(list(state), collect_losses=True):
            outputs = outputs_of(_with_floats(args, floats, inputs))
        return _loss(outputs), outputs

    run = jax.grad(forward, argnums=(0, 1), has_aux=True) if gradient else forward
    return run, (inputs, weights, others)


def _tensorflow(
    layer: Any,
    args: list,
    floats: list[bool],
    outputs_of: Callable,
    mode: str,
    gradient: bool,
) -> tuple[list, list, list]:
    import tensorflow as tf

    inputs = [tf.constant(x) for x in _floats_of(args, floats)]
    weights = [v.value for v in layer.trainable_variables]

    def forward(inputs: list) -> tuple[list, list, list]:
        if not gradient:
            outputs = outputs_of(_with_floats(args, floats, inputs))
            return outputs, [None] * len(inputs), [None] * len(weights)
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            outputs = outputs_of(_with_floats(args, floats, inputs))
            loss = _loss(outputs)
        grads = tape.gradient(loss, [inputs, weights])
        grads = tree.map_structure(
            lambda g: None if g is None else tf.convert_to_tensor(g),
            grads,
            none_is_leaf=True,
        )
        return outputs, *grads

    if mode != "eager":
        forward = tf.function(forward, jit_compile=mode == "xla", autograph=False)
    return forward(inputs)


def _torch(
    layer: Any,
    args: list,
    floats: list[bool],
    outputs_of: Callable,
    mode: str,
    gradient: bool,
) -> tuple[list, list, list]:
    import torch

    inputs = [torch.tensor(x, requires_grad=gradient) for x in _floats_of(args, floats)]
    weights = [v.value for v in layer.trainable_variables]
    none = [None] * len(inputs), [None] * len(weights)
    if not gradient:
        with torch.no_grad():
            return outputs_of(_with_floats(args, floats, inputs)), *none
    outputs = outputs_of(_with_floats(args, floats, inputs))
    loss = _loss(outputs)
    if not loss.requires_grad:
        return outputs, *none
    grads = torch.autograd.grad(loss, inputs + weights, allow_unused=True)
    return outputs, list(grads[: len(inputs)]), list(grads[len(inputs) :])
