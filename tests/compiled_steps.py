"""The programs that JAX makes of a step: what is in them, and what they cost.

Compiled, never run: so for a device that is not there, an H100 or a TPU, see
`make gpu-gates` and `make tpu-gates`. Nothing says at the trace which device it is.
"""

import functools
import inspect
import math
import os
import re
import time
from typing import NamedTuple

import jax
import keras
import numpy as np
from jax.extend.core import jaxprs_in_params
from keras.optimizers import SGD, Adam, AdamW, Muon

import keras_mp

OPTIMIZERS = {
    "Adam": Adam,
    "AdamW": functools.partial(AdamW, weight_decay=0.01),
    "SGD": functools.partial(SGD, momentum=0.9),
    "EMA": functools.partial(Adam, use_ema=True),
    "EMA that overwrites": functools.partial(
        Adam, use_ema=True, ema_overwrite_frequency=3
    ),
    "clipnorm": functools.partial(Adam, clipnorm=1.0),
    "global_clipnorm": functools.partial(Adam, global_clipnorm=1.0),
    "Muon": functools.partial(Muon, weight_decay=0.01),
    "accumulation": functools.partial(Adam, gradient_accumulation_steps=4),
    "Muon, accumulation": functools.partial(Muon, gradient_accumulation_steps=4),
}
BYTES = {"f16": 2, "bf16": 2, "pred": 1, "s8": 1, "u8": 1, "f64": 8, "s64": 8, "u64": 8}


class Program(NamedTuple):
    """A compiled step.

    Attributes:
        text: its optimized HLO.
        temporary: bytes of memory beside its arguments and results.
        peak: bytes of memory with them; what is donated counts once.
        accessed: bytes that its kernels read and write.
        gradients: bytes of the gradients in float32, a pass over the parameters.
        variables: how many are trained.
        equations: what JAX traced.
        instructions: what it gave to XLA.
        trace_seconds: of the processor, to trace it; a benchmark may ask, no test does.
        compile_seconds: of the processor, all its cores together, to lower and compile.
    """

    text: str
    temporary: int
    peak: int
    accessed: int
    gradients: int
    variables: int
    equations: int
    instructions: int
    trace_seconds: float
    compile_seconds: float

    def count(self, operation: str) -> int:
        return len(re.findall(rf" {operation}\(", self.text))

    @property
    def calls(self) -> set[str]:
        """What it calls outside of XLA."""
        return set(re.findall(r'custom_call_target="([^"]*)"', self.text))


class Chain(keras.layers.Layer):
    """Small matrices and biases one after another, `number` variables."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def build(self, shape):
        for _ in range(self.number // 2):
            self.add_weight(shape=(shape[-1], shape[-1]))
            self.add_weight(shape=(shape[-1],))

    def call(self, x):
        for kernel, bias in zip(self.weights[::2], self.weights[1::2], strict=True):
            x = keras.ops.tanh(x @ kernel + bias)
        return x


def wide():
    """Four matrices of 256 KiB; activations are small."""
    x = inputs = keras.Input((256,), batch_size=8)
    for _ in range(4):
        x = keras.layers.Dense(256, activation="relu")(x)
    return keras.Model(inputs, keras.layers.Dense(1)(x))


def normalized():
    """Convolutions and BatchNormalization: statistics that a skipped step keeps."""
    x = inputs = keras.Input((16, 16, 3), batch_size=8)
    for filters in (16, 32):
        x = keras.layers.Conv2D(filters, 3, strides=2)(x)
        x = keras.layers.ReLU()(keras.layers.BatchNormalization()(x))
    return keras.Model(inputs, keras.layers.Dense(10)(keras.layers.Flatten()(x)))


def small(number):
    inputs = keras.Input((8,), batch_size=8)
    return keras.Model(inputs, Chain(number)(inputs))


MODELS = {"wide": wide, "normalized": normalized} | {
    f"{number} variables": functools.partial(small, number) for number in (10, 100, 200)
}


@functools.cache
def train_step(
    model,
    optimizer,
    scaled,
    policy="mixed_float16",
    monitored=False,
    rolled_back=True,
):
    """The train step of `fit`, its state donated, as Keras jits it.

    With everything on: statistics and metrics put back, counts for each variable,
    bounds of the scale. Not scaled: the same with the bare optimizer. Not rolled back:
    as Keras makes it without us round our optimizer.
    """
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    with keras_mp.policy_scope(policy):
        model = MODELS[model]()
    optimizer = OPTIMIZERS[optimizer]()
    if scaled:
        optimizer = keras_mp.LossScaleOptimizer(optimizer)
    model.compile(optimizer, "mse", metrics=["mae"], auto_scale_loss=False)
    shapes = model.input_shape, model.output_shape
    data = tuple(np.zeros(shape, "float32") for shape in shapes)
    build(model, data)
    if monitored:
        keras_mp.callbacks.LossScaleMonitor(underflow=True).set_model(model)
    if not rolled_back:
        keras_mp.uninstall()
    try:
        model.make_train_function()
    finally:
        keras_mp.install()
    return step_of(model, data)


def build(model, data):
    """Creates what a step of a compiled model on this batch reads and writes."""
    model.optimizer.build(model.trainable_variables)
    model._symbolic_build(data_batch=data)


def step_of(model, data, **options):
    """Compiles the train function that the model has made, with options of XLA."""
    step = inspect.getclosurevars(inspect.unwrap(model.train_function))
    state = tuple(
        [v.value for v in variables]
        for variables in (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )
    )
    function = step.nonlocals["step_function"]
    return compiled(function, (state, data), state[0], **options)


@functools.cache
def update(optimizer, scaled):
    """`stateless_apply` on its own: gradients are arguments, the rest is donated."""
    shapes = [(512, 256), (256, 256), (256,), (256, 512), (512,)]
    variables = [keras.Variable(np.zeros(shape, "float32")) for shape in shapes]
    optimizer = OPTIMIZERS[optimizer]()
    if scaled:
        optimizer = keras_mp.LossScaleOptimizer(optimizer)
    optimizer.build(variables)
    weights = [v.value for v in variables]
    state = [v.value for v in optimizer.variables]

    def step(state, weights, grads):
        if scaled:  # As a loop does; otherwise it is warned of.
            optimizer.stateless_scale_loss(state, 1.0)
        return optimizer.stateless_apply(state, grads, weights)

    step = jax.jit(step, donate_argnums=(0, 1))
    return compiled(step, (state, weights, weights), weights)


def compiled(function, args, weights, **options):
    """Traces and compiles a jitted function, for the device of these gates."""
    args = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding()), args
    )
    started = time.process_time()
    traced = function.trace(*args)
    between = time.process_time()
    lowered = traced.lower()
    program = lowered.compile(options)
    compiled_at = time.process_time()
    text, cost = program.as_text(), program.cost_analysis()
    memory = program.memory_analysis()
    return Program(
        text=text,
        temporary=memory.temp_size_in_bytes,
        peak=memory.temp_size_in_bytes
        + memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes,
        accessed=int(cost["bytes accessed"]) if cost else bytes_of_kernels(text),
        gradients=4 * sum(math.prod(w.shape) for w in weights),
        variables=len(weights),
        equations=equations(traced.jaxpr.jaxpr, set()),
        instructions=lowered.as_text().count(" = "),
        trace_seconds=between - started,
        compile_seconds=compiled_at - between,
    )


@functools.cache
def sharding():
    """Where programs are compiled for; None for the device that is there.

    KERAS_MP_GPU_TARGET is a file that describes a GPU, KERAS_MP_TPU_TARGET the name of
    a topology, "v5e:2x2".
    """
    from jax.experimental import topologies

    if target := os.environ.get("KERAS_MP_GPU_TARGET"):
        with open(target) as file:
            topology = topologies.get_topology_desc(
                "H100", "cuda", topology="1x1x1", target_config=file.read()
            )
    elif target := os.environ.get("KERAS_MP_TPU_TARGET"):
        topology = topologies.get_topology_desc(target, "tpu")
    else:
        return None
    return jax.sharding.SingleDeviceSharding(topology.devices[0])


def platform():
    """That of the device: "cpu", "gpu" or "tpu"."""
    return (
        next(iter(sharding().device_set)).platform
        if sharding()
        else jax.default_backend()
    )


def equations(jaxpr, seen):
    """How many equations JAX traced; a function that is called again, once."""
    if id(jaxpr) in seen:
        return 0
    seen.add(id(jaxpr))
    return len(jaxpr.eqns) + sum(
        equations(each, seen)
        for eqn in jaxpr.eqns
        for each in jaxprs_in_params(eqn.params)
    )


def bytes_of_kernels(text, dtype=r"[a-z]+\d*"):
    """What the instructions of the entry computation read and write, each as a whole.

    For GPUs, where XLA does not say it without the device.
    """
    entry = text[text.index("\nENTRY") :]
    size, total = {}, 0
    for line in entry.splitlines():
        found = re.match(r"\s+(?:ROOT )?%(\S+) = (.*?) ([a-z][a-z-]*)\((.*)", line)
        if found is None:
            continue
        name, shape, operation, rest = found.groups()
        size[name] = bytes_of(shape, dtype)
        if operation in FREE:
            continue
        operands = re.findall(r"%([\w.-]+)", rest.split("), ")[0])
        total += size[name] + sum(size.get(operand, 0) for operand in operands)
    return total


FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}


def bytes_of(shape, dtype):
    return sum(
        BYTES.get(dtype, 4) * math.prod(int(d) for d in dims.split(",") if d)
        for dtype, dims in re.findall(rf"\b({dtype})\[([\d,]*)\]", shape)
    )
