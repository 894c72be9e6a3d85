"""`compare`: the same training under several policies."""

import functools
import numbers
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras

import keras_mp.keras_private as private
from keras_mp.loss_scaling.schedule import check_whole_number
from keras_mp.messages import warn
from keras_mp.policies.hardware import recommended_policy
from keras_mp.policies.policy import ChoosingPolicy, Policy
from keras_mp.tools.comparison.comparison_report import Comparison
from keras_mp.tools.comparison.training import (
    Plan,
    Training,
    initial_values,
    train_once,
)
from keras_mp.tools.data import TrainingData
from keras_mp.tools.display.progress_bar import check_verbose, progress_bar

POLICIES = ("float32", "mixed_float16", "mixed_bfloat16")


def compare(
    build: Callable[[], keras.Model],
    train: Any,
    validation: Any,
    policies: Sequence[str | keras.DTypePolicy] = POLICIES,
    seeds: int | Sequence[int] = 3,
    *,
    epochs: int = 1,
    batch_size: int = 32,
    callbacks: Callable[[], Sequence[keras.callbacks.Callback]] | None = None,
    verbose: int = 1,
) -> Comparison:
    """Trains the same model under several policies, and says what differs.

    With each seed, all policies start from the same weights and see the same batches:
    only the policy differs. The final metrics are those of `evaluate` on the validation
    data. Each is compared with the first policy's, seed by seed, by Student's t:

        0 is outside the 95 % confidence interval of the mean -> differs
        else                                                  -> no clear difference

    False alarms: 1 in 20 of the metrics that half precision does not change is said to
    differ, as each is judged alone; with 2 seeds, 1 in 8 of those that move in coarse
    steps, like the accuracy on a few hundred examples. A clear difference may still be
    small: the spread beside the mean, the sample standard deviation, is what another
    seed changes. There is no verdict on one seed, nor without scipy.

    Steps are timed within `fit`, without their compilation: all but the first epoch, or
    in a single epoch all but the first and the last call of the train function. The
    policies take turns in going first. Peak memory is what the devices have counted,
    beyond what was in use before; on JAX, what the compiled train step needs; else it
    is not measured. A training that diverges is a result like any other.

    Sets the random seeds (`keras.utils.set_random_seed`) and does not restore them.

    Args:
        build: takes nothing, and returns a new compiled `keras.Model`. It is called
            with each policy as the global one.
        train, validation: `(x, y)` or `(x, y, sample_weight)`, or what else `fit`
            takes as one argument: a `tf.data.Dataset`, a `PyDataset`, a torch
            `DataLoader`. Or a function that returns one of these and is called for each
            training, which a dataset that shuffles anew each time needs.
        policies: at least two names or `keras.DTypePolicy` objects. The others are
            compared with the first.
        seeds: how many, or which.
        epochs: of each training.
        batch_size: of arrays.
        callbacks: takes nothing, and returns new callbacks for `fit`. It is called for
            each training. One that is not `async_safe` waits for each step on JAX.
        verbose: 0 for no progress bar.

    Returns:
        A `Comparison`: prints, shows in a notebook, `.to_html(path)`, `.to_dict()`,
        `.plot()`.

    Raises:
        TypeError, ValueError: for an argument of another kind, a name that is no
            policy, or a `build` that returns no compiled model, the same model twice,
            or models of different shapes. The global policy stays as it was.

    Example:

    ```python
    def build():
        model = keras.Sequential([keras.layers.Dense(64), keras.layers.Dense(1)])
        model.compile("adam", "mse")
        return model

    print(keras_mp.compare(build, (x, y), (x_test, y_test), epochs=5))
    ```
    """
    if not callable(build) or isinstance(build, keras.layers.Layer):
        raise TypeError(
            f"`build` must be a function. Received: build={build!r}. Give one that "
            "returns a new compiled model at each call."
        )
    if callbacks is not None and not callable(callbacks):
        raise TypeError(
            "`callbacks` must be a function that returns new callbacks at each call. "
            f"Received: callbacks={callbacks!r}."
        )
    chosen, which = _labelled(policies), _checked_seeds(seeds)
    check_whole_number("epochs", epochs)
    check_whole_number("batch_size", batch_size)
    check_verbose(verbose)
    data = (
        TrainingData("train", train, batch_size),
        TrainingData("validation", validation, batch_size),
    )
    names = private.names_given()
    try:
        with progress_bar(len(chosen) * len(which), verbose) as show:
            plan = Plan(build, *data, epochs, names, callbacks or list)
            trainings, warned = _trainings(plan, chosen, which, show)
    finally:
        private.set_names_given(names)  # Keras goes on counting from there.
    for text in warned:
        warn(text)
    notes = [
        f"{label} is {policy!r}."
        for label, policy in chosen.items()
        if isinstance(policy, ChoosingPolicy) and policy.float32
    ]
    kinds = {device.kind for device in recommended_policy().devices}
    if kinds == {"cpu"} and any(t.seconds_per_step for t in trainings):
        notes.append("Timed on a CPU. A GPU or TPU will differ.")
    return Comparison(
        backend=keras.backend.backend(),
        policies=tuple(chosen),
        seeds=which,
        epochs=epochs,
        trainings=tuple(trainings),
        notes=(*warned, *notes),
    )


def _labelled(policies: Any) -> dict[str, Any]:
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
            "'mixed_bfloat16', 'bfloat16', 'auto', names of float dtypes and "
            "DTypePolicy objects. "
            f"Received: policies={policies!r}."
        )
    return found


def _checked_seeds(seeds: Any) -> tuple[int, ...]:
    def is_whole(x: Any) -> bool:
        return isinstance(x, numbers.Integral) and not isinstance(x, bool)

    which = range(int(seeds)) if is_whole(seeds) else seeds
    if isinstance(which, Iterable) and not isinstance(which, str):
        which = tuple(which)
        # NumPy takes seeds of 32 bits.
        if which and all(is_whole(x) and 0 <= x < 2**32 for x in which):
            if len(set(which)) == len(which):
                return tuple(int(x) for x in which)
    raise ValueError(
        "`seeds` must be a whole number of at least 1, or different whole numbers from "
        f"0 to 2**32 - 1. Received: seeds={seeds!r}."
    )


def _trainings(
    plan: Plan,
    chosen: dict[str, Any],
    seeds: Sequence[int],
    show: Callable[[str, int, float], None],
) -> tuple[list[Training], list[str]]:
    """The trainings, and warnings of what makes them hard to compare."""
    found: dict[tuple[int, str], Training] = {}
    orders: list[Any] = []
    labels = list(chosen)
    for turn, seed in enumerate(seeds):
        initial = initial_values(plan, chosen[labels[0]], seed)
        first = turn % len(labels)
        for label in labels[first:] + labels[:first]:
            if len(orders) < 2:
                keras.utils.set_random_seed(seed)
                orders.append(plan.train.order())
            progress = functools.partial(show, f"{label}, seed {seed}", len(found))
            found[seed, label] = train_once(
                plan, label, chosen[label], seed, initial, progress
            )
    trainings = [found[seed, label] for seed in seeds for label in labels]
    base, *others = trainings[: len(labels)]
    warned = [
        f"Under {other.policy} no layer computes in another dtype than under "
        f"{base.policy}. `keras_mp.inspect(build())` says what has decided that."
        for other in others
        if other.compute_dtypes == base.compute_dtypes
        and chosen[other.policy] != chosen[base.policy]
    ]
    if orders[0] != orders[1]:
        warned.append(
            "The batches were not the same under each policy: the dataset has an order "
            "of its own each time. As `train` give a function that makes it anew, with "
            "a seed if it has one of its own."
        )
    return trainings, warned
