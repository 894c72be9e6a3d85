"""What random layers draw from, which no file of Keras' holds."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from keras import ops

from keras_mp.backends import engine

_SEEDS = "seeds"


def seeds_of(model: Any) -> dict[str, np.ndarray]:
    """The states of the seed generators of a model's layers."""
    seeds = [ops.convert_to_numpy(seed) for seed in _seeds(model)]
    return {_SEEDS: np.stack(seeds)} if seeds else {}


def set_random_state(model: Any, states: Mapping[str, np.ndarray]) -> None:
    """Lets the layers of a model draw again what they drew.

    Args:
        model: the model.
        states: those of `seeds_of` and of `generator_states`.

    Raises:
        ValueError: if the model has another number of seeds.
    """
    seeds, values = _seeds(model), states.get(_SEEDS, np.zeros((0, 2)))
    if len(values) != len(seeds):
        raise ValueError(
            f"the model must have the {len(values)} random seeds that were saved. "
            f"Received: a model with {len(seeds)}"
        )
    for seed, value in zip(seeds, values, strict=True):
        seed.assign(value.astype(seed.dtype))
    engine.set_generator_states(states)


def _seeds(model: Any) -> list[Any]:
    found = [g.state for x in model._flatten_layers() for g in x._seed_generators]
    return list({id(seed): seed for seed in found}.values())
