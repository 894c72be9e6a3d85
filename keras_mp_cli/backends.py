"""The backend that a command runs on, chosen before Keras is imported."""

import contextlib
import importlib
import json
import os
from importlib.util import find_spec

from keras_mp_cli.messages import fail

BACKENDS = ("jax", "tensorflow", "torch")


def set_backend(asked: str | None, preferred: str | None = None) -> None:
    """Sets KERAS_BACKEND. If that is not installed, keras_mp's error is raised."""
    os.environ["KERAS_BACKEND"] = chosen = choose_backend(asked, preferred)
    if find_spec(chosen) is None:
        importlib.import_module("keras_mp")


def choose_backend(asked: str | None, preferred: str | None = None) -> str:
    """The backend asked for, by argument or KERAS_BACKEND, or one that is installed.

    If nobody asked, that is the preferred one if it is installed, else the one in
    Keras' own configuration file, else the first of jax, tensorflow and torch that is.
    If none is, it is jax.
    """
    asked = asked or os.environ.get("KERAS_BACKEND")
    if asked:
        if asked not in BACKENDS:
            fail(
                f"the backend must be one of {', '.join(BACKENDS)}. "
                f"Received: KERAS_BACKEND={asked}"
            )
        return asked
    for backend in (preferred, configured_backend(), *BACKENDS):
        if backend in BACKENDS and find_spec(backend):
            return backend
    return BACKENDS[0]


def fall_back() -> None:
    """Sets KERAS_BACKEND if nobody has and Keras' choice is not installed."""
    if os.environ.get("KERAS_BACKEND"):
        return
    taken = configured_backend() or "tensorflow"  # Keras' own default.
    chosen = choose_backend(None, taken)
    if chosen != taken:
        os.environ["KERAS_BACKEND"] = chosen


def configured_backend() -> str | None:
    """The backend in Keras' configuration file, read without importing Keras."""
    folder = os.path.expanduser(os.environ.get("KERAS_HOME", "~/.keras"))
    return _backend_in(os.path.join(folder, "keras.json"))


def backend_of_breakpoint(folder: str) -> str | None:
    """The backend that a breakpoint was saved on; None if that cannot be read."""
    return _backend_in(os.path.join(folder, "breakpoint.json"))


def _backend_in(path: str) -> str | None:
    # Keras also goes on without a file that is missing or damaged.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        with open(path, encoding="utf-8") as file:
            return json.load(file).get("backend")
    return None
