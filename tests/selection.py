"""Which tests run where, and when: what conftest.py makes of their marks.

`once` and `slow` are given a reason. `once` and `trains_many` pick a backend; `slow`
leaves a test to `make test-slow`, `sampled` the greater part of a table; `kernels` is
left out where kernels are.
"""

import dataclasses
import os

import keras
import pytest

OF_A_TABLE = "Each entry of the table is in a case that is not slow."


def reason(item, name):
    """Why a test has this mark, which must say so, or None where it has none."""
    mark = item.get_closest_marker(name)
    if mark is None:
        return None
    if not (len(mark.args) == 1 and isinstance(mark.args[0], str)):
        raise pytest.UsageError(f"{item.nodeid}: `{name}` must be given a reason.")
    return mark.args[0]


def is_at_home(item):
    """Is this backend the one that the test runs on?"""
    # What a page looks like; the command in front of a stand-in for Keras.
    if {"browser", "work"} & {*item.fixturenames} or reason(item, "once"):
        return keras.backend.backend() == "jax"
    if item.get_closest_marker("kernels") and os.environ.get("KERAS_MP_KERNELS") == "0":
        return False
    if item.get_closest_marker("trains_many"):
        return keras.backend.backend() == "torch"
    return True


def entries_of(item):
    """What a case of a table holds: a column and a value each."""
    by = item.get_closest_marker("sampled").kwargs.get("by")
    params = item.callspec.params
    if by is not None:
        return {repr(by(**params))}
    entries = set()
    for column, value in params.items():
        if dataclasses.is_dataclass(value):
            value = [getattr(value, field.name) for field in dataclasses.fields(value)]
        cells = value if isinstance(value, list | tuple) else [value]
        entries |= {f"{column} {place}: {cell!r}" for place, cell in enumerate(cells)}
    return entries


def few_that_hold_all(items):
    """Cases that hold every entry of the table between them, the fullest first."""
    left = {item: entries_of(item) for item in items}
    seen = set()
    while left:
        fullest = max(left, key=lambda item: len(left[item] - seen))
        if not left[fullest] - seen:
            return
        seen |= left.pop(fullest)
        yield fullest


def mark_what_is_slow(items):
    """Gives `slow` to the greater part of each table that is `sampled`."""
    tables = {}
    for item in items:
        reason(item, "slow")  # Raises an error if there is none.
        if item.get_closest_marker("sampled"):
            tables.setdefault((item.path, item.originalname), []).append(item)
    for table in tables.values():
        kept = {*few_that_hold_all(table)}
        for item in table:
            if item not in kept:
                item.add_marker(pytest.mark.slow(OF_A_TABLE))
