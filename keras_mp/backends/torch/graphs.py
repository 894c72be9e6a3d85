"""The graphs of traces: what changes no value is left out, the rest becomes Python."""

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from keras_mp.backends.torch.private import (
    MULTIPLY_ALL,
    RESHAPES,
    is_operator,
    native,
    shares_memory,
    writes_into,
)

aten = torch.ops.aten


def _calls(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function"]


def _has_effect(node: fx.Node) -> bool:
    return node.target not in (*_VIEWS, aten.empty.memory_format)


def clean(graph: fx.Graph) -> None:
    """Leaves out what changes no value: views that undo or repeat one another."""
    known: dict[str, fx.Node] = {}
    for node in _calls(graph):
        if node.target is aten.detach.default:
            same = node.args[0]
        elif node.target in _VIEWS:
            _shorten(node)
            same = _undone(node) or known.setdefault(f"{node.target}{node.args}", node)
        else:
            continue
        if same is not node:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
    graph.eliminate_dead_code(_has_effect)


_VIEWS = (
    *RESHAPES,
    aten.permute.default,
    aten.t.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.squeeze.dim,
)


def _shorten(node: fx.Node) -> None:
    """Lets a view of a view look at what that one looks at, if that is simple."""
    source = node.args[0]
    if node.target in RESHAPES and source.target in RESHAPES:
        node.args = source.args[0], *node.args[1:]
    elif node.target is source.target is aten.permute.default:
        node.args = source.args[0], [source.args[1][i] for i in node.args[1]]


def _undone(node: fx.Node) -> fx.Node | None:
    """What a view is a view of, if each element is where it was there."""
    place, before = _place(node), node.args[0]
    while place is not None:
        if _place(before) == place:
            return before
        if before.target not in _VIEWS:
            break
        before = before.args[0]
    return None


def _place(node: fx.Node) -> Any:
    """Where each element of a tensor is; None if elements may share a place."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or 0 in value.stride():
        return None
    return value.shape, value.stride(), value.storage_offset()


def fold_numbers(module: fx.GraphModule) -> None:
    """Makes what is computed of Python numbers alone now, on its device, and once."""
    known: dict[fx.Node, torch.Tensor] = {}
    written = _written(module.graph)
    for node in _calls(module.graph):
        given = node.all_input_nodes
        # Any other tensor that the graph holds may change: it is somebody's.
        lifts = node.target is aten.lift_fresh_copy.default
        if not (lifts or _makes_a_number(node) and all(x in known for x in given)):
            continue
        if node in written:
            continue
        if lifts:
            known[node] = getattr(module, given[0].target).clone()
        else:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
            known[node] = node.target(*args, **kwargs)
    for index, (node, value) in enumerate(known.items()):
        name = f"number_{index}"
        module.register_buffer(name, value)
        with module.graph.inserting_before(node):
            constant = module.graph.get_attr(name)
        node.replace_all_uses_with(constant)
        module.graph.erase_node(node)


def _makes_a_number(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return (
        is_operator(node.target)
        and isinstance(value, torch.Tensor)
        and value.numel() <= 1
        and not writes_into(node.target)
        and torch.Tag.nondeterministic_seeded not in node.target.tags
    )


def _written(graph: fx.Graph) -> set[fx.Node]:
    """What operators write into, with what that is a view of."""
    found: set[fx.Node] = set()
    for node in _calls(graph):
        places = writes_into(node.target) if is_operator(node.target) else []
        for place in places:
            given = node.args[place] if place < len(node.args) else node.all_input_nodes
            for source in given if isinstance(given, list | tuple) else [given]:
                found.update(_behind(source))
    return found


def _behind(node: Any) -> Iterator[fx.Node]:
    """A tensor, and those whose memory it may be in."""
    while isinstance(node, fx.Node):
        yield node
        is_part = node.target is operator.getitem  # Of what an operator has split.
        shares = is_operator(node.target) and shares_memory(node.target)
        node = node.args[0] if is_part or shares else None


def multiply_together(graph: fx.Graph) -> None:
    """Multiplies inputs by numbers in two kernels, in place of two for each.

    BatchNormalization does it to its moving variance, before and after its own kernel.
    """
    nodes = [*graph.nodes]
    places = {node: place for place, node in enumerate(nodes)}
    inputs = [node for node in nodes if node.op == "placeholder"]
    first: list[fx.Node] = []
    second: dict[fx.Node, int] = {}  # With the place of the next that reads it.
    for node in inputs:
        uses = sorted(node.users, key=places.__getitem__)
        if any(_may_be_read_later(use, node) for use in uses):
            continue
        first += [use for use in uses[:1] if _multiplies(use, node)]
        if len(uses) > 2 and _multiplies(uses[2], node):
            second[uses[2]] = places[uses[3]] if uses[3:] else len(nodes)
    end = max(map(places.__getitem__, second), default=0)
    late = [node for node, read in second.items() if read > end]
    for before, group in ((nodes[len(inputs)], first), (nodes[end], late)):
        if len(group) > 1:
            tensors, numbers = zip(*(node.args[:2] for node in group), strict=True)
            with graph.inserting_before(before):
                graph.call_function(MULTIPLY_ALL, ([*tensors], [*numbers]))
    for node in {*(first if len(first) > 1 else ()), *(late if len(late) > 1 else ())}:
        graph.erase_node(node)


def _may_be_read_later(use: fx.Node, node: fx.Node) -> bool:
    """Is it a view, by which an input may be read at any time?"""
    is_view = is_operator(use.target) and shares_memory(use.target)
    return is_view and not _multiplies(use, node)


def _multiplies(node: fx.Node, place: fx.Node) -> bool:
    """Is a tensor multiplied by a number in its place, and not used by what returns?"""
    is_number = node.target is aten.mul_.Tensor and isinstance(node.args[1], float)
    return is_number and node.args[0] is place and not node.users


def copy_inputs(graph: fx.Graph) -> None:
    """Copies what is returned and may be in the memory of what comes in."""
    output = next(node for node in graph.nodes if node.op == "output")
    copies = []
    for node in output.args[0]:
        *_, source = _behind(node)
        if source.op in ("placeholder", "get_attr"):
            with graph.inserting_before(output):
                node = graph.call_function(aten.clone.default, (node,))
        copies.append(node)
    output.args = (copies,)


def compiled(module: fx.GraphModule) -> Callable:
    """The graph as one Python function, which forgets a tensor after its last use."""
    names: dict[str, Any] = {}
    lines: list[str] = []
    inputs: list[str] = []
    last = {n: node for node in module.graph.nodes for n in node.all_input_nodes}
    dying: dict[fx.Node, list[str]] = {}
    for node, user in last.items():
        dying.setdefault(user, []).append(node.name)

    def named(value: Any) -> str:
        if isinstance(value, fx.Node):
            return value.name
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(named, value))}]"
        if value is None or type(value) in (bool, int):
            return repr(value)
        name = f"constant_{len(names)}"
        names[name] = value
        return name

    for node in module.graph.nodes:
        if node.op == "placeholder":
            inputs.append(node.name)
        elif node.op == "get_attr":
            names[node.name] = operator.attrgetter(node.target)(module).detach()
        elif node.op == "output":
            lines.append(f"return {named(node.args[0])}")
        elif node.target is operator.getitem:
            lines.append(f"{node.name} = {named(node.args[0])}[{node.args[1]}]")
        else:
            function = f"call_{node.name}"
            names[function] = native(node.target)
            given = [*map(named, node.args)]
            given += [f"{key}={named(value)}" for key, value in node.kwargs.items()]
            kept = f"{node.name} = " if node.users else ""
            lines.append(f"{kept}{function}({', '.join(given)})")
        dead = [n for n in dying.get(node, ()) if n not in names]
        if dead and node.op == "call_function":
            lines.append(f"del {', '.join(dead)}")
    body = "\n    ".join(lines)
    exec(f"def run({', '.join(inputs)}):\n    {body}\n", names)
    run: Callable = names["run"]
    return run


def draws(graph: fx.Graph) -> bool:
    """Does a graph draw random numbers?"""
    operators = [n.target for n in _calls(graph) if is_operator(n.target)]
    return any(torch.Tag.nondeterministic_seeded in o.tags for o in operators)
