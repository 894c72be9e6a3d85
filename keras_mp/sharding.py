"""`fully_shard`: a model whose weights are spread over several processes, on torch."""

import collections
import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras

import keras_mp.keras_private as private
from keras_mp import wanted
from keras_mp.backends import engine
from keras_mp.messages import warn
from keras_mp.policies.layers import children_of
from keras_mp.policies.paths import layer_path
from keras_mp.types import Layer, Model, Optimizer, Variable

# A layer with a smaller share of the weights has no group of its own: gathering it
# takes longer than sending it. It is gathered with others like it, for a whole pass.
SMALL = 0.01
# The models whose sharding by torch was told; `in` alone reads it.
_warned: weakref.WeakSet = weakref.WeakSet()


def fully_shard(model: keras.Model, mesh: Any = None) -> keras.Model:
    """Spreads a model's weights, gradients and optimizer states over processes.

    Needs torch, which does it with FSDP2: each process holds a part of every weight,
    and a layer's weights are gathered while it computes. `fit` and custom loops work
    unchanged, with different batches in each process. Gradients are averaged over all
    processes, and if one of them skips a step, all do. Training starts with the weights
    of the first process.

    All processes must make the same calls, including those that read a weight,
    `model.save` and `model.save_weights`. Only the first process writes the file, which
    holds whole weights and opens anywhere.

    Args:
        model: a built `keras.Model`, compiled or not.
        mesh: a torch `DeviceMesh` with one dimension, or with two named ones, the first
            for copies and the second for shards. None means all processes.

    Returns:
        `model`.

    Raises:
        TypeError: if `model` is not a `keras.Model`.
        ValueError: if it is not built, or already sharded; for any other `mesh`; on a
            backend other than torch; if `torch.distributed` is not initialized.

    Source: PyTorch, `torch.distributed.fsdp.fully_shard`.

    Example:

    ```python
    torch.distributed.init_process_group()  # under `torchrun train.py`
    model = keras_mp.fully_shard(build_model())
    model.compile("adam", "mse")
    model.fit(x_of_this_process, y_of_this_process)
    ```
    """
    if not isinstance(model, keras.Model):
        raise TypeError(f"`model` must be a keras.Model. Received: model={model!r}.")
    if not model.built or not model.weights:
        raise ValueError(
            "`model` must be built, so that it has weights. Received: model "
            f"{model.name!r}, which has none. Call it on data, or `model.build`."
        )
    wanted.sharding()  # Whatever it computes in: a file gathers the shards.
    engine.fully_shard(model, _groups(model), mesh)
    for reference, slot in _slots(getattr(model, "optimizer", None)):
        engine.shard_like(reference, slot)
    return model


def warn_of_torchs_own(model: Model) -> None:
    """Warns once if torch's own `fully_shard` was called on layers of a model."""
    if model in _warned:
        return
    for layer in private.layers_in(model):
        if engine.shards_in_vain(layer):
            _warned.add(model)
            warn(
                f"torch's `fully_shard` does nothing for {layer_path(layer)!r}: Keras' "
                "variables stay whole in every process, and their gradients are not "
                "averaged. Create a new model, and call "
                "`keras_mp.fully_shard(model)` instead."
            )
            return


def _groups(model: Model) -> list[tuple[Any, list[Any]]]:
    """Layers, each with the weights that only it reads, and the model with the rest."""
    blocks = {id(block): block for block in _blocks(model)}.values()
    weights = {id(block): _weights(block) for block in blocks}
    readers = collections.Counter(id(v) for of in weights.values() for v in of)
    everything = _weights(model)
    least = SMALL * _size(everything)
    groups = []
    for block in blocks:
        own = [
            v
            for v in weights[id(block)]
            # A regularizer reads it once more, after the pass.
            if readers[id(v)] == 1 and getattr(v, "regularizer", None) is None
        ]
        if _size(own) >= least:
            groups.append((block, own))
    taken = {id(v) for _, own in groups for v in own}
    return [*groups, (model, [v for v in everything if id(v) not in taken])]


def _blocks(layer: Layer) -> Iterator[Any]:
    """The outermost layers that are not models."""
    for child in children_of(layer):
        if isinstance(child, keras.Model):
            yield from _blocks(child)
        else:
            yield child


def _weights(layer: Layer) -> list[Any]:
    """What an optimizer may train, frozen or not, without statistics and seeds."""
    layers = private.layers_in(layer)
    found = {id(v): v for each in layers for v in private.own_trainable(each)}
    return [*found.values()]


def _size(variables: Iterable[Variable]) -> int:
    return sum(math.prod(v.shape) for v in variables)


def _slots(optimizer: Optimizer) -> Iterator[tuple[Any, Any]]:
    """Each weight, with each variable that the optimizer has for it so far."""
    if optimizer is None:
        return
    for part in (optimizer, *_within(optimizer)):
        trained = private.own_trainable(part)
        for value in vars(part).values():
            if isinstance(value, list) and len(value) == len(trained):
                pairs = zip(trained, value, strict=True)
                yield from (p for p in pairs if p[1] is not None and p[0] is not p[1])


def _within(optimizer: Optimizer) -> Iterator[Any]:
    inner = getattr(optimizer, "inner_optimizer", None)
    for part in (*([inner] if inner else []), *getattr(optimizer, "optimizers", ())):
        yield part
        yield from _within(part)


def wrap_save(original: Callable) -> Callable:
    """Wraps `save` and `save_weights`."""

    def save(self: Any, *args: Any, **kwargs: Any) -> Any:
        write = functools.partial(original, self, *args, **kwargs)
        return engine.write_file(self, write)

    return save


def wrap_add_slot(original: Callable) -> Callable:
    """Wraps what creates an optimizer's variables."""

    def add_variable_from_reference(
        self: Any, reference_variable: Any, *args: Any, **kwargs: Any
    ) -> Any:
        slot = original(self, reference_variable, *args, **kwargs)
        engine.shard_like(reference_variable, slot)
        return slot

    return add_variable_from_reference
