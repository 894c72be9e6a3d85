"""The commands but `run`: each chooses the backend and hands on to `keras_mp.cli`.

Only here may Keras be imported, and only after KERAS_BACKEND is set.
"""

import importlib.machinery
import importlib.util
import os
import sys
import types
from typing import Any

from keras_mp_cli.backends import backend_of_breakpoint, choose_backend
from keras_mp_cli.messages import fail


def demo(epochs: int, out: str, backend: str | None = None) -> None:
    """Trains handwritten digits under three policies."""
    os.environ["KERAS_BACKEND"] = choose_backend(backend)
    from keras_mp.cli.demo import demo

    demo(epochs=epochs, out=out)


def doctor(backend: str | None = None) -> None:
    """Prints what hardware is here, what is fast on it, and what "auto" picks."""
    os.environ["KERAS_BACKEND"] = choose_backend(backend)
    from keras_mp.cli.doctor import doctor

    doctor()


def inspect(model: str, backend: str | None = None) -> None:
    """Prints what the layers of a model in a file compute in."""
    if not os.path.isfile(model):
        fail(f"cannot read the model {model!r}: there is no such file")
    os.environ["KERAS_BACKEND"] = choose_backend(backend)
    from keras_mp.cli.inspect import inspect

    inspect(model)


def compare(
    script: str, backend: str | None = None, out: str | None = None, **options: Any
) -> None:
    """Trains what a script defines under several policies, and prints what differs.

    The script is imported as a module, before Keras is: it may choose the backend in
    its first lines, as it may without us, but not another one than `backend`.
    """
    os.environ["KERAS_BACKEND"] = choose_backend(backend)
    module = _imported(script)
    from keras_mp.cli.compare import compare

    compare(script, module, backend, out, **options)


def replay(folder: str, script: str | None, backend: str | None = None) -> None:
    """Takes a saved step again, on the backend asked for or on the step's own."""
    os.environ["KERAS_BACKEND"] = choose_backend(backend, backend_of_breakpoint(folder))
    from keras_mp.cli.replay import replay

    replay(folder, script)


def _imported(script: str) -> types.ModuleType:
    """The script as a module, which finds those beside it; without its main part."""
    path = os.path.join(os.getcwd(), script)
    name = os.path.splitext(os.path.basename(path))[0].replace(".", "_")
    if not os.path.isfile(path):
        fail(f"cannot read the script {script!r}: there is no such file")
    sys.argv = [script]
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    loader = importlib.machinery.SourceFileLoader(name, path)
    spec = importlib.util.spec_from_loader(name, loader)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    # Where pickle looks for what it defines.
    sys.modules[name] = module
    loader.exec_module(module)
    return module
