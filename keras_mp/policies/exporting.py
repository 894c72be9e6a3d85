"""What a model computes in, once `export` has written it to a file.

LiteRT has no float16 products: its converter stops, or leaves them to TensorFlow's own
kernels, which a phone's interpreter lacks. Such a file computes in float32. To make it
half as large, its weights are stored in float16 by the converter's options.
"""

import contextlib
from typing import Any

from keras_mp.policies.temporary import half_in_float32, temporary_policies


def policies_for(model: Any, format: str) -> contextlib.AbstractContextManager[None]:
    """The policies under which a model is traced for a file of this format."""
    if format == "litert":
        return temporary_policies(model, half_in_float32)
    return contextlib.nullcontext()
