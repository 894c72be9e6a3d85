"""The global policy."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from keras_mp.policies import Policy


def set_global_policy(policy: Any) -> None:
    """Sets the policy of all layers created from here on.

    Args:
        policy: "float32", "mixed_float16", "mixed_bfloat16", "auto" (what
            `recommended_policy` picks), the name of a float dtype, or a
            `keras.DTypePolicy`.

    Raises:
        ValueError: for a name that is no policy. The policy in force stays.

    Example:

    ```python
    keras_mp.set_global_policy("mixed_float16")
    ```
    """
    keras.config.set_dtype_policy(Policy(policy))


def global_policy() -> keras.DTypePolicy:
    """Returns the policy object now in force."""
    return keras.config.dtype_policy()


@contextlib.contextmanager
def policy_scope(policy: Any) -> Iterator[keras.DTypePolicy]:
    """Sets the global policy within a `with` block, and the one before after it.

    Args:
        policy: as in `set_global_policy`.

    Yields:
        The policy object in force within the block.
    """
    before = global_policy()
    set_global_policy(policy)
    try:
        yield global_policy()
    finally:
        keras.config.set_dtype_policy(before)
