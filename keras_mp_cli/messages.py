"""What the command says when it cannot go on."""

import contextlib
import sys
from collections.abc import Iterator
from typing import NoReturn


def fail(message: str) -> NoReturn:
    """Ends with one line on stderr and the exit status of a wrong command line."""
    print(f"keras-mp: error: {message}", file=sys.stderr)
    raise SystemExit(2)


@contextlib.contextmanager
def missing_package_is_one_line() -> Iterator[None]:
    """Ends the command if keras_mp says that a package is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if not is_missing_package(error):
            raise
        fail(str(error))


@contextlib.contextmanager
def unwritable_is_one_line(path: str | None) -> Iterator[None]:
    """Ends the command if its result cannot be written to `path`: the disk is full."""
    try:
        yield
    except OSError as error:
        if path is None or error.filename != path:
            raise
        fail(f"cannot write {path!r}: {error.strerror}")


def is_missing_package(error: BaseException) -> bool:
    """Whether this is keras_mp's MissingPackageError, whose message is one sentence.

    Goes by name: the class cannot be imported if Keras, or its backend, is missing.
    """
    return type(error).__name__ == "MissingPackageError"


def one_line(error: Exception) -> str:
    """The message of an error, without the configurations that Keras quotes."""
    text = str(error).split("Exception encountered: ")[-1]
    text = text.split("Full object config: ")[0].strip().split("\n\n")[0]
    return " ".join(text.split()) or type(error).__name__
