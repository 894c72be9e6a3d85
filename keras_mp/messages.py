"""Messages to the user: printed lines, and warnings."""

import contextlib
import logging
import re
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


# All but line breaks and tabs: a layer may be named by whoever wrote its file.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def visible(text: str) -> str:
    """A text in which control characters are written out: a terminal obeys them."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def show_message(text: str) -> None:
    """Prints a text where Keras prints its progress, or logs it as an INFO.

    `keras.config.disable_interactive_logging` turns printing off. A text that cannot be
    printed, because the disk of a log is full, becomes a warning: the training goes on.
    """
    text = visible(text)
    if keras.config.is_interactive_logging_enabled():
        encoding = sys.stdout.encoding or "utf-8"
        try:
            # A layer's name may have characters that the terminal lacks.
            print(text.encode(encoding, "replace").decode(encoding), flush=True)
        except OSError as error:
            warn(
                f"Could not be printed: {type(error).__name__}: {error}. {text.strip()}"
            )
    else:
        logging.getLogger("keras_mp").info(text.strip())


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns, and names the user's line that led here.

    Every warning of keras_mp goes through here. The number of frames in between differs
    from backend to backend, so no `stacklevel` fits, and `skip_file_prefixes` needs
    Python 3.12.
    """
    frame = _users_frame()
    module = frame.f_globals
    warnings.warn_explicit(
        visible(message),
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        module.get("__name__"),
        module.setdefault("__warningregistry__", {}),
    )


@contextlib.contextmanager
def warnings_at_the_user() -> Iterator[None]:
    """Makes warnings that Keras gives meanwhile name the user's line, too."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        warn(str(warning.message), warning.category)


def _users_frame() -> FrameType:
    """The user's innermost frame; in a thread without one, the innermost of all."""
    frames = [frame for frame, _ in traceback.walk_stack(None)]
    return next(filter(_is_the_users, frames), frames[0])


def _is_the_users(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__name__")).split(".")[0]
    # AutoGraph turns a user's function into a file that is deleted at the end.
    made = "__autograph_generated" in frame.f_code.co_filename
    return not (made or package in _BETWEEN or package in sys.stdlib_module_names)
