"""A skipped step, saved by `OverflowBreakpoint` and replayed."""
