"""Small programs within a larger one, as one kernel each where JAX compiles for CPUs.

XLA compiles each small result on its own there, and takes as long for a scalar as for
any other. What it calls, and is told is small, it compiles as a whole. It knows no
reductions there, and a result of many elements it divides among threads, which then
cannot be called: that is not told to be small.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.interpreters import ad, batching, mlir
from jax.interpreters.mlir import ir

# Elements of a result: XLA gives a thread at least 256 KiB to read and write.
SMALL = 8 * 1024


def compiled(function: Callable, static: Sequence[int] = ()) -> Callable:
    """A function of a few small tensors, element by element, as one program.

    No reductions, loops or conditionals are to be in it.

    `static`: the places of arguments that are no tensors.
    """

    @functools.wraps(function)
    def inline(*args: Any) -> Any:
        # Functions of jax.numpy are jitted, which takes longer here than to trace them.
        with jax.disable_jit():
            return function(*args)

    jitted = jax.jit(inline, static_argnums=static)

    def call(*args: Any) -> Any:
        results = jitted(*args)
        leaves, tree = jax.tree.flatten(results)
        if not isinstance(leaves[0], jax.core.Tracer):
            return results
        # The call is known by a result that it has computed.
        leaves[0] = _result_of_small_call().bind(leaves[0])
        return tree.unflatten(leaves)

    return call


@functools.cache
def _result_of_small_call() -> Any:
    """The identity, as a primitive of JAX.

    Once it is lowered it is known for which device, and how large results have become,
    under vmap for one.
    """
    from jax.extend.core import Primitive  # Keras does not import it.

    primitive = Primitive("result_of_small_call")
    primitive.def_impl(lambda x: x)
    primitive.def_abstract_eval(lambda x: x)
    batching.defvectorized(primitive)
    ad.deflinear2(primitive, lambda cotangent, _: [cotangent])
    # Not cached: a result would be that of the function which is cached.
    mlir.register_lowering(primitive, _lower, cacheable=False)
    return primitive


def _lower(context: mlir.LoweringRuleContext, result: ir.Value) -> list[ir.Value]:
    call = result.owner
    if (
        tuple(context.module_context.platforms) == ("cpu",)
        and not isinstance(call, ir.Block)  # What was inlined is no call.
        and call.name == "func.call"
        and all(_is_small(ir.RankedTensorType(r.type)) for r in call.results)
    ):
        told = {"inlineable": "false", "xla_cpu_small_call": "true"}
        call.attributes["mhlo.frontend_attributes"] = ir.DictAttr.get(
            {name: ir.StringAttr.get(value) for name, value in told.items()}
        )
    return [result]


def _is_small(array: ir.RankedTensorType) -> bool:
    return array.has_static_shape and math.prod(array.shape) <= SMALL
