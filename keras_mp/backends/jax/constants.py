"""The numbers in a traced program, on JAX."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import keras
import numpy as np

from keras_mp.backends.measures import SCOPE, Constant

scope = jax.named_scope


def constants(
    function: Callable, variables: Sequence[Any], arguments: Any
) -> list[Constant]:
    def run(values: list, arguments: Any) -> Any:
        # As arguments, variables do not become constants.
        mapping = list(zip(variables, values, strict=True))
        with keras.StatelessScope(mapping):
            return function(arguments)

    def spec(x: Any) -> Any:
        return jax.ShapeDtypeStruct(tuple(x.shape), x.dtype)

    values = [spec(v) for v in variables]
    closed = jax.make_jaxpr(run)(values, keras.tree.map_structure(spec, arguments))
    known = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    return list(_within(closed.jaxpr, known, ""))


def _within(jaxpr: Any, known: dict[Any, Any], outer: str) -> Iterator[Constant]:
    """The constants of a program, given the values of variables that have one."""

    def value_of(atom: Any) -> Any:
        is_literal = hasattr(atom, "val")
        return atom.val if is_literal else known.get(atom)

    for equation in jaxpr.eqns:
        names = re.findall(SCOPE, str(equation.source_info.name_stack))
        name = names[-1] if names else outer
        inner = [*_programs(equation)]
        for program, consts in inner:
            constvars = dict(zip(program.constvars, consts, strict=False))
            passed = {}
            if len(program.invars) == len(equation.invars):
                pairs = zip(program.invars, equation.invars, strict=True)
                passed = {inside: value_of(atom) for inside, atom in pairs}
            passed = {k: v for k, v in passed.items() if v is not None}
            yield from _within(program, {**constvars, **passed}, name)
        if inner:
            continue
        for atom in equation.invars:
            value = value_of(atom)
            if value is None or np.size(value) != 1:
                continue
            dtype = atom.aval.dtype
            if equation.primitive.name in ("convert_element_type", "broadcast_in_dim"):
                # What counts is what it is converted to.
                out = equation.outvars[0]
                turned = np.asarray(value).astype(out.aval.dtype)
                known[out] = turned.reshape(())
            elif jax.numpy.issubdtype(dtype, jax.numpy.floating):
                yield Constant(name, float(np.asarray(value).reshape(())), str(dtype))


def _programs(equation: Any) -> Iterator[tuple[Any, Sequence[Any]]]:
    """The programs that an equation calls, with their constants."""
    for parameter in equation.params.values():
        for part in parameter if isinstance(parameter, (tuple, list)) else [parameter]:
            if hasattr(part, "jaxpr") and hasattr(part, "consts"):
                yield part.jaxpr, part.consts
            elif hasattr(part, "eqns"):
                yield part, []
