"""What tools ask of a backend: gradients, programs, devices, memory."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from keras_mp.types import Tensor, Variables

# The name of a scope, with its number.
SCOPE = r"keras_mp_(\d+)_"


class Constant(NamedTuple):
    """A floating-point number in a traced program."""

    scope: str  # The number of the innermost scope; empty if there is none.
    value: float
    dtype: str


class IntegerCast(NamedTuple):
    """A cast of half-precision numbers to integers in a traced program."""

    scope: str
    source: str  # The dtype of the numbers, and of the integers.
    target: str


class LostAddend(NamedTuple):
    """A number in a sum with a larger one beside which half precision loses it."""

    scope: str
    value: float
    beside: float
    dtype: str


Fact = Constant | IntegerCast | LostAddend

# Integers of one byte have no number that either half dtype rounds.
WIDE_INTEGERS = ("int16", "int32", "int64", "uint16", "uint32", "uint64")
_SPACING = {"float16": 2.0**-10, "bfloat16": 2.0**-7}


def lost_addend(
    scope: str, addends: Sequence[tuple[str, float]], dtype: str
) -> Iterator[LostAddend]:
    """Yields the smaller of two addends, of one scope, if the other swallows it.

    Args:
        scope: that of the sum.
        addends: the constants in it: the scope and the size of each.
        dtype: of the sum.
    """
    if len(addends) != 2 or any(own != scope for own, _ in addends):
        return
    small, large = sorted(size for _, size in addends)
    if 0 < small < large * _SPACING.get(dtype, 0) / 4 < math.inf:
        yield LostAddend(scope, small, large, dtype)


class Measures:
    """What can be measured about a model and the machine."""

    def differentiate(
        self,
        function: Callable,
        arguments: Any,
        variables: Any,
        state: Any,
        compiled: bool,
    ) -> tuple[Any, list, list, list]:
        """See `differentiation.differentiate`."""
        raise NotImplementedError

    def sums_of_bits(self, value: Tensor) -> Any:
        """Sums a tensor's elements, their bits read as integers, over all axes but one.

        The last axis is left, except that of a vector. If the tensor changes, so do the
        sums, except by a coincidence. They may wrap round.
        """
        raise NotImplementedError

    traces = True
    """Does the backend trace a model into a program?"""

    def traced(
        self, function: Callable, variables: Variables, arguments: Any
    ) -> list[Fact]:
        """What a function's program does with numbers. It is traced, and not run.

        That is each floating-point scalar in it, each cast of half-precision numbers to
        integers, and each constant that is lost in a sum with another one.

        Args:
            function: takes `arguments`, and reads `variables`.
            arguments: symbolic tensors of Keras, or structures of them.
        """
        raise NotImplementedError

    def integer_casts(self, call: Callable[[], Any]) -> list[IntegerCast]:
        """The casts of half-precision numbers to integers in a call."""
        facts = self.traced(lambda _: call(), (), ())
        return [fact for fact in facts if isinstance(fact, IntegerCast)]

    def scope(self, name: str) -> contextlib.AbstractContextManager:
        """A context that gives its name to the constants in it."""
        return contextlib.nullcontext()

    def list_devices(self) -> list[Any]:
        """The devices that the framework sees, each a `devices.Device`."""
        raise NotImplementedError

    def measure_memory(self) -> Callable[[], int | None]:
        """Starts to measure a training's memory; no other may run at the same time.

        Call it before the model is built.

        Returns:
            A function to call after the training. It returns the peak in bytes on all
            devices of this process, less what was in use before; on JAX what the
            compiled train step needs; None if nothing counts it (`why_no_memory`).
        """
        raise NotImplementedError

    why_no_memory = ""
    """Why `measure_memory` may return None on this backend, as a clause."""
