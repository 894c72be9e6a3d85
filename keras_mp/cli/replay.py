"""`keras-mp replay`."""

from inspect import isclass, isfunction

from keras_mp.diagnostics.breakpoint import replay as breakpoints
from keras_mp.errors import BreakpointError
from keras_mp_cli.commands import import_script
from keras_mp_cli.messages import fail, one_line


def replay(folder: str, script: str | None = None) -> None:
    """Prints what a saved step does here.

    Args:
        folder: what the callback OverflowBreakpoint wrote.
        script: a file that defines the model's own classes; None if there are none.
    """
    defined = vars(import_script(script)) if script else {}
    names = {k: v for k, v in defined.items() if isfunction(v) or isclass(v)}
    build = names.get("build")
    try:
        print(breakpoints.replay(folder, build=build, custom_objects=names))
    except BreakpointError as error:
        fail(one_line(error))
