"""The `keras-mp` command.

`import keras_mp` imports Keras, and Keras reads `KERAS_BACKEND` once, when it is
imported. So this package stands beside keras_mp. It reads the arguments and chooses the
backend with only the standard library, and then imports the command's module.
"""

import importlib
import os
from collections.abc import Sequence
from typing import Any

from keras_mp_cli import arguments, run
from keras_mp_cli.backends import backend_of_breakpoint, set_backend
from keras_mp_cli.messages import (
    fail,
    missing_package_is_one_line,
    unwritable_is_one_line,
)
from keras_mp_cli.scripts import import_script


def main(argv: Sequence[str] | None = None) -> None:
    """The entry point of `keras-mp` and of `python -m keras_mp_cli`."""
    options = arguments.parsed(argv)
    command = options.pop("command")
    if command == "run":
        run.run(**options)
        return
    with missing_package_is_one_line():
        _start(command, **options)


def _start(command: str, backend: str | None = None, **options: Any) -> None:
    """Chooses the backend, and calls the function that has the command's name."""
    preferred = None
    if command == "inspect" and not os.path.isfile(options["model"]):
        fail(f"cannot read the model {options['model']!r}: there is no such file")
    if command == "replay":
        if not os.path.isdir(options["folder"]):
            fail(f"there is no folder {options['folder']!r}")
        preferred = backend_of_breakpoint(options["folder"])
    set_backend(backend, preferred)
    if command == "compare":
        # Imported before Keras: it may choose the backend in its first lines.
        options.update(module=import_script(options["script"]), backend=backend)
    importlib.import_module("keras_mp")  # Before Keras, as it says what is missing.
    module = importlib.import_module(f"keras_mp_cli.{command}")
    with unwritable_is_one_line(options.get("out")):
        getattr(module, command)(**options)
