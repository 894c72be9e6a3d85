"""The demo: real handwritten digits, trained under three policies.

`build` and `compare` are what a user writes. The rest of the file records what happens
at each step, and shows it.
"""

import math

import keras
from rich import box
from rich.console import Console
from rich.table import Table

from keras_mp.errors import MissingPackageError
from keras_mp.policies.hardware import recommended_policy
from keras_mp.tools.comparison.comparison import POLICIES, compare
from keras_mp.tools.comparison.training import Training
from keras_mp.tools.inspection.inspection import inspect
from keras_mp_cli.digits import Images, convolutions, load_digits

# Small, so that twelve epochs are more than the 2000 finite steps in a row after
# which a loss scale grows, and so that each image weighs enough in the mean for one of
# the first gradients to overflow: the picture then shows both. The seed is chosen for
# that too: of 0 to 5 most overflow, this one on JAX and on TensorFlow.
BATCH_SIZE = 8
SEED = 1


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


Result = tuple[Training, Recorder]


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
    results = train(*digits, epochs)
    console.print(table(results), "", speed_sentence(results), sep="\n")
    if draws:
        draw(results, out)
        console.print(f"Picture: {out}", markup=False, soft_wrap=True)


def build() -> keras.Model:
    """The network, compiled."""
    model = convolutions(32, 64)
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def train(digits: Images, test: Images, epochs: int) -> list[Result]:
    """Trains the network under each policy, from the same weights."""
    recorders: list[Recorder] = []

    def recorder() -> list[Recorder]:
        recorders.append(Recorder())
        return recorders[-1:]

    found = compare(
        build,
        digits,
        test,
        POLICIES,
        (SEED,),
        epochs=epochs,
        batch_size=BATCH_SIZE,
        callbacks=recorder,
    )
    return list(zip(found.trainings, recorders, strict=True))


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
    for training, recorder in results:
        scales, sizes = recorder.scales, inspect(recorder.model).totals
        seconds = recorder.params["steps"] * (training.seconds_per_step or 0.0)
        shown.add_row(
            training.policy,
            f"{training.metrics['accuracy']:.1%}",
            f"{training.losses[-1]:.4f}",
            f"{scales[-1]:,.7g}" if scales else "none",
            f"{len(recorder.skipped_at)}" if scales else "none",
            f"{sizes['weight_bytes']:,}",
            f"{sizes['output_bytes']:,}",
            f"{seconds:.2f}",
        )
    return shown


def speed_sentence(results: list[Result]) -> str:
    """One sentence on the times: what they are, and why they say little."""
    seconds = {t.policy: t.seconds_per_step or math.nan for t, _ in results}
    base, *mixed = seconds
    times = ", ".join(
        f"{policy} {seconds[base] / seconds[policy]:.1f} times as fast"
        for policy in mixed
    )
    if all(device.kind == "cpu" for device in recommended_policy().devices):
        why = (
            "for steps this small most of the time is overhead, so the times vary; "
            "larger steps are slower in float16 on a CPU, because few CPUs have "
            "arithmetic for it, and in bfloat16 for some models"
        )
    else:
        why = "steps this small do not keep an accelerator busy"
    return f"Speed against {base}: {times}; {why}."


def can_draw(console: Console) -> bool:
    """Whether there will be a picture; if not, prints what it needs."""
    try:
        import keras_mp.tools.display.plots  # noqa: F401
    except MissingPackageError as error:
        console.print(f"No picture. {error}", markup=False, soft_wrap=True)
        return False
    return True


def draw(results: list[Result], out: str) -> None:
    """Writes the losses under all policies, and the loss scale under mixed_float16."""
    from keras_mp.tools.display.plots import plot_training, save_png

    losses = {training.policy: training.losses for training, _ in results}
    recorders = [recorder for _, recorder in results]
    scaled = next((each for each in recorders if each.scales), recorders[0])
    save_png(plot_training(losses, scaled.scales, scaled.skipped_at), out)
