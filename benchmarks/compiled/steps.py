"""The steps of the suite `compiled`: made, compiled for a device, and read."""

import inspect
from typing import Any

import jax
import keras

import keras_mp
import keras_mp.keras_private as private
from benchmarks.compiled import by_hand
from benchmarks.compiled.cases import Case
from benchmarks.compiled.compiled_tables import (
    BFLOAT16,
    BY_HAND,
    FLOAT32,
    KERAS,
    RECOMPUTED,
)
from benchmarks.compiled.devices import Device
from benchmarks.compiled.private import as_if_there
from benchmarks.compiled.roofline import cost_of
from benchmarks.results import Record
from keras_mp.installing import uninstall


def read_step(case: Case, device: Device, way: str) -> Record:
    """The least seconds of a step, its peak of memory in bytes, and its products.

    For plain Keras it removes the seams, and leaves them out: Keras traces later.
    """
    sharding = device.sharding()
    if way == BY_HAND:
        half = device.half.removeprefix("mixed_")
        attention = "cudnn" if device.platform == "gpu" else "xla"
        function, arguments = by_hand.step(case, half, attention)
    else:
        function, arguments = _step(case, device, way)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments
    )
    with as_if_there(device, sharding):
        lowered = function.trace(*shapes).lower()
    options = dict(case.options) if device.platform == "gpu" else {}
    program = lowered.compile(options)
    memory = program.memory_analysis()
    cost = cost_of(program.as_text(), device)
    seconds = cost.seconds
    if device.platform == "tpu":
        # Transfers overlap with products, so XLA's counts for the whole program apply.
        whole = program.cost_analysis()
        moved = whole["bytes accessed"] / device.bandwidth
        seconds = max(whole["flops"] / device.peak[False], moved)
    return {
        "seconds": seconds,
        "peak": memory.temp_size_in_bytes
        + memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes,
        "products": len(cost.products),
        "float32_products": sum("f32" in p.operands for p in cost.products),
    }


def _step(case: Case, device: Device, way: str) -> tuple[Any, tuple]:
    """The jitted step of `fit`, with Adam, and its arguments."""
    if way in (FLOAT32, KERAS):
        uninstall()
    keras.config.set_dtype_policy(_policy(device, way))
    model = case.build()
    case.compile(model, keras.optimizers.Adam(1e-4))
    data = case.data()
    model.optimizer.build(model.trainable_variables)
    private.build_from_batch(model, data)
    model.make_train_function()
    state = tuple(
        [v.value for v in variables]
        for variables in (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )
    )
    step = inspect.getclosurevars(inspect.unwrap(model.train_function))
    return step.nonlocals["step_function"], (state, data)


def _policy(device: Device, way: str) -> Any:
    plain = {FLOAT32: "float32", KERAS: device.half}
    if way in plain:
        return keras.DTypePolicy(plain[way])
    policy = type(keras_mp.Policy("bfloat16" if way == BFLOAT16 else device.half))
    return policy(recompute_logits=way == RECOMPUTED)
