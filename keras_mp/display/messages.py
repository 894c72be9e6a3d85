"""Messages during training."""

import logging
import sys

import keras


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
