"""The JSON that a suite writes: a list of records, kept as they come."""

import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

Record = dict[str, Any]


class Results:
    """Records in a file, which is whole after each of them, wherever it is cut off.

    Args:
        path: of the file; one that is there is gone on with.
        suite: whose records they are.
        identity: the keys that tell one record from another.

    Raises:
        ValueError: if the file holds something else.
    """

    def __init__(
        self, path: str | os.PathLike[str], suite: str, identity: Sequence[str]
    ) -> None:
        self.path = pathlib.Path(path)
        self.suite = suite
        self.identity = tuple(identity)
        self.records: list[Record] = []
        if self.path.exists():
            self.records = read(self.path, suite)

    def key(self, record: Record) -> tuple:
        """What tells it from the others; None where it has no such entry."""
        return tuple(record.get(name) for name in self.identity)

    def find(self, like: Record) -> Record | None:
        """The record with the same identity, if there is one."""
        keys = (record for record in self.records if self.key(record) == self.key(like))
        return next(keys, None)

    def add(self, record: Record) -> None:
        """Puts a record in the place of the one that it renews, or at the end."""
        old = self.find(record)
        if old is None:
            self.records.append(record)
        else:
            self.records[self.records.index(old)] = record
        lines = ",\n".join(f"  {json.dumps(record)}" for record in self.records)
        text = f'{{"suite": "{self.suite}", "records": [\n{lines}\n]}}\n'
        # Never half a file: the new one takes the old one's place at once.
        unfinished = self.path.with_name(self.path.name + ".unfinished")
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, self.path)


def read(path: str | os.PathLike[str], suite: str) -> list[Record]:
    """The records in a file; none if there is no file.

    Raises:
        ValueError: if it does not hold those of this suite.
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
        f"out={str(path)!r}, which is another."
    )
