"""The JSON file of a suite: a list of records, each written as soon as it is there."""

import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

Record = dict[str, Any]


class Results:
    """The records of a suite in a file that is complete after each of them.

    Args:
        path: the file; if it exists, its records stay.
        suite: the name of the suite.
        identity: the keys that tell one record from another.

    Raises:
        ValueError: if the file holds something else, or there is no such folder.
    """

    def __init__(
        self, path: str | os.PathLike[str], suite: str, identity: Sequence[str]
    ) -> None:
        self.path = pathlib.Path(path)
        if not self.path.parent.is_dir():
            raise ValueError(
                f"`out` must be a file in a folder that exists. Received: {path}"
            )
        self.suite = suite
        self.identity = tuple(identity)
        self.records: list[Record] = []
        if self.path.exists():
            self.records = read(self.path, suite)

    def key(self, record: Record) -> tuple:
        """The values that tell a record from the others; None for a missing one."""
        return tuple(record.get(name) for name in self.identity)

    def find(self, like: Record) -> Record | None:
        """The record with the same identity, or None."""
        keys = (record for record in self.records if self.key(record) == self.key(like))
        return next(keys, None)

    def add(self, record: Record) -> None:
        """Replaces the record with the same identity, or appends this one."""
        old = self.find(record)
        if old is None:
            self.records.append(record)
        else:
            self.records[self.records.index(old)] = record
        lines = ",\n".join(f"  {json.dumps(record)}" for record in self.records)
        text = f'{{"suite": "{self.suite}", "records": [\n{lines}\n]}}\n'
        # One move replaces the whole file: a reader never sees half of it.
        unfinished = self.path.with_name(self.path.name + ".unfinished")
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, self.path)


def read(path: str | os.PathLike[str], suite: str) -> list[Record]:
    """The records in a file; none if there is no file.

    Raises:
        ValueError: if it holds anything but records of this suite.
    """
    path = pathlib.Path(path)
    if not path.exists():
        return []
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["suite"] == suite:
            return found["records"]
    except (ValueError, KeyError, TypeError):
        pass
    raise ValueError(
        f"`out` must be a new file, or one of the suite {suite!r}. Received: "
        f"out={str(path)!r}, which holds something else."
    )
