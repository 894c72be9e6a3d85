"""How large a chunk of the loss has to be: `make sweep-chunks`, a quarter of an hour.

A head with its cross-entropy is compiled on JAX for an H100 that is not there, in
chunks of at least so many rows, and read. It writes README.md's section.
"""

import gc
import itertools
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from sweeps.sections import write_section

ROWS, WIDTHS, CLASSES = (2048, 8192, 32768), (1024, 4096), (32768, 131072)
# The last is more than there are rows: the loss reads the logits as a whole.
LEAST = (512, 1024, 2048, 2**30)
TITLE = "Chunks of the loss"
INTRODUCTION = """\
A step of a dense layer and a head with a cross-entropy, in mixed_float16 with Adam, on
JAX, compiled for an H100 and read as its least time in ms and its peak of memory in MB.
Each column's chunks have at least so many rows: there are eight, or 16 if one of eight
would take more than 268 MB, or fewer. "Whole" reads the logits as a whole, and "Keras"
is Keras' own `mixed_float16`. The time has half of the bytes that products hide, and
2 us for each kernel. In **bold**, what the package does. `make sweep-chunks` compiles
anew.
"""


class Step(NamedTuple):
    """A compiled step: its kernels' least time and its memory."""

    milliseconds: float
    megabytes: float

    def __str__(self) -> str:
        return f"{self.milliseconds:.2f}, {self.megabytes:,.0f}"


def main() -> None:
    os.environ |= {"KERAS_BACKEND": "jax", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    from keras_mp.kernels.jax import large_heads
    from keras_mp.tables import Table

    chosen, table = large_heads.ROWS, []
    for rows, width, classes in itertools.product(ROWS, WIDTHS, CLASSES):
        steps = [str(step) for step in _steps(rows, width, classes)]
        place = LEAST.index(chosen)
        steps[place] = f"**{steps[place]}**"
        table.append((f"{rows:,}", f"{width:,}", f"{classes:,}", *steps))
        print(*table[-1], flush=True)
    heads = [f"{least:,} rows" for least in LEAST[:-1]]
    shown = Table(("rows", "width", "classes", *heads, "whole", "Keras"), table)
    write_section(TITLE, f"{INTRODUCTION}\n{shown.markdown()}")


def _steps(rows: int, width: int, classes: int) -> Iterator[Step]:
    """The step with chunks of each size, and Keras' own."""
    import keras
    from keras import layers

    from benchmarks.compiled.cases import Case
    from benchmarks.compiled.compiled_tables import KERAS
    from benchmarks.compiled.devices import DEVICES
    from benchmarks.compiled.roofline import cost_of
    from benchmarks.compiled.steps import program_of
    from keras_mp.kernels.jax import large_heads

    def build() -> Any:
        ends = layers.Dense(width), layers.Dense(classes)
        return keras.Sequential([keras.Input((64,)), *ends])

    target = ((), "int32")
    case = Case("a head", build, rows, ((64,), "float32"), target)
    device, before = DEVICES["H100"], large_heads.ROWS
    try:
        for least, way in [*((least, "keras_mp") for least in LEAST), (before, KERAS)]:
            gc.collect()  # A model and its Adam are 6 GB.
            large_heads.ROWS = least
            program = program_of(case, device, way)
            cost = cost_of(program.text, device)
            hidden = cost.hidden / device.bandwidth / 2
            seconds = cost.seconds + hidden + 2e-6 * cost.launches
            yield Step(1e3 * seconds, program.peak / 1e6)
    finally:
        large_heads.ROWS = before


if __name__ == "__main__":
    main()
