"""One batch at a time on torch, which has its own random generators."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import distributed

from keras_mp.backends.batches import Batches
from keras_mp.types import Model

_CPU, _GPU = "torch", "torch_cuda"


class TorchBatches(Batches):
    """A step may draw from torch's generators."""

    def other_workers(self, model: Model) -> str:
        if not (distributed.is_available() and distributed.is_initialized()):
            return ""
        processes = distributed.get_world_size()
        return f"{processes} processes" if processes > 1 else ""

    def generator_states(self) -> dict[str, np.ndarray]:
        states = {_CPU: torch.get_rng_state()}
        if torch.cuda.is_available():
            states[_GPU] = torch.cuda.get_rng_state()
        return {name: state.numpy() for name, state in states.items()}

    def set_generator_states(self, states: Mapping[str, np.ndarray]) -> None:
        if _CPU in states:
            torch.set_rng_state(torch.tensor(states[_CPU]))
        if _GPU in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(torch.tensor(states[_GPU]))
