"""The global policy."""

import contextlib
import threading
from collections.abc import Iterator

import keras

import keras_mp.keras_private as private
from keras_mp.display.messages import warn
from keras_mp.policies.policy import Policy

# What `set_global_policy`, or Keras' setter after it, has set last. Keras keeps its
# policy only for each thread, and `clear_session` forgets it.
# "auto" until a layer asks: looking for devices starts the backend, after which a
# program can neither set up its devices nor join other processes.
_of_process: keras.DTypePolicy | str | None = None
_thread = threading.local()

_warned_of_float16 = False


def set_global_policy(policy: str | keras.DTypePolicy) -> None:
    """Sets the policy of all layers created from here on.

    It holds in threads that start later and after `keras.utils.clear_session()`.

    Args:
        policy: "float32", "mixed_float16", "mixed_bfloat16", "bfloat16" (weights too,
            see `BFloat16`), "auto" (what `recommended_policy` picks, once the first
            layer asks), the name of a float dtype, or a `keras.DTypePolicy`. "float16"
            warns once.

    Raises:
        ValueError: for a name that is no policy. The policy in force stays.

    Example:

    ```python
    keras_mp.set_global_policy("mixed_float16")
    ```
    """
    global _of_process, _warned_of_float16
    _of_process = policy if policy == "auto" else Policy(policy)
    if isinstance(policy, str) and policy == "float16" and not _warned_of_float16:
        _warned_of_float16 = True
        warn(
            "The policy 'float16' keeps the weights in float16, too: most updates are "
            "too small to change them, and training stalls. Did you mean "
            "'mixed_float16'? For float16 weights, in a model that only predicts, "
            "`keras.DTypePolicy('float16')` gives no warning."
        )
    private.set_policy_of_thread(None if policy == "auto" else _of_process)


def restore_global_policy() -> None:
    """Sets the policy of the process in a thread that has none, or has lost it."""
    global _of_process
    if _of_process is not None and private.policy_of_thread() is None:
        _of_process = Policy(_of_process)
        private.set_policy_of_thread(_of_process)


def note_global_policy() -> None:
    """Makes the policy that Keras' setter has just set the policy of the process.

    If keras_mp has set none before, everything stays as in Keras. What is set within a
    `policy_scope` ends with it.
    """
    global _of_process
    if _of_process is not None and not getattr(_thread, "in_scope", False):
        _of_process = private.policy_of_thread()


def global_policy() -> keras.DTypePolicy:
    """Returns the policy object now in force."""
    return keras.config.dtype_policy()


@contextlib.contextmanager
def policy_scope(policy: str | keras.DTypePolicy) -> Iterator[keras.DTypePolicy]:
    """Sets the global policy within a `with` block, and restores the old one after it.

    Only in this thread, as Keras does.

    Args:
        policy: as in `set_global_policy`.

    Yields:
        The policy object in force within the block.
    """
    before, outer = private.policy_of_thread(), getattr(_thread, "in_scope", False)
    chosen = Policy(policy)
    try:
        private.set_policy_of_thread(chosen)
        _thread.in_scope = True
        yield global_policy()
    finally:
        _thread.in_scope = outer
        private.set_policy_of_thread(before)
