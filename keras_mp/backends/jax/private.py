"""The private names of JAX that keras_mp uses, each with the reason."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

from jax._src.cudnn import fused_attention_stablehlo as _cudnn

# JAX checks the cuDNN of this process when it traces attention. It raises if there is
# none, though the program may be compiled for a GPU from here.
_CHECK = "check_cudnn_version"
# The first version with everything that JAX asks for on GPUs up to Hopper.
_ASSUMED = 91000

# JAX does not say which program a tracer belongs to. If the name goes away, all tracers
# count as parts of one program. That is wrong only where a loss inside `lax.cond`, for
# example, reads logits that were made outside.
_TRACE = "_trace"

# Of each thread, for the check is that of the whole process.
_assumed = contextvars.ContextVar("assumed", default=False)


@contextlib.contextmanager
def cudnn_assumed() -> Iterator[None]:
    """Lets this thread trace attention by cuDNN even without a GPU."""
    check = getattr(_cudnn, _CHECK)
    if not getattr(check, "_keras_mp", False):
        setattr(_cudnn, _CHECK, _lenient(check))
    before = _assumed.get()
    try:
        _assumed.set(True)
        yield
    finally:
        _assumed.set(before)


def are_of_one_trace(a: Any, b: Any) -> bool:
    """Do two tensors belong to one program?

    JAX raises if a tracer of an inner program is used outside it.
    """
    return getattr(a, _TRACE, None) is getattr(b, _TRACE, None)


def _lenient(original: Callable) -> Any:
    def check_cudnn_version() -> int:
        try:
            return original()
        except RuntimeError:
            if _assumed.get():
                return _ASSUMED
            raise

    check_cudnn_version._keras_mp = True  # type: ignore[attr-defined]
    return check_cudnn_version
