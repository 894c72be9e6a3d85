"""Callbacks that show what loss scaling does during `fit`."""

from typing import TYPE_CHECKING, Any

from keras_mp.callbacks.loss_scale_monitor import LossScaleMonitor

if TYPE_CHECKING:
    from keras_mp.tools.breakpoint.overflow_breakpoint import OverflowBreakpoint

__all__ = ["LossScaleMonitor", "OverflowBreakpoint"]


def __getattr__(name: str) -> Any:
    if name != "OverflowBreakpoint":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # It imports all of `diagnose`, which a training rarely needs.
    from keras_mp.tools.breakpoint.overflow_breakpoint import OverflowBreakpoint

    globals()[name] = OverflowBreakpoint
    return OverflowBreakpoint


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
