"""A progress bar on stderr, so that a pipe gets the result alone."""

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress(
    unit: str, total: int, verbose: int = 1
) -> Iterator[Callable[[int], None]]:
    """Shows a bar that `advance(count)` moves, and takes it away at the end.

    Args:
        unit: what is counted, in the plural.
        total: how many there are.
        verbose: 0 for silence.
    """
    # Here, not above: `import keras_mp` shows no bar.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    console = Console(stderr=True)
    shown = verbose and (console.is_terminal or console.is_jupyter)
    bar = Progress(
        BarColumn(),
        MofNCompleteColumn(),
        unit,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not shown,
    )
    with bar:
        task = bar.add_task("", total=total)
        yield lambda count: bar.advance(task, count)
