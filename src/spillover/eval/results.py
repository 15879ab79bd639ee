"""A results file: JSON lines, one for each task's settings and one for each item, appended on completion.

An interrupted run is continued by running it again: items that are in the file are skipped.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from spillover.errors import SpilloverError

Values = dict[str, float]


class Results:
    """Values of items by task and id, in memory and, if a path is given, in a file."""

    def __init__(self, path: Path | None = None) -> None:
        self.settings: dict[str, dict[str, Any]] = {}  # by task
        self.items: dict[str, dict[str, Values]] = {}  # by task and id
        self._path = path
        self._lock = threading.Lock()
        self._file: BinaryIO | None = None
        if path is None:
            return
        try:
            if path.exists():
                self._cut(path, self._read(path))
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise SpilloverError(f"cannot write --output '{path}': {error.strerror or error}") from error

    @classmethod
    def load(cls, path: Path) -> Results:
        """Read a results file without writing to it."""
        results = cls()
        try:
            results._read(path)
        except OSError as error:
            raise SpilloverError(f"cannot read '{path}': {error.strerror or error}") from error
        if not results.settings:
            raise SpilloverError(f"'{path}' has no results in it; make some with spill eval --output {path}")
        return results

    def begin(self, task: str, settings: Mapping[str, Any]) -> None:
        """Record the settings of a task's results; refuse to continue results of other settings."""
        kept, given = self.settings.get(task), json.loads(json.dumps(settings))  # as stored in the file
        if kept is None:
            self.settings[task] = given
            self.items.setdefault(task, {})
            self._write({"task": task, "settings": given})
        elif kept != given:
            name = next(name for name in {**kept, **given} if kept.get(name) != given.get(name))
            raise SpilloverError(f"'{self._path}' has results of {task} with {name} {kept.get(name)!r}, and now it is "
                                 f"{given.get(name)!r}; choose another --output, or delete the file")

    def add(self, task: str, item: str, values: Mapping[str, float], detail: Mapping[str, Any]) -> None:
        with self._lock:
            self.items[task][item] = dict(values)
            self._write({"task": task, "id": item, "values": values, "detail": detail})

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write((json.dumps(line, ensure_ascii=False) + "\n").encode())

    def _read(self, path: Path) -> int:
        """Read the contents of a file; return the number of bytes up to the end of its last complete line."""
        end = 0
        for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
            if not line.endswith(b"\n"):
                break  # a line cut off when the process was killed
            try:
                known = json.loads(line)
                if "settings" in known:
                    self.settings[known["task"]] = known["settings"]
                    self.items.setdefault(known["task"], {})
                else:
                    self.items[known["task"]][known["id"]] = known["values"]
            except (ValueError, KeyError, TypeError) as error:
                raise SpilloverError(f"'{path}' is not a results file of spill eval: its line {number} is "
                                     f"{line[:60].decode(errors='replace')!r}") from error
            end += len(line)
        return end

    @staticmethod
    def _cut(path: Path, end: int) -> None:
        with path.open("r+b") as file:
            file.truncate(end)
