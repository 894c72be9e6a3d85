"""The private names of JAX that keras_mp uses, each with the reason."""

import contextlib
import threading
from collections.abc import Callable, Iterator

from keras_mp.replaced import replaced
from keras_mp.types import Tensor

# JAX checks the cuDNN of this process when it traces attention. It raises if there is
# none, though the program may be compiled for a GPU from here.
_CHECK = "check_cudnn_version"
# The first version with everything that JAX asks for on GPUs up to Hopper.
_ASSUMED = 91000

# JAX does not say which program a tracer belongs to. If the name goes away, all tracers
# count as parts of one program. That is wrong only where a loss inside `lax.cond`, for
# example, reads logits that were made outside.
_TRACE = "_trace"


@contextlib.contextmanager
def cudnn_assumed() -> Iterator[None]:
    """Lets this thread trace attention by cuDNN even without a GPU."""
    from jax._src.cudnn import fused_attention_stablehlo

    with replaced("check of cuDNN", fused_attention_stablehlo, {_CHECK: _lenient}):
        yield


def are_of_one_trace(a: Tensor, b: Tensor) -> bool:
    """Do two tensors belong to one program?

    JAX raises if a tracer of an inner program is used outside it.
    """
    return getattr(a, _TRACE, None) is getattr(b, _TRACE, None)


def _lenient(original: Callable) -> Callable:
    thread = threading.get_ident()  # The check is that of all threads.

    def check_cudnn_version() -> int:
        try:
            return original()
        except RuntimeError:
            if threading.get_ident() == thread:
                return _ASSUMED
            raise

    return check_cudnn_version
