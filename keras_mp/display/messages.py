"""Messages to the user: printed lines, and warnings."""

import contextlib
import logging
import sys
import traceback
import warnings
from collections.abc import Iterator
from types import FrameType

import keras

# Packages whose frames may lie between a line of the user's and a warning. optree, tree
# and wrapt are those that Keras and TensorFlow call functions through.
_BETWEEN = {
    *("keras_mp", "keras_mp_cli", "keras", "jax", "jaxlib", "tensorflow", "torch"),
    *("optree", "tree", "wrapt"),
}


def show_message(text: str) -> None:
    """Prints a text where Keras prints its progress, or logs it as an INFO.

    `keras.config.disable_interactive_logging` turns printing off.
    """
    if keras.config.is_interactive_logging_enabled():
        encoding = sys.stdout.encoding or "utf-8"
        # The name of a layer may have characters that the terminal has not.
        print(text.encode(encoding, "replace").decode(encoding), flush=True)
    else:
        logging.getLogger("keras_mp").info(text.strip())


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns, and names the line of the user's that led here.

    Every warning of keras_mp comes this way. How many frames lie between differs from
    backend to backend, so that no `stacklevel` fits, and `skip_file_prefixes` needs
    Python 3.12.
    """
    frame = _users_frame()
    module = frame.f_globals
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        module.get("__name__"),
        module.setdefault("__warningregistry__", {}),
    )


@contextlib.contextmanager
def warnings_at_the_user() -> Iterator[None]:
    """Lets the warnings that Keras gives within name the line of the user's, too."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        warn(str(warning.message), warning.category)


def _users_frame() -> FrameType:
    """The innermost frame of the user's; in a thread without one, the innermost."""
    frames = [frame for frame, _ in traceback.walk_stack(None)]
    return next(filter(_is_the_users, frames), frames[0])


def _is_the_users(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__name__")).split(".")[0]
    # What AutoGraph makes of a user's function is a file that is gone at the end.
    made = "__autograph_generated" in frame.f_code.co_filename
    return not (made or package in _BETWEEN or package in sys.stdlib_module_names)
