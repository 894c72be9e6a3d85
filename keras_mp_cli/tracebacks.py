"""Tracebacks of a script's errors, as they are without `keras-mp run`."""

import itertools
import os
import types


def traces(error: BaseException) -> list[types.TracebackType]:
    """The frames of an exception's traceback, outermost first."""
    found = []
    trace = error.__traceback__
    while trace is not None:
        found.append(trace)
        trace = trace.tb_next
    return found


def remove_our_frames(error: BaseException) -> None:
    """Removes this package's frames from a traceback, and from those chained to it.

    Python hides the frames of its import machinery, but not if a frame of this package
    is between them. So those next to such a frame go too.
    """
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        pending += [current.__cause__, current.__context__]

        kept: list[types.TracebackType] = []
        for internal, group in itertools.groupby(traces(current), _is_internal):
            neighbours = list(group)
            if not (internal and any(map(_is_ours, neighbours))):
                kept += neighbours
        for trace, following in itertools.zip_longest(kept, kept[1:]):
            trace.tb_next = following
        current.__traceback__ = kept[0] if kept else None


def file_of(trace: types.TracebackType) -> str:
    """The file whose code a frame of a traceback runs."""
    return trace.tb_frame.f_code.co_filename


_OUR_FOLDER = os.path.dirname(file_of.__code__.co_filename)


def _is_ours(trace: types.TracebackType) -> bool:
    return os.path.dirname(file_of(trace)) == _OUR_FOLDER


def _is_internal(trace: types.TracebackType) -> bool:
    return _is_ours(trace) or file_of(trace).startswith("<frozen importlib")
