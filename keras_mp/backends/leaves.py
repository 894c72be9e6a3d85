"""The tensors in what a layer takes or returns.

Not by `keras.tree`: on torch it leaves circles of references behind, which hold the
tensors, with all that made them, until Python collects its garbage.
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
