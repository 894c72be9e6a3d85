"""The policies and the seeds that `compare` is asked for."""

import numbers
from collections.abc import Iterable
from typing import Any

from keras_mp.policies.policy import Policy


def labelled(policies: Any) -> dict[str, Any]:
    """The policies by labels that differ."""
    if isinstance(policies, str) or not isinstance(policies, Iterable):
        policies = (policies,)
    policies = tuple(policies)
    found: dict[str, Any] = {}
    try:
        for given in policies:
            policy = Policy(given)
            label = f"auto ({policy.name})" if given == "auto" else str(policy.name)
            same = sum(x.partition(" #")[0] == label for x in found)
            found[f"{label} #{same + 1}" if same else label] = policy
    except ValueError:
        found = {}
    if len(found) < 2:
        raise ValueError(
            "`policies` must be two or more of 'float32', 'mixed_float16', "
            "'mixed_bfloat16', 'auto', names of float dtypes and DTypePolicy objects. "
            f"Received: policies={policies!r}."
        )
    return found


def check_seeds(seeds: Any) -> tuple[int, ...]:
    def is_whole(x: Any) -> bool:
        return isinstance(x, numbers.Integral) and not isinstance(x, bool)

    which = range(int(seeds)) if is_whole(seeds) else seeds
    if isinstance(which, Iterable) and not isinstance(which, str):
        which = tuple(which)
        # Those that NumPy takes.
        if which and all(is_whole(x) and 0 <= x < 2**32 for x in which):
            if len(set(which)) == len(which):
                return tuple(int(x) for x in which)
    raise ValueError(
        "`seeds` must be a whole number of at least 1, or different whole numbers from "
        f"0 to 2**32 - 1. Received: seeds={seeds!r}."
    )
