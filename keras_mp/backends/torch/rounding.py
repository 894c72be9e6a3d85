"""Stochastic rounding to bfloat16 on torch.

The bits come from separate torch generators: the hash of the other backends, run
eagerly, would take twenty kernels for each write.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from keras_mp.backends.torch.sharding import on_own_part
from keras_mp.types import Tensor


def stochastic_rounding(seed: Tensor, step: Any) -> Callable[[Any], Any]:
    # Each step has its own seed. Reading the step number waits for the device.
    start = int(seed) * 0x9E3779B97F4A7C15 + int(step)
    generators: dict[Any, torch.Generator] = {}

    def rounded(x: torch.Tensor, shard: int) -> torch.Tensor:
        generator = generators.get((x.device, shard))
        if generator is None:
            generator = generators[x.device, shard] = torch.Generator(x.device)
            # All processes must round alike what each of them holds whole.
            generator.manual_seed((start + (shard << 40)) % 2**63)
        noise = torch.randint(
            2**16, x.shape, generator=generator, device=x.device, dtype=torch.int32
        )
        high = noise.add_(x.contiguous().view(torch.int32)).bitwise_right_shift_(16)
        near = high.to(torch.int16).view(torch.bfloat16)
        # The sum turns nans into infinities and zeros.
        return torch.where(x.isnan(), torch.nan, near)

    return functools.partial(on_own_part, rounded)
