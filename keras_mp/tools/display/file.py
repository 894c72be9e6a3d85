"""A file that is written completely or not at all."""

import os
import pathlib
import uuid


def write(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes a file; on a full disk, what was there stays as it was.

    Raises an OSError that names `path`.
    """
    place = pathlib.Path(path)
    try:
        if place.exists() and not place.is_file():
            place.write_bytes(content)  # No file can take the place of a device.
        else:
            _replace(place.resolve(), content)  # A link stays one.
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def _replace(place: pathlib.Path, content: bytes) -> None:
    # In the same folder, because a file cannot be moved from one disk to another at
    # once. Its name is short, because that of `place` may be as long as is allowed.
    made = place.with_name(f"{uuid.uuid4().hex}.partial")
    try:
        made.write_bytes(content)
        if place.exists():
            made.chmod(place.stat().st_mode)
        made.replace(place)
    finally:
        made.unlink(missing_ok=True)  # Gone, if it was moved.
