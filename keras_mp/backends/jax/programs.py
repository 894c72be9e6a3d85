"""What a traced program does with numbers, on JAX."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import keras
import numpy as np

from keras_mp.backends.interface import HALF
from keras_mp.backends.measures import (
    SCOPE,
    WIDE_INTEGERS,
    Constant,
    Fact,
    IntegerCast,
    lost_addend,
)
from keras_mp.types import Tensor, Variables

scope = jax.named_scope

_CONVERTING = ("convert_element_type", "broadcast_in_dim")
_SUMS = ("add", "add_any", "sub")
# The result of these has the addends of their operand.
_PASSING = (
    *_CONVERTING,
    *("abs", "clamp", "copy", "max", "min", "neg"),
    *("reshape", "slice", "squeeze", "transpose"),
)


def traced(function: Callable, variables: Variables, arguments: Any) -> list[Fact]:
    def run(values: list, arguments: Any) -> Any:
        # As arguments, variables do not become constants.
        mapping = list(zip(variables, values, strict=True))
        with keras.StatelessScope(mapping):
            return function(arguments)

    def spec(x: Tensor) -> Any:
        return jax.ShapeDtypeStruct(tuple(x.shape), x.dtype)

    values = [spec(v) for v in variables]
    closed = jax.make_jaxpr(run)(values, keras.tree.map_structure(spec, arguments))
    known = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    return list(_Program(known, {}).facts(closed.jaxpr, ""))


class _Program:
    """The facts of a program, or of a part.

    Args:
        known: the values of the variables that have one.
        addends: of the variables that hold a sum with a constant, the scope and the
            size of the largest one.
    """

    def __init__(self, known: dict[Any, Any], addends: dict[Any, Any]) -> None:
        self._known, self._addends = known, addends

    def facts(self, jaxpr: Any, outer: str) -> Iterator[Fact]:
        for equation in jaxpr.eqns:
            names = re.findall(SCOPE, str(equation.source_info.name_stack))
            name = names[-1] if names else outer
            inner = [*_programs(equation)]
            for program, consts in inner:
                yield from self._part(equation, program, consts, name)
            if not inner:
                yield from self._sums(equation, name)
                yield from self._casts(equation, name)
                yield from self._constants(equation, name)

    def _part(
        self, equation: Any, program: Any, consts: Sequence[Any], name: str
    ) -> Iterator[Fact]:
        known = dict(zip(program.constvars, consts, strict=False))
        addends = {}
        if len(program.invars) == len(equation.invars):
            for inside, atom in zip(program.invars, equation.invars, strict=True):
                if (value := self._value(atom)) is not None:
                    known[inside] = value
                elif found := self._addend(atom):
                    addends[inside] = found
        part = _Program(known, addends)
        yield from part.facts(program, name)
        if len(program.outvars) == len(equation.outvars):
            for outside, atom in zip(equation.outvars, program.outvars, strict=True):
                if found := part._addend(atom):
                    self._addends[outside] = found

    def _value(self, atom: Any) -> Any:
        return atom.val if hasattr(atom, "val") else self._known.get(atom)

    def _addend(self, atom: Any) -> Any:
        return None if hasattr(atom, "val") else self._addends.get(atom)

    def _sums(self, equation: Any, name: str) -> Iterator[Fact]:
        primitive, out = equation.primitive.name, equation.outvars[0]
        if primitive not in (*_SUMS, *_PASSING):
            return
        found = [x for atom in equation.invars if (x := self._addend(atom))]
        if primitive in _SUMS:
            numbers = map(self._value, equation.invars)
            scalars = [x for x in numbers if x is not None and np.size(x) == 1]
            found += [(name, abs(float(np.asarray(x).reshape(())))) for x in scalars]
            yield from lost_addend(name, found, str(out.aval.dtype))
        if found:
            self._addends[out] = max(found, key=lambda addend: addend[1])

    def _casts(self, equation: Any, name: str) -> Iterator[Fact]:
        if equation.primitive.name == "convert_element_type":
            source = str(equation.invars[0].aval.dtype)
            target = str(equation.outvars[0].aval.dtype)
            if source in HALF and target in WIDE_INTEGERS:
                yield IntegerCast(name, source, target)

    def _constants(self, equation: Any, name: str) -> Iterator[Fact]:
        for atom in equation.invars:
            value = self._value(atom)
            if value is None or np.size(value) != 1:
                continue
            dtype = atom.aval.dtype
            if equation.primitive.name in _CONVERTING:
                # What counts is what it is converted to.
                out = equation.outvars[0]
                turned = np.asarray(value).astype(out.aval.dtype)
                self._known[out] = turned.reshape(())
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
