"""What diagnostics ask of a backend: gradients, constants, devices, memory."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

# The name of a scope, with its number.
SCOPE = r"keras_mp_(\d+)_"


class Constant(NamedTuple):
    """A floating-point number in a traced program."""

    scope: str  # The number of the innermost scope; empty if there is none.
    value: float
    dtype: str


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

    def sums_of_bits(self, value: Any) -> Any:
        """Sums a tensor's elements, their bits read as integers, over all axes but one.

        The last axis is left, except that of a vector. If the tensor changes, so do the
        sums, except by a coincidence. They may wrap round.
        """
        raise NotImplementedError

    traces = True
    """Does the backend trace a model into a program?"""

    def constants(
        self, function: Callable, variables: Sequence[Any], arguments: Any
    ) -> list[Constant]:
        """The floating-point scalars in the program of a function, which is not run.

        Args:
            function: takes `arguments`, and reads `variables`.
            arguments: symbolic tensors of Keras, or structures of them.
        """
        raise NotImplementedError

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
