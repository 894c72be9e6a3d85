"""`keras-mp replay`."""

from keras_mp.diagnostics.breakpoint import replay as breakpoints
from keras_mp.errors import BreakpointError
from keras_mp_cli.messages import fail, one_line


def replay(folder: str, script: str | None) -> None:
    """Prints what a saved step does here.

    Args:
        folder: what the callback OverflowBreakpoint wrote.
        script: a file that defines the model's own classes; None if there are none.
    """
    try:
        names = breakpoints.names_in(script) if script else {}
        build = names.get("build")
        print(breakpoints.replay(folder, build=build, custom_objects=names))
    except BreakpointError as error:
        fail(one_line(error))
