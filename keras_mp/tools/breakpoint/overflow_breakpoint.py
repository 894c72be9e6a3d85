"""A breakpoint in `fit`, at a step that was skipped."""

import os
import shlex
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras

from keras_mp import wanted
from keras_mp.backends import engine
from keras_mp.backends.train_step import next_calls
from keras_mp.loss_scaling.schedule import check_whole_number
from keras_mp.messages import show_message, warn
from keras_mp.tools.breakpoint.batch import batch_of
from keras_mp.tools.breakpoint.folder import check_folder, prepare
from keras_mp.tools.breakpoint.model_file import WEIGHTS
from keras_mp.tools.breakpoint.skipped_step import Step, save, scaling_of


class OverflowBreakpoint(keras.callbacks.Callback):
    """Saves the n-th skipped step in a row, with all that it takes to repeat it.

    That is its batch, the weights, the optimizer's state, the loss scale and the random
    seeds as they were before the step, and what `keras_mp.diagnose` says about them.
    `keras-mp replay FOLDER` repeats the step, here or on another machine. It saves once
    in each call of `fit`, which goes on as usual; `max_consecutive_skips` ends a
    training. This is a tool for debugging: it waits for the device at each step. With
    an optimizer that does not scale the loss it does nothing.

    Args:
        folder: where to save. Created if it is missing. An existing breakpoint is kept:
            the next one goes to `folder`-2, then to `folder`-3.
        skips: which skipped step in a row to save: 3 is the third of three in a row. An
            applied step restarts the count.

    Raises:
        TypeError: if `folder` is not a path.
        ValueError: if `folder` holds anything else; if `skips` is not a whole number of
            at least 1; and when `fit` begins on several replicas or processes, each of
            which has only a part of the batch.

    Example:

    ```python
    model.fit(x, y, callbacks=[keras_mp.callbacks.OverflowBreakpoint("overflow")])
    ```
    """

    def __init__(self, folder: str | os.PathLike[str], skips: int = 3) -> None:
        super().__init__()
        check_whole_number("skips", skips)
        self.folder, self.skips = folder, skips
        self._path = check_folder(folder)
        self._epoch, self._watches = 0, False
        self._step: Step | TypeError | None = None
        self._trained: Any = None

    def set_model(self, model: keras.Model) -> None:
        """Keeps the model: on JAX, each read of `self.model` restores the state."""
        super().set_model(model)
        self._trained = model

    def on_train_begin(self, logs: dict | None = None) -> None:
        if others := engine.other_workers(self.model):
            raise ValueError(
                "`OverflowBreakpoint` must see the whole batch of each step: train "
                f"without it, or in one process on one device. Received: {others}."
            )
        prepare(self._path)
        self._watches = wanted.done  # Else nothing computes in half precision.

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._epoch = epoch + 1

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        if self._watches:
            next_calls[self._trained] = weakref.WeakMethod(self._call)

    def on_train_end(self, logs: dict | None = None) -> None:
        if next_calls.pop(self._trained, None):
            warn(
                "OverflowBreakpoint saw no step: the model has a `make_train_function` "
                "of its own, which does not call that of keras.Model."
            )

    def _call(self, train_function: Callable, args: Sequence[Any]) -> Any:
        """Calls the train function once, step by step if the n-th skip may come."""
        model = self._trained
        state = args[0] if keras.backend.backend() == "jax" else None
        scaling = scaling_of(model, state)
        steps = model.steps_per_execution
        if scaling is None and getattr(model.optimizer, "built", True):
            return train_function(*args)  # It does not scale.
        if scaling and scaling.skips + steps < self.skips:
            return train_function(*args)
        return engine.run_by_batch(train_function, args, steps, self._take)

    def _take(self, batch: Any, state: Any, once: Callable) -> tuple[Any, Any]:
        self._before(batch, state)
        result, state = once(state)
        self._after(state)
        return result, state

    def _before(self, batch: Any, state: Any) -> None:
        scaling = scaling_of(self._trained, state)
        skips = scaling.skips if scaling else 0
        self._step = None
        if self._watches and skips + 1 >= self.skips:
            try:
                self._step = Step(batch_of(batch), scaling, engine.generator_states())
            except TypeError as error:
                self._step = error  # Raised only if the step is skipped.

    def _after(self, state: Any) -> None:
        step, self._step = self._step, None
        after = scaling_of(self._trained, state)
        if step is None or after is None or after.skips < self.skips:
            return
        self._watches = False
        try:
            if isinstance(step, TypeError):
                raise step
            with engine.attached(self._trained, state):
                saved, place = save(self._path, self._trained, step, after, self._epoch)
        except Exception as error:  # Whatever fails, the training goes on.
            warn(
                f"Skipped steps in a row: {after.skips}. The last could not be saved "
                f"in {os.fspath(self.folder)!r}: {type(error).__name__}: {error}. The "
                "training goes on."
            )
            return
        shown = self.folder if place == self._path else place
        command = f"keras-mp replay {shlex.quote(os.fspath(shown))}"
        if saved.model == WEIGHTS:
            command += (
                " --script SCRIPT (only the weights could be saved: its `build()` has "
                "to return the compiled model)"
            )
        show_message(
            f"\nkeras_mp: skipped steps in a row: {saved.skips}. The last, step "
            f"{saved.step}, is saved. To replay it: {command}"
        )
