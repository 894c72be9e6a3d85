"""Functions that are one equation each in the programs which JAX traces.

JAX takes its time for each equation, and for each transformation of it. What is within
these is traced once, when the program is lowered; for which device is known by then.

XLA for CPUs compiles each small result on its own, and takes as long for a scalar as
for any other. What it calls, and is told is small, it compiles as a whole. Long sums
and maxima it leaves to a library, and a result of many elements it divides among
threads, which then cannot be called: that is not told to be small.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.interpreters import ad, batching, mlir
from jax.interpreters.mlir import ir
from jax.interpreters.partial_eval import dce_jaxpr

# Elements of a result: XLA gives a thread at least 256 KiB to read and write.
SMALL = 8 * 1024


def compiled(
    results: Callable, static: Sequence[int] = ()
) -> Callable[[Callable], Callable]:
    """Makes one equation of a function of a few small tensors.

    No sums, maxima, loops or conditionals are to be in it. A reduction of several
    operands may be, of what is no larger than one of the results.

    `results`, `static`: as for `equation`.
    """

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def inline(*args: Any) -> Any:
            # Functions of jax.numpy are jitted, which takes longer than to trace them.
            with jax.disable_jit():
                return function(*args)

        return equation(results, static, small=True)(inline)

    return decorate


def equation(
    results: Callable, static: Sequence[int] = (), small: bool = False
) -> Callable[[Callable], Callable]:
    """Makes one equation of a function of structures of arrays.

    `results`: of the types of its arguments, what the results are like: what has a
    shape and a dtype.
    `static`: the places of arguments that are no arrays.
    `small`: whether XLA is to call it, where the results are small.
    """

    def decorate(function: Callable) -> Callable:
        jitted = jax.jit(function, static_argnums=static)

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            arrays = [a for place, a in enumerate(args) if place not in static]
            leaves, tree = jax.tree.flatten(arrays)
            if not any(isinstance(x, jax.core.Tracer) for x in leaves):
                return jitted(*args)
            types = [jax.typeof(x) for x in leaves]
            # Where types name a mesh, JAX finds out how the results are sharded.
            if not all(t.sharding.mesh.empty for t in types):
                return jitted(*args)
            fixed = tuple((place, args[place]) for place in static)
            flat = _Flat(function, tree, fixed)
            # Not of what was given: a float64 of NumPy's may be a float32 here.
            likes, out = jax.tree.flatten(results(*flat.arguments(types)))
            found = _primitive().bind(
                *leaves,
                name=function.__name__,
                function=flat,
                jitted=flat._replace(function=jitted),
                avals=tuple(jax.core.ShapedArray(x.shape, x.dtype) for x in likes),
                small=small,
            )
            return out.unflatten(found)

        return call

    return decorate


class _Flat(NamedTuple):
    """A function of arrays in a row, which returns a list of them."""

    function: Callable
    tree: Any
    static: tuple[tuple[int, Any], ...]

    def arguments(self, leaves: Sequence[Any]) -> list[Any]:
        args = self.tree.unflatten(leaves)
        for place, value in self.static:
            args.insert(place, value)
        return args

    def __call__(self, *leaves: Any) -> list[Any]:
        return jax.tree.leaves(self.function(*self.arguments(leaves)))


@functools.cache
def _primitive() -> Any:
    from jax.extend.core import Primitive  # Keras does not import it.

    primitive = Primitive("keras_mp")
    primitive.multiple_results = True
    primitive.def_impl(lambda *args, jitted, **_: jitted(*args))
    primitive.def_abstract_eval(lambda *_, avals, **__: list(avals))
    # Transformed, it is what it would have been without all this.
    batching.primitive_batchers[primitive] = _batched
    ad.primitive_jvps[primitive] = _differentiated
    mlir.register_lowering(primitive, _lower)
    return primitive


def _batched(args: Any, axes: Any, *, jitted: Callable, **_: Any) -> Any:
    results = jax.vmap(jitted, axes)(*args)
    return results, [0] * len(results)


def _differentiated(primals: Any, tangents: Any, *, jitted: Callable, **_: Any) -> Any:
    return jax.jvp(jitted, primals, tuple(map(ad.instantiate_zeros, tangents)))


def _lower(
    context: mlir.LoweringRuleContext,
    *args: ir.Value,
    name: str,
    function: _Flat,
    small: bool,
    **_: Any,
) -> Sequence[ir.Value]:
    called = (
        small
        # With sizes that are not known yet, each call is handed them too.
        and not context.dim_var_values
        and tuple(context.module_context.platforms) == ("cpu",)
        and all(math.prod(aval.shape) <= SMALL for aval in context.avals_out)
    )
    if not called:
        # Not jitted: that would be one call more, which XLA would have to inline.
        return mlir.lower_fun(function)(context, *args)
    traced = jax.make_jaxpr(function)(*context.avals_in)
    # XLA cannot call what does not read all that it is given.
    jaxpr, read = dce_jaxpr(traced.jaxpr, [True] * len(context.avals_out))
    context = context.replace(avals_in=[*itertools.compress(context.avals_in, read)])
    results = mlir.core_call_lowering(
        context,
        *itertools.compress(args, read),
        name=name,
        call_jaxpr=traced.replace(jaxpr=jaxpr),
    )
    told = {"inlineable": "false", "xla_cpu_small_call": "true"}
    results[0].owner.attributes["mhlo.frontend_attributes"] = ir.DictAttr.get(
        {word: ir.StringAttr.get(value) for word, value in told.items()}
    )
    return results
