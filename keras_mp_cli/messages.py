"""What the command says when it cannot go on."""

import sys
from typing import NoReturn


def fail(message: str) -> NoReturn:
    """Ends with one line on stderr and the exit status of a wrong command line."""
    print(f"keras-mp: error: {message}", file=sys.stderr)
    raise SystemExit(2)


def one_line(error: Exception) -> str:
    """The message of an error, without the configurations that Keras quotes."""
    text = str(error).split("Exception encountered: ")[-1]
    text = text.split("Full object config: ")[0].strip().split("\n\n")[0]
    return " ".join(text.split()) or type(error).__name__
