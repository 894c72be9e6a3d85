"""Small programs within a larger one, as one kernel each where JAX compiles for CPUs.

XLA compiles each small result on its own there, and takes as long for a scalar as for
any other. What it calls, and is told is small, it compiles as a whole. It knows no
reductions there; and a single result of many elements it divides among threads, which
then cannot be called: that is not told to be small.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.interpreters.mlir import ir


def compiled(function: Callable, static: Sequence[int] = ()) -> Callable:
    """A function of a few small tensors, element by element, as one program.

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
        leaves[0] = _result_of_small_call.bind(leaves[0])
        return tree.unflatten(leaves)

    return call


# The identity. Once it is lowered it is known what for, and how large results have
# become, under vmap for one.
_result_of_small_call = Primitive("result_of_small_call")
_result_of_small_call.def_impl(lambda x: x)
_result_of_small_call.def_abstract_eval(lambda x: x)
batching.defvectorized(_result_of_small_call)
ad.deflinear2(_result_of_small_call, lambda cotangent, _: [cotangent])


def _lower(context: mlir.LoweringRuleContext, result: ir.Value) -> list[ir.Value]:
    call = result.owner
    if (
        tuple(context.module_context.platforms) == ("cpu",)
        and not isinstance(call, ir.Block)  # What was inlined is no call.
        and call.name == "func.call"
        and (len(call.results) > 1 or context.avals_in[0].shape == ())
    ):
        told = {"inlineable": "false", "xla_cpu_small_call": "true"}
        attributes = {key: ir.StringAttr.get(told[key]) for key in told}
        call.attributes["mhlo.frontend_attributes"] = ir.DictAttr.get(attributes)
    return [result]


# Not cached: a result would be that of the function which is cached.
mlir.register_lowering(_result_of_small_call, _lower, cacheable=False)
