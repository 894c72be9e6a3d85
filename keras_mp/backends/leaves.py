"""The tensors in what a layer takes or returns.

`keras.tree` is not used: on torch it leaves reference cycles behind, which hold the
tensors, and all that made them, until Python collects its garbage.
"""

from collections.abc import Iterator
from typing import Any


def leaves(structure: Any) -> Iterator[Any]:
    """What is in lists, tuples and dicts, in no order to rely on."""
    if isinstance(structure, dict):
        structure = [*structure.values()]
    if not isinstance(structure, list | tuple):
        yield structure
        return
    for part in structure:
        yield from leaves(part)
