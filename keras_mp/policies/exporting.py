"""What a model computes in, once `export` has written it to a file.

LiteRT has no float16 products: its converter stops, or leaves them to TensorFlow's own
kernels, which a phone's interpreter lacks. Such a file computes in float32. To make it
half as large, its weights are stored in float16 by the converter's options.
"""

import contextlib
from collections.abc import Callable
from typing import Any

from keras_mp.policies.temporary import half_in_float32, temporary_policies


def wrap_export(original: Callable) -> Callable:
    """Wraps `export`: a file's format says under which policies a model is traced."""

    def export(
        self: Any,
        filepath: Any,
        format: str = "tf_saved_model",
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        changed: Any = contextlib.nullcontext()
        if format == "litert":
            changed = temporary_policies(self, half_in_float32)
        with changed:
            return original(self, filepath, format, *args, **kwargs)

    return export
