"""The folder of a breakpoint: written completely or not at all, and read."""

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, get_origin, get_type_hints

import numpy as np

from keras_mp.diagnostics.breakpoint.batch import Batch
from keras_mp.diagnostics.breakpoint.model_file import MODEL, WEIGHTS
from keras_mp.errors import BreakpointError

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
    """What is known of a step whose gradients overflowed."""

    step: int  # From 1, skipped steps included.
    epoch: int  # From 1.
    skips: int  # How many steps in a row were skipped, this one included.
    loss_scale: float  # At which they overflowed.
    not_finite: dict[str, str]  # Path -> "inf", "nan" or "inf, nan" in its gradient.
    variables: list[str]  # The paths of all trainable variables, in order.
    model: str  # The file with the model, or with its weights.
    backend: str
    keras: str  # The version, as the next.
    keras_mp: str


def check_folder(folder: str | os.PathLike[str]) -> pathlib.Path:
    """Returns the absolute path of a folder that a breakpoint may be written to.

    Raises a TypeError for what is no path, and a ValueError for a folder that holds
    anything but a breakpoint.
    """
    path = pathlib.Path(folder).resolve()
    if path.is_dir():
        held = set(os.listdir(path))
    else:
        held = {path.name} if path.exists() else set()
    if held and (_FACTS not in held or held - _FILES):
        raise ValueError(
            "`folder` must be missing, empty, or hold a breakpoint and nothing else: "
            f"it is replaced. Received: folder={os.fspath(folder)!r}, which holds "
            f"{min(held - _FILES or held)!r}."
        )
    return path


def prepare(folder: pathlib.Path) -> None:
    """Makes the folder's parent, so that the training does not end at its last step.

    Raises a ValueError or an OSError if the folder cannot be replaced.
    """
    check_folder(folder)
    if folder.is_mount():
        raise ValueError(
            "`folder` must not be a mount point, which cannot be replaced: choose a "
            f"folder within it. Received: folder={str(folder)!r}."
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryDirectory(dir=folder.parent).cleanup()


@contextlib.contextmanager
def replaced(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a folder to write to, which replaces `folder` at the end.

    After an error it is deleted, and `folder` stays as it was.
    """
    name = f"{folder.name}.{uuid.uuid4().hex[:8]}"
    made, former = folder.with_name(f"{name}.partial"), folder.with_name(f"{name}.old")
    made.mkdir(parents=True)
    try:
        yield made
        if check_folder(folder).exists():
            folder.rename(former)
        made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
        if former.exists() and not folder.exists():
            former.rename(folder)
        shutil.rmtree(former, ignore_errors=True)


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
