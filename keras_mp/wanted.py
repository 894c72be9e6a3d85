"""The doors: whoever is asked for half precision says so here, and the seams go in.

On the ground, so that a policy and an optimizer can say it, which stand below the
seams. `installing` sets `put_in`, `done` and `kernels`.
"""

import threading
from collections.abc import Callable


def _nothing() -> None:
    """What there is to put in until `installing` has been imported."""


put_in: Callable[[], None] = _nothing
done = False
# Without kernels a step is right, too.
kernels = True
# Are there sharded weights? Their seams go in with the others from then on.
shards = False
# A second thread that asks meanwhile waits until all seams are in.
lock = threading.RLock()


def half_precision() -> None:
    """Puts the seams in, unless they are in already.

    Raises:
        ImportError: if this Keras lacks what one of them wraps. None is in then.
    """
    if not done:
        put_in()


def sharding() -> None:
    """Puts in what sharded weights need as well."""
    global done, shards
    with lock:
        done, shards = done and shards, True
        put_in()
