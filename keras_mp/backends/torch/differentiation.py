"""Gradients by what is computed on the way to a loss, on torch."""

from collections.abc import Callable
from typing import Any

import keras
import torch

from keras_mp.backends.torch import logits
from keras_mp.backends.torch.private import is_transformed


def differentiate(
    function: Callable, arguments: Any, variables: Any, state: Any, compiled: bool
) -> tuple[Any, list, list, list]:
    seen: list[Any] = []

    def see(x: Any) -> tuple[Any, bool]:
        # What is inside of torch.vmap must not leave it.
        here = isinstance(x, torch.Tensor) and not is_transformed(x)
        if not (here and x.is_floating_point()):
            return x, False
        seen.append(x)
        logits.known.forget(x)  # Else the loss would not go by its gradient.
        return x, True

    # Keras assigns in place, where the graph may need the value of before: that of the
    # states of a stateful LSTM. In this scope it notes what is assigned.
    ids = {id(v) for v in variables}
    values = [(v, v.value) for v in state if id(v) not in ids]
    # A Dropout without a seed draws from torch's own generators.
    with torch.enable_grad(), torch.random.fork_rng():
        with keras.StatelessScope(values, collect_losses=True):
            loss = function(arguments, see)
        wanted = [*(v.value for v in variables), *seen]
        asked = [i for i, x in enumerate(wanted) if x.requires_grad]
        found: list[Any] = [None] * len(wanted)
        # Of a frozen model there is nothing to differentiate by, or a loss of it
        # that depends on nothing.
        if asked and loss.requires_grad:
            inputs = [wanted[i] for i in asked]
            by_input = torch.autograd.grad(loss, inputs, allow_unused=True)
            for i, gradient in zip(asked, by_input, strict=True):
                found[i] = gradient
    seen = [x.detach() for x in seen]
    count = len(variables)
    return loss.detach(), seen, found[count:], found[:count]
