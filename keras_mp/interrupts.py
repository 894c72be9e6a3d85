"""Ctrl-C, held back while half of something is written.

Python raises KeyboardInterrupt between any two instructions of the main thread: between
the update of the weights and that of their counter, or when a compiled step has taken
the old state and nobody has its result yet. Only SIGINT is held back, and only if
Python handles it.
"""

import signal
import threading
from typing import Any

# The blocks that hold interrupts back, the innermost last: all in the main thread.
_holding: list["held"] = []


class held:  # noqa: N801 (reads as a verb: `with held():`)
    """Lets an interrupt wait until the end of a `with` block, which must be short."""

    def __enter__(self) -> None:
        self.handler: Any = None
        if threading.current_thread() is threading.main_thread():
            self.handler = signal.getsignal(signal.SIGINT)
        if callable(self.handler):  # Else it is a constant, or not Python's.
            self._came: list[tuple[Any, ...]] = []
            signal.signal(signal.SIGINT, self.hold)
            _holding.append(self)

    def hold(self, *call: Any) -> None:
        """Takes the place of the handler."""
        self._came.append(call)

    def __exit__(self, *error: Any) -> None:
        if callable(self.handler):
            _holding.remove(self)
            signal.signal(signal.SIGINT, self.handler)
            if self._came:
                self.handler(*self._came[0])


class let_through:  # noqa: N801
    """Lets interrupts through in a `with` block within one that holds them back."""

    def __enter__(self) -> None:
        main = threading.current_thread() is threading.main_thread()
        self._holds = _holding[-1] if _holding and main else None
        if self._holds is not None:
            signal.signal(signal.SIGINT, self._holds.handler)

    def __exit__(self, *error: Any) -> None:
        if self._holds is not None:
            signal.signal(signal.SIGINT, self._holds.hold)
