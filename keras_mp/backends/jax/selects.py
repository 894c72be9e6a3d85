"""Selects in place of JAX's conditionals.

Keras accumulates gradients on JAX with `lax.cond`, whose branches choose between values
that exist already. On a GPU each conditional waits for the host.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

# In a branch that is not taken, these cost no more than a read of their operands.
CHEAP = frozenset(
    {"add", "broadcast_in_dim", "convert_element_type", "copy", "div", "mul", "sub"}
)


def without_conditionals(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a pure function of structures of arrays, inside a JAX trace.

    The wrapped function returns the same, bit for bit. Conditionals whose branches are
    cheap become selects; others stay.
    """
    from jax.extend.core import jaxpr_as_fun  # Keras does not import it.

    def selecting(*args: Any) -> Any:
        traced, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        equations = [
            with_select(eqn) if _is_cheap_conditional(eqn) else eqn
            for eqn in traced.eqns
        ]
        jaxpr = traced.jaxpr.replace(eqns=equations)
        results = jaxpr_as_fun(traced.replace(jaxpr=jaxpr))(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    def with_select(eqn: Any) -> Any:
        no, yes = map(jaxpr_as_fun, eqn.params["branches"])

        @jax.jit
        def select(index: Any, *operands: Any) -> list[Any]:
            cases = zip(no(*operands), yes(*operands), strict=True)
            return [lax.select_n(index != 0, *case) for case in cases]

        (call,) = jax.make_jaxpr(select)(*(atom.aval for atom in eqn.invars)).eqns
        return eqn.replace(primitive=call.primitive, params=call.params)

    return selecting


def _is_cheap_conditional(eqn: Any) -> bool:
    branches = eqn.params["branches"] if eqn.primitive.name == "cond" else ()
    return len(branches) == 2 and all(map(_is_cheap, branches))


def _is_cheap(branch: Any) -> bool:
    return not branch.effects and all(
        _is_cheap(eqn.params["jaxpr"])
        if eqn.primitive.name in ("jit", "pjit")  # Older versions of JAX say pjit.
        else eqn.primitive.name in CHEAP
        for eqn in branch.eqns
    )
