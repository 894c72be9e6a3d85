"""The framework's own random generators, from which layers may draw.

Keras' layers draw from seeds of their own, but a Dropout without a seed on torch.
"""

from collections.abc import Mapping

import keras
import numpy as np

_CPU, _GPU = "torch", "torch_cuda"


def generator_states() -> dict[str, np.ndarray]:
    """The states of the generators that the framework has for all; torch alone."""
    if keras.backend.backend() != "torch":
        return {}
    import torch

    states = {_CPU: torch.get_rng_state()}
    if torch.cuda.is_available():
        states[_GPU] = torch.cuda.get_rng_state()
    return {name: state.numpy() for name, state in states.items()}


def set_generator_states(states: Mapping[str, np.ndarray]) -> None:
    """Sets them as `generator_states` has found them, as far as they are here."""
    if keras.backend.backend() != "torch":
        return
    import torch

    if _CPU in states:
        torch.set_rng_state(torch.tensor(states[_CPU]))
    if _GPU in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(states[_GPU]))
