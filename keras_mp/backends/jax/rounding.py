"""Stochastic rounding to bfloat16 on JAX: one kernel with the update that it rounds."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from keras_mp.backends.rounding import RandomBits, Words
from keras_mp.types import Tensor

_WORDS = Words(
    word=lambda x: np.uint32(x) if isinstance(x, int) else x.astype(np.uint32),
    xor=lambda x, y: x ^ y,
    shift=lambda x, bits: x >> np.uint32(bits),
    numbers=lambda shape, axis: lax.broadcasted_iota(np.uint32, shape, axis),
)


def stochastic_rounding(seed: Tensor, step: Any) -> Callable[[Any], Any]:
    random = RandomBits(_WORDS, jnp.asarray(seed), jnp.asarray(step))

    def rounded(x: Tensor) -> Any:
        noise = random.next(x.shape) & np.uint32(0xFFFF)
        sums = lax.bitcast_convert_type(x, np.uint32) + noise
        high = (sums >> np.uint32(16)).astype(np.uint16)
        near = lax.bitcast_convert_type(high, jnp.bfloat16)
        # The sum turns nans into infinities and zeros.
        return jnp.where(jnp.isnan(x), jnp.bfloat16(jnp.nan), near)

    return rounded
