"""`compare`: the same training under several policies."""

import contextlib
import functools
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
from keras.src.backend.common import global_state

from keras_mp.diagnostics.comparison.arguments import check_seeds, labelled
from keras_mp.diagnostics.comparison.comparison import Comparison
from keras_mp.diagnostics.comparison.training import (
    NAMES,
    Plan,
    Training,
    initial_values,
    train_once,
)
from keras_mp.diagnostics.training_data import TrainingData
from keras_mp.display.progress_bar import check_verbose, progress_bar
from keras_mp.loss_scaling.rule import check_whole_number
from keras_mp.policies.hardware import recommended_policy
from keras_mp.policies.policy import MixedPolicy

POLICIES = ("float32", "mixed_float16", "mixed_bfloat16")


def compare(
    build: Callable[[], Any],
    train: Any,
    validation: Any,
    policies: Sequence[Any] = POLICIES,
    seeds: int | Sequence[int] = 3,
    *,
    epochs: int = 1,
    batch_size: int = 32,
    verbose: int = 1,
) -> Comparison:
    """Trains the same model under several policies, and says what differs.

    With each seed, all policies start from the same weights and see the same batches,
    so that nothing differs but the policy. The final metrics are those of `evaluate`
    on the validation data. A policy's differ from those of the first policy by some
    mean over the seeds; whether that is much is judged by what another seed makes, the
    sample standard deviation of the first policy's metrics over the seeds:

        the mean is at most that            -> within the spread
        else, with every seed the same sign -> beyond the spread
        else                                -> unclear: more seeds would tell

    Where half precision changes a training no more than another seed would, this says
    "beyond" of one metric in five with 3 seeds, in twenty with 5, and hardly ever with
    10. One seed leaves nothing to judge by.

    Steps are timed within `fit`, without their compilation: all but the first epoch, or
    of a single epoch all but the first and the last call of the train function. The
    policies take turns in going first. Peak memory is what the devices have counted,
    beyond what was in use before; on JAX, what the compiled train step needs; else it
    is not measured. A training that diverges is a result like another.

    Random states are seeded anew (`keras.utils.set_random_seed`) and left so.

    Args:
        build: takes nothing, and returns a new compiled `keras.Model`. It is called
            under each policy, as the global one.
        train, validation: `(x, y)` or `(x, y, sample_weight)`, or what else `fit`
            takes as one argument: a `tf.data.Dataset`, a `PyDataset`, a torch
            `DataLoader`. Or a function that returns one of these, called for each
            training: needed for a dataset that shuffles, in another order each time.
        policies: names or `keras.DTypePolicy` objects, two at least. The others are
            compared with the first.
        seeds: how many, or which.
        epochs: of each training.
        batch_size: of arrays.
        verbose: 0 for no progress bar.

    Returns:
        A `Comparison`: prints, shows in a notebook, `.to_html(path)`, `.to_dict()`,
        `.plot()`.

    Raises:
        TypeError, ValueError: for an argument of another kind, a name that is no
            policy, or a `build` that returns no compiled model, the same model twice,
            or models of different shapes. The global policy is what it was.

    Example:

    ```python
    def build():
        model = keras.Sequential([keras.layers.Dense(64), keras.layers.Dense(1)])
        model.compile("adam", "mse")
        return model

    print(keras_mp.compare(build, (x, y), (x_test, y_test), epochs=5))
    ```
    """
    if not callable(build):
        raise TypeError(f"`build` must be a function. Received: build={build!r}.")
    chosen, which = labelled(policies), check_seeds(seeds)
    check_whole_number("epochs", epochs)
    check_whole_number("batch_size", batch_size)
    check_verbose(verbose)
    data = (
        TrainingData("train", train, batch_size),
        TrainingData("validation", validation, batch_size),
    )
    with (
        _names_given() as names,
        progress_bar(len(chosen) * len(which), verbose) as tell,
    ):
        plan = Plan(build, *data, epochs, names)
        trainings, troubles = _trainings(plan, chosen, which, tell)
    for trouble in troubles:
        warnings.warn(trouble, stacklevel=2)
    told = [
        f"{label} is {policy!r}."
        for label, policy in chosen.items()
        if isinstance(policy, MixedPolicy) and policy.float32
    ]
    kinds = {device.kind for device in recommended_policy().devices}
    if kinds == {"cpu"} and any(t.seconds_per_step for t in trainings):
        told.append("These are the times of a CPU: an accelerator's are others.")
    return Comparison(
        backend=keras.backend.backend(),
        policies=tuple(chosen),
        seeds=which,
        epochs=epochs,
        trainings=tuple(trainings),
        notes=(*troubles, *told),
    )


def _trainings(
    plan: Plan,
    chosen: dict[str, Any],
    seeds: Sequence[int],
    tell: Callable[[str, int, float], None],
) -> tuple[list[Training], list[str]]:
    """The trainings, and what makes them say less than they seem to."""
    trainings: list[Training] = []
    orders: list[Any] = []
    labels = list(chosen)
    for turn, seed in enumerate(seeds):
        initial = initial_values(plan, chosen[labels[0]], seed)
        found: dict[str, Training] = {}
        first = turn % len(labels)
        for label in labels[first:] + labels[:first]:
            if len(orders) < 2:
                keras.utils.set_random_seed(seed)
                orders.append(plan.train.order())
            moved = functools.partial(
                tell, f"{label}, seed {seed}", len(trainings) + len(found)
            )
            found[label] = train_once(plan, label, chosen[label], seed, initial, moved)
        trainings += [found[label] for label in labels]
    base, *others = trainings[: len(labels)]
    troubles = [
        f"Under {other.policy} no layer computes in another dtype than under "
        f"{base.policy}. `keras_mp.inspect(build())` tells what has decided that."
        for other in others
        if other.compute_dtypes == base.compute_dtypes
        and chosen[other.policy] != chosen[base.policy]
    ]
    if orders[0] != orders[1]:
        troubles.append(
            "The batches were not the same under each policy: the dataset has an order "
            "of its own each time. As `train` give a function that makes it anew, with "
            "a seed if it has one of its own."
        )
    return trainings, troubles


@contextlib.contextmanager
def _names_given() -> Iterator[dict[str, int]]:
    """How often Keras has given each name so far; and it goes on from there."""
    names = global_state.get_global_attribute(NAMES, defaultdict(int), True)
    try:
        yield names.copy()
    finally:
        global_state.set_global_attribute(NAMES, names)
