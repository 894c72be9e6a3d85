"""The products of a training step, forward and backward, by the dtypes of operands.

Read from what is traced after training: the jaxpr on JAX, the graph on TensorFlow, the
calls that are dispatched on torch. There Keras multiplies float16 in float32 on CPUs:
ask for bfloat16.
"""

import collections
import re

import keras
from keras import ops

import keras_mp.keras_private as private

BACKEND = keras.backend.backend()


def products_of(model, x, y):
    """Counts the products of one train step of a compiled model, by operand dtype.

    Returns:
        A Counter: "float16" -> how many products have float16 operands, and float16
        results. Operands of two dtypes are both named, "float16, float32"; so is a
        result of another dtype, "float16 -> float32".
    """
    x, y = keras.tree.map_structure(ops.convert_to_tensor, (x, y))
    found = {"jax": _jax, "tensorflow": _tensorflow, "torch": _torch}[BACKEND]
    return counted(found(model, (x, y)))


def counted(found):
    """A Counter of pairs of operand dtypes and the dtype of the result."""
    counter: collections.Counter = collections.Counter()
    for operands, result in found:
        names = ", ".join(sorted(set(operands)))
        counter[names if result in operands else f"{names} -> {result}"] += 1
    return counter


def _jax(model, batch):
    return _of_jaxpr(jaxpr_of(model, batch).jaxpr)


def jaxpr_of(model, batch):
    """What JAX traces of the train step of a compiled model."""
    import jax

    groups = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )
    private.record_shardings(model)
    state = tuple([v.value for v in group] for group in groups)
    return jax.make_jaxpr(model.train_step)(state, batch)


def lowered(function, arguments, platform):
    """The program that JAX gives to XLA, for a platform that need not be here."""
    import jax

    traced = jax.jit(function).trace(*arguments)
    return traced.lower(lowering_platforms=(platform,)).as_text()


def _of_jaxpr(jaxpr):
    import jax

    for equation in jaxpr.eqns:
        if equation.primitive.name in ("dot_general", "conv_general_dilated"):
            operands = [v.aval.dtype.name for v in equation.invars]
            yield operands, equation.outvars[0].aval.dtype.name
        values = list(equation.params.values())
        if equation.params.get("branches_platforms"):  # What is not for CPUs.
            values = equation.params["branches"][-1:]
        for value in jax.tree.leaves(values, is_leaf=lambda v: hasattr(v, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _of_jaxpr(inner)


def _tensorflow(model, batch):
    import tensorflow as tf

    graph = tf.function(model.train_step).get_concrete_function(batch).graph
    definition = graph.as_graph_def()
    nodes = [*definition.node]
    for function in definition.library.function:
        nodes.extend(function.node_def)
    for node in nodes:
        if node.op.startswith(("MatMul", "BatchMatMul", "Einsum", "Conv")) or (
            node.op.startswith("DepthwiseConv")
        ):
            name = tf.dtypes.as_dtype(node.attr["T"].type).name
            yield [name], name


def in_hlo(function, *args):
    """The products that XLA is given, of a function that it compiles on TensorFlow.

    What it makes of them on CPUs are products in float32.
    """
    text = function.experimental_get_compiler_ir(*args)(stage="hlo")
    dtype = r"(f\d+|bf16)\[[^ ]* "
    product = rf"= {dtype}(?:dot|convolution)\({dtype}%[^ ]* {dtype}"
    found = re.findall(product, text)
    return [([_HLO[a], _HLO[b]], _HLO[result]) for result, a, b in found]


_HLO = {"f16": "float16", "bf16": "bfloat16", "f32": "float32"}


def _torch(model, batch):
    return dispatched(lambda: model.train_step(batch))


def dispatched(function):
    """The dtypes of operands and result of each product that torch computes in it."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            name = function.__name__.split(".")[0]
            result = function(*args, **(kwargs or {}))
            if name in ("mm", "addmm", "bmm", "baddbmm") or "convolution" in name:
                tensors = [a for a in args if isinstance(a, torch.Tensor)]
                floats = [a for a in tensors if a.is_floating_point()]
                one = result if name in ("mm", "addmm", "bmm", "baddbmm") else floats[0]
                seen.append(([_name(a) for a in floats], _name(one)))
            return result

    with Record():
        function()
    return seen


def _name(tensor):
    return str(tensor.dtype).removeprefix("torch.")
