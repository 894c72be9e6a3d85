"""`keras-mp inspect`."""

import sys

from keras.models import load_model

import keras_mp
from keras_mp_cli.messages import fail, one_line


def inspect(model: str, all: bool = False) -> None:
    """Prints what the layers of a model in a file compute in."""
    try:
        opened = load_model(model)
    except Exception as with_optimizer:
        # The model can be shown even if its loss or optimizer is the user's own.
        try:
            opened = load_model(model, compile=False)
        except Exception:
            fail(f"cannot open the model {model!r}: {one_line(with_optimizer)}")
        print(
            f"keras-mp: opened without what it was compiled with: "
            f"{one_line(with_optimizer)}",
            file=sys.stderr,
        )
    print(keras_mp.inspect(opened).text(every_layer=all))
