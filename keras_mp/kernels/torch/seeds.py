"""Draws by a seed, such as those of a seeded Dropout, without a wait for the device.

Keras keeps the state of a `SeedGenerator` on the device and reads it at each draw. What
it will be is known: its second number counts the draws.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import torch

from keras_mp.backends.known import Known
from keras_mp.backends.torch.private import writes_to


class _State(NamedTuple):
    """What a state holds, if nobody has written to it since."""

    writes: int
    seed: int
    draws: int


known: Known[_State] = Known()


def read_once(original: Callable) -> Callable:
    """Wraps the function that makes torch's generator for a seed."""

    @functools.wraps(original)
    def torch_seed_generator(seed: Any) -> Any:
        if type(seed) is keras.random.SeedGenerator and _is_plain(seed.state.value):
            seed = _Drawn(seed)
        return original(seed)

    return torch_seed_generator


def _is_plain(state: torch.Tensor) -> bool:
    # In a stateless call, or among shards, it is something else.
    return (
        type(state) is torch.nn.Parameter
        and state.dtype == torch.int32
        and state.device.type != "meta"
        and not state.is_inference()  # It does not count writes.
        and not torch.compiler.is_compiling()
    )


class _Drawn(keras.random.SeedGenerator):
    """Stands for a `SeedGenerator` in one draw, and moves it on.

    Args:
        generator: the one that it stands for.
    """

    def __init__(self, generator: keras.random.SeedGenerator) -> None:
        self._generator = generator  # It has no state of its own.

    def next(self, ordered: bool = True) -> tuple[int, int]:
        """The two numbers whose sum is the seed, as Keras' `next` returns them."""
        variable = self._generator.state
        state = variable.value
        last = known.get(state)
        if last is None or last.writes != writes_to(state):
            last = _State(0, *state.tolist())  # This waits.
        step = torch.arange(2, dtype=state.dtype, device=state.device)
        variable.assign(state + step)
        if variable.value is state:
            next_state = _State(writes_to(state), last.seed, last.draws + 1)
            known.note(state, next_state)
        # The sum of two tensors of int32 has 32 bits.
        return (last.seed + last.draws + 2**31) % 2**32 - 2**31, 0
