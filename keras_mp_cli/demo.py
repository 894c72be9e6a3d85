"""The demo: real handwritten digits, trained under three policies.

`train` holds what a user writes: a policy, `compile("adam")` and `fit`. The rest of the
file measures that and shows it.
"""

import dataclasses
import functools
from collections.abc import Callable

import keras
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from keras_mp.config import policy_scope
from keras_mp.diagnostics.comparison.stopwatch import Stopwatch
from keras_mp.diagnostics.inspection.inspection import inspect
from keras_mp.display.progress_bar import TrainingProgress, progress_bar
from keras_mp.errors import MissingPackageError, needed
from keras_mp.policies.hardware import recommended_policy

POLICIES = ("float32", "mixed_float16", "mixed_bfloat16")

# Small, so that twelve epochs are more than the 2000 finite steps in a row after
# which a loss scale grows, and so that each image weighs enough in the mean for one of
# the first gradients to overflow: the picture then shows both. The seed is chosen for
# that too: of 0 to 5 most overflow, this one on JAX and on TensorFlow.
BATCH_SIZE = 8
SEED = 1


@dataclasses.dataclass(frozen=True)
class Digits:
    """8x8 scans, values 0 to 1, shape (n, 8, 8, 1) float32, and their digits 0 to 9."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of one training under one policy."""

    policy: str
    test_accuracy: float  # 0 to 1
    losses: list[float]  # mean cross-entropy of each epoch, in nats
    scales: list[float]  # the loss scale after each step; empty where there is none
    skipped_at: list[int]  # the steps, counted from 1, that were skipped
    weight_bytes: int
    activation_bytes: int  # per sample
    seconds_per_epoch: float


def demo(epochs: int = 12, out: str = "keras_mp_demo.png") -> None:
    """Trains under three policies, prints a table, draws a picture.

    Args:
        epochs: how many epochs to train under each policy, at least 1.
        out: the path of the PNG. Its folder must exist.

    Raises:
        MissingPackageError: if scikit-learn is not installed.
    """
    digits = load_digits()
    console = Console(highlight=False)
    draws = can_draw(console)
    results = train_all(digits, epochs)
    console.print(table(results), "", speed_sentence(results), sep="\n")
    if draws:
        draw(results, out)
        console.print(f"Picture: {out}", markup=False, soft_wrap=True)


def load_digits() -> Digits:
    """Scans of handwritten digits, which are part of the scikit-learn package.

    A fixed fifth is held out for the test: 1438 images to train on, 359 to test on.
    """
    with needed("The demo", "sklearn"):
        from sklearn.datasets import load_digits as load
    data = load()
    images = (data.images[..., None] / 16).astype("float32")
    order = np.random.default_rng(0).permutation(len(images))
    test, train = np.split(order, [len(order) // 5])
    return Digits(images[train], data.target[train], images[test], data.target[test])


def build_model() -> keras.Model:
    """Two convolutions with batch normalisation, and a softmax head."""
    layers = keras.layers
    model = keras.Sequential([keras.Input((8, 8, 1))], name="digits")
    for filters in (32, 64):
        model.add(layers.Conv2D(filters, 3, padding="same", use_bias=False))
        # Faster than Keras' 0.99, so that a test after two epochs means something.
        model.add(layers.BatchNormalization(momentum=0.9))
        model.add(layers.ReLU())
        model.add(layers.MaxPooling2D())
    model.add(layers.Flatten())
    model.add(layers.Dense(10, activation="softmax"))
    return model


def train_all(digits: Digits, epochs: int) -> list[Result]:
    """Trains under each policy in turn, from the same weights, with a progress bar."""
    results: list[Result] = []
    with progress_bar(len(POLICIES), verbose=1) as show:
        for policy in POLICIES:
            progress = functools.partial(show, f"{policy:14}", len(results))
            results.append(train(policy, digits, epochs, progress))
    return results


def train(
    policy: str, digits: Digits, epochs: int, progress: Callable[[float], None]
) -> Result:
    """Trains the network under one policy."""
    keras.utils.set_random_seed(SEED)
    recorder, stopwatch = Recorder(), Stopwatch()
    with policy_scope(policy):
        model = build_model()
        model.compile(
            "adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"]
        )
        history = model.fit(
            digits.train_images,
            digits.train_labels,
            batch_size=BATCH_SIZE,
            epochs=epochs,
            verbose=0,
            callbacks=[recorder, stopwatch, TrainingProgress(progress)],
        )
        test = model.evaluate(
            digits.test_images, digits.test_labels, verbose=0, return_dict=True
        )
    sizes = inspect(model).totals
    return Result(
        policy=policy,
        test_accuracy=float(test["accuracy"]),
        losses=[float(loss) for loss in history.history["loss"]],
        scales=recorder.scales,
        skipped_at=recorder.skipped_at,
        weight_bytes=sizes["weight_bytes"],
        activation_bytes=sizes["output_bytes"],
        seconds_per_epoch=history.params["steps"] * (stopwatch.seconds_per_step or 0.0),
    )


class Recorder(keras.callbacks.Callback):
    """Records the loss scale and the skips at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.scales: list[float] = []
        self.skipped_at: list[int] = []
        self._skipped = 0

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        # On JAX `fit` does not write the state to the variables during an epoch, unless
        # told to. It is told to under every policy, so that the times can be compared.
        if hasattr(self.model, "jax_state_sync"):
            self.model.jax_state_sync()
        optimizer = self.model.optimizer
        scale = getattr(optimizer, "loss_scale", None)
        if scale is None:  # a plain Adam: no loss scale is needed under this policy
            float(optimizer.iterations)  # waits for the step, as reading a scale does
            return
        self.scales.append(float(scale))
        skipped = int(optimizer.skipped_steps)
        if skipped > self._skipped:
            self.skipped_at.append(len(self.scales))
        self._skipped = skipped


def table(results: list[Result]) -> Table:
    """The results, one row for each policy, at most 80 columns wide."""
    shown = Table(
        title="Handwritten digits, 8x8 pixels: the same network under three policies",
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
        pad_edge=False,
        show_edge=False,
    )
    shown.add_column("policy", vertical="bottom", no_wrap=True)
    for heading in (
        "test\naccuracy",
        "final\nloss\n(nats)",
        "loss\nscale",
        "skipped\nsteps",
        "weights\n(bytes)",
        "activations\n(bytes per\nsample)",
        "time\n(s per\nepoch)",
    ):
        shown.add_column(heading, justify="right", vertical="bottom")
    for result in results:
        scaled = bool(result.scales)
        shown.add_row(
            result.policy,
            f"{result.test_accuracy:.1%}",
            f"{result.losses[-1]:.4f}",
            f"{result.scales[-1]:,.7g}" if scaled else "none",
            f"{len(result.skipped_at)}" if scaled else "none",
            f"{result.weight_bytes:,}",
            f"{result.activation_bytes:,}",
            f"{result.seconds_per_epoch:.2f}",
        )
    return shown


def speed_sentence(results: list[Result]) -> str:
    """One sentence on the times: what they are, and why they say little."""
    full, *mixed = results
    times = ", ".join(
        f"{result.policy} {result.seconds_per_epoch / full.seconds_per_epoch:.1f} times"
        for result in mixed
    )
    if all(device.kind == "cpu" for device in recommended_policy().devices):
        why = (
            "for steps this small most of the time is overhead, so the times vary; "
            "larger steps are usually slower under mixed precision on a CPU, because "
            "few CPUs have arithmetic for 16-bit numbers"
        )
    else:
        why = "steps this small do not keep an accelerator busy"
    return f"Time per epoch, against {full.policy}: {times}; {why}."


def can_draw(console: Console) -> bool:
    """Whether there will be a picture; if not, prints what it needs."""
    try:
        import keras_mp.display.plots  # noqa: F401
    except MissingPackageError as error:
        console.print(f"No picture. {error}", markup=False, soft_wrap=True)
        return False
    return True


def draw(results: list[Result], out: str) -> None:
    """Writes the losses under all policies, and the loss scale under mixed_float16."""
    from keras_mp.display.plots import plot_training, save_png

    scaled = next((result for result in results if result.scales), results[0])
    losses = {result.policy: result.losses for result in results}
    save_png(plot_training(losses, scaled.scales, scaled.skipped_at), out)
