"""What loss scaling asks of a backend in a step: unscale, check, write or not.

A gradient passes `unscale` and `check` on its way to `update_if`.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from keras import ops

from keras_mp.types import Gradients, Tensor, Variables

# What a gradient holds besides finite numbers: the highest code that applies.
FINITE, INFINITE, NAN = 0, 1, 2


class Update(NamedTuple):
    """An update of variables that may be skipped.

    Attributes:
        run: applies gradients to variables.
        written: returns the variables that `run` writes; None if not all of them are
            known.
        branches: whether Keras puts conditionals into `run`.
    """

    run: Callable[[list[Any]], None]
    written: Callable[[], Sequence[Any] | None]
    branches: bool = False


class Step:
    """A step of an eager backend."""

    def is_tracing(self) -> bool:
        """Are we inside a function that is being compiled?"""
        raise NotImplementedError

    def refuse_baking(self, what: str, remedy: str) -> None:
        """Raises a ValueError if JAX would turn a variable's value into a constant."""
        return  # AutoGraph warns about a function that is only a docstring.

    def check_strategy(self, variables: Variables, built: bool) -> None:
        """Raises a ValueError if replicas would disagree on `variables`."""
        return

    def unscale(self, grads: Gradients, inverse_scale: Tensor) -> list[Any]:
        """Multiplies each gradient by `inverse_scale` in float32; None stays None."""
        raise NotImplementedError

    def unscale_in_place(
        self, grads: Gradients, scale: Tensor, variables: Variables
    ) -> tuple[list[Any], Any] | None:
        """Divides gradients by the scale in place, and checks them in the same pass.

        Returns:
            The gradients and, for `check`, what was found. None if that is no
            faster than `unscale`.
        """
        return None

    @staticmethod
    def nonfinite_to_nan(grads: Gradients) -> list[Any]:
        """Turns infinities into nan, which clipping by value cannot make finite."""
        return [
            None if g is None else ops.where(ops.isfinite(g), g, float("nan"))
            for g in grads
        ]

    def check(self, tensors: Sequence[Any], found: Any = None) -> tuple[Any, Any]:
        """Looks for what is not finite.

        Args:
            tensors: gradients and others that must be finite, None for a missing one.
                The last is the loss, which gets a code but does not decide.
            found: what `unscale_in_place` found in the gradients, if `tensors` holds
                nothing else but the loss.

        Returns:
            A bool scalar: is all but the loss finite? And the code of each tensor:
            int8, (len(tensors),). Both are the same on all replicas.
        """
        codes = self.nonfinite(tensors)
        return self.all_finite(codes[:-1]), codes

    def nonfinite(self, grads: Gradients) -> Any:
        """The codes of `check`."""
        raise NotImplementedError

    def all_finite(self, codes: Any) -> Any:
        """Bool scalar: is each of the codes FINITE?"""
        raise NotImplementedError

    def update_if(
        self, finite: Tensor, update: Update, grads: list[Tensor]
    ) -> bool | None:
        """Runs an update, whose writes take effect only if `finite`, a bool scalar.

        Returns:
            Whether it ran, or None if Python does not know.
        """
        if finite:
            update.run(grads)
            return True
        return False

    def stochastic_rounding(self, seed: Tensor, step: Any) -> Callable[[Any], Any]:
        """A function that rounds float32 tensors to bfloat16, see `rounding.py`.

        Args:
            seed, step: integer scalars. The same two give the tensors of a step the
                same bits in the same order; each tensor gets bits of its own.
        """
        raise NotImplementedError

    def plain_updates(
        self, optimizers: Sequence[Any]
    ) -> contextlib.AbstractContextManager:
        """A context in which Keras optimizers write each variable with `assign`."""
        return contextlib.nullcontext()

    def refuse_replicas(self, what: str) -> None:
        """Raises a ValueError under a TensorFlow strategy of several replicas."""
        return

    def agreed(self, value: Tensor) -> Any:
        """A scalar of this process; on torch, the scalar of the first process."""
        return value
