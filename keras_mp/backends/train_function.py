"""Keras' `make_train_function` with a wrapped train step, without a framework."""

from collections.abc import Callable
from typing import Any


def make_train_function(
    model: Any, original: Callable, force: bool, wrap: Callable[[Callable], Callable]
) -> None:
    """Runs `original(model, force)` with `model.train_step` wrapped by `wrap`.

    Keras on JAX and TensorFlow reads the attribute once, in this call; the user's own
    `train_step`, a method or an attribute of the instance, is left as it was.
    """
    attributes = vars(model)
    before = {k: v for k, v in attributes.items() if k == "train_step"}
    attributes["train_step"] = wrap(model.train_step)
    try:
        original(model, force)
    finally:
        del attributes["train_step"]
        attributes.update(before)
