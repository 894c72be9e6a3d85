"""A batch of a train step as arrays for a file, and back."""

from typing import Any, NamedTuple

import numpy as np
from keras import ops

_PARTS = ("x", "y", "sample_weight")


class Batch(NamedTuple):
    """A batch of a train step, for a file."""

    # They have NumPy's own dtypes; `x/0` and `x/mask` are parts of a structure `x`.
    arrays: dict[str, np.ndarray]
    # The structure whose leaves are these arrays, as JSON stores it.
    structure: Any


def batch_of(data: Any) -> Batch:
    """Copies a batch: dicts, lists and tuples of tensors and arrays.

    Sparse tensors become dense. A dtype that NumPy lacks, such as bfloat16, becomes
    float32, which holds its numbers exactly. Raises a TypeError for any other part.
    """
    arrays: dict[str, np.ndarray] = {}
    if isinstance(data, (list, tuple)) and len(data) <= len(_PARTS):
        named = zip(data, _PARTS[: len(data)], strict=True)
        parts = [_structure(x, name, arrays) for x, name in named]
        structure: Any = {_sequence(data): parts}
    else:
        structure = _structure(data, "x", arrays)
    return Batch(arrays, structure)


def _structure(part: Any, name: str, arrays: dict[str, np.ndarray]) -> Any:
    """The structure of a part, whose arrays are added to `arrays`."""
    if part is None:
        return None
    if isinstance(part, dict):
        if not all(isinstance(key, (str, int)) for key in part):
            raise TypeError(f"`{name}` has keys that are neither texts nor integers")
        items = part.items()
        return {"dict": [[k, _structure(v, f"{name}/{k}", arrays)] for k, v in items]}
    if isinstance(part, (list, tuple)):
        parts = [_structure(x, f"{name}/{i}", arrays) for i, x in enumerate(part)]
        return {_sequence(part): parts}
    if hasattr(part, "ragged_rank"):
        raise TypeError(f"`{name}` is ragged")
    array = ops.convert_to_numpy(part)
    dtype = array.dtype.name
    if array.dtype.isbuiltin == 2:  # From ml_dtypes.
        array = array.astype("float32")
    elif array.dtype.hasobject:
        if not all(isinstance(x, bytes) for x in array.flat):
            raise TypeError(f"`{name}` is no array of numbers or texts")
        array = array.astype("S")  # TensorFlow's texts.
    while name in arrays:  # A key of a dict may be "0" or hold a slash.
        name += "_"
    arrays[name] = array
    return {"array": name, "dtype": dtype}


def _sequence(part: Any) -> str:
    return "list" if isinstance(part, list) else "tuple"


def tensors_of(batch: Batch) -> Any:
    """The batch as tensors again; a KeyError or TypeError if arrays are missing."""
    return _tensors(batch.structure, batch.arrays)


def _tensors(part: Any, arrays: dict[str, np.ndarray]) -> Any:
    if part is None:
        return None
    if "dict" in part:
        return {key: _tensors(value, arrays) for key, value in part["dict"]}
    for kind in (list, tuple):
        if kind.__name__ in part:
            return kind(_tensors(x, arrays) for x in part[kind.__name__])
    array, dtype = arrays[part["array"]], part["dtype"]
    wide = array.dtype.name == "float32" != dtype
    return ops.convert_to_tensor(array, dtype=dtype if wide else None)
