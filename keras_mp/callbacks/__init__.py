"""Callbacks that show what loss scaling does during `fit`."""

from keras_mp.callbacks.loss_scale_monitor import LossScaleMonitor
from keras_mp.callbacks.overflow_breakpoint import OverflowBreakpoint

__all__ = ["LossScaleMonitor", "OverflowBreakpoint"]
