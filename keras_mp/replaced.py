"""What keras_mp replaces for a while, and puts back however the block ends."""

import contextlib
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

# All of it; the seams, which stay, stand in `seams.py`.
REPLACED = {
    "calls": "`Operation.__call__`, while a diagnostic looks at what each operation "
    "returns",
    "random draws": "functions of Keras' random module, while a diagnostic compares: "
    "they then draw the same numbers in half precision as in float32",
    "slots": "`Optimizer.add_variable_from_reference`, while the optimizer within a "
    "`StochasticRoundingOptimizer` is built",
    "writes": "`assign`, `assign_add` and `assign_sub` of variables of TensorFlow, "
    "while a step that may be skipped is traced",
    "updates": "methods of one optimizer, while it writes: by `assign`, or in one "
    "kernel for Adam on torch",
    "gradients": "`apply` of one optimizer, while a train step is traced on torch",
    "steps": "`train_step`, `test_step` or `predict_step` of one model, while Keras "
    "makes the function that runs it",
    "own calls": "`call` of one model, or layer, that may mix dtypes, while it is "
    "called",
    "check of cuDNN": "`check_cudnn_version` of JAX, while attention is traced for a "
    "GPU, which may be elsewhere",
}
_ABSENT = object()
# What a class or a module has is that of all threads: one replaces it at a time.
_of_all_threads = threading.RLock()
# Threads may replace what one object has at the same time. By its id and the name: its
# own value, which comes back with the last of them, and the new ones.
_lock = threading.Lock()
_values: dict[tuple[int, str], list[Any]] = {}


@contextlib.contextmanager
def replaced(
    kind: str, owner: Any, wrappers: Mapping[str, Callable[[Any], Any]]
) -> Iterator[None]:
    """Gives an owner other attributes than its own within a `with` block.

    Args:
        kind: which entry of REPLACED it is.
        owner: a class, a module, or one object, whose class stays as it is.
        wrappers: by the name of an attribute, what makes the new one of its value.
    """
    if kind not in REPLACED:
        raise KeyError(f"REPLACED must name {kind!r}.")
    shared = isinstance(owner, type | types.ModuleType)
    new: dict[str, Any] = {}
    with _of_all_threads if shared else contextlib.nullcontext():
        try:
            try:
                for name, wrap in wrappers.items():
                    with _lock:
                        new[name] = wrap(getattr(owner, name))
                        own = vars(owner).get(name, _ABSENT)
                        _values.setdefault((id(owner), name), [own]).append(new[name])
                        _put(owner, name, new[name])
                yield
            finally:
                _take_back(owner, new)
        finally:  # Again, because an interrupt may have come in between.
            _take_back(owner, new)


def instead(new: Any) -> Callable[[Any], Any]:
    """A wrapper that needs nothing of what it replaces."""
    return lambda original: new


def _take_back(owner: Any, new: Mapping[str, Any]) -> None:
    for name, value in new.items():
        key = id(owner), name
        with _lock:
            own, *others = _values.get(key, [vars(owner).get(name, _ABSENT)])
            left = [own, *(x for x in others if x is not value)]
            _put(owner, name, left[-1])
            _values[key] = left
            if len(left) == 1:
                del _values[key]


def _put(owner: Any, name: str, value: Any) -> None:
    attributes = vars(owner)
    if isinstance(owner, type):
        if value is not _ABSENT:
            setattr(owner, name, value)
        elif name in attributes:
            delattr(owner, name)
    # Not `setattr`: Keras, torch and TensorFlow track what is set on their objects.
    elif value is not _ABSENT:
        attributes[name] = value
    else:
        attributes.pop(name, None)
