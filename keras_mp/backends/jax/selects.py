"""Selects in place of JAX's conditionals.

Keras accumulates gradients on JAX with `lax.cond`, whose branches choose between values
that are there already. On a GPU each of them waits for the host.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

# What costs no more in a branch that is not taken than a read of its operands.
CHEAP = frozenset(
    {"add", "broadcast_in_dim", "convert_element_type", "copy", "div", "mul", "sub"}
)


def without_conditionals(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a pure function of structures of arrays, inside a JAX trace.

    The result computes the same, bit for bit. Conditionals whose branches are cheap
    become selects; others stay.
    """

    def selecting(*args: Any) -> Any:
        jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        flat = _evaluate(jaxpr, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), flat)

    return selecting


def _evaluate(closed: Any, args: Sequence[Any]) -> list[Any]:
    jaxpr = closed.jaxpr
    values = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if hasattr(atom, "val") else values[atom]

    for eqn in jaxpr.eqns:
        inputs = [read(atom) for atom in eqn.invars]
        branches = eqn.params["branches"] if eqn.primitive.name == "cond" else ()
        if len(branches) == 2 and all(map(_cheap, branches)):
            index, *operands = inputs
            no, yes = (_evaluate(branch, operands) for branch in branches)
            outputs = [
                lax.select_n(index != 0, *cases) for cases in zip(no, yes, strict=True)
            ]
        else:
            bound = eqn.primitive.get_bind_params(eqn.params)
            # Older versions of JAX give the functions apart.
            functions, params = bound if isinstance(bound, tuple) else ((), bound)
            outputs = eqn.primitive.bind(*functions, *inputs, **params)
            outputs = outputs if eqn.primitive.multiple_results else [outputs]
        values.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _cheap(branch: Any) -> bool:
    return not branch.effects and all(
        _cheap(eqn.params["jaxpr"])
        if eqn.primitive.name == "jit"
        else eqn.primitive.name in CHEAP
        for eqn in branch.jaxpr.eqns
    )
