"""What keras_mp raises beyond ValueError and TypeError."""


class TrainingDivergedError(RuntimeError):
    """Raised after `max_consecutive_skips` skipped steps in a row."""


class BreakpointError(ValueError):
    """Raised of a folder that holds no breakpoint, a damaged one, or none to open."""
