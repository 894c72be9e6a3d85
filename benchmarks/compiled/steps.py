"""The steps of the suite `compiled`: made, compiled for a device, and read."""

from typing import Any, NamedTuple

import jax
import keras

import keras_mp
import keras_mp.keras_private as private
from benchmarks.compiled import by_hand, traced
from benchmarks.compiled.cases import Case
from benchmarks.compiled.compiled_tables import (
    BFLOAT16,
    BY_HAND,
    FLOAT32,
    KERAS,
    RECOMPUTED,
)
from benchmarks.compiled.devices import Device
from benchmarks.compiled.private import as_if_there, compiled
from benchmarks.compiled.roofline import cost_of
from benchmarks.results import Record
from keras_mp.installing import uninstall


class Program(NamedTuple):
    """A compiled step.

    Attributes:
        text: its optimized HLO.
        peak: bytes of memory; what is donated counts once.
        least: seconds, by XLA's count for the whole program; None on a GPU.
    """

    text: str
    peak: int
    least: float | None


def read_step(case: Case, device: Device, way: str) -> Record:
    """The least seconds of a step, its peak of memory in bytes, and what it runs."""
    program = program_of(case, device, way)
    cost = cost_of(program.text, device)
    return {
        "seconds": program.least or cost.seconds,
        "peak": program.peak,
        "products": len(cost.products),
        "float32_products": sum("f32" in p.operands for p in cost.products),
        "launches": cost.launches,
        "hidden": cost.hidden,
    }


def program_of(case: Case, device: Device, way: str) -> Program:
    """Compiles a step for a device that is not there.

    For plain Keras it removes the seams, and leaves them out: Keras traces later.
    """
    sharding = device.sharding()
    options = dict(case.options) if device.platform == "gpu" else {}
    if keras.backend.backend() == "tensorflow":
        with as_if_there(device, sharding):
            step = traced.by_tensorflow(*_model(case, device, way))
        program = compiled(step, sharding, options)
        text, memory = program.hlo_modules()[0].to_string(), program
        memory = program.get_compiled_memory_stats()
    else:
        function, arguments = (
            by_hand.step(case, device)
            if way == BY_HAND
            else traced.by_jax(*_model(case, device, way))
        )
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            arguments,
        )
        with as_if_there(device, sharding):
            lowered = function.trace(*shapes).lower()
        program = lowered.compile(options)
        text, memory = program.as_text(), program.memory_analysis()
    least = None
    if device.platform == "tpu":
        # Transfers overlap with products, so XLA's counts for the whole program apply.
        whole = program.cost_analysis()
        moved = whole["bytes accessed"] / device.bandwidth
        least = max(whole["flops"] / device.peak[False], moved)
    peak = (
        memory.temp_size_in_bytes
        + memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
    )
    return Program(text, peak, least)


def _model(case: Case, device: Device, way: str) -> tuple[Any, Any]:
    """A built model with Adam, under the policy of the way, and its batch."""
    if way in (FLOAT32, KERAS):
        uninstall()
    keras.config.set_dtype_policy(_policy(device, way))
    model = case.build()
    case.compile(model, keras.optimizers.Adam(1e-4))
    data = case.data()
    model.optimizer.build(model.trainable_variables)
    private.build_from_batch(model, data)
    return model, data


def _policy(device: Device, way: str) -> Any:
    plain = {FLOAT32: "float32", KERAS: device.half}
    if way in plain:
        return keras.DTypePolicy(plain[way])
    policy = type(keras_mp.Policy("bfloat16" if way == BFLOAT16 else device.half))
    return policy(recompute_logits=way == RECOMPUTED)
