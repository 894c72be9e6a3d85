"""Puts into Keras what half precision needs, from three tables, and takes it out.

Seams and repairs go in always, kernels unless they are left out. A repair or a kernel
whose private names this Keras, or this framework, has not got is left out with a
warning; a seam that cannot be set is an error, and nothing is set then.
"""

import collections
import functools
import importlib
import os
from collections.abc import Iterator
from pkgutil import resolve_name
from typing import Any, NamedTuple

import keras_mp.keras_private as private
from keras_mp import interrupts, seams, wanted
from keras_mp.backends import engine
from keras_mp.backends.interface import Wrapper
from keras_mp.config import give_back_global_policy
from keras_mp.loss_scaling.wrapping import wrap_add_loss
from keras_mp.messages import warn
from keras_mp.policies import exporting, heads, inputs, saving
from keras_mp.repairs import table as repairs
from keras_mp.repairs.guard import guarded
from keras_mp.repairs.table import EACH, HALF, HEADS, Row, rows_of

_KERNELS = "KERAS_MP_KERNELS"
_warned: set[str] = set()


class Place(NamedTuple):
    """An attribute of Keras, or of the core, and what wraps it."""

    owner: Any
    name: str
    wrap: Wrapper


def install(kernels: bool = True) -> None:
    """Wraps methods of Keras now, as asking for half precision does.

    It does nothing if they are wrapped already, and the kernels are as asked for.

    Args:
        kernels: False leaves out what makes a step faster or smaller and changes
            nothing else. So does the environment variable `KERAS_MP_KERNELS=0`, for
            whoever asks. What was traced before stays as it is.

    Raises:
        ImportError: if this Keras lacks a method that a promise needs. Nothing is
            wrapped then.
        ValueError: if `KERAS_MP_KERNELS` is neither 0 nor 1.
    """
    said = os.environ.get(_KERNELS, "1")
    if said not in ("0", "1"):
        raise ValueError(f"`{_KERNELS}` must be 0 or 1. Received: {_KERNELS}={said}.")
    kernels = kernels and said == "1"
    with wanted.lock:
        private.check()
        places = list(_places(kernels))
        if wanted.done and wanted.kernels != kernels:
            _take_out()
        try:
            for place in places:
                _put(*place)
            saving.wrap_own_get_configs()
            wanted.done, wanted.kernels = True, kernels
        except BaseException:
            with interrupts.held():
                _take_out()
            raise


def uninstall() -> None:
    """Gives Keras back as it is without keras_mp; does nothing if it is.

    The wrappers go, and the global policy becomes Keras' own of the same name. Asking
    for half precision again, or `install`, puts the wrappers back.

    What was made before stays: a layer keeps the dtype policy that was chosen for it,
    and a `LossScaleOptimizer` scales, but in `fit` a skipped step changes statistics,
    metrics and logs. Layers that are created afterwards are Keras' own.

    Example:

    ```python
    keras_mp.uninstall()
    keras.layers.Dense(8)  # as if keras_mp had not been imported
    keras_mp.install()
    ```
    """
    with wanted.lock:
        give_back_global_policy()
        inputs.give_back()
        with interrupts.held():
            _take_out()
            wanted.kernels = True


# The attributes of Keras that are wrapped.
_installed: dict[tuple[Any, str], None] = {}


def _put(owner: Any, name: str, wrap: Wrapper) -> None:
    original = vars(owner)[name]
    if not hasattr(original, "_keras_mp_original"):
        wrapper: Any = functools.wraps(original)(wrap(original))
        wrapper._keras_mp_original, wrapper._keras_mp_self = original, wrapper
        _installed[owner, name] = None
        setattr(owner, name, wrapper)


def _take_out() -> None:
    wanted.done = False
    saving.unwrap_own_get_configs()
    for owner, name in list(_installed):
        marks = vars(vars(owner)[name])
        # Another library's wrapper round ours has our marks, copied by functools. If
        # that goes, ours is still to be taken out.
        if marks.get("_keras_mp_self") is vars(owner)[name]:
            setattr(owner, name, marks["_keras_mp_original"])
        if "_keras_mp_self" not in vars(vars(owner)[name]):
            del _installed[owner, name]


def _places(kernels: bool) -> Iterator[Place]:
    """What is to be wrapped.

    Raises:
        ImportError: if this Keras lacks a method that a promise needs.
    """
    for seam in (*seams.SEAMS, *(seams.OF_SHARDS if wanted.shards else ())):
        for method in seam.methods if seam.wrap else ():
            name = method.rpartition(".")[2]
            yield Place(seams.home_of(method), name, seam.wrap)
    yield from _operations(kernels)
    if not isinstance(private.tracebacks, private.Missing):
        yield Place(private.tracebacks, private.INCLUDE_FRAME, seams.wrap_include_frame)


# Functions of the core that repairs and kernels wrap, beside those of Keras.
_CORE: dict[str, tuple[Any, str]] = {
    "heads.call": (heads, "call"),
}
# Repairs that use policies or loss scaling, which the folder `repairs` must not import.
_MORE_REPAIRS: dict[str, Wrapper] = {
    "Layer.add_loss": wrap_add_loss,
    "Model.export": exporting.wrap_export,
}


def place_of(operation: str) -> tuple[Any, str] | None:
    """Where an operation of the tables is; None if this Keras has it nowhere."""
    return _CORE.get(operation) or private.place_of(operation)


def _operations(kernels: bool) -> Iterator[Place]:
    """The operations that this Keras and this framework can have."""
    of_shards = engine.of_shards() if wanted.shards else {}
    repaired = {**_MORE_REPAIRS, **repairs.wrappers(), **of_shards}
    tables = [("repair", repairs.REPAIRS, repaired)]
    if kernels:
        # Imported when it is wanted: a tenth of all modules.
        from keras_mp.kernels import table

        tables.append(("kernel", table.KERNELS, table.wrappers()))
    # For each operation, what wraps which calls: a kernel comes before a repair.
    found: dict[str, dict[str, Wrapper]] = collections.defaultdict(dict)
    for kind, rows, wrappers in tables:
        for operation, wrap in wrappers.items():
            own = rows_of(operation, rows)
            missing = _missing(operation, own)
            if missing:
                _say(operation, missing, kind)
            else:
                by = [row.by for row in own] or [EACH]
                found[operation] |= dict.fromkeys(by, wrap)
    for operation, calls in found.items():
        wrap = calls.get(EACH) or guarded(calls.get(HALF), calls.get(HEADS))
        place = place_of(operation)
        if place is not None:
            yield Place(*place, wrap)


def _missing(operation: str, rows: list[Row]) -> str | None:
    """A name that the wrapper of an operation needs and that is not there."""
    if place_of(operation) is None:
        return f"keras: {operation}"
    for path in (name for row in rows for name in row.needs):
        try:
            resolve_name(path)
        except (ImportError, AttributeError):
            return path.replace(":", ".")
    return None


def _say(operation: str, name: str, kind: str) -> None:
    if name in _warned:
        return
    _warned.add(name)
    package = name.split(".")[0].split(":")[0]
    version = importlib.import_module(package).__version__
    price = {
        "repair": "in half precision it is Keras' own, which may be wrong",
        "kernel": "steps are right, and slower or larger",
    }[kind]
    warn(
        f"keras_mp goes without its {kind} of `{operation}`: {package} {version} does "
        f"not have {name.removeprefix('keras: ')}, and {price}. Run `pip install "
        "--upgrade keras_mp`."
    )


wanted.put_in = lambda: install(wanted.kernels)
