"""A progress bar."""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import keras


def check_verbose(verbose: Any) -> None:
    """Raises a ValueError unless `verbose` is 0 or 1."""
    if verbose not in (0, 1):
        raise ValueError(f"`verbose` must be 0 or 1. Received: {verbose=}.")


@contextlib.contextmanager
def progress_bar(
    total: int, verbose: int
) -> Iterator[Callable[[str, int, float], None]]:
    """A bar on stderr, so that a pipe gets only the result; it disappears at the end.

    Yields a function that moves it, given a text that says what is being done, how many
    of the `total` things are done, and how much of the current one, from 0 to 1.
    """
    # Imported here, because `import keras_mp` draws no bar.
    from rich import progress as bars
    from rich.console import Console

    console = Console(stderr=True)
    progress = bars.Progress(
        "{task.description}",
        bars.BarColumn(),
        bars.TaskProgressColumn(),
        bars.TimeElapsedColumn(),
        bars.TimeRemainingColumn(),
        console=console,
        disable=not (verbose and _can_show(console)),
        transient=True,
    )
    with progress:
        task = progress.add_task("starting", total=total)

        def show(text: str, done: int, part: float) -> None:
            progress.update(task, description=text, completed=done + part)

        yield show


def _can_show(console: Any) -> bool:
    """Is there a terminal, or a notebook that has all that rich needs for a bar?"""
    if console.is_jupyter:
        # Without them rich writes into the notebook that they are missing.
        return importlib.util.find_spec("ipywidgets") is not None
    return console.is_terminal


class TrainingProgress(keras.callbacks.Callback):
    """Calls `show` with the part of a training that is done, from 0 to 1."""

    def __init__(self, show: Callable[[float], None]) -> None:
        super().__init__()
        self._show = show

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._epoch = epoch
        self._show(epoch / self.params["epochs"])

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        if steps := self.params["steps"]:
            self._show((self._epoch + batch / steps) / self.params["epochs"])
