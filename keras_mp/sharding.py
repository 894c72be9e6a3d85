"""`fully_shard`: a model whose weights are spread over several processes, on torch."""

import collections
import math
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import keras

import keras_mp.keras_private as private
from keras_mp.backends import engine
from keras_mp.display.messages import warn
from keras_mp.policies.layers import children_of, layer_path

# A layer with less of a model's weights has no group of its own: to gather it alone
# takes longer than to send it. With others like it, it is gathered for a whole pass.
SMALL = 0.01
_warned: weakref.WeakSet = weakref.WeakSet()


def fully_shard(model: keras.Model, mesh: Any = None) -> keras.Model:
    """Spreads a model's weights, gradients and optimizer states over processes.

    On torch, by FSDP2: each process holds a part of every weight, and a layer's are
    gathered while it computes. `fit` and loops of your own go on as they are, each
    process with batches of its own; gradients are averaged over all processes, a step
    that one of them skips is skipped by all. Begins with the weights of the first
    process.

    All processes have to make the same calls, those that read a weight among them. Of
    `model.save` and `model.save_weights` too, and the first process alone writes the
    file: it holds whole weights, and opens anywhere.

    Args:
        model: a built `keras.Model`, compiled or not.
        mesh: a `DeviceMesh` of torch with one dimension; or with two that have names:
            along the first are copies, along the second shards. None for all processes.

    Returns:
        `model`.

    Raises:
        TypeError: if `model` is no `keras.Model`.
        ValueError: if it is not built, or sharded already; for another `mesh`; on
            another backend than torch; where torch knows no other processes.

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
    engine.fully_shard(model, _groups(model), mesh)
    for reference, slot in _slots(getattr(model, "optimizer", None)):
        engine.shard_like(reference, slot)
    return model


def warn_of_torchs_own(model: Any) -> None:
    """Warns once of a model whose layers torch's own `fully_shard` was called on."""
    if model in _warned:
        return
    for layer in private.layers_in(model):
        if engine.shards_in_vain(layer):
            _warned.add(model)
            warn(
                f"torch's `fully_shard` does nothing for {layer_path(layer)!r}: Keras' "
                "variables stay whole in every process, and their gradients are not "
                "averaged. Create the model anew, and call "
                "`keras_mp.fully_shard(model)` in its place."
            )
            return


def _groups(model: Any) -> list[tuple[Any, list[Any]]]:
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


def _blocks(layer: Any) -> Iterator[Any]:
    """The outermost layers that are no models."""
    for child in children_of(layer):
        if isinstance(child, keras.Model):
            yield from _blocks(child)
        else:
            yield child


def _weights(layer: Any) -> list[Any]:
    """All that an optimizer may train, frozen or not: no statistics, and no seeds."""
    layers = private.layers_in(layer)
    found = {id(v): v for each in layers for v in private.own_trainable(each)}
    return [*found.values()]


def _size(variables: Iterable[Any]) -> int:
    return sum(math.prod(v.shape) for v in variables)


def _slots(optimizer: Any) -> Iterator[tuple[Any, Any]]:
    """The variables that an optimizer has for each weight by now, with the weight."""
    if optimizer is None:
        return
    for part in (optimizer, *_within(optimizer)):
        trained = private.own_trainable(part)
        for value in vars(part).values():
            if isinstance(value, list) and len(value) == len(trained):
                pairs = zip(trained, value, strict=True)
                yield from (p for p in pairs if p[1] is not None and p[0] is not p[1])


def _within(optimizer: Any) -> Iterator[Any]:
    inner = getattr(optimizer, "inner_optimizer", None)
    for part in (*([inner] if inner else []), *getattr(optimizer, "optimizers", ())):
        yield part
        yield from _within(part)
