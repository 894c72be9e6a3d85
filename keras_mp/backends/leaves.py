"""The tensors in what a layer takes or returns.

`keras.tree` is not used: on torch it leaves reference cycles behind, which hold the
tensors, and all that made them, until Python collects its garbage.
"""

from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras import ops

from keras_mp.backends.interface import HALF
from keras_mp.types import Tensor


def leaves(structure: Any) -> Iterator[Any]:
    """What is in lists, tuples and dicts, in no order to rely on."""
    if isinstance(structure, dict):
        structure = [*structure.values()]
    if not isinstance(structure, list | tuple):
        yield structure
        return
    for part in structure:
        yield from leaves(part)


def mapped(function: Callable[[Any], Any], structure: Any) -> Any:
    """What `function` makes of each leaf, in the same structure."""
    if isinstance(structure, dict | list | tuple):
        return keras.tree.map_structure(function, structure)
    return function(structure)


def is_half_tensor(x: Tensor) -> bool:
    """Is it a tensor, not a symbolic one, in float16 or bfloat16?"""
    return ops.is_tensor(x) and keras.backend.standardize_dtype(x.dtype) in HALF
