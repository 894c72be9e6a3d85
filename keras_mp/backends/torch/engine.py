"""What keras_mp asks of torch: its parts, and the train step of `fit`."""

import collections
from collections.abc import Callable, Iterable
from typing import Any

import keras
import torch
from keras import ops
from torch import distributed

import keras_mp.keras_private as private
from keras_mp import interrupts
from keras_mp.backends.interface import HALF, Engine, Wrapper
from keras_mp.backends.torch import sharding, writes
from keras_mp.backends.torch.batches import TorchBatches
from keras_mp.backends.torch.measures import TorchMeasures
from keras_mp.backends.torch.private import copy_all
from keras_mp.backends.torch.step import TorchStep, highest_of_all_processes
from keras_mp.backends.train_step import any_measured, logs_of_step, loss_is_finite
from keras_mp.types import Model, Variable


class TorchEngine(TorchStep, TorchBatches, TorchMeasures, Engine):
    """Steps are eager, or traced and replayed; see `traces.py`."""

    half_dtypes = frozenset((*HALF, torch.float16, torch.bfloat16))
    fully_shard = staticmethod(sharding.fully_shard)
    shards_in_vain = staticmethod(sharding.shards_in_vain)
    shard_like = staticmethod(sharding.shard_like)
    among_shards = staticmethod(sharding.among_shards)
    write_file = staticmethod(sharding.write_file)

    @property
    def tracing(self) -> Any:
        from keras_mp.backends.torch import traces  # A second, for whoever traces.

        return traces

    @property
    def shards(self) -> bool:  # type: ignore[override]
        return distributed.is_available() and distributed.is_initialized()

    def of_shards(self) -> dict[str, Wrapper]:
        return {
            "convert_to_numpy": sharding.converted_whole,
            "Variable.__array__": sharding.read_whole,
        }

    @staticmethod
    def ends_whole(original: Callable) -> Callable:
        # An interrupt on the way out of one of Keras' `torch.no_grad` leaves it on.
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            before = torch.is_grad_enabled()
            try:
                return original(self, *args, **kwargs)
            except BaseException as error:
                torch.set_grad_enabled(before)
                private.drop_internal_frames(error)
                raise

        return run

    def set_dtype(self, variable: Variable, dtype: str) -> None:
        # In place: torch's modules and optimizers hold this parameter object.
        parameter = private.raw_value(variable)
        if parameter is not None:
            parameter.data = parameter.data.to(getattr(torch, dtype))
        private.set_dtype(variable, dtype, parameter)

    def only_shapes(self) -> bool:
        return bool(ops.convert_to_tensor(0.0).is_meta)

    def make_train_function(
        self, model: Model, original: Callable, force: bool, wrap: Wrapper
    ) -> None:
        # On torch Keras looks up `train_step` at each call: wrap the train function.
        before = model.train_function
        original(model, force)
        if model.train_function is not before:
            model.train_function = wrap(model.train_function)

    def undo_skipped(self, model: Model, scaling: Any, step: Callable) -> Callable:
        # Frozen weights, which may be nearly all weights, are copied only if the step
        # assigns to them: what torch itself writes into one is not put back.
        def undoing(data: Any) -> Any:
            frozen = {id(v) for v in _frozen_weights(model)}
            changing = model.non_trainable_variables + model.metrics_variables
            before = _with_values([v for v in changing if id(v) not in frozen])
            buffers = [(x, x.detach().clone()) for x in _buffers(model)]
            generators = self.generator_states()

            def put_back() -> None:
                with interrupts.held(), torch.no_grad():
                    for variable, value in before.values():
                        variable.assign(value)
                    for buffer, value in buffers:
                        buffer.copy_(value)
                    self.set_generator_states(generators)

            def note(variable: Variable) -> None:
                if id(variable) in frozen and id(variable) not in before:
                    before.update(_with_values([variable]))

            scaling.begin_step()
            try:
                with writes.noted_by(note):
                    logs = step(data)
                # Reading the counter would wait for the device.
                skipped = scaling.before_skip is not None
                if skipped:
                    undo_loss(logs)
                    put_back()
            except BaseException:
                if not scaling.applied:  # Half of a step: it has not been taken.
                    put_back()
                raise
            metrics = [v.value for v in model.metrics_variables]
            measured = skipped and any_measured(metrics)
            return logs_of_step(model, logs, scaling, skipped, measured)

        def undo_loss(logs: Any) -> None:
            # All processes skipped, so all are here, and they agree about their losses.
            broken = (~loss_is_finite(logs)).to(torch.int8)
            if highest_of_all_processes(broken):
                blameless = scaling.after_broken_step(scaling.before_skip)
                for variable, value in zip(scaling.variables, blameless, strict=True):
                    variable.assign(value)

        return undoing

    def may_have_skipped(self, scaling: Any) -> bool:
        return scaling.before_skip is not None


def _with_values(variables: Iterable[Variable]) -> dict[int, tuple[Any, torch.Tensor]]:
    """Variables and copies of their values, by id: one kernel copies each dtype."""
    alike = collections.defaultdict(list)
    for variable in variables:
        value = private.raw_value(variable).detach()
        kind = value.dtype, type(value)
        alike[kind].append((variable, value, torch.empty_like(value)))
    for group in alike.values():
        _, values, copies = zip(*group, strict=True)
        copy_all(copies, values)
    return {id(v): (v, copy) for group in alike.values() for v, _, copy in group}


def _frozen_weights(model: Model) -> list[Any]:
    """Weights that `trainable = False` on a layer keeps as they are."""
    layers = private.layers_in(model)
    weights = (v for layer in layers for v in private.own_trainable(layer))
    return [v for v in weights if not v.trainable]


def _buffers(model: Model) -> list[torch.Tensor]:
    """What modules of torch keep that is no weight, such as running means."""
    layers = private.layers_in(model)
    modules = [x for x in layers if isinstance(x, keras.layers.TorchModuleWrapper)]
    return [buffer for layer in modules for buffer in layer.module.buffers()]


engine = TorchEngine()
