"""Whether the gradients that come next still carry the loss scale.

The tensors themselves cannot tell: a gradient that was clipped or averaged is a new
tensor. So the optimizer watches the calls that go by:

    scale_loss:  stage = SCALED
    unscale:     refused if it is the second since the last scale_loss or apply;
                 stage = UNSCALED
    apply:       divides by the scale unless stage is UNSCALED

Compiled functions run Python only while they are traced, so a stage holds until another
call says otherwise, and what was seen inside a trace may happen again unseen.
"""

import contextlib
import enum
import threading
from collections.abc import Iterator
from typing import Any

from keras_mp.messages import warn
from keras_mp.types import Optimizer

# What the step of this thread has scaled and updated so far.
_thread = threading.local()


@contextlib.contextmanager
def train_step() -> Iterator[list[Any]]:
    """Marks the Python run (or trace) of one `train_step` of `fit`.

    Within it a gradient counts as scaled only if the step itself scaled a loss: the
    `train_step` of Keras' "customize fit()" guides never does.

    Yields:
        The optimizers that update, once for each time.
    """
    before = getattr(_thread, "seen", None), getattr(_thread, "updates", None)
    try:
        _thread.seen, _thread.updates = set(), []
        yield _thread.updates
    finally:
        _thread.seen, _thread.updates = before


@contextlib.contextmanager
def update_by(optimizer: Optimizer, scaled: bool = False) -> Iterator[None]:
    """Marks an update; one that is made within another is a part of it.

    Args:
        optimizer: what updates.
        scaled: whether it scales the loss.
    """
    updates, within = getattr(_thread, "updates", None), in_scaled_update()
    if updates is not None:
        updates.append(optimizer)
    try:
        _thread.updates, _thread.scaled = None, within or scaled
        yield
    finally:
        _thread.updates, _thread.scaled = updates, within


def in_scaled_update() -> bool:
    """Is an optimizer that scales its loss updating?"""
    return getattr(_thread, "scaled", False)


def in_train_step() -> bool:
    """Whether a `train_step` of `fit` is running, or being traced."""
    return getattr(_thread, "seen", None) is not None


class Stage(enum.Enum):
    """What the last call said about the gradients that come next."""

    NEVER_SCALED = "never scaled"
    SCALED = "scaled"
    UNSCALED = "unscaled"


class GradientStage:
    """The stage of one optimizer's gradients; see the module's pseudocode."""

    def __init__(self) -> None:
        self.stage = Stage.NEVER_SCALED
        self._traced = False
        self._unscaled_since = False
        self._warned = False

    def scaled(self, tracing: bool) -> None:
        """A loss was scaled. `tracing`: inside a function being compiled."""
        self._saw(Stage.SCALED, tracing)
        self._unscaled_since = False

    def unscaled(self, tracing: bool) -> None:
        """Gradients are about to be unscaled.

        Raises:
            ValueError: if they have been already.
        """
        # Python does not see a scale_loss inside a compiled function again: two eager
        # unscalings in a row are then two steps, not one step unscaled twice.
        unseen = self._traced and not tracing
        if self._unscaled_since and not unseen:
            raise ValueError(
                "These gradients were unscaled already: `unscale` may be called once "
                "between `scale_loss` and `apply`. Received: a second call. Pass the "
                "gradients that the first one returned to `apply_gradients`."
            )
        traced = self._traced
        self._saw(Stage.UNSCALED, tracing)
        self._traced = traced or tracing
        self._unscaled_since = True

    def take(self, tracing: bool, name: str) -> bool:
        """Gradients arrive at `apply`: must they be divided by the scale?

        Args:
            tracing: inside a function being compiled.
            name: the optimizer's, for the user.

        Raises:
            ValueError: inside a `train_step` that did not scale its loss, if earlier
                steps of the same optimizer did, so that neither answer is safe.
        """
        self._unscaled_since = False
        seen = getattr(_thread, "seen", None)
        if seen is None or id(self) in seen:
            if self.stage is Stage.NEVER_SCALED:
                self._warn(
                    f"Optimizer {name!r} applies gradients, but no loss was ever "
                    "scaled. They are "
                    "divided by the loss scale all the same, so the update is too "
                    "small by that factor if they are not scaled. Compute them from "
                    "`optimizer.scale_loss(loss)`."
                )
            return self.stage is not Stage.UNSCALED
        if self._traced and not tracing:
            # An eager step whose loss was scaled inside a function compiled earlier.
            return self.stage is Stage.SCALED
        if self.stage is not Stage.NEVER_SCALED:
            raise ValueError(
                f"This `train_step` never called `scale_loss` of optimizer {name!r}, "
                "but an earlier one did: its gradients may be scaled or not. Compute "
                "them from `optimizer.scale_loss(loss)`, or compile the model anew."
            )
        self._warn(
            f"This `train_step` never calls `scale_loss` of optimizer {name!r}: its "
            "gradients are applied as they are, without loss scaling, and those below "
            "2**-24 are lost in float16. Compute them from "
            "`optimizer.scale_loss(loss)`."
        )
        return False

    def _saw(self, stage: Stage, tracing: bool) -> None:
        self.stage = stage
        self._traced = tracing
        seen = getattr(_thread, "seen", None)
        if seen is not None:
            seen.add(id(self))

    def _warn(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            warn(message)
