"""What a model returns: its output layers compute in float32, and the rest is cast.

A cast at the end makes no value better. It is for programs that use the outputs in
float32, because TensorFlow does not mix dtypes.
"""

import collections
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras

import keras_mp.keras_private as private
from keras_mp.backends import engine
from keras_mp.backends.leaves import is_half_tensor, leaves
from keras_mp.policies import hidden, returned, symbolic
from keras_mp.policies.choosing import Plan, carry_out, decision_for
from keras_mp.policies.layers import is_composite, is_graph, policy_of
from keras_mp.policies.paths import name_layers
from keras_mp.policies.policy import ChoosingPolicy, chooser_of
from keras_mp.types import Layer, Model, Tensor

# The compiled models with a graph, each with the ids of the layers that none of its
# losses reads.
_hidden: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def note_compiled(model: Model) -> None:
    """Decides again which layers of a model that was just compiled are its heads.

    A head is a layer that a loss reads, unless another compiled model has it in its
    middle: that model's loss is computed from float32 anyway. It does not matter which
    models call this one, or contain it without being compiled.
    """
    name_layers(model)
    plan = Plan()
    if ChoosingPolicy.paths_matter:
        plan.by_paths(model)
    outputs = list(_output_layers(model))
    if is_graph(model):
        of_heads = {id(x) for head in outputs for x in private.layers_in(head)}
        inside = [x for x in private.layers_in(model) if id(x) not in of_heads]
        _hidden[model] = {id(layer) for layer in inside}
        for layer in inside:
            plan.no_head(layer)
    plan_heads(plan, model, outputs)
    if changed := carry_out(plan):
        symbolic.refresh(model, changed)
        _follow(model, {id(layer) for layer in changed})


def note_first_call(layer: Layer, becomes_part: bool) -> None:
    """Names the layers within a layer, or model, that nothing else is calling.

    Args:
        layer: the layer or model.
        becomes_part: whether it is called on symbols, to become part of a model.
    """
    name_layers(layer, within_another=becomes_part)
    if isinstance(layer, keras.Model) and ChoosingPolicy.paths_matter:
        plan = Plan()
        plan.by_paths(layer)
        if changed := carry_out(plan):
            symbolic.refresh(layer, changed)


def note_changed(model: Model, layers: list[Layer]) -> None:
    """Takes notice that layers of a model compute in another precision than before."""
    symbolic.refresh(model, layers)
    symbolic.forget_traces(model)
    _follow(model, set(map(id, layers)))


def _follow(model: Model, changed: set[int]) -> None:
    """Lets other compiled models know that layers of theirs have changed."""
    for other in _others(model):
        theirs = [x for x in private.layers_in(other) if id(x) in changed]
        if theirs:
            symbolic.refresh(other, theirs)
            symbolic.forget_traces(other)


def _others(model: Model) -> list[Any]:
    """The other compiled models. `keyrefs` copies at once: threads compile, too."""
    found = [reference() for reference in _hidden.keyrefs()]
    return [other for other in found if other is not None and other is not model]


def plan_heads(plan: Plan, model: Model, outputs: Iterable[Any] | None = None) -> None:
    """Keeps the output layers of a model in float32; without a graph, once called.

    Only layers for which a `ChoosingPolicy` has decided: what the user said explicitly
    for a layer wins. A layer made of layers stays unless it has `autocast=False`,
    because nobody knows what it computes from their results. An output without a loss
    in `compile` stays, too, and so does a layer in the middle of another compiled
    model.

    Args:
        outputs: the output layers, if they are known.
    """
    hidden = {i for other in _others(model) for i in _hidden.get(other, ())}
    for layer in _output_layers(model) if outputs is None else outputs:
        stays = is_composite(layer) and layer.autocast
        if not stays and id(layer) not in hidden:
            plan.head(layer)


def in_float32(
    model: Model,
    outputs: Any,
    is_half: Callable = is_half_tensor,
    cast: Callable = hidden.in_float32,
) -> Any:
    """What the outermost call of a model returns: half-precision tensors in float32.

    Symbolic tensors stay, and so does what the user chose half precision for: the
    output layer of a graph, or the whole of a subclassed model, with a `dtype` of
    Keras' own.
    """
    is_one = not isinstance(outputs, dict | list | tuple)
    if is_one and getattr(outputs, "dtype", None) not in engine.half_dtypes:
        return outputs  # Of most calls, without another function.
    if not any(map(is_half, leaves(outputs))):
        return outputs
    flat = keras.tree.flatten(outputs)
    chosen = [any(map(_users_choice, layers)) for layers in _makers(model)]
    if len(chosen) != len(flat):  # It has no graph, or a `call` of its own.
        chosen = [_users_choice(model)] * len(flat)
    wide = [
        cast(x) if is_half(x) and not stays else x
        for x, stays in zip(flat, chosen, strict=True)
    ]
    return keras.tree.pack_sequence_as(outputs, wide)


def specs_in_float32(model: Model, specs: Any) -> Any:
    """The symbolic tensors that say what the outermost call of a model returns."""
    return in_float32(model, specs, symbolic.is_half, symbolic.copy_in_float32)


def _makers(model: Model) -> list[Iterator[Any]]:
    """The layers that make each output of a model with a graph."""
    if not is_graph(model):
        return []
    graph = private.graph_of(model) if isinstance(model, keras.Sequential) else model
    if graph is None:
        return [_leaves(model.layers[-1])]
    return [producers(tensor) for tensor in graph.outputs]


def _users_choice(layer: Layer) -> bool:
    """Has the user, and no `ChoosingPolicy`, chosen what the layer computes in?"""
    return decision_for(layer) is None and chooser_of(policy_of(layer)) is None


def _output_layers(model: Model) -> Iterator[Any]:
    graph = symbolic.graph_of(model) if is_graph(model) else None
    if graph is not None:
        yield from _ends(graph, _read_by_losses(model, graph.output))
    elif isinstance(model, keras.Sequential):
        for layer in model.layers[-1:]:
            yield from _leaves(layer)
    else:
        makers = _read_by_losses(model, returned.makers_of(model))
        yield from (layer for layer in makers if layer is not None)


def _ends(graph: Any, outputs: list[Any]) -> Iterator[Any]:
    """The layers whose values make up these outputs of a graph.

    Looks through plain operations and layers without weights, unless something else
    reads what they read: a value that is added to an output and used elsewhere stays.
    """
    wanted = {id(tensor) for tensor in outputs}
    readers: dict[int, set[int]] = collections.defaultdict(set)
    seen_through: set[int] = set()
    nodes = private.nodes_by_depth(graph)
    for node in itertools.chain.from_iterable(nodes[depth] for depth in sorted(nodes)):
        ends = [
            i in wanted or (bool(readers[i]) and readers[i] <= seen_through)
            for i in map(id, node.outputs)
        ]
        if any(ends):
            yield from _layers_behind(node, ends)
            if _passes_values_on(node.operation):
                seen_through.add(id(node))
        for tensor in node.input_tensors:
            readers[id(tensor)].add(id(node))


def _layers_behind(node: Any, ends: list[bool]) -> Iterator[Any]:
    """The layers that make some of what a call in a graph returns."""
    layer = node.operation
    if node.is_input or not isinstance(layer, keras.layers.Layer):
        return
    if isinstance(layer, keras.Model):
        yield from _leaves(layer)
    elif is_composite(layer) and layer.autocast:
        makers = keras.tree.flatten(returned.makers_in(layer, node))
        yield from (m for m, end in zip(makers, ends, strict=False) if m and end)
    else:
        yield layer


def _passes_values_on(operation: Any) -> bool:
    is_layer = isinstance(operation, keras.layers.Layer)
    return not is_layer or not (operation.weights or is_composite(operation))


def _read_by_losses(model: Model, outputs: Any) -> list[Any]:
    """The outputs of a model, without those whose loss is None."""
    loss, flat = getattr(model, "loss", None), keras.tree.flatten(outputs)
    if isinstance(loss, dict) and isinstance(outputs, dict):
        return [x for name, x in outputs.items() if loss.get(name) is not None]
    if isinstance(loss, (list, tuple)) and len(loss) == len(flat):
        pairs = zip(flat, loss, strict=True)
        return [x for x, its_loss in pairs if its_loss is not None]
    return flat


def producers(tensor: Tensor) -> Iterator[Any]:
    """The layers whose values make up a tensor, looking through plain operations."""
    operation, call = private.origin(tensor)
    if isinstance(operation, keras.layers.Layer):
        yield from _leaves(operation)
        return
    for argument in private.calls_of(operation)[call].input_tensors:
        yield from producers(argument)


def _leaves(layer: Layer) -> Iterator[Any]:
    if isinstance(layer, keras.layers.InputLayer):
        return
    if is_graph(layer):
        yield from _output_layers(layer)
    elif not isinstance(layer, keras.Model):
        yield layer
