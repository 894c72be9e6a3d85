"""The global policy."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import keras

import keras_mp.keras_private as private
from keras_mp import wanted
from keras_mp.messages import warn
from keras_mp.policies.policy import Policy, as_stock, chooser_of

# What `set_global_policy`, or Keras' setter after it, has set last. Keras keeps its
# policy only for each thread, and `clear_session` forgets it.
# "auto" until a layer asks: looking for devices starts the backend, after which a
# program can neither set up its devices nor join other processes.
_of_process: keras.DTypePolicy | str | None = None


class _Scope:
    """A policy and where it holds; each is its own, even if their policies are one."""

    def __init__(self, policy: Any) -> None:
        self.policy = as_stock(policy)  # What Keras holds for a thread.


# The scopes that this task is in, the innermost last. A task starts with a copy of
# those of the task that created it, a thread with none.
_scopes: ContextVar[tuple[_Scope, ...]] = ContextVar("keras_mp_scopes", default=())


class _Thread(threading.local):
    """Whose policy Keras holds for this thread: a scope's, or that outside of all."""

    def __init__(self) -> None:
        self.shown = self.outside = _Scope(None)


_thread = _Thread()

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
    if policy == "auto":
        wanted.half_precision()  # Keras' own `dtype_policy` knows no "auto".
        new = policy
    else:
        new = Policy(policy)
    show_scope()
    _of_process = new
    if isinstance(policy, str) and policy == "float16" and not _warned_of_float16:
        _warned_of_float16 = True
        warn(
            "The policy 'float16' keeps the weights in float16, too: most updates are "
            "too small to change them, and training stalls. Did you mean "
            "'mixed_float16'? For float16 weights, in a model that only predicts, "
            "`keras.DTypePolicy('float16')` gives no warning."
        )
    _thread.shown.policy = None if policy == "auto" else as_stock(_of_process)
    private.set_policy_of_thread(_thread.shown.policy)


def show_scope() -> Any:
    """Gives Keras, which knows threads alone, the policy of the scope of this task.

    Returns:
        The policy that Keras has then for this thread, or None.
    """
    scopes = _scopes.get()
    scope = scopes[-1] if scopes else _thread.outside
    policy = private.policy_of_thread()
    if scope is not _thread.shown:
        _thread.shown.policy, _thread.shown = policy, scope
    elif not scopes or policy is not None:
        return policy
    # Else `clear_session` has forgotten it.
    private.set_policy_of_thread(scope.policy)
    return scope.policy


def restore_global_policy() -> bool:
    """Sets the policy of this task's scope, or of the process if Keras has none.

    Returns:
        Whether Keras has one now.
    """
    global _of_process
    policy = show_scope()
    if _of_process is not None and policy is None:
        _of_process = Policy(_of_process)
        policy = as_stock(_of_process)
        private.set_policy_of_thread(policy)
    return policy is not None


def note_global_policy() -> None:
    """Makes the policy that Keras' setter has just set the policy of the process.

    If keras_mp has set none before, everything stays as in Keras. What is set within a
    `policy_scope` ends with it.
    """
    global _of_process
    policy = private.policy_of_thread()
    private.set_policy_of_thread(as_stock(policy))
    if _of_process is not None and not _scopes.get():
        _of_process = chooser_of(policy) or policy


def give_back_global_policy() -> None:
    """Leaves Keras its own policy of that name, in each thread that has shown ours."""
    global _of_process
    restore_global_policy()  # Keras alone knows no "auto".
    _of_process = None
    policy = private.policy_of_thread()
    if chooser_of(policy) is not None:
        private.set_policy_of_thread(keras.DTypePolicy(str(policy.name)))


def global_policy() -> keras.DTypePolicy:
    """Returns the policy object now in force."""
    restore_global_policy()
    policy = keras.config.dtype_policy()
    return chooser_of(policy) or policy


@contextlib.contextmanager
def policy_scope(policy: str | keras.DTypePolicy) -> Iterator[keras.DTypePolicy]:
    """Sets the global policy within a `with` block, and restores the old one after it.

    Only in this thread, as Keras does, and only in this asyncio task and those that it
    creates. A generator that is suspended within the block leaves the policy in force
    for its caller, as in a fixture of pytest or a `contextlib.contextmanager`.

    Args:
        policy: as in `set_global_policy`.

    Yields:
        The policy object in force within the block.
    """
    scope = _Scope(Policy(policy))
    try:
        _scopes.set((*_scopes.get(), scope))
        show_scope()
        yield global_policy()
    finally:
        # Not the last one if a generator was suspended within its own scope.
        _scopes.set(tuple(other for other in _scopes.get() if other is not scope))
        show_scope()


def wrap_dtype_policy(original: Callable) -> Callable:
    """Wraps Keras' getter of the global policy, under each of its names."""

    def dtype_policy() -> Any:
        policy = show_scope()
        if policy is None:
            restore_global_policy()
            policy = original()
        return chooser_of(policy) or policy

    return dtype_policy


def wrap_set_dtype_policy(original: Callable) -> Callable:
    """Wraps Keras' setter."""

    def set_dtype_policy(policy: Any) -> None:
        show_scope()
        if private.is_default_being_set() and restore_global_policy():
            return
        original(policy)
        note_global_policy()

    return set_dtype_policy
