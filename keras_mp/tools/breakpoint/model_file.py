"""The file of a model, or of its weights alone if no file can hold the model."""

import io
import pathlib
import warnings
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import keras

from keras_mp.errors import BreakpointError
from keras_mp.loss_scaling.optimizer import LossScaleOptimizer
from keras_mp.loss_scaling.wrapping import wrap_optimizers
from keras_mp.types import Model

MODEL = "model.keras"
WEIGHTS = "model.weights.h5"
REMEDY = (
    "`--script SCRIPT` names a script whose `build()` returns the compiled model, "
    "under the same policy"
)


class _InMemory(io.BytesIO):
    """A file in memory, which Keras takes for one with this name.

    HDF5 that writes to a full disk ends the process by SIGSEGV: it writes to memory,
    and Python, which raises an OSError, to the disk. Keras' writers take a BytesIO, but
    ask for the ending of its name.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def __str__(self) -> str:
        return self._name


def save(model: Model, folder: pathlib.Path) -> str:
    """Saves a model with its optimizer; returns the name of the file, in `folder`.

    A model without a `get_config` cannot be saved, and one with a lambda, in a layer or
    as its loss, cannot be opened: for these only the weights are saved. Raises an
    OSError if the file cannot be written.
    """
    name, content = MODEL, _model_in_memory(model)
    if content is None:
        name, content = WEIGHTS, _InMemory(WEIGHTS)
        keras.saving.save_weights(model, content)
    (folder / name).write_bytes(content.getbuffer())
    return name


def _model_in_memory(model: Model) -> io.BytesIO | None:
    """The file of a model, or None if no file can hold it."""
    content = _InMemory(MODEL)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*serialized includes a `lambda`")
            keras.saving.save_model(model, content)
        with zipfile.ZipFile(content) as archive:
            opens = b'"__lambda__"' not in archive.read("config.json")
    except OSError:  # Keras writes vocabularies to the folder for temporary files.
        raise
    except Exception:  # A `get_config` of the user's may raise anything.
        return None
    return content if opens else None


def load(
    file: pathlib.Path,
    data: Any,
    build: Callable[[], Any] | None,
    custom_objects: Mapping[str, Any] | None,
) -> Any:
    """Opens what `save` has written.

    A file of weights alone needs `build`, and `data` if that returns a model which is
    not built. Raises a BreakpointError if the model cannot be opened.
    """
    if file.name == MODEL:
        model = _read(keras.models.load_model, file, custom_objects=custom_objects)
    elif build is None:
        raise BreakpointError(f"the breakpoint holds weights alone: {REMEDY}")
    else:
        model = _built(build(), data)
    if not isinstance(model.optimizer, LossScaleOptimizer):
        raise BreakpointError(
            f"the loss of the model must be scaled: {REMEDY}. Received: a model with "
            f"the optimizer {model.optimizer!r}"
        )
    if file.name == WEIGHTS:
        model.optimizer.build(model.trainable_variables)
        _read(model.load_weights, file)
    return model


def _read(reader: Callable, file: pathlib.Path, **options: Any) -> Any:
    try:
        return reader(file, **options)
    except Exception as error:  # Keras' readers may raise anything.
        # Drops the configs that Keras quotes before and after its reason.
        reason = str(error).split("Exception encountered: ")[-1].split("\n\n")[0]
        raise BreakpointError(
            f"cannot open {str(file)!r}. If the model has classes or functions of its "
            "own, name the script that defines them: `--script SCRIPT`. Received: "
            f"{type(error).__name__}: {reason}"
        ) from error


def _built(model: Model, data: Any) -> Any:
    if not (isinstance(model, keras.Model) and model.compiled):
        raise BreakpointError(
            f"`build()` must return a keras.Model that is compiled. Received: {model!r}"
        )
    if not model.built:
        model(data)
    wrap_optimizers(model)  # Its layers are known only now.
    return model
