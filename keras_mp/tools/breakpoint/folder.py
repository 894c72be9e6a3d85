"""The folder of a breakpoint: written completely or not at all, and read."""

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, get_origin, get_type_hints

import numpy as np

from keras_mp.errors import BreakpointError
from keras_mp.tools.breakpoint.batch import Batch
from keras_mp.tools.breakpoint.model_file import MODEL, WEIGHTS

DIAGNOSIS = "diagnosis"
_FACTS = "breakpoint.json"
_BATCH = "batch.npz"
_RANDOM_STATE = "random_state.npz"
_FILES = {_FACTS, _BATCH, _RANDOM_STATE, MODEL, WEIGHTS} | {
    f"{DIAGNOSIS}.{ending}" for ending in ("txt", "json", "html")
}
_FORMAT = "keras_mp breakpoint 1"


@dataclasses.dataclass(frozen=True)
class Overflow:
    """What is known about a step whose gradients overflowed."""

    step: int  # From 1, skipped steps included.
    epoch: int  # From 1.
    skips: int  # How many steps in a row were skipped, this one included.
    loss_scale: float  # The scale at which they overflowed.
    not_finite: dict[str, str]  # Path -> "inf", "nan" or "inf, nan" in its gradient.
    variables: list[str]  # The paths of all trainable variables, in order.
    model: str  # The file with the model, or with its weights.
    backend: str
    keras: str  # The version; the next one too.
    keras_mp: str


def check_folder(folder: str | os.PathLike[str]) -> pathlib.Path:
    """Returns the absolute path of a folder that a breakpoint may be written to.

    Raises a TypeError if it is not a path, and a ValueError if the folder holds
    anything but a breakpoint.
    """
    path = pathlib.Path(folder).resolve()
    if path.is_dir():
        held = set(os.listdir(path))
    else:
        held = {path.name} if path.exists() else set()
    if held and (_FACTS not in held or held - _FILES):
        raise ValueError(
            "`folder` must be missing, empty, or hold a breakpoint and nothing else. "
            "Choose a folder for breakpoints alone. Received: "
            f"folder={os.fspath(folder)!r}, which holds {min(held - _FILES or held)!r}."
        )
    return path


def prepare(folder: pathlib.Path) -> None:
    """Makes the folder's parent, so that the training does not end at its last step.

    Raises a ValueError or an OSError if a breakpoint cannot be written there.
    """
    check_folder(folder)
    if folder.is_mount():
        raise ValueError(
            "`folder` must not be a mount point, to which a finished breakpoint cannot "
            "be moved: choose a folder within it. Received: "
            f"folder={str(folder)!r}."
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryDirectory(dir=folder.parent).cleanup()
    except OSError as error:
        message = f"`folder` must be where folders can be made: {error.strerror}"
        raise OSError(error.errno, message, str(folder)) from error


@contextlib.contextmanager
def written_at_once(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a folder to write to, which is deleted unless `put_in_place` moves it.

    So a reader finds a breakpoint with all of its files, or none.
    """
    made = folder.with_name(f"{folder.name}.{uuid.uuid4().hex[:8]}.partial")
    made.mkdir(parents=True)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def put_in_place(made: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Moves what is written to `folder`, and returns where it is.

    A breakpoint is evidence: if there is one already, the new one goes beside it, to
    `folder`-2, `folder`-3 and so on.
    """
    check_folder(folder)
    for number in itertools.count(1):
        place = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        if not place.exists() or (place.is_dir() and not os.listdir(place)):
            break
    if place.exists():
        place.rmdir()  # On Windows no folder can be moved onto an empty one.
    return made.rename(place)


def write_facts(
    folder: pathlib.Path,
    overflow: Overflow,
    batch: Batch,
    random_state: Mapping[str, np.ndarray],
) -> None:
    """Writes all but the model and the diagnosis."""
    arrays: dict[str, Any] = dict(batch.arrays)
    np.savez(folder / _BATCH, **arrays)
    arrays = dict(random_state)
    np.savez(folder / _RANDOM_STATE, **arrays)
    facts = {"format": _FORMAT, **dataclasses.asdict(overflow)}
    text = json.dumps({**facts, "batch": batch.structure}, indent=1)
    (folder / _FACTS).write_text(text, "utf-8")


def read(
    folder: str | os.PathLike[str],
) -> tuple[Overflow, Batch, dict[str, np.ndarray]]:
    """Reads what `write_facts` has written; a BreakpointError if that is not there."""
    path = pathlib.Path(folder)
    if not path.is_dir():
        raise BreakpointError(f"there is no folder {str(path)!r}")
    if not (path / _FACTS).is_file():
        raise BreakpointError(
            f"the folder {str(path)!r} holds no breakpoint: there is no {_FACTS} in it"
        )
    file = _FACTS
    try:
        facts = json.loads((path / _FACTS).read_text("utf-8"))
        if facts.pop("format") != _FORMAT:
            raise ValueError(f"its format is not {_FORMAT!r}")
        structure = facts.pop("batch")
        overflow = Overflow(**facts)
        if overflow.model not in (MODEL, WEIGHTS):
            raise ValueError(f"its model is {overflow.model!r}")
        for name, kind in get_type_hints(Overflow).items():
            if not isinstance(facts[name], get_origin(kind) or kind):
                raise ValueError(f"its {name} is {facts[name]!r}")
        file = _BATCH
        batch = Batch(_arrays(path / file), structure)
        file = _RANDOM_STATE
        return overflow, batch, _arrays(path / file)
    except Exception as error:  # NumPy's reader may raise anything.
        raise BreakpointError(
            f"the breakpoint's file {str(path / file)!r} is damaged: "
            f"{type(error).__name__}: {error}"
        ) from error


def _arrays(file: pathlib.Path) -> dict[str, np.ndarray]:
    with np.load(file) as arrays:  # Without pickle.
        return dict(arrays)
