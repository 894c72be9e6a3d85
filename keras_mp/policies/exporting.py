"""What a model computes in, in a file of `export`.

LiteRT has no float16 products: a converter leaves them to TensorFlow's own kernels,
which a phone's interpreter has not, or stops. Such a file computes in float32. To make
it half as large, its weights are stored in float16 by the converter's options.
"""

import contextlib
from typing import Any

from keras_mp.policies.temporary import half_in_float32, temporary_policies


def policies_for(model: Any, format: str) -> contextlib.AbstractContextManager[None]:
    """The policies under which a model is traced for a file of this format."""
    if format == "litert":
        return temporary_policies(model, half_in_float32)
    return contextlib.nullcontext()
