"""Training steps on torch: `torch.amp`'s, Keras' in float32 and ours."""

import functools
import time
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import keras
import numpy as np
import torch
from keras import layers

import keras_mp
from benchmarks import models
from benchmarks.kernels import peers
from benchmarks.kernels.counting import Count, count
from benchmarks.kernels.kernels_tables import (
    AMP,
    CONVOLUTIONS,
    DECODER,
    FLOAT32,
    KERAS,
    LOGITS,
    OURS,
    SUBCLASSED,
    TRACED,
)
from benchmarks.kernels.private import products_as_on_a_gpu
from benchmarks.pairs import Quartiles, time_in_pairs
from keras_mp.installing import install, uninstall

_POLICIES: dict[str, Callable[[], Any]] = {
    FLOAT32: functools.partial(keras.DTypePolicy, "float32"),
    KERAS: functools.partial(keras.DTypePolicy, "mixed_float16"),
    OURS: keras_mp.MixedFloat16,
    TRACED: keras_mp.MixedFloat16,
}


class KernelCase(NamedTuple):
    """A network.

    Attributes:
        sizes: of the network.
        batch: examples in a batch.
        keras: sizes -> the model in Keras.
        torch: sizes -> the same in torch alone.
        narrow: the sizes that host time is measured with; empty for no host time.
    """

    sizes: dict[str, int]
    batch: int
    keras: Callable[..., Any]
    torch: Callable[..., torch.nn.Module]
    narrow: Mapping[str, int] = MappingProxyType({})


def _convolutions(depth: int, filters: int, classes: int) -> keras.Model:
    images = keras.Input((16, 16, 3))
    return keras.Model(images, _Convolutions(depth, filters, classes).call(images))


class _Convolutions(keras.Model):
    def __init__(self, depth: int, filters: int, classes: int) -> None:
        super().__init__()
        self.body = [
            layer
            for _ in range(depth)
            for layer in (
                layers.Conv2D(filters, 3, padding="same", use_bias=False),
                layers.BatchNormalization(),
                layers.ReLU(),
            )
        ]
        self.pooling = layers.GlobalAveragePooling2D()
        self.head = layers.Dense(classes)

    def call(self, x: Any, training: bool | None = None) -> Any:
        for layer in self.body:
            x = layer(x)
        return self.head(self.pooling(x))


_CONVOLUTIONS = KernelCase(
    {"depth": 8, "filters": 16, "classes": 10},
    4,
    _convolutions,
    peers.Convolutions,
    {"depth": 24, "filters": 4},
)
CASES = {
    DECODER: KernelCase(
        {"vocabulary": 4096, "length": 128, "width": 256, "depth": 4, "heads": 4},
        4,
        models.decoder,
        peers.Decoder,
        {"vocabulary": 64, "length": 8, "width": 16, "depth": 12, "heads": 2},
    ),
    LOGITS: KernelCase(
        {"vocabulary": 131072, "length": 128, "width": 64, "depth": 1, "heads": 4},
        4,
        models.decoder,
        peers.Decoder,
    ),
    CONVOLUTIONS: _CONVOLUTIONS,
    SUBCLASSED: _CONVOLUTIONS._replace(keras=_Convolutions),
}


class Step(NamedTuple):
    """A training step.

    Attributes:
        run: takes the step.
        state: returns the tensors that it updates.
    """

    run: Callable[[], object]
    state: Callable[[], Iterable[torch.Tensor]]


def _set_seams(way: str) -> None:
    """Puts our seams in for our own step, and takes them out for the others."""
    (install if way in (OURS, TRACED) else uninstall)()


def count_step(case: KernelCase, way: str) -> Count:
    """Counts the fourth step of a case in one of `WAYS`; in float16, or "float32".

    The first builds, before the second `fit` notes what the weights are, and the third
    may be traced.
    """
    with products_as_on_a_gpu():
        step = _step(case, way)
        for _ in range(3):
            step.run()
        return count(step.run, step.state())


def host_time(case: KernelCase, way: str, seconds: float) -> Quartiles:
    """The time that a step takes Python and torch, over that of torch.amp's step.

    On one thread, of a network so narrow that products take no time; see `pairs`.
    """
    torch.set_num_threads(1)
    narrow = case._replace(sizes={**case.sizes, **case.narrow})
    with products_as_on_a_gpu():
        base, other = _step(narrow, AMP), _step(narrow, way)
        for step in (base, other):
            for _ in range(3):
                step.run()
        timing = time_in_pairs(
            _repeated(base), {way: _repeated(other)}, seconds, clock=time.process_time
        )
    return timing[way].ratio


def _repeated(step: "Step") -> Callable[[int], None]:
    def run(number: int) -> None:
        for _ in range(number):
            step.run()

    return run


def _step(case: KernelCase, way: str) -> "Step":
    make = _of_torch if way == AMP else _of_keras
    return make(case, way, *_batch(case))


def _batch(case: KernelCase) -> tuple[torch.Tensor, torch.Tensor]:
    generator, sizes = np.random.default_rng(0), case.sizes
    if "vocabulary" in sizes:
        shape = case.batch, sizes["length"] + 1
        ids = generator.integers(0, sizes["vocabulary"], shape, "int32")
        return torch.tensor(ids[:, :-1]), torch.tensor(ids[:, 1:])
    x = generator.standard_normal((case.batch, 16, 16, 3), dtype="float32")
    y = generator.integers(0, sizes["classes"], case.batch).astype("int32")
    return torch.tensor(x), torch.tensor(y)


def _of_torch(case: KernelCase, way: str, x: torch.Tensor, y: torch.Tensor) -> Step:
    model = case.torch(**case.sizes)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu")
    labels = y.long().flatten()

    def run() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            logits = model(x)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    def state() -> Iterable[torch.Tensor]:
        yield from model.state_dict().values()
        for slots in optimizer.state.values():
            yield from slots.values()

    return Step(run, state)


def _of_keras(case: KernelCase, way: str, x: torch.Tensor, y: torch.Tensor) -> Step:
    before = keras.config.dtype_policy()
    _set_seams(way)
    keras.config.set_dtype_policy(_POLICIES[way]())
    model = case.keras(**case.sizes)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.Adam()
    if way in (OURS, TRACED):  # As after the steps that `fit` may take again.
        optimizer = keras_mp.LossScaleOptimizer(optimizer, retake_steps=0)
    model.compile(optimizer, loss, jit_compile=way == TRACED)
    model.make_train_function()
    keras.config.set_dtype_policy(before)

    def run() -> None:
        _set_seams(way)
        model.train_function([(x, y)])

    def state() -> Iterable[torch.Tensor]:
        return [v.value for v in (*model.variables, *model.optimizer.variables)]

    return Step(run, state)
