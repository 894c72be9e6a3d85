"""Stochastic rounding to bfloat16 on torch.

Bits come from a generator of its own: eagerly the hash of the other backends would be
twenty kernels a write.
"""

from collections.abc import Callable
from typing import Any

import torch


def stochastic_rounding(seed: Any, step: Any) -> Callable[[Any], Any]:
    # To begin anew at each step it has to know which one it is: a wait for the device.
    start = int(seed) * 0x9E3779B97F4A7C15 + int(step)
    generators: dict[torch.device, torch.Generator] = {}

    def rounded(x: torch.Tensor) -> torch.Tensor:
        if x.device not in generators:
            generators[x.device] = torch.Generator(x.device)
            generators[x.device].manual_seed(start % 2**63)
        noise = torch.randint(
            2**16,
            x.shape,
            generator=generators[x.device],
            device=x.device,
            dtype=torch.int32,
        )
        high = noise.add_(x.contiguous().view(torch.int32)).bitwise_right_shift_(16)
        near = high.to(torch.int16).view(torch.bfloat16)
        # The sum makes infinities and zeros of nans.
        return torch.where(x.isnan(), torch.nan, near)

    return rounded
